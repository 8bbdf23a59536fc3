"""Any sequence of what users do and of what befalls the cloud: no zombies, nothing that runs lost, others untouched.

Against the simulator over HTTP, through Google's own client; the engine is a model of its calls (`lab.Stack`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.aliases import Json
from infra.cloud_tpu import tpu_request
from infra.slice_apis.retry import CloudTpuError
from rehearsal.tpu_api import ApiError, Clock, TpuApi
from tests.infra.cloud_tpu.lab import OWNER, PARENT, POOL, Cloud, PowerCut, Stack, machine_of

QR = f"{PARENT}/queuedResources/main"
CONFIGS = st.fixed_dictionaries(
    {
        "accelerator_type": st.sampled_from(["v5litepod-8", "v5litepod-16"]),
        "node_count": st.sampled_from([1, 1, 2]),
        "labels": st.sampled_from([{}, {"team": "nlp"}, {"area": "b"}]),
        "valid_until_s": st.sampled_from([None, None, 40]),
    }
)
EVENTS = st.sampled_from(
    ["preempt", "preempt-leave", "terminate", "fail", "vanish", "vanish-node", "maintain"]
)
KINDS = st.sampled_from(["too-many-requests", "unavailable", "cut-before", "cut-after", "slow"])
METHODS = st.sampled_from(
    ["*", "queuedResources.create", "queuedResources.get", "queuedResources.delete", "nodes.*"]
)


class Machine(RuleBasedStateMachine):
    """`left`: an up was cut off or has failed since the state was last known to be all that there is of ours."""

    @initialize(chips=st.sampled_from([0, 16, 64, 64]))
    def start(self, chips: int) -> None:
        clock = Clock(frozen_at=1_800_000_000.0)
        self.api = TpuApi(clock=clock, capacity={POOL: chips})
        self.api.__enter__()
        self.cloud = Cloud(self.api, clock)
        self.control = self.api.control
        self.stack = Stack(cloud=self.cloud)
        self.left = False
        self.asked: list[tuple[int, int]] = []  # what the journal has of deletions that the engine asked for
        self.config: Json = {"accelerator_type": "v5litepod-16", "node_count": 1, "labels": {}}
        delete = self.cloud.provider.delete

        def asked(_id: str, props: Json) -> None:
            before = len(self.control.journal())
            try:
                delete(_id, props)
            finally:
                self.asked.append((before, len(self.control.journal())))

        self.cloud.provider.delete = asked  # type: ignore[assignment,method-assign]

    # --- what a user does ---------------------------------------------------------------------------------------------

    @rule(config=st.one_of(st.none(), CONFIGS))
    def up(self, config: Json | None) -> None:
        """With the same configuration as before, or another."""
        self.config = config or self.config
        before = self.stack.state
        self._act(lambda: self.stack.up(wait_s=60, **self.config))
        assert self.left or self.stack.state is before or QR in self._ours()

    @rule(config=st.one_of(st.none(), CONFIGS), sleeps=st.integers(1, 8), later_s=st.sampled_from([0, 600]))
    def interrupted_up(self, config: Json | None, sleeps: int, later_s: float) -> None:
        self.config = config or self.config

        def cut() -> None:
            raise PowerCut

        self.cloud.at_sleep(sleeps, cut)
        try:
            self._act(lambda: self.stack.up(wait_s=60, **self.config))
        except PowerCut:
            self.left = True
        self.control.advance(later_s)

    @rule(event=EVENTS, sleeps=st.integers(1, 5))
    def up_while_something_happens(self, event: str, sleeps: int) -> None:
        self.cloud.at_sleep(sleeps, lambda: self._befall(event))
        self._act(lambda: self.stack.up(wait_s=60, **self.config))

    @rule(first=CONFIGS, then=CONFIGS, sleeps=st.integers(1, 3), later_s=st.sampled_from([0, 600]))
    def change_of_mind(self, first: Json, then: Json, sleeps: int, later_s: float) -> None:
        """What was asked for from scratch and interrupted is not what is wanted after all."""
        self.destroy()
        self.interrupted_up(first, sleeps, later_s)
        self.up(then)

    @rule(verb=st.sampled_from(["up_as_before", "refresh", "destroy"]))
    def someone_else_is_quicker(self, verb: str) -> None:
        """Ours is gone behind our back, and the name is somebody else's now."""
        self._befall("vanish")
        self.someone_else_asks("main", labelled=True)
        getattr(self, verb)()

    @rule()
    def refresh(self) -> None:
        before = self.control.journal()
        self._act(self.stack.refresh)
        assert "DELETING" not in [line.state for line in self.control.journal()[len(before) :]]

    @rule()
    def destroy(self) -> None:
        """Only of the slice; its remains that no state knows of go with the stack's identity (teardown)."""
        self._act(self.stack.destroy)

    # --- what befalls the cloud ---------------------------------------------------------------------------------------

    @rule(chips=st.sampled_from([0, 8, 16, 32, 64]))
    def set_capacity(self, chips: int) -> None:
        self.control.set_capacity(POOL, chips)

    @rule(event=EVENTS)
    def befall(self, event: str) -> None:
        self._befall(event)

    @rule(seconds=st.sampled_from([1, 3, 10, 600]))
    def time_passes(self, seconds: float) -> None:
        self.control.advance(seconds)

    @rule(kind=KINDS, methods=METHODS, times=st.integers(1, 3))
    def inject(self, kind: Any, methods: str, times: int) -> None:
        """Requests that go wrong and that a second try, or a third, gets through."""
        self.control.inject(kind, methods, times, 0.01 if kind == "slow" else 0.0)

    @rule(
        kind=st.sampled_from(["unavailable", "cut-before"]),
        methods=METHODS,
        verb=st.sampled_from(["up", "refresh", "destroy"]),
    )
    def outage(self, kind: Any, methods: str, verb: str) -> None:
        """No try gets through while the user does something."""
        self.control.inject(kind, methods, 500)
        try:
            {"up": self.up_as_before, "refresh": self.refresh, "destroy": self.destroy}[verb]()
        finally:
            self.control.clear_faults()

    def up_as_before(self) -> None:
        self._act(lambda: self.stack.up(wait_s=60, **self.config))

    @rule(own_id=st.sampled_from(["main", "other"]), labelled=st.booleans())
    def someone_else_asks(self, own_id: str, labelled: bool) -> None:
        """For the name of our queued resource, or under another for that of our node."""
        self.control.clear_faults()
        with contextlib.suppress(CloudTpuError):
            self.cloud.put(own_id, owner="someone-else" if labelled else None, node_id="main")

    @rule()
    def someone_else_makes_a_node(self) -> None:
        self.control.clear_faults()
        with contextlib.suppress(CloudTpuError):
            self.cloud.put_node("someone-else")

    @rule()
    def the_others_go(self) -> None:
        for name in self._others():
            with contextlib.suppress(ApiError):
                self.control.vanish(name)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_that_runs_was_deleted_without_being_asked(self) -> None:
        """ACTIVE is what may not be lost; one of which nothing runs is SUSPENDING at once in the simulator."""
        last: dict[str, str] = {}
        for index, line in enumerate(self.control.journal()):
            if line.state == "DELETING" and last.get(line.name) == "ACTIVE":
                assert any(start <= index < end for start, end in self.asked), line
            last[line.name] = line.state

    @invariant()
    def what_no_state_knows_of_is_the_work_of_an_interruption(self) -> None:
        if self.stack.state is None and not self.left:
            assert self._ours() == []

    @invariant()
    def chips_are_held_once(self) -> None:
        nodes = [node for node in self.control.alive()["nodes"] if tpu_request.is_owned(node, OWNER)]
        assert len({node["acceleratorType"] for node in nodes}) <= 1
        assert len(nodes) <= 2

    def teardown(self) -> None:
        """Once all is well again, an up makes what is asked for, and to destroy the stack leaves nothing of ours."""
        if not hasattr(self, "api"):
            return
        try:
            self.control.clear_faults()
            self.cloud.while_sleeping = lambda: None
            self.the_others_go()
            self.control.set_capacity(POOL, 256)
            with _refusal_of_what_runs():
                self.stack.refresh()
                self.stack.up(wait_s=600, **self.config)
                self._holds()
            self.stack.destroy()
            self.cloud.lifecycle().remove_all("grant", OWNER)
            assert self._ours() == []
        finally:
            self.cloud.client.close()
            self.api.__exit__(None, None, None)

    # --- how ----------------------------------------------------------------------------------------------------------

    def _act(self, action: Callable[[], None]) -> None:
        """What goes wrong for a reason is an error in words; nothing of others changes but by itself."""
        others, before = self._others(), len(self.control.journal())
        try:
            action()
        except CloudTpuError:
            self.left = True
        else:
            if self.stack.state is not None or not self.left:
                self._known()
        finally:
            self.cloud.while_sleeping = lambda: None
            after = self._others()
            for name, was in others.items():
                self._require_untouched(name, before)
                assert after.get(name, was) == was

    def _require_untouched(self, name: str, since: int) -> None:
        """It may have gone by itself, for want of chips; nobody but we could have had it deleted."""
        for line in self.control.journal()[since:]:
            if line.name == name:
                assert line.state != "DELETING", line
                if line.state == "gone":
                    return

    def _known(self) -> None:
        """After a success: the state is what there is."""
        self.left = False
        if self.stack.state is not None and self.stack.state["state"] == "ACTIVE":
            self._holds()

    def _holds(self) -> None:
        assert self.stack.state is not None
        shown = [node["id"] for node in self.stack.state["nodes"]]
        ids = ["main"] if self.stack.state["node_count"] == 1 else ["main-0", "main-1"]
        assert shown == ids

    def _befall(self, event: str) -> None:
        with contextlib.suppress(ApiError, ValueError):  # its state does not allow it, or it is not there
            match event:
                case "preempt" | "preempt-leave":
                    self.control.preempt(QR, leave_nodes=event.endswith("leave"))
                case "terminate":
                    self.control.terminate(QR)
                case "fail":
                    self.control.fail(QR)
                case "vanish":
                    self.control.vanish(QR)
                case "vanish-node":
                    self.control.vanish(f"{PARENT}/nodes/main-1")
                case "maintain":
                    self.control.maintain(QR, 30)

    def _things(self) -> Iterator[tuple[Json, Json]]:
        """Everything that is there, with the node by whose labels one tells whose it is."""
        alive = self.control.alive()
        for queued in alive["queuedResources"]:
            yield queued, tpu_request.requested_node(queued)
        for node in alive["nodes"]:
            yield node, node

    def _ours(self) -> list[str]:
        return [thing["name"] for thing, node in self._things() if tpu_request.is_owned(node, OWNER)]

    def _others(self) -> dict[str, Json]:
        """By name, what could be changed of them."""
        return {
            thing["name"]: {
                key: node.get(key) for key in ("labels", "metadata", "tags", "description", "networkConfig")
            }
            for thing, node in self._things()
            if not tpu_request.is_owned(node, OWNER)
        }


@contextlib.contextmanager
def _refusal_of_what_runs() -> Iterator[None]:
    """An interrupted up has made an ACTIVE one that the present configuration does not want: only a person decides."""
    try:
        yield
    except CloudTpuError as error:
        assert "is ACTIVE. Nothing that runs" in str(error) or "its other nodes run" in str(error), error


TestMachine = machine_of(Machine, 60)
TestMachineForLonger = pytest.mark.slow(pytest.mark.nightly(machine_of(Machine, 600)))
