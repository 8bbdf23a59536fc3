"""Goodput: a table of attempts and where their time went, and what holds of all records, whoever has written them."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import goodput
from contracts.goodput import Goodput, attempt_goodputs, run_goodput
from jobs.runtime.monitoring.metrics import Part

MADE, AGAIN = "2026-11-20T11:00:00.5Z", "2026-11-20T12:03:00Z"
PARTS = {"start": 10.0, "restore": 2.0, "compile": 8.0, "compute": 60.0, "input_wait": 20.0}


def attempt(number: int, started: str, *, parts: Any = None, **fields: Any) -> dict[str, Any]:
    """One of run.json that has ended. Its time is that of its parts, unless `wall_s` says another."""
    names = ("from_step", "saved_step", "step", "open", "idle_s")
    timing: dict[str, Any] = {name: fields.pop(name) for name in names if name in fields}
    parts = PARTS if parts is None else parts
    started = f"2026-11-20T12:{started}Z"
    ended = {"wall_s": sum(parts.values()), "timing": {"parts": parts, **timing}}
    return {
        "attempt": number,
        "started": started,
        "slice_created": MADE,
        "outcome": "failed",
        **ended,
        **fields,
    }


def run_of(*attempts: dict[str, Any]) -> dict[str, Any]:
    return {"attempts": [*attempts]}


def seconds(found: Goodput | None) -> dict[str, float]:
    assert found is not None
    return {str(name): value for name, value in found.seconds.items()}


def latest(found: list[dict[str, Any]], **result: Any) -> Goodput | None:
    """Of a run whose last attempt has a result and a heartbeat, from what run.json would have of that attempt."""
    *earlier, last = found
    timing = last["timing"]
    result = {"attempt": last["attempt"], "outcome": last["outcome"], "wall_s": last["wall_s"], **result}
    beat = {
        "rank": 0,
        "attempt": last["attempt"],
        "state": "x",
        "step": timing.get("step", 0),
        "timing": timing,
    }
    names = ("attempt", "started", "slice_created", "slice_active_at")
    plain = {name: last[name] for name in names if name in last}
    return run_goodput({"attempts": [*earlier, plain]}, result, [beat, {"rank": 1}])


FIRST = attempt(0, "00:00", from_step=0, saved_step=60, step=100)
KEPT = {"starting": 10.0, "restoring": 2.0, "compiling": 8.0}
STORIES: dict[str, tuple[list[dict[str, Any]], dict[str, float]]] = {
    "done": (
        [attempt(0, "00:00", parts={**PARTS, "finish": 5.0, "logging": 1.0}, step=100, outcome="done")],
        {"productive": 60.0, "input_wait": 20.0, "recording": 1.0, **KEPT, "finishing": 5.0},
    ),
    # Killed at step 100 and not resumed: what was not saved is lost.
    "killed": ([FIRST], {"productive": 36.0, "lost": 32.0, "input_wait": 12.0, **KEPT}),
    # Resumed on the same slice 20 s later, from an older checkpoint than its last one, which was torn.
    "resumed": (
        [FIRST, attempt(1, "02:00", parts={"start": 5.0, "compute": 40.0}, from_step=50, step=130, outcome="done")],
        {"productive": 70.0, "lost": 40.0, "input_wait": 10.0, "starting": 15.0, "restoring": 2.0, "compiling": 8.0,
         "waiting": 20.0},
    ),
    # Twice: the third goes on from a step of the first, so that all of the second is lost.
    "twice": (
        [
            attempt(0, "00:00", parts={"compute": 100.0}, from_step=0, step=100),
            attempt(1, "01:40", parts={"compute": 50.0}, from_step=80, step=120),
            attempt(2, "02:30", parts={"compute": 10.0}, from_step=80, step=90, outcome="done"),
        ],
        {"productive": 90.0, "lost": 70.0},
    ),
    # The slice was made anew at 12:03, and a minute went by until the attempt began on it; before, nothing was paid.
    "another slice": (
        [
            attempt(0, "00:00", parts={"compute": 90.0}, from_step=0, step=9, outcome="preempted"),
            attempt(1, "04:00", parts={"compute": 10.0}, from_step=9, step=10, outcome="done", slice_created=AGAIN),
        ],
        {"productive": 100.0, "waiting": 60.0},
    ),
    # It was asked for at 12:03, and there at 12:03:30.
    "another slice, which waited for capacity": (
        [
            attempt(0, "00:00", parts={"compute": 90.0}, from_step=0, step=9, outcome="preempted"),
            attempt(1, "04:00", parts={"compute": 10.0}, from_step=9, step=10, outcome="done", slice_created=AGAIN,
                    slice_active_at="2026-11-20T12:03:30Z"),
        ],
        {"productive": 100.0, "waiting": 30.0},
    ),
    # A slice that was there before may have had other runs meanwhile; a run that somebody stopped waits for nothing.
    "an older slice": (
        [
            attempt(0, "00:00", parts={"compute": 9.0}, outcome="preempted"),
            attempt(1, "09:00", parts={"compute": 9.0}, outcome="done", slice_created="2026-11-20T11:59:00Z"),
        ],
        {"productive": 18.0},
    ),
    "stopped": (
        [
            attempt(0, "00:00", parts={"compute": 9.0}, outcome="stopped", saved_step=4, step=4),
            attempt(1, "09:00", parts={"compute": 9.0}, from_step=4, step=5, outcome="done"),
        ],
        {"productive": 18.0},
    ),
    "hung": (
        [attempt(0, "00:00", parts={"start": 9.0, "compute": 50.0}, open="compute", idle_s=30.0, step=10, saved_step=5,
                 outcome="hung")],
        {"productive": 10.0, "lost": 10.0, "starting": 9.0, "idle": 30.0},
    ),
    # It began to measure 4 s after it was started.
    "before it measured": (
        [attempt(0, "00:00", parts={"start": 1.0, "compute": 5.0}, wall_s=10.0, outcome="done")],
        {"productive": 5.0, "starting": 5.0},
    ),
    "clocks differ": (
        [attempt(0, "00:00", parts={"start": 1.0, "compute": 3.0}, wall_s=2.0, outcome="done")],
        {"productive": 1.5, "starting": 0.5},
    ),
    # An attempt of older code, resumed by this one.
    "older code": (
        [
            {"attempt": 0, "started": "2026-11-20T12:00:00Z", "wall_s": 30.0, "outcome": "failed"},
            attempt(1, "05:00", parts={"compute": 10.0}, from_step=4, step=9, outcome="done"),
        ],
        {"productive": 10.0, "unknown": 30.0},
    ),
    "a command that reports no step": (
        [attempt(0, "00:00", parts={"start": 1.0, "command": 9.0}, outcome="done")],
        {"starting": 1.0, "unknown": 9.0},
    ),
    "a command that reports steps": (
        [attempt(0, "00:00", parts={"start": 1.0, "command": 2.0, "compute": 7.0}, from_step=1, outcome="done")],
        {"productive": 7.0, "starting": 3.0},
    ),
    "a job that tells no parts apart": (
        [attempt(0, "00:00", parts={"start": 9.0}, outcome="done")],
        {"unknown": 9.0},
    ),
    "failed before its first step": ([attempt(0, "00:00", parts={"start": 9.0})], {"starting": 9.0}),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_the_time_of_a_run_is_divided_by_what_became_of_it(story: str) -> None:
    attempts, expected = STORIES[story]
    assert seconds(latest(attempts)) == expected
    # What run.json keeps of an attempt says the same as the files that the attempt has left.
    if len(attempts) == 1:
        beats = [
            {
                "rank": 0,
                "attempt": 0,
                "step": attempts[0]["timing"].get("step"),
                "timing": attempts[0]["timing"],
            }
        ]
        result = {"attempt": 0, "outcome": attempts[0]["outcome"], "wall_s": attempts[0]["wall_s"]}
        kept = {**attempts[0], **goodput.measured(attempts[0], result, beats)}
        after = attempt(1, "50:00", parts={}, wall_s=0.0, slice_created="")
        assert seconds(attempt_goodputs(run_of(kept, after), None, [])[0]) == expected


def test_a_run_that_still_runs_has_the_time_until_its_last_heartbeat() -> None:
    run = run_of({"attempt": 0, "started": "2026-11-20T12:00:00Z"})
    at_s = 1795176000.0
    timing = {"parts": {"start": 8.0, "compute": 30.0}, "open": "compute", "from_step": 0, "saved_step": 5}
    beats = [{"rank": 0, "attempt": 0, "state": "stepping", "step": 9, "time": at_s + 40.0, "timing": timing}]
    found = run_goodput(run, None, [*beats, None])
    assert seconds(found) == {"productive": 30.0, "starting": 10.0}
    assert found is not None and found.text() == "75% of 40 s; starting 25%"
    assert run_goodput(run, None, []) is None, "nothing is known of it yet"
    hung = {"attempt": 0, "outcome": "hung", "time": at_s + 40.0, "wall_s": None}
    assert seconds(run_goodput(run, hung, [{**beats[0], "step_time": at_s + 28.0}])) == {
        "productive": 10.0, "lost": 8.0, "starting": 10.0, "idle": 12.0,
    }  # fmt: skip


def test_an_attempt_has_ended_with_its_result_even_where_a_frozen_host_beats_again_afterwards() -> None:
    run = run_of({"attempt": 0, "started": "2026-11-20T12:00:00Z"})
    at_s = 1795176000.0
    timing = {"parts": {"start": 8.0, "compute": 30.0}, "open": "compute", "from_step": 0}
    beats = [
        {"rank": 0, "attempt": 0, "state": "failed", "step": 9, "time": at_s + 38.0, "timing": timing},
        {"rank": 1, "attempt": 0, "state": "failed", "step": 9, "time": at_s + 3600.0},
    ]
    lost = {"attempt": 0, "outcome": "failed", "time": at_s + 40.0, "wall_s": None}
    assert seconds(run_goodput(run, lost, beats)) == {"productive": 30.0, "starting": 10.0}


def test_what_is_not_known_is_said() -> None:
    assert (
        Goodput({"unknown": 9000, "starting": 1000}).text() == "not known (10 s); unknown 90%, starting 10%"
    )
    assert Goodput({"unknown": 5000, "productive": 5000}).text() == "at least 50% of 10 s; unknown 50%"
    assert not Goodput({"unknown": 1}).is_known


def test_every_part_and_every_category_is_described() -> None:
    assert goodput.PART_CATEGORIES.keys() == {*get_args(Part)}
    assert (
        goodput.MEANINGS.keys()
        == {*goodput.CATEGORIES}
        == {*goodput.PART_CATEGORIES.values(), "lost", "waiting", "idle"}
    )


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just("2026-11-20T12:00:00Z"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
SECONDS = st.floats(0, 1e6) | st.integers(0, 10**6)
STEP = st.integers(0, 100)
TIMING = st.fixed_dictionaries(
    {},
    optional={
        "parts": st.dictionaries(st.sampled_from(get_args(Part)), SECONDS | ANY) | ANY,
        "open": st.sampled_from(get_args(Part)) | ANY,
        **dict.fromkeys(("from_step", "saved_step", "step", "idle_s"), STEP | ANY),
    },
)
ATTEMPT = st.fixed_dictionaries(
    {"started": st.datetimes().map(lambda at: f"{at:%Y-%m-%dT%H:%M:%SZ}") | ANY},
    optional={
        "wall_s": SECONDS | ANY,
        "timing": TIMING | ANY,
        "outcome": st.sampled_from(["done", "failed", "stopped", "hung"]) | ANY,
        "slice_created": st.sampled_from([MADE, AGAIN]) | ANY,
        "attempt": st.integers(0, 3) | ANY,
    },
)
RESULT = st.fixed_dictionaries(
    {},
    optional={
        "attempt": st.integers(0, 3), "outcome": st.sampled_from(["done", "hung"]) | ANY, "wall_s": SECONDS | ANY,
        "time": SECONDS | ANY, "steps": STEP | ANY,
        "time_s": st.dictionaries(st.sampled_from(get_args(Part)), ANY) | ANY,
    },
)  # fmt: skip


@given(
    st.lists(ATTEMPT, max_size=4) | ANY,
    RESULT | ANY,
    st.lists(st.fixed_dictionaries({"timing": TIMING}) | ANY),
)
def test_whatever_the_files_hold_the_categories_add_up_to_the_slice_time(
    attempts: Any, result: Any, heartbeats: list[Any]
) -> None:
    found = attempt_goodputs({"attempts": attempts}, result, heartbeats)
    for record, part in zip(attempts if isinstance(attempts, list) else [], found[:-1], strict=False):
        assert part is None or all(value > 0 for value in part.milliseconds.values())
        if part is not None and len(found) == len(attempts):
            waited = part.milliseconds.get("waiting", 0)
            assert sum(part.milliseconds.values()) - waited == round(1000 * record["wall_s"])
            assert part.share is None or 0 <= part.share <= 1
    total = run_goodput({"attempts": attempts}, result, heartbeats)
    assert total is None or json.loads(json.dumps(total.seconds)) == total.seconds
