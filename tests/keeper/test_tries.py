"""What counts as a try to bring a run back, and what is withdrawn with its end, on the machine of test_machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from contracts.errors import RequestError
from infra import lease
from infra.cloud_tpu.lifecycle import Lifecycle
from infra.cloud_tpu.request import Spec
from infra.cloud_tpu.retry import CloudTpuError, LostAgainError
from infra.documents import DocumentsError, MissingError
from keeper import commands, passes, rules, slices, store
from keeper.store import Wanted
from launch.runs import AtWorkError
from tests.keeper.test_machine import POOLS, RUN_ID, ZONES, Away, Machine, PowerCut, World


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    made.start(0.0)
    yield made
    monkeypatch.undo()
    made.teardown()


def entry(one: Machine) -> Wanted:
    return store.read_wanted(Away(one))[RUN_ID]


def raises(error: BaseException) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


def test_a_run_whose_slice_was_refused_many_times_is_resumed_once_there_is_one(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.happen("preempt")
    with monkeypatch.context() as patch:
        patch.setattr(slices, "have", raises(CloudTpuError("no capacity", "RESOURCE_EXHAUSTED")))
        for _ in range(passes.MOST_PREPARED + 3):
            one.keeper()
            one.control.advance(rules.LONGEST_PAUSE_S)
        assert (entry(one).state, entry(one).prepares) == ("waiting", 0)
    one.keeper()
    assert one.world.runs and entry(one).prepares == 0


def test_a_slice_whose_hosts_are_never_published_is_tried_so_often_and_no_more(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.world.crash()
    asked: list[int] = []

    def have(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise slices.UnpublishedError("not yet")

    monkeypatch.setattr(slices, "have", have)
    one.keeper()
    assert (len(asked), entry(one).prepares) == (1, 1)  # of two looks
    for _ in range(passes.MOST_PREPARED):
        one.control.advance(rules.LONGEST_PAUSE_S)
        one.keeper()
    assert (entry(one).state, len(asked)) == ("ended", passes.MOST_PREPARED + 1)
    assert entry(one).reason == f"its hosts could not be prepared {passes.MOST_PREPARED} times"
    one.world.outcome = "done"


def test_a_slice_that_is_lost_before_it_is_there_is_asked_for_at_the_next_look(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.happen("preempt")
    with monkeypatch.context() as patch:
        patch.setattr(slices, "have", raises(LostAgainError("it is SUSPENDED")))
        one.keeper()
    assert (entry(one).failures, entry(one).not_before_s) == (0, 0.0)
    one.keeper()
    assert one.world.runs


def test_a_multislice_of_which_a_node_vanishes_is_lost_and_made_again_which_is_an_attempt() -> None:
    """Google's listing goes on calling it ACTIVE."""
    one = Machine()
    one.node_count = 2
    one.start(0.0)
    before = entry(one)
    one.control.vanish(f"projects/grant/locations/{ZONES[0]}/nodes/main-1")
    one.keeper()
    assert one.world.runs and len(one.world.on) == 8
    assert [act["act"] for act in entry(one).acts] == ["asks", "resumes", "runs"]
    assert entry(one).attempts_left == before.attempts_left - 1
    assert "main is lost: node main-1 is gone" in one.cloud.said
    one.teardown()


def test_hosts_that_somebody_else_uses_take_no_attempt(one: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one.world.crash()
    before = entry(one)
    with monkeypatch.context() as patch:
        patch.setattr(World, "resume", raises(AtWorkError("somebody trains there")))
        one.keeper()
    now = entry(one)
    assert (now.attempts_left, now.failures, now.last_restored_step) == (before.attempts_left, 0, None)
    assert now.not_before_s > one.clock.now() - rules.FIRST_PAUSE_S
    one.control.advance(rules.FIRST_PAUSE_S)
    one.keeper()
    assert one.world.runs and entry(one).attempts_left == before.attempts_left - 1


def test_nothing_is_done_where_the_stack_cannot_be_read(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.happen("preempt")
    monkeypatch.setattr(store, "find_stack", raises(DocumentsError("the bucket does not answer")))
    one.keeper()
    assert (entry(one).state, entry(one).acts) == ("watched", ())


def test_what_a_killed_keeper_asked_for_is_withdrawn_with_the_last_run(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.happen("preempt")
    one.happen("stock-out")
    have = slices.have

    def killed(*given: Any, **how: Any) -> Any:
        have(*given, **how)
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(slices, "have", killed)
        one.keeper()
    assert len(one.live()) == 1 and entry(one).state == "recovering"
    store.change_wanted(Away(one), RUN_ID, lambda now: now and dataclasses.replace(now, stop=True))
    one.control.advance(120.0)
    one.keeper()
    assert one.live() == [] and entry(one).state == "ended"
    one.world.outcome = "done"


@pytest.mark.parametrize("is_kept_too", [False, True])
def test_what_waits_is_withdrawn_when_its_run_is_kept_no_more(one: Machine, is_kept_too: bool) -> None:
    one.happen("preempt")
    one.happen("stock-out")
    one.keeper()
    assert entry(one).state == "waiting" and len(one.live()) == 1
    if is_kept_too:  # the slice is wanted for another one
        other = dataclasses.replace(entry(one), run_id="other")
        store.change_wanted(Away(one), "other", lambda _: other)
    commands.unkeep(Away(one), RUN_ID)
    one.away_until_s = one.clock.now() + 60.0
    one.keeper()
    one.control.advance(60.0)
    one.keeper()
    assert [*store.read_wanted(Away(one))] == (["other"] if is_kept_too else [])
    assert len(one.live()) == is_kept_too


@pytest.mark.parametrize("moment", ["silent", "prepare"])
def test_a_run_that_is_taken_back_while_its_hosts_are_prepared_is_not_resumed(
    one: Machine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    before = getattr(World, moment)

    def meanwhile(*given: Any) -> Any:
        if entry(one).is_kept:
            commands.unkeep(Away(one), RUN_ID)
        return before(*given)

    one.happen("preempt")
    monkeypatch.setattr(World, moment, meanwhile)
    one.keeper()
    assert one.world.attempt == 0 and store.read_wanted(Away(one)) == {}


def test_a_run_that_is_kept_no_more_goes_on(one: Machine) -> None:
    commands.unkeep(Away(one), RUN_ID)
    with pytest.raises(RequestError, match="is not kept"):
        commands.unkeep(Away(one), RUN_ID)
    before = one.world.attempt
    one.keeper()
    assert store.read_wanted(Away(one)) == {} and len(one.live()) == 1
    assert one.world.runs and one.world.attempt == before


@pytest.mark.parametrize("end", ["done", "unkept"])
def test_the_loser_of_a_race_is_withdrawn_also_if_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    one = Machine()
    one.start(0.0, "race")
    try:
        here = one.live()[0].split("/")[3]
        there = next(zone for zone in ZONES if zone != here)
        one.control.set_capacity(POOLS[ZONES.index(there)], 0)
        props = store.read_stack(Away(one)).slices["main"]
        spec = dataclasses.replace(Spec.of(props), zone=there)
        Lifecycle(one.cloud.client, one.cloud.session.backoff).ask(spec, is_recorded=False)
        assert len(one.live()) == 2
        if end == "unkept":
            commands.unkeep(Away(one), RUN_ID)
        one.world.outcome = "done" if end == "done" else None
        one.keeper()
        assert [each.state for each in store.read_wanted(Away(one)).values()] == ["ended"] * (end == "done")
        assert [name.split("/")[3] for name in one.live()] == [here]
    finally:
        one.teardown()


def test_a_slice_that_was_active_before_stays_where_the_bucket_is_missing(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody has deleted the bucket by mistake: the slice may be at work."""
    one.world.crash()
    missing = MissingError("there is no such bucket")

    def have(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(lease.Lease, "take", raises(missing))
        raise lease.LeaseLostError("the lease cannot be renewed")

    with monkeypatch.context() as patch:
        patch.setattr(slices, "have", have)
        one.keeper()
    monkeypatch.undo()
    assert len(one.live()) == 1
    one.world.outcome = "done"
