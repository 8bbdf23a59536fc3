"""The keeper and a slice on Compute Engine: any sequence of what befalls both, and what a person wants meanwhile.

The keeper's world, `backends.vm.ensure`, lifecycle, lease and documents are the real ones, against the simulator over
HTTP; hosts and what runs on them are modelled by `Lab`.
"""

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from contracts.inventory import SPECIFICATION, to_json
from infra.documents import Documents
from infra.slice_apis.lifecycles import lifecycle_for
from rehearsal.simulated_cloud import ApiError, Instance
from tests.infra.cloud_tpu.lab import OWNER, machine_of
from tests.infra.compute.lab import SPOT, ZONES, A, B, ComputeLab, opened_lab
from tests.keeper import lab as labs
from tests.keeper.lab import INVENTORY, RUN_ID, Lab

ASKED = {"WAITING"}
"""What the journal has when a group is asked for."""
PAUSES = 3
"""Looks of the keeper, each long after the last one."""
TWO_ZONES = {"zones": [*ZONES], "strategy": "first", "zone_wait_s": 600}
(SLICE,) = INVENTORY.slices
COMPUTE_INVENTORY = dataclasses.replace(
    INVENTORY, slices=(dataclasses.replace(SLICE, zone=A, zones=ZONES, origin="group main"),)
)


class ComputeKeeperLab(Lab):
    """`Lab` whose slice is made by Compute Engine. numbers: of the machines that the attempt was started on."""

    cloud: ComputeLab
    numbers: frozenset[int] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "on":  # machines that are made again have the same names
            machines = self.cloud.api.cloud.all(Instance)
            numbers = {
                each.number for each in machines if each.instances[0] in value and each.status == "RUNNING"
            }
            object.__setattr__(self, "numbers", frozenset(numbers))

    def instances(self) -> set[str]:
        machines = self.cloud.api.cloud.all(Instance)
        return {each.instances[0] for each in machines if each.status == "RUNNING"}

    @property
    def is_running(self) -> bool:
        running = {each.number for each in self.cloud.api.cloud.all(Instance) if each.status == "RUNNING"}
        return self.cause is None and bool(self.numbers) and self.numbers <= running

    def specify(self, **more: Any) -> None:
        value = {
            "project": "grant",
            "owner": OWNER,
            "slices": {"main": self.cloud.props(**more)},
            "inventory": to_json(COMPUTE_INVENTORY),
        }
        self.documents.change(SPECIFICATION, lambda now: {**(now or {}), **value})


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.exits = contextlib.ExitStack()
        folder = Path(self.exits.enter_context(tempfile.TemporaryDirectory()))
        patch = self.exits.enter_context(pytest.MonkeyPatch.context())
        cloud = self.exits.enter_context(opened_lab({SPOT[A]: 16, SPOT[B]: 16}))
        self.lab = ComputeKeeperLab(cloud, Documents(str(folder / "control")))
        self.control = cloud.control
        labs.prepare_patches(self.lab, cloud.clock, folder, patch)
        self.lab.up(**TWO_ZONES)
        self.lab.train()
        self.wanted = True

    @rule(seconds=st.sampled_from([60.0, 60.0, 400.0, 1200.0]))
    def keeper_looks(self, seconds: float) -> None:
        self.control.advance(seconds)
        before, is_there = len(self.control.journal()), "ACTIVE" in self.control.slices().values()
        self.lab.one_pass()
        if self.lab.cloud.api.cloud.unreachable and not is_there:
            changes = {line.state for line in self.control.journal()[before:]}
            assert not changes & {"DELETING", *ASKED}, "something was done while a zone did not answer"

    @rule(event=st.sampled_from(["preempt", "preempt", "terminate", "fail", "vanish", "maintain"]))
    def it_befalls(self, event: str) -> None:
        with contextlib.suppress(ApiError, ValueError, StopIteration):
            getattr(self.control, event)(next(iter(self.control.slices())))

    @rule(zone=st.sampled_from(ZONES), chips=st.sampled_from([0, 0, 16]))
    def set_capacity(self, zone: str, chips: int) -> None:
        self.control.set_capacity(SPOT[zone], chips)

    @rule(zones=st.sampled_from([ZONES, (A,), (B,)]))
    def zones_are_away(self, zones: tuple[str, ...]) -> None:
        for zone in zones:
            self.control.cut_off(zone)

    @rule()
    def zones_answer(self) -> None:
        self.control.clear_faults()

    @rule(kind=st.sampled_from(["unavailable", "cut-after"]), times=st.integers(1, 3))
    def inject(self, kind: Any, times: int) -> None:
        self.control.inject(kind, "compute.*", times)

    @rule()
    def a_person_stops_the_run(self) -> None:
        self.wanted = False
        self.lab.store.edit_run(RUN_ID, lambda now: now and now.to_be("stopped"))

    @invariant()
    def there_are_never_two_for_one_run(self) -> None:
        if not hasattr(self, "lab"):
            return
        live: set[str] = set()
        for line in self.control.journal():
            if "/instanceGroupManagers/" in line.name:
                (live.discard if line.state in ("DELETING", "gone") else live.add)(line.name)
                assert len(live) <= 1, line

    def teardown(self) -> None:
        """Once all is well: what is wanted runs, what is not is at rest; `pulumi destroy` leaves nothing, for good."""
        if not hasattr(self, "lab"):
            return
        with self.exits:
            self.control.clear_faults()
            if not self.wanted:
                for _ in range(PAUSES):
                    self.lab.later(400.0)
                assert "WAITING" not in self.control.slices().values(), "it outlives what it was asked for"
            for zone in ZONES:
                self.control.set_capacity(SPOT[zone], 64)
            for _ in range(30):
                if self.lab.is_running is self.wanted:
                    break
                self.lab.later(400.0)
            for _ in range(PAUSES):
                self.lab.later(400.0)
                assert self.lab.is_running is self.wanted, self.lab.lines[-8:]
            with self.lab.world().hold("main") as lease:
                lease.mark(removed=True)
                clients, backoff = self.lab.cloud.session.clients, self.lab.cloud.session.backoff
                props = self.lab.cloud.props(**TWO_ZONES)
                lifecycle_for(props, clients, backoff).delete(props)
            for _ in range(PAUSES):
                self.lab.later(400.0)
            assert self.control.slices() == {}


def test_a_group_that_waits_goes_with_the_last_run_that_needs_it() -> None:
    walk = Machine()
    walk.start()
    for zone in ZONES:
        walk.set_capacity(zone=zone, chips=0)
    walk.it_befalls(event="preempt")
    for _ in range(PAUSES):
        walk.keeper_looks(seconds=400.0)
    assert "WAITING" in walk.control.slices().values()
    walk.a_person_stops_the_run()
    walk.there_are_never_two_for_one_run()
    walk.teardown()


TestMachine = machine_of(Machine, 12)
TestMachineForLonger = pytest.mark.slow(pytest.mark.nightly(machine_of(Machine, 60)))
