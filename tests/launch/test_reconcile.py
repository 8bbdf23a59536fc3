"""What a reconciler decided is carried out only if the object is still the one that it was decided about."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from launch.control.control_documents import Attempt, Limits, Run
from tests.launch.reconciler_model import Process, World


class Lab:
    """One kept run on the slice "a". at: what happens in the middle of an action, by its place."""

    def __init__(self, **changes: Any) -> None:
        self.at: dict[str, Callable[[], object]] = {}
        self.world = World(self._pause)
        self.world.declared.add("a")
        self.world.cloud.create("a", "pulumi")
        created = self.world.cloud.created["a"]
        attempt = Attempt(number=0, created=created, checkpoint=-2, has_joined=True)
        run = Run(
            run_id="r", stack="s", runs_url="/runs", slices=("a",), slice="a", project="p", attempt=attempt,
            limits=Limits(attempts=20), seen="running", added_s=self.world.clock.now(),
        )  # fmt: skip
        self.world.store().edit_run("r", lambda _: dataclasses.replace(run, **changes))
        self.process = Process(attempt=0, token=1, on=("a", created), state="running")
        self.world.processes["r"] = self.process

    def _pause(self, place: str) -> None:
        if (happens := self.at.pop(place, None)) is not None:
            happens()

    def desire(self, desired: Any) -> None:
        self.world.store().edit_run("r", lambda now: now and dataclasses.replace(now, desired=desired))

    @property
    def run(self) -> Run:
        found = self.world.store().run("r")
        assert found is not None
        return found


def fail(lab: Lab) -> None:
    lab.process.state, lab.process.cause = "failed", "failed"


def test_a_run_that_is_stopped_while_its_restart_is_decided_is_not_started() -> None:
    lab = Lab()
    fail(lab)
    lab.at["decided"] = lambda: lab.desire("stopped")
    lab.world.one_pass()
    assert lab.process.attempt == 0 and lab.run.limits.attempts == 20
    lab.world.one_pass()
    assert lab.run.end is not None and lab.run.end.outcome == "stopped"


def test_a_run_that_is_stopped_while_its_code_is_staged_is_not_started() -> None:
    lab = Lab()
    fail(lab)
    lab.at["stage"] = lambda: lab.desire("stopped")
    lab.world.one_pass()
    assert lab.process.attempt == 0
    assert lab.run.end is not None and lab.run.end.outcome == "stopped"


def test_a_run_that_gets_new_limits_while_its_end_is_decided_goes_on() -> None:
    lab = Lab(limits=Limits(attempts=0))
    fail(lab)
    lab.at["decided"] = lambda: lab.world.store().edit_run(
        "r", lambda now: now and dataclasses.replace(now, limits=Limits(attempts=5))
    )
    lab.world.one_pass()
    assert lab.run.end is None and lab.world.is_living("r")


@pytest.mark.parametrize(
    ("cause", "cost_usd", "kind"),
    [("failed", 4.9, "failed"), ("failed", 5.0, "out of budget"), ("over budget", 4.9, "out of budget")],
)
def test_people_are_told_that_a_run_is_out_of_budget_only_if_it_is(
    cause: Any, cost_usd: float, kind: str
) -> None:
    lab = Lab(limits=Limits(attempts=0, max_usd=5.0))
    lab.process.state, lab.process.cause, lab.process.cost_usd = "failed", cause, cost_usd
    lab.world.one_pass()
    assert lab.run.end is not None and lab.world.told == [("r", kind)]


def test_a_quiet_look_writes_nothing() -> None:
    lab = Lab()
    lab.world.one_pass()
    count = lab.world.memory.count
    for _ in range(3):
        lab.world.sleep(60.0)
        lab.world.one_pass()
    assert lab.world.memory.count == count


def test_a_slice_that_pulumi_is_destroying_is_not_requested() -> None:
    lab = Lab()
    with lab.world.hold("a") as mine:
        mine.mark(removed=True)
    lab.world.cloud.delete("a")
    lab.world.one_pass()
    assert lab.world.cloud.states == {}
    assert lab.run.end is None and "pulumi up" in lab.run.reason
