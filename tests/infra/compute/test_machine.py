"""Any sequence of what users do and of what befalls Compute Engine: no zombies, nothing that runs is lost."""

import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from contracts.aliases import Json
from infra.compute import compute_request
from infra.slice_apis.retry import CloudTpuError
from rehearsal.simulated_cloud import Group, Instance
from tests.infra.cloud_tpu.lab import OWNER, machine_of
from tests.infra.compute.lab import SPOT, A, ComputeLab, opened_lab
from tests.infra.slice_machine import SliceMachine

ONE_HOST = {"hosts": 1, "topology": "2x2"}
RUNS = ("ACTIVE", "RUNNING")
SHAPES: list[Json] = [{}, {}, ONE_HOST, {"count": 2}, {**ONE_HOST, "count": 2}]
KEYS = st.fixed_dictionaries(
    {
        "labels": st.sampled_from([{}, {"team": "nlp"}, {"area": "b"}]),
        "valid_until_s": st.sampled_from([None, None, 40]),
    }
)


class Machine(SliceMachine):
    """After an error `left` stays: with another count its parts have other names, and go with the stack."""

    cloud: ComputeLab
    configs = st.builds(lambda shape, keys: {**shape, **keys}, st.sampled_from(SHAPES), KEYS)
    events = st.sampled_from(
        ["preempt", "preempt", "terminate", "fail", "vanish", "vanish-machine", "maintain"]
    )
    methods = st.sampled_from(
        ["compute.*", "compute.*.insert", "compute.*.get", "compute.*.delete", "compute.instances.*"]
    )
    pool = SPOT[A]

    def open_cloud(self, chips: int) -> contextlib.AbstractContextManager[ComputeLab]:
        return opened_lab({SPOT[A]: chips})

    def befalls(self, event: str) -> None:
        machines, things = [*self.control.alive()["instances"]], [*self.control.slices()]
        if event == "vanish-machine" and machines:
            self.vanish(machines[-1])
        elif event != "vanish-machine" and things:
            getattr(self.control, event)(things[-1])

    def vanish(self, name: str) -> None:
        self.control.vanish(name)

    def _owned(self) -> dict[str, bool]:
        cloud = self.cloud.api.cloud
        groups = {group.name: group.render("", 0) for group in cloud.all(Group)}
        things = {**groups, **{instance.name: instance.render() for instance in cloud.all(Instance)}}
        return {path: compute_request.owner_of(thing) == OWNER for path, thing in things.items()}

    def ours(self) -> set[str]:
        return {path for path, is_ours in self._owned().items() if is_ours}

    def others(self) -> set[str]:
        return {path for path, is_ours in self._owned().items() if not is_ours}

    def require_whole(self) -> None:
        assert self.stack.state is not None and self.stack.state["state"] == "ACTIVE"
        hosts = self.config.get("hosts", 4) * self.config.get("count", 1)
        assert sum(len(node["workers"]) for node in self.stack.state["nodes"]) == hosts

    # --- rules of this API ------------------------------------------------------------------------------------------

    @rule(verb=st.sampled_from(["up", "refresh", "destroy"]))
    def zone_is_away(self, verb: str) -> None:
        """Nothing is asked for and nothing deleted in a zone that does not answer, and nothing is forgotten."""
        self.control.cut_off(A)
        before, state = len(self.control.journal()), self.stack.state
        try:
            {"up": lambda: self.up(None), "refresh": self.refresh, "destroy": self.destroy}[verb]()
        finally:
            self.control.clear_faults()
        # Groups that were asked for before may get their machines meanwhile.
        lines = [line for line in self.control.journal()[before:] if "-w-" not in line.name]
        assert not {line.state for line in lines} & {"DELETING", "PROVISIONING", "WAITING"}
        assert self.stack.state == state

    @rule()
    def someone_else_asks(self) -> None:
        self.control.clear_faults()
        with contextlib.suppress(CloudTpuError):
            self.cloud.put_group(A, "main")

    @invariant()
    def nothing_that_runs_was_deleted_without_being_asked(self) -> None:
        """Of a slice with several parts, the others go with one that is lost."""
        last: dict[str, str] = {}
        for index, line in enumerate(self.control.journal()):
            if line.state == "DELETING" and last.get(line.name) in RUNS:
                others = {
                    name: state for name, state in last.items() if "/main-" in name and "-w-" not in name
                }
                is_whole = "/main-" not in line.name or all(state in RUNS for state in others.values())
                is_asked = any(start <= index < end for start, end in self.asked)
                assert is_asked or not is_whole, line
            last[line.name] = line.state


TestMachine = machine_of(Machine, 30)
TestMachineForLonger = pytest.mark.slow(pytest.mark.nightly(machine_of(Machine, 120)))
