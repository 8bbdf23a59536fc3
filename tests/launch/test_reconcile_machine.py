"""Any sequence of what people, Pulumi, two reconcilers, Google, hosts and a bucket do, in the middle of actions too."""

import contextlib
import dataclasses
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from infra.documents import DocumentsError
from infra.documents.lease import LeaseHeldError, LeaseLostError
from launch.control.control_documents import Attempt, Limits, Run, Submission
from tests.launch.reconciler_model import PowerCut, Process, World

KEPT, SUBMITTED = ("kept-1", "kept-2"), ("queued-1", "queued-2", "queued-3")
SLICES = ("a", "b")
STEPS = 100
FAULTS = (
    "preempt", "preempt", "vanish", "stock-out", "restock", "unreachable", "reachable", "forbidden", "busy", "willing",
    "silent", "speaking", "unpreparable", "preparable", "bucket-away", "bucket-back", "answer-lost",
    "registry-away", "registry-back", "in-use", "free", "lost-in-stock-out", "lost-in-stock-out", "preempt",
)  # fmt: skip
RUNS_DO = ("progress", "progress", "progress", "crash", "outage", "wrong")
PEOPLE_DO = ("stop", "unmanage", "keep-again", "cancel", "remove")
IN_THE_MIDDLE = (
    *FAULTS, *RUNS_DO, *PEOPLE_DO, *PEOPLE_DO, "pulumi-up", "pulumi-destroy", "destroy-begins", "stop-while-frozen",
    "other", "other", "other-after-freeze", "other-after-freeze", "power-cut", "power-cut", "slow",
)  # fmt: skip


class Machine(RuleBasedStateMachine):
    @initialize(
        ahead_s=st.sampled_from([0.0, 3600.0, -3600.0]), kept=st.integers(0, 2), submitted=st.integers(0, 3)
    )
    def begin(self, ahead_s: float, kept: int, submitted: int) -> None:
        self.plan: list[tuple[int, str]] = []
        self.depth = 0
        self.pauses = 0
        self.world = World(self.pause)
        self.world.memory.ahead_s = ahead_s
        self.rng = 0
        for name in SLICES:
            self.world.declared.add(name)
            self.world.cloud.create(name, "pulumi")
        for run_id, name in zip(KEPT[:kept], SLICES, strict=False):
            self.train_and_keep(run_id, name)
        for run_id in SUBMITTED[:submitted]:
            self.submit(run_id, SLICES, 1)
        self.world.one_pass()

    # --- people -----------------------------------------------------------------------------------------------------

    def train_and_keep(self, run_id: str, name: str) -> None:
        world = self.world
        store = world.store()
        if run_id in world.processes or any(
            run.slice == name and run.end is None for run in store.read().runs.values()
        ):
            return
        if world.cloud.states.get(name) != "ACTIVE":
            return
        world.processes[run_id] = Process(
            attempt=0, token=1, on=(name, world.cloud.created[name]), state="running"
        )
        world.cloud.made_by[name] = "pulumi"
        run = Run(
            run_id=run_id, stack="s", runs_url="/runs", slices=(name,), slice=name, project="p",
            limits=Limits(attempts=20), seen="running", added_s=store.now_s(),
        )  # fmt: skip
        created = world.cloud.created[name]
        run = dataclasses.replace(
            run, attempt=Attempt(number=0, created=created, checkpoint=-2, has_joined=True)
        )
        store.edit_run(run_id, lambda now: now or run)

    def submit(self, run_id: str, slices: tuple[str, ...], restarts: int) -> None:
        store = self.world.store()
        if store.run(run_id) is not None or run_id in self.world.removed:
            return
        submission = Submission(
            number=0, what="train.py", request={}, submitted={}, bundles=(), where={}, by="me", added=""
        )
        run = Run(
            run_id=run_id, stack="s", runs_url="/runs", slices=slices, project="p",
            limits=Limits(restarts=restarts), submission=submission, added_s=store.now_s(),
        )  # fmt: skip
        with contextlib.suppress(DocumentsError):
            store.add_runs([run])

    def desire(self, desired: Any, *, which: int) -> None:
        store = self.world.store()
        with contextlib.suppress(DocumentsError):
            runs = sorted(run.run_id for run in store.read().runs.values() if run.end is None)
            if runs:
                run_id = runs[which % len(runs)]
                note(f"  {run_id} is to be {desired}")
                store.edit_run(run_id, lambda now: now and now.to_be(desired))

    # --- events -----------------------------------------------------------------------------------------------------

    def pause(self, where: str) -> None:
        """Something may happen in the middle of what a reconciler does."""
        world = self.world
        self.pauses += 1
        world.sleep(5.0)
        while self.plan and self.plan[0][0] <= 0:
            _, what = self.plan.pop(0)
            note(f"  in the middle ({where}): {what}")
            if what == "power-cut":
                raise PowerCut(where)
            if what == "other-after-freeze":
                self.frozen_pass()
            elif what == "other":
                self.nested_pass()
            elif what == "slow":
                world.sleep(300.0)
            else:
                self.happen(what)
        if self.plan:
            self.plan[0] = (self.plan[0][0] - 1, self.plan[0][1])

    def nested_pass(self) -> None:
        """Another reconciler looks meanwhile."""
        if self.depth < 1:
            self.depth += 1
            try:
                self.world.one_pass()
            finally:
                self.depth -= 1

    def frozen_pass(self) -> None:
        """Whoever holds a lease stands still for minutes, and another reconciler looks."""
        held, self.world.held = self.world.held, []
        try:
            self.world.sleep(400.0)
            self.nested_pass()
        finally:
            self.world.held = held

    def happen(self, what: str) -> None:
        world, cloud = self.world, self.world.cloud
        self.rng += 1
        name = SLICES[self.rng % 2]
        living = [run_id for run_id in sorted(world.processes) if world.is_living(run_id)]
        match what:
            case "preempt":
                used = [p.on[0] for p in world.processes.values() if p.on and world.is_there(p.on)]
                chosen = (used or [name])[0]
                if cloud.states.get(chosen) == "ACTIVE":
                    cloud.states[chosen] = "SUSPENDED"
            case "vanish":
                cloud.delete(name)
            case "stock-out" | "restock":
                cloud.capacity = what == "restock"
                for each, state in list(cloud.states.items()):
                    if cloud.capacity and state == "WAITING":
                        cloud.states[each] = "ACTIVE"
            case "unreachable" | "reachable":
                cloud.unreachable = what == "unreachable"
            case "forbidden" | "busy" | "willing":
                cloud.refuses = "" if what == "willing" else what
            case "silent" | "speaking":
                (world.silent_slices.add if what == "silent" else world.silent_slices.discard)(name)
            case "unpreparable" | "preparable":
                (world.unpreparable.add if what == "unpreparable" else world.unpreparable.discard)(name)
            case "bucket-away" | "bucket-back":
                world.memory.away = what == "bucket-away"
            case "answer-lost":
                world.memory.answers_lost = 1
            case "registry-away" | "registry-back":
                world.registry_away = what == "registry-away"
            case "in-use" | "free":
                (world.in_use.add if what == "in-use" else world.in_use.discard)(name)
            case "progress":
                for run_id in living:
                    process = world.processes[run_id]
                    process.step += 30
                    process.saved = process.step - process.step % 20
                    if process.step >= STEPS:
                        process.state, process.cause = "done", "done"
            case "crash" | "outage" | "wrong":
                for run_id in living[:1]:
                    process = world.processes[run_id]
                    process.state = "failed"
                    process.cause = {"crash": "failed", "outage": "outside", "wrong": "wrong request"}[what]  # type: ignore[assignment]
            case "stop" | "cancel":
                self.desire("stopped", which=self.rng)
            case "remove":
                self.desire("removed", which=self.rng)
            case "unmanage":
                self.desire("unmanaged", which=self.rng)
            case "keep-again":
                self.desire("running", which=self.rng)
            case "stop-while-frozen":
                self.desire("stopped", which=self.rng)
                self.frozen_pass()
            case "lost-in-stock-out":
                self.happen("stock-out")
                self.happen("preempt")
            case "destroy-begins":
                with (
                    contextlib.suppress(LeaseHeldError, LeaseLostError, DocumentsError),
                    world.hold(name) as mine,
                ):
                    mine.mark(removed=True)
                    cloud.delete(name)
            case "pulumi-up":
                self.pulumi("up", name)
            case "pulumi-destroy":
                self.pulumi("destroy", name)

    def pulumi(self, what: str, name: str) -> None:
        world = self.world
        with contextlib.suppress(LeaseHeldError, LeaseLostError, DocumentsError), world.hold(name) as mine:
            mine.mark(removed=what == "destroy")
            if world.cloud.unreachable:
                return
            if what == "destroy":
                world.declared.discard(name)
                world.cloud.delete(name)
            elif world.cloud.states.get(name) not in ("ACTIVE", "WAITING"):
                world.declared.add(name)
                world.cloud.create(name, "pulumi")

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(
        befalls=st.lists(st.sampled_from((*FAULTS, *RUNS_DO, *RUNS_DO, *PEOPLE_DO)), max_size=3),
        middle=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(IN_THE_MIDDLE)), max_size=2),
        seconds=st.sampled_from([30.0, 90.0, 90.0, 1000.0, 5000.0]),
        heals=st.sampled_from([True, True, False]),
    )
    def scene(self, befalls: list[str], middle: list[tuple[int, str]], seconds: float, heals: bool) -> None:
        """Time goes on, things befall runs and slices, and a reconciler looks; then most faults are over."""
        self.world.sleep(seconds)
        for what in befalls:
            self.happen(what)
        self.plan = list(middle)
        with contextlib.suppress(PowerCut):
            self.world.one_pass()
        self.plan = []
        self.world.held.clear()
        if heals:
            self.heal()

    def heal(self) -> None:
        for what in ("restock", "reachable", "willing", "bucket-back", "registry-back"):
            self.happen(what)
        for several in (self.world.silent_slices, self.world.unpreparable, self.world.in_use):
            several.clear()
        self.world.memory.answers_lost = 0

    @rule(which=st.integers(0, 1), name=st.sampled_from(SLICES))
    def train(self, which: int, name: str) -> None:
        if not self.world.memory.away:
            self.train_and_keep(KEPT[which], name)

    @rule(
        which=st.integers(0, 2),
        slices=st.sampled_from([("a",), ("b",), ("b", "a")]),
        restarts=st.integers(0, 3),
    )
    def queue(self, which: int, slices: tuple[str, ...], restarts: int) -> None:
        if not self.world.memory.away:
            self.submit(SUBMITTED[which], slices, restarts)

    # --- what holds -------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_desired_is_given_up_while_it_lives(self) -> None:
        if not hasattr(self, "world"):
            return
        for run in self.documents().values():
            if run.end is not None and run.desired == "running":
                is_given_up = "could not be prepared" in run.end.reason
                assert not self.world.is_living(run.run_id) or is_given_up, run
                told = {run_id for run_id, _ in self.world.told} | {
                    run.run_id for each in run.notices for _ in [each]
                }
                assert run.end.reason
                assert run.end.outcome in ("stopped", "unmanaged") or run.run_id in told, "nobody was told"

    @invariant()
    def no_slice_has_two_submitted_runs(self) -> None:
        if hasattr(self, "world"):
            having = [
                run.slice
                for run in self.documents().values()
                if run.slice and run.end is None and run.submission
            ]
            assert len(having) == len({*having}), having

    def documents(self) -> dict[str, Run]:
        memory = self.world.memory
        was, memory.away = memory.away, False
        try:
            return dict(self.world.store().read().runs)
        finally:
            memory.away = was

    def teardown(self) -> None:
        """All faults end, and time goes on: what is wanted comes about, what is not is gone."""
        if not hasattr(self, "world"):
            return
        world, cloud = self.world, self.world.cloud
        self.heal()
        self.plan = []
        for name in SLICES:  # a destruction that has begun comes to its end
            if (world.documents().read(f"leases/{name}.json").value or {}).get("removed"):
                world.declared.discard(name)
                cloud.delete(name)
        # Two looks after the API answers again: what nobody wants is gone.
        for _ in range(3):
            world.sleep(1000.0)
            world.one_pass()
        runs = self.documents()
        for run in runs.values():
            if run.is_unwanted:
                assert not world.is_living(run.run_id), f"{run.run_id} was to be stopped, and lives"
            assert run.desired != "removed" or run.slice not in world.declared, f"{run} is not removed"
        for name, made_by in cloud.made_by.items():
            is_needed = any(run.slice == name and run.end is None for run in runs.values())
            is_paid_for = cloud.states[name] in ("ACTIVE", "WAITING")
            assert made_by == "pulumi" or is_needed or not is_paid_for, (
                f"{name} is paid for, and nobody wants it"
            )
            assert name in world.declared, f"{name} outlived `pulumi destroy`"
        for _ in range(60):
            world.sleep(4000.0)
            self.happen("progress")
            world.one_pass()
            if all(run.end is not None for run in self.documents().values()):
                break
        for run in self.documents().values():
            names = run.slices if run.slice is None else (run.slice,)
            is_waiting_for_pulumi = (
                not world.declared.intersection(names) and "`pulumi up` makes" in run.reason
            )
            assert run.end is not None or is_waiting_for_pulumi, f"{run} never came to its end"
        for run_id, process in world.processes.items():
            assert not world.is_living(run_id) or process.state == "running"


SEQUENCES = os.environ.get("TPU_STACK_SEQUENCES")
"""So many, and others each time."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sequences", [100, pytest.param(int(SEQUENCES or 600), marks=pytest.mark.slow)])
def test_whatever_befalls_runs_and_slices_none_trains_twice_none_is_forgotten_and_nothing_is_paid_for_in_vain(
    sequences: int,
) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
            derandomize=SEQUENCES is None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink a sequence takes minutes
            print_blob=True,
        ),
    )
