"""Any sequence of what users do and of what befalls Compute Engine: no zombies, nothing that runs is lost.

Against the simulator over HTTP, through Google's own client; the engine is a model of its calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.aliases import Json
from infra.compute import compute_request
from infra.slice_apis.retry import CloudTpuError
from rehearsal.tpu_api import ApiError
from tests.infra.cloud_tpu.lab import OWNER, PowerCut, Stack, machine_of
from tests.infra.compute.lab import SPOT, A, ComputeLab, opened_lab

ONE_HOST = {"hosts": 1, "topology": "2x2"}
RUNS = ("ACTIVE", "RUNNING")
SHAPES: list[Json] = [{}, {}, ONE_HOST, {"count": 2}, {**ONE_HOST, "count": 2}]
KEYS = st.fixed_dictionaries(
    {
        "labels": st.sampled_from([{}, {"team": "nlp"}, {"area": "b"}]),
        "valid_until_s": st.sampled_from([None, None, 40]),
    }
)
CONFIGS: st.SearchStrategy[Json] = st.builds(
    lambda shape, keys: {**shape, **keys}, st.sampled_from(SHAPES), KEYS
)
EVENTS = st.sampled_from(["preempt", "preempt", "stop", "fail", "vanish", "vanish-machine", "reactivate"])
KINDS = st.sampled_from(["too-many-requests", "unavailable", "cut-before", "cut-after"])
METHODS = st.sampled_from(
    ["compute.*", "compute.*.insert", "compute.*.get", "compute.*.delete", "compute.instances.*"]
)


class Machine(RuleBasedStateMachine):
    """`left`: an up was cut off or has failed, so that there may be what no state knows of."""

    @initialize(chips=st.sampled_from([0, 16, 64, 64]))
    def start(self, chips: int) -> None:
        self.exits = contextlib.ExitStack()
        self.lab: ComputeLab = self.exits.enter_context(opened_lab({SPOT[A]: chips}))
        self.stack = Stack(cloud=self.lab)
        self.left = False
        self.asked: list[tuple[int, int]] = []  # what the journal has of deletions that the engine asked for
        self.config: Json = {}
        delete = self.lab.provider.delete

        def asked(_id: str, props: Json) -> None:
            before = len(self.lab.control.journal())
            try:
                delete(_id, props)
            finally:
                self.asked.append((before, len(self.lab.control.journal())))

        self.lab.provider.delete = asked  # type: ignore[assignment,method-assign]

    # --- what a user does -------------------------------------------------------------------------------------------

    @rule(config=st.one_of(st.none(), CONFIGS))
    def up(self, config: Json | None) -> None:
        self.config = self.config if config is None else config
        self._act(lambda: self.stack.up(wait_s=60, **self.config))

    @rule(config=st.one_of(st.none(), CONFIGS), sleeps=st.integers(1, 6), later_s=st.sampled_from([0, 600]))
    def interrupted_up(self, config: Json | None, sleeps: int, later_s: float) -> None:
        self.config = self.config if config is None else config

        def cut() -> None:
            raise PowerCut

        self.lab.at_sleep(sleeps, cut)
        try:
            self._act(lambda: self.stack.up(wait_s=60, **self.config))
        except PowerCut:
            self.left = True
        self.lab.control.advance(later_s)

    @rule(event=EVENTS, sleeps=st.integers(1, 5))
    def up_while_something_happens(self, event: str, sleeps: int) -> None:
        self.lab.at_sleep(sleeps, lambda: self._befall(event))
        self._act(lambda: self.stack.up(wait_s=60, **self.config))

    @rule()
    def refresh(self) -> None:
        before = len(self.lab.control.journal())
        self._act(self.stack.refresh)
        assert "DELETING" not in [line.state for line in self.lab.control.journal()[before:]]

    @rule()
    def destroy(self) -> None:
        self._act(self.stack.destroy)

    # --- what befalls the cloud -------------------------------------------------------------------------------------

    @rule(chips=st.sampled_from([0, 4, 16, 32, 64]))
    def set_capacity(self, chips: int) -> None:
        self.lab.control.set_capacity(SPOT[A], chips)

    @rule(event=EVENTS)
    def befall(self, event: str) -> None:
        self._befall(event)

    @rule(seconds=st.sampled_from([1, 3, 10, 600]))
    def time_passes(self, seconds: float) -> None:
        self.lab.control.advance(seconds)

    @rule(kind=KINDS, methods=METHODS, times=st.integers(1, 3))
    def inject(self, kind: Any, methods: str, times: int) -> None:
        self.lab.control.inject(kind, methods, times)

    @rule(verb=st.sampled_from(["up", "refresh", "destroy"]))
    def zone_is_away(self, verb: str) -> None:
        """Nothing is asked for and nothing deleted in a zone that does not answer, and nothing is forgotten."""
        self.lab.control.cut_off(A)
        before, state = len(self.lab.control.journal()), self.stack.state
        try:
            {"up": lambda: self.up(None), "refresh": self.refresh, "destroy": self.destroy}[verb]()
        finally:
            self.lab.control.clear_faults()
        # Groups that were asked for before may get their machines meanwhile.
        lines = [line for line in self.lab.control.journal()[before:] if "-w-" not in line.name]
        assert not {line.state for line in lines} & {"DELETING", "PROVISIONING", "WAITING"}
        assert self.stack.state == state

    @rule()
    def someone_else_asks(self) -> None:
        self.lab.control.clear_faults()
        with contextlib.suppress(CloudTpuError):
            self.lab.put_group(A, "main")

    @rule()
    def the_others_go(self) -> None:
        for path in self._others():
            with contextlib.suppress(ApiError):
                self.lab.befall.vanish(path)

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def nothing_that_runs_was_deleted_without_being_asked(self) -> None:
        """Of a slice with several parts, the others go with one that is lost."""
        last: dict[str, str] = {}
        for index, line in enumerate(self.lab.control.journal()):
            if line.state == "DELETING" and last.get(line.name) in RUNS:
                others = {
                    name: state for name, state in last.items() if "/main-" in name and "-w-" not in name
                }
                is_whole = "/main-" not in line.name or all(state in RUNS for state in others.values())
                is_asked = any(start <= index < end for start, end in self.asked)
                assert is_asked or not is_whole, line
            last[line.name] = line.state

    @invariant()
    def what_no_state_knows_of_is_the_work_of_an_interruption(self) -> None:
        if self.stack.state is None and not self.left:
            assert self._ours() == set()

    def teardown(self) -> None:
        """Once all is well again, an up makes what is asked for, and to destroy the stack leaves nothing of ours."""
        if not hasattr(self, "lab"):
            return
        with self.exits:
            self.lab.control.clear_faults()
            self.lab.while_sleeping = lambda: None
            self.the_others_go()
            self.lab.control.set_capacity(SPOT[A], 256)
            with _refusal_of_what_runs():
                self.stack.refresh()
                self.stack.up(wait_s=600, **self.config)
                assert self.stack.state is not None and self.stack.state["state"] == "ACTIVE"
                hosts = self.config.get("hosts", 4) * self.config.get("count", 1)
                assert sum(len(node["workers"]) for node in self.stack.state["nodes"]) == hosts
            self.stack.destroy()
            self.lab.lifecycle().remove_all("grant", OWNER)
            assert self._ours() == set()

    # --- how --------------------------------------------------------------------------------------------------------

    def _act(self, action: Callable[[], None]) -> None:
        others, before = self._others(), len(self.lab.control.journal())
        try:
            action()
        except CloudTpuError:
            self.left = True  # for good: with another count its parts have other names, and go with the stack
        finally:
            self.lab.while_sleeping = lambda: None
            for line in self.lab.control.journal()[before:]:
                assert not (line.name in others and line.state == "DELETING"), line

    def _befall(self, event: str) -> None:
        things = [*self.lab.befall.slices()]
        machines = [*self.lab.befall.alive()["instances"]]
        with contextlib.suppress(ApiError, ValueError, IndexError):  # its state does not allow it
            match event:
                case "vanish-machine":
                    self.lab.befall.vanish(machines[-1])
                case _:
                    getattr(self.lab.befall, event)(things[-1])

    def _owned(self) -> dict[str, bool]:
        cloud = self.lab.compute.cloud
        groups = {path: group.render("", 0) for path, group in cloud.groups.items()}
        things = {**groups, **{path: each.render() for path, each in cloud.instances.items()}}
        return {path: compute_request.owner_of(thing) == OWNER for path, thing in things.items()}

    def _ours(self) -> set[str]:
        return {path for path, is_ours in self._owned().items() if is_ours}

    def _others(self) -> set[str]:
        return {path for path, is_ours in self._owned().items() if not is_ours}


@contextlib.contextmanager
def _refusal_of_what_runs() -> Any:
    """An interrupted up has made an ACTIVE one that the present configuration does not want: only a person decides."""
    try:
        yield
    except CloudTpuError as error:
        assert "is ACTIVE. Nothing that runs" in str(error) or "its other nodes run" in str(error), error


TestMachine = machine_of(Machine, 30)
TestMachineForLonger = pytest.mark.slow(pytest.mark.nightly(machine_of(Machine, 120)))
