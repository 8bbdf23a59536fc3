"""Any sequence of what users do and of what befalls the cloud: no zombies, nothing that runs lost, others untouched."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from contracts.aliases import Json
from infra.cloud_tpu import tpu_request
from infra.slice_apis.retry import CloudTpuError
from rehearsal.simulated_cloud import Clock, SimulatedCloud
from tests.infra.cloud_tpu.lab import OWNER, PARENT, POOL, Cloud, machine_of
from tests.infra.slice_machine import SliceMachine

QR = f"{PARENT}/queuedResources/main"
CONFIGS = st.fixed_dictionaries(
    {
        "accelerator_type": st.sampled_from(["v5litepod-8", "v5litepod-16"]),
        "node_count": st.sampled_from([1, 1, 2]),
        "labels": st.sampled_from([{}, {"team": "nlp"}, {"area": "b"}]),
        "valid_until_s": st.sampled_from([None, None, 40]),
    }
)
METHODS = st.sampled_from(
    ["*", "queuedResources.create", "queuedResources.get", "queuedResources.delete", "nodes.*"]
)


class Machine(SliceMachine):
    """After a success, all that is ours is in the state."""

    configs, methods, pool = CONFIGS, METHODS, POOL
    events = st.sampled_from(
        ["preempt", "preempt-leave", "terminate", "fail", "vanish", "vanish-node", "maintain"]
    )

    @contextlib.contextmanager
    def open_cloud(self, chips: int) -> Iterator[Cloud]:
        clock = Clock(frozen_at=1_800_000_000.0)
        with SimulatedCloud(clock=clock, capacity={POOL: chips}) as api:
            cloud = Cloud(api, clock)
            try:
                yield cloud
            finally:
                cloud.client.close()

    def befalls(self, event: str) -> None:
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

    def vanish(self, name: str) -> None:
        self.control.vanish(name)

    def _things(self) -> Iterator[tuple[Json, Json]]:
        """Everything that is there, with the node by whose labels one tells whose it is."""
        alive = self.control.alive()
        for queued in alive["queuedResources"]:
            yield queued, tpu_request.requested_node(queued)
        for node in alive["nodes"]:
            yield node, node

    def ours(self) -> list[str]:
        return [thing["name"] for thing, node in self._things() if tpu_request.is_owned(node, OWNER)]

    def others(self) -> dict[str, Json]:
        """By name, what could be changed of them."""
        return {
            thing["name"]: {
                key: node.get(key) for key in ("labels", "metadata", "tags", "description", "networkConfig")
            }
            for thing, node in self._things()
            if not tpu_request.is_owned(node, OWNER)
        }

    def require_whole(self) -> None:
        assert self.stack.state is not None
        shown = [node["id"] for node in self.stack.state["nodes"]]
        ids = ["main"] if self.stack.state["node_count"] == 1 else ["main-0", "main-1"]
        assert shown == ids

    def act(self, action: Callable[[], None]) -> None:
        others = self.others()

        def checked() -> None:
            action()
            if self.stack.state is not None or not self.left:
                self.left = False
                if self.stack.state is not None and self.stack.state["state"] == "ACTIVE":
                    self.require_whole()

        super().act(checked)
        after = self.others()
        assert {name: after.get(name, was) for name, was in others.items()} == others

    # --- rules of this API ------------------------------------------------------------------------------------------

    @rule(first=CONFIGS, then=CONFIGS, sleeps=st.integers(1, 3), later_s=st.sampled_from([0, 600]))
    def change_of_mind(self, first: Json, then: Json, sleeps: int, later_s: float) -> None:
        """What was asked for from scratch and interrupted is not what is wanted after all."""
        self.destroy()
        self.interrupted_up(first, sleeps, later_s)
        self.up(then)

    @rule(verb=st.sampled_from(["up_as_before", "refresh", "destroy"]))
    def someone_else_is_quicker(self, verb: str) -> None:
        """Ours is gone behind our back, and the name is somebody else's now."""
        self.befall("vanish")
        self.someone_else_asks("main", labelled=True)
        getattr(self, verb)()

    @rule(
        kind=st.sampled_from(["unavailable", "cut-before"]),
        methods=METHODS,
        verb=st.sampled_from(["up_as_before", "refresh", "destroy"]),
    )
    def outage(self, kind: Any, methods: str, verb: str) -> None:
        """No try gets through while the user does something."""
        self.control.inject(kind, methods, 500)
        try:
            getattr(self, verb)()
        finally:
            self.control.clear_faults()

    def up_as_before(self) -> None:
        self.act(lambda: self.stack.up(wait_s=60, **self.config))

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

    @invariant()
    def nothing_that_runs_was_deleted_without_being_asked(self) -> None:
        """ACTIVE is what may not be lost; one of which nothing runs is SUSPENDING at once in the simulator."""
        last: dict[str, str] = {}
        for index, line in enumerate(self.control.journal()):
            if line.state == "DELETING" and last.get(line.name) == "ACTIVE":
                assert any(start <= index < end for start, end in self.asked), line
            last[line.name] = line.state

    @invariant()
    def chips_are_held_once(self) -> None:
        nodes = [node for node in self.control.alive()["nodes"] if tpu_request.is_owned(node, OWNER)]
        assert len({node["acceleratorType"] for node in nodes}) <= 1
        assert len(nodes) <= 2


TestMachine = machine_of(Machine, 30)
TestMachineForLonger = pytest.mark.slow(pytest.mark.nightly(machine_of(Machine, 600)))
