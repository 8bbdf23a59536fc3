"""What is done about a run follows from what is seen of it, and stops where it would help nobody."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from keeper import rules
from keeper.rules import Facts, Sign
from keeper.store import Wanted

NOW_S = 1_800_000_000.0
WANTED = Wanted(run_id="r", stack="dev", slice="main", runs_url="gs://b/runs")
FRESH, SILENT, ENDED = (
    Sign(beat_age_s=5.0, has_result=False),
    Sign(beat_age_s=rules.SILENT_S + 1, has_result=False),
    Sign(beat_age_s=5.0, has_result=True),
)


def wanted(**changes: Any) -> Wanted:
    return dataclasses.replace(WANTED, **changes)


@pytest.mark.parametrize(
    ("entry", "of_slice", "sign", "do"),
    [
        (wanted(), "active", FRESH, "nothing"),
        (wanted(), "none", FRESH, "nothing"),
        (wanted(), "active", SILENT, "examine"),
        (wanted(), "active", ENDED, "examine"),
        (wanted(), "active", None, "examine"),
        (wanted(state="recovering"), "active", FRESH, "examine"),
        (wanted(state="ended"), "lost", SILENT, "nothing"),
        (wanted(), "unread", SILENT, "nothing"),
        (wanted(), "lost", FRESH, "ask"),
        (wanted(), "absent", FRESH, "ask"),
        (wanted(not_before_s=NOW_S + 1), "lost", FRESH, "nothing"),
        (wanted(state="waiting"), "waiting", SILENT, "nothing"),
        (wanted(state="waiting"), "overdue", SILENT, "ask"),
        (wanted(state="waiting", not_before_s=NOW_S + 1), "overdue", SILENT, "nothing"),
        (wanted(unkept=True), "active", FRESH, "end"),
        (wanted(unkept=True), "waiting", SILENT, "end"),
        (wanted(unkept=True), "unread", SILENT, "nothing"),
        (wanted(state="waiting", stop=True), "overdue", SILENT, "end"),
        (wanted(attempts_left=0), "doubled", FRESH, "ask"),
        (wanted(attempts_left=0), "lost", FRESH, "end"),
        (wanted(state="waiting", deadline_s=NOW_S - 1), "waiting", SILENT, "end"),
        (wanted(deadline_s=NOW_S - 1), "active", FRESH, "nothing"),
        (wanted(for_queue=True), "active", None, "nothing"),
        (wanted(for_queue=True, state="recovering"), "active", None, "examine"),
        (wanted(for_queue=True), "lost", None, "ask"),
        (wanted(stop=True), "active", FRESH, "examine"),
        (wanted(stop=True), "lost", FRESH, "end"),
        (wanted(stop=True, state="waiting"), "waiting", SILENT, "end"),
    ],
)
def test_a_look_is_enough_as_long_as_all_is_well(
    entry: Wanted, of_slice: rules.Slice, sign: Sign | None, do: str
) -> None:
    assert rules.glance(entry, of_slice, sign, NOW_S).do == do


@pytest.mark.parametrize(
    ("entry", "facts", "do", "reason"),
    [
        (wanted(), Facts(state="running"), "nothing", "it is running"),
        (wanted(attempts_left=0), Facts(state="saving"), "nothing", "it is saving"),
        (wanted(stop=True), Facts(state="running"), "stop", "it is running"),
        (wanted(stop=True), Facts(state="preempted", saved=(5,)), "end", "`fab stop` has ended it"),
        (wanted(), Facts(state="done"), "end", "it is done"),
        (wanted(), Facts(state="stopped", error="its budget is spent"), "end", "budget is spent"),
        (wanted(), Facts(state="failed", is_wrong=True, error="no text"), "end", "would fail again: no text"),
        (wanted(), Facts(state="failed"), "resume", "it failed, and goes on from the start"),
        (
            wanted(),
            Facts(state="lost", saved=(5, 20)),
            "resume",
            "it was lost, and goes on from the checkpoint of",
        ),
        (wanted(last_restored_step=-1), Facts(state="failed"), "end", "failed twice from the start"),
        (
            wanted(last_restored_step=20),
            Facts(state="hung", saved=(5, 20)),
            "end",
            "hung twice from the checkpoint",
        ),
        (wanted(last_restored_step=20), Facts(state="failed", saved=(20, 30)), "resume", "step 30"),
        (wanted(last_restored_step=20), Facts(state="preempted", saved=(20,)), "resume", "step 20"),
        (
            wanted(last_restored_step=20, slice_lost=True),
            Facts(state="failed", saved=(20,)),
            "resume",
            "step 20",
        ),
        (
            wanted(last_restored_step=-1),
            Facts(state="failed", is_outage=True, error="the bucket is away"),
            "resume",
            "from the start",
        ),
        (wanted(attempts_left=0), Facts(state="lost"), "end", "no attempts left"),
        (wanted(deadline_s=NOW_S - 3600), Facts(state="lost"), "end", "its deadline was 1 h"),
        (wanted(max_usd=10.0), Facts(state="lost", cost_usd=12.0), "end", "12.00 USD of at most 10.00"),
        (wanted(max_usd=10.0), Facts(state="lost", cost_usd=12.0, max_usd=20.0), "resume", "from the start"),
        (wanted(not_before_s=NOW_S + 90), Facts(state="lost"), "nothing", "next try is in 1 min 30 s"),
    ],
)
def test_a_run_is_resumed_only_where_that_may_go_better(
    entry: Wanted, facts: Facts, do: str, reason: str
) -> None:
    step = rules.next_step(entry, facts, NOW_S)
    assert (step.do, reason in step.reason) == (do, True), step


def test_tries_without_a_new_checkpoint_come_after_pauses_that_double_and_each_is_counted() -> None:
    entry, pauses_s = wanted(attempts_left=9), []
    for saved in ((), (), (10,), (10,), (10,)):
        entry = rules.resumed(entry, Facts(state="lost", saved=saved), NOW_S)
        pauses_s.append(entry.not_before_s - NOW_S)
    assert pauses_s == [60.0, 120.0, 60.0, 120.0, 240.0]
    assert (entry.attempts_left, entry.last_restored_step, entry.state) == (4, 10, "recovering")
    assert rules.pause_s(50) == rules.LONGEST_PAUSE_S
