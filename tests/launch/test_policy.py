"""The policy as a table: what is desired and observed, and what is done."""

import dataclasses
from typing import Any

import pytest

from launch import policy
from launch.control.control_documents import Attempt, End, Limits, Run, Slice, Submission
from launch.policy import Action, RunObserved, Signs, SliceObserved, Standing

NOW = 1_800_000_000.0
ACTIVE = SliceObserved(standing="active", created="c1")
QUEUED = Submission(
    number=1, what="train.py", request={}, submitted={}, bundles=(), where={}, by="me", added=""
)


STARTING = Attempt(number=4, created="c1", checkpoint=40, starting_until_s=NOW + 1)


def kept(*, after: str = "", **changes: Any) -> Run:
    attempt = Attempt(number=3, created="c1", checkpoint=20, after=after, has_joined=True)
    run = Run(
        run_id="r", stack="s", runs_url="/runs", slices=("a",), slice="a", seen="running", attempt=attempt,
        limits=Limits(attempts=20),
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def ended(cause: policy.Cause, checkpoint: int = 40, **changes: Any) -> RunObserved:
    state: Any = {"wrong request": "failed", "outside": "failed", "over budget": "stopped"}.get(cause, cause)
    return dataclasses.replace(
        RunObserved(living="absent", state=state, cause=cause, attempt=3, checkpoint=checkpoint), **changes
    )


def decide(
    run: Run,
    observed: RunObserved | None,
    place: SliceObserved = ACTIVE,
    signs: Signs | None = None,
    **slice_spec: Any,
) -> Action:
    return policy.next_action(run, Slice(name="a", **slice_spec), place, signs, observed, NOW)


@pytest.mark.parametrize(
    ("run", "observed", "do"),
    [
        (kept(), ended("done"), "end"),
        (kept(), ended("stopped"), "end"),
        (kept(), ended("over budget"), "end"),
        (kept(), ended("wrong request"), "end"),
        (kept(), ended("preempted"), "start"),
        (kept(), ended("preempted", checkpoint=20), "start"),
        (kept(), ended("failed"), "start"),
        (kept(), ended("failed", checkpoint=20), "start"),
        (kept(failures=3, after="preempted"), ended("failed", checkpoint=20), "start"),
        (kept(after="failed"), ended("failed", checkpoint=20), "end"),
        (kept(after="failed"), ended("hung", checkpoint=20), "end"),
        (kept(after="failed"), ended("failed"), "start"),
        (kept(failures=5), ended("outside", checkpoint=20), "start"),
        (kept(failures=policy.MOST_OUTAGES), ended("outside", checkpoint=20), "end"),
        (kept(after="failed"), ended("failed", checkpoint=20, attempt=2), "start"),  # the newest was never started
        (kept(failed_starts=policy.MOST_FAILED_STARTS), ended("preempted"), "end"),
        (kept(limits=Limits(attempts=0)), ended("preempted"), "end"),
        (kept(limits=Limits(deadline_s=NOW - 1)), ended("preempted"), "end"),
        (kept(limits=Limits(deadline_s=NOW)), ended("preempted"), "start"),
        (kept(limits=Limits(max_usd=5.0)), ended("preempted", cost_usd=5.0), "end"),
        (kept(limits=Limits(max_usd=5.0)), ended("preempted", cost_usd=5.0, max_usd=6.0), "start"),
        (kept(limits=Limits(restarts=0)), ended("failed"), "end"),
        (kept(limits=Limits(restarts=0)), ended("preempted"), "start"),
        (kept(limits=Limits(restarts=0)), ended("outside"), "start"),
        (kept(limits=Limits(restarts=0), failures=policy.MOST_LOSSES), ended("preempted", checkpoint=20), "end"),
        (kept(not_before_s=NOW + 1), ended("preempted"), "wait"),
        (kept(), RunObserved(living="present", state="running", attempt=3), "wait"),
        (kept(desired="stopped"), RunObserved(living="present", state="running", attempt=3), "stop"),
        (kept(), RunObserved(living="unknown", state="lost", attempt=3, silent=1), "wait"),
        (kept(desired="stopped"), RunObserved(living="unknown", state="lost", attempt=3, silent=1), "wait"),
        (kept(desired="stopped"), ended("failed"), "end"),
        (kept(desired="removed"), RunObserved(living="present", state="running", attempt=3), "stop"),
        (kept(desired="removed"), RunObserved(living="unknown", state="lost", attempt=3, silent=1), "wait"),
        (kept(desired="removed"), ended("failed", attempt=2), "end"),
        (kept(desired="removed", attempt=STARTING), ended("failed"), "wait"),
        (kept(desired="removed", end=End(outcome="stopped", reason="", at_s=1.0)), None, "remove"),
        (kept(desired="stopped", end=End(outcome="stopped", reason="", at_s=1.0)), None, "wait"),
        (kept(desired="unmanaged"), RunObserved(living="present", state="running", attempt=3), "end"),
        (kept(), None, "examine"),
    ],
)  # fmt: skip
def test_a_run_whose_slice_is_there(run: Run, observed: RunObserved | None, do: str) -> None:
    assert decide(run, observed).do == do


@pytest.mark.parametrize(
    ("standing", "do"),
    [("unknown", "wait"), ("waiting", "wait"), ("overdue", "wait"), ("lost", "wait"), ("absent", "wait")],
)
def test_a_run_without_its_slice_is_neither_started_nor_given_up(standing: Standing, do: str) -> None:
    place = SliceObserved(standing=standing)
    assert decide(kept(), None, place).do == do
    assert decide(kept(), ended("failed", checkpoint=20), place).do == do
    if standing != "unknown":
        assert decide(kept(desired="stopped"), None, place).do == "end"
        assert decide(kept(), ended("done"), place).do == "end"
        assert decide(kept(), None, place, refused="403").do == "end"


def test_hosts_that_were_made_again_are_no_fault_of_the_run() -> None:
    again = SliceObserved(standing="active", created="c2")
    run, failed = kept(after="failed"), ended("failed", checkpoint=20)
    assert decide(run, failed).do == "end"
    assert decide(run, failed, again).do == "start"


@pytest.mark.parametrize(
    ("left_s", "observed", "do"),
    [
        (policy.ENDING_S + 1, ended("preempted"), "start"),
        (policy.ENDING_S - 1, ended("preempted"), "wait"),
        (-3600.0, ended("preempted"), "wait"),  # Google is late; it would still be taken back
        (60.0, ended("done"), "end"),
        (60.0, RunObserved(living="present", state="running", attempt=3), "wait"),
    ],
)
def test_nothing_is_started_on_a_slice_that_is_about_to_be_taken_back(
    left_s: float, observed: RunObserved, do: str
) -> None:
    place = SliceObserved(standing="active", created="c1", ends_s=NOW + left_s)
    assert decide(kept(), observed, place).do == do
    waiting = Run(run_id="1", stack="s", runs_url="/runs", slices=("a",), submission=QUEUED)
    is_assigned = policy.assignments([waiting], {"a": (Slice(name="a"), place)}, NOW) == {"1": "a"}
    assert is_assigned == (left_s > policy.ENDING_S)


def test_a_run_with_fresh_signs_of_life_is_not_examined() -> None:
    fresh = Signs(beat_age_s=5.0, has_result=False)
    assert decide(kept(), None, signs=fresh).do == "wait"
    for signs in (Signs(beat_age_s=91.0, has_result=False), Signs(beat_age_s=5.0, has_result=True), None):
        assert decide(kept(), None, signs=signs).do == "examine"
    assert decide(kept(seen=""), None, signs=fresh).do == "examine"
    assert decide(kept(desired="stopped"), None, signs=fresh).do == "examine"


@pytest.mark.parametrize(
    ("cause", "limits", "attempts", "days"),
    [
        ("failed", Limits(attempts=20), 2, 0.1),
        ("hung", Limits(attempts=20), 2, 0.1),
        ("lost", Limits(attempts=20), 2, 0.1),
        ("wrong request", Limits(attempts=20), 1, 0.0),
        ("preempted", Limits(attempts=20), 21, 1.0),  # with its slice still there
        ("preempted", Limits(restarts=0), policy.MOST_LOSSES + 1, 0.1),
        ("outside", Limits(restarts=0), policy.MOST_OUTAGES + 1, 1.0),
        ("never joins", Limits(attempts=20), policy.MOST_FAILED_STARTS, 0.1),
    ],
)
def test_a_run_that_never_takes_a_step_ends_however_it_fails(
    cause: Any, limits: Limits, attempts: int, days: float
) -> None:
    """So its slice is not kept for it for ever."""
    run, observed, now_s, begun = kept(attempt=None, limits=limits), None, NOW, 0
    while observed is None or policy.judge(run, observed, now_s, created="c1").do != "end":
        run = policy.begin_attempt(run, observed, "c1", now_s)
        assert run.attempt is not None
        begun += 1
        assert begun < 100, "it goes on for ever"
        now_s = max(now_s + policy.STARTING_LIMIT_S, run.not_before_s)
        number = -1 if cause == "never joins" else run.attempt.number
        observed = ended("lost" if cause == "never joins" else cause, checkpoint=-1, attempt=number)
    assert begun == attempts
    assert now_s - NOW - begun * policy.STARTING_LIMIT_S <= days * 86400


def test_an_attempt_is_counted_before_it_starts() -> None:
    run = policy.begin_attempt(
        kept(limits=Limits(attempts=20, restarts=1)), ended("failed", checkpoint=20), "c1", NOW
    )
    assert run.limits == Limits(attempts=19, restarts=0)
    assert run.attempt is not None and (run.attempt.number, run.attempt.checkpoint) == (4, 20)
    assert (run.failures, run.not_before_s) == (1, NOW + policy.FIRST_PAUSE_S)
    assert run.attempt.after == "failed"
    after_outage = policy.begin_attempt(kept(), ended("outside"), "c1", NOW)
    assert after_outage.limits.attempts == 20
    first = policy.begin_attempt(kept(attempt=None, limits=Limits(restarts=0)), None, "c1", NOW)
    assert first.attempt is not None and first.attempt.number == 0 and first.limits.restarts == 0


def test_what_could_not_start_because_somebody_else_is_at_work_counts_as_no_try() -> None:
    before = kept(limits=Limits(attempts=3))
    counted = policy.begin_attempt(before, ended("preempted"), "c1", NOW)
    in_use = policy.undo_attempt(before, counted, NOW, counts=False)
    assert (in_use.limits, in_use.attempt, in_use.failed_starts) == (before.limits, before.attempt, 0)
    assert in_use.not_before_s > NOW
    failed = policy.undo_attempt(before, counted, NOW, counts=True)
    assert (failed.limits.attempts, failed.attempt, failed.failed_starts) == (2, before.attempt, 1)


@pytest.mark.parametrize(
    ("slice_spec", "standing", "runs", "silent", "do"),
    [
        ({}, "absent", [kept()], 0, "request"),
        ({}, "lost", [kept()], 0, "request"),
        ({}, "overdue", [kept()], 0, "request"),
        ({}, "doubled", [kept()], 0, "request"),
        ({}, "waiting", [kept()], 0, "wait"),
        ({}, "unknown", [kept()], 0, "wait"),
        ({"not_before_s": NOW + 1}, "absent", [kept()], 0, "wait"),
        ({"refused": "403"}, "absent", [kept()], 0, "wait"),
        ({}, "absent", [kept(desired="stopped")], 0, "wait"),
        ({}, "active", [kept()], 0, "wait"),
        ({}, "active", [kept()], 2, "prepare"),
        ({"requested": True}, "active", [kept()], 0, "prepare"),
        ({"requested": True, "prepared": "c1"}, "active", [kept()], 0, "wait"),
        ({"requested": True, "prepared": "c0"}, "active", [kept()], 0, "prepare"),
        ({"requested": True}, "active", [], 0, "release"),
        ({"requested": True}, "waiting", [], 0, "release"),
        ({"requested": True}, "unknown", [], 0, "wait"),
        ({"requested": True}, "active", [kept(desired="stopped")], 0, "wait"),
        ({}, "active", [], 0, "wait"),
        ({}, "waiting", [], 0, "wait"),
    ],
)  # fmt: skip
def test_a_slice(
    slice_spec: dict[str, Any], standing: Standing, runs: list[Run], silent: int, do: str
) -> None:
    place = SliceObserved(standing=standing, created="c1")
    assert policy.next_slice_action(Slice(name="a", **slice_spec), place, runs, silent, NOW).do == do


def test_slices_go_by_priority_and_order_to_one_run_each_and_a_run_leaves_a_lost_slice_for_a_free_one() -> (
    None
):
    def waits(run_id: str, *slices: str, **changes: Any) -> Run:
        run = Run(run_id=run_id, stack="s", runs_url="/runs", slices=slices, submission=QUEUED)
        return dataclasses.replace(run, **changes)

    def given(runs: list[Run], **standings: Standing) -> dict[str, str]:
        slices = {name: (Slice(name=name), SliceObserved(standing=of)) for name, of in standings.items()}
        return policy.assignments(runs, slices, NOW)

    first, urgent = waits("1", "a", "b", order=1.0), waits("2", "a", order=2.0, priority=5)
    assert given([first, urgent], a="active", b="active") == {"2": "a", "1": "b"}
    assert given([first, urgent], a="active", b="unknown") == {"2": "a"}
    assert given([first], a="lost", b="active") == {"1": "b"}
    assert given([first], a="lost", b="unknown") == {"1": "a"}
    assert given([waits("1", "a"), kept()], a="active") == {}
    assert given([waits("1", "a"), kept(end=End(outcome="done", reason="", at_s=NOW))], a="active") == {
        "1": "a"
    }
    assert given([waits("1", "a", failed_starts=1), waits("2", "a", order=9.0)], a="active") == {"2": "a"}
    assert given([dataclasses.replace(first, slice="a")], a="lost", b="active") == {"1": "b"}
    assert given([dataclasses.replace(first, slice="a")], a="active", b="active") == {}
    assert given([dataclasses.replace(first, desired="stopped")], a="active") == {}
