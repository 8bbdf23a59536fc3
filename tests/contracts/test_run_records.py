"""Lines of metrics, heartbeats and results are read as values of one kind, whoever has written them."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import run_records
from contracts.run_records import Unread

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
MOMENT_S = 1795643640.0
LEFT_OUT = "is left out"


@pytest.mark.parametrize(
    ("line", "measured", "problem"),
    [
        (
            '{"step": 1, "loss": 0.5, "time": 1795643640.0}',
            [{"step": 1, "loss": 0.5, "time": MOMENT_S}],
            None,
        ),
        ('{"step": 1, "time": "2026-11-25T21:54:00Z"}', [{"step": 1, "time": MOMENT_S}], None),
        ('{"step": 1, "time": "2026-11-25T23:54:00+02:00"}', [{"step": 1, "time": MOMENT_S}], None),
        ('{"step": 1, "time": "2026-11-25 21:54:00"}', [{"step": 1, "time": MOMENT_S}], None),
        ('{"step": 1, "loss": 0.5, "time": null}', [{"step": 1, "loss": 0.5}], None),
        ('{"step": 1, "time": 12.5}', [{"step": 1}], "time is 12.5, which is no date"),
        ('{"step": 1, "time": "noon"}', [{"step": 1}], 'time is "noon", which is no date'),
        ('{"step": "20", "loss": "0.5"}', [{"step": 20, "loss": 0.5}], None),
        ('{"step": 2.0, "loss": 3}', [{"step": 2, "loss": 3}], None),
        ('{"step": 0.25}', [{"step": 0.25}], None),
        ('{"step": -1, "loss": 3}', [{"loss": 3}], "step is -1, which is no number of 0 or more"),
        ('{"step": true, "loss": 3}', [{"loss": 3}], "step is true"),
        ('{"step": "first", "loss": 3}', [{"loss": 3}], 'step is "first"'),
        (
            '{"step": 1, "a": NaN, "b": Infinity, "c": "-inf"}',
            [{"step": 1, "a": None, "b": None, "c": None}],
            None,
        ),
        (f'{{"step": 1, "loss": {"9" * 400}}}', [{"step": 1, "loss": None}], None),
        (f'{{"step": {"9" * 400}, "loss": 1}}', [{"loss": 1}], "step is 999"),
        (
            '{"step": 1, "loss": {"train": 1.0}, "lr": 0.1}',
            [{"step": 1, "lr": 0.1}],
            'loss is {"train": 1.0}',
        ),
        ('{"step": 1, "phase": "train", "ok": true}', [{"step": 1}], 'phase is "train", which is no number'),
        ('{"step": 1, "loss": "tensor(0.5)"}', [{"step": 1}], 'loss is "tensor(0.5)"'),
        ('\ufeff{"step": 1}', [{"step": 1}], None),
        ('{"step": 1}\r', [{"step": 1}], None),
        ('{"step": 1}{"step": 2} {"step": 3}', [{"step": 1}, {"step": 2}, {"step": 3}], None),
        ("  ", [], None),
        ('{"step": 1, "lo', [], "a line is torn, or no JSON object"),
        ("[1, 2]", [], "a line is torn, or no JSON object"),
        ("null", [], "a line is torn, or no JSON object"),
        ("[" * 100_000, [], "a line is torn, or no JSON object"),
        ('{"step": 1} and more', [], "a line is torn, or no JSON object"),
    ],
)
def test_of_a_line_of_metrics_is_taken_what_is_a_number_and_said_what_is_not(
    line: str, measured: list[dict[str, Any]], problem: str | None
) -> None:
    unread = Unread()
    good = b'{"step": 7, "loss": 1.5}'
    found = run_records.metrics([good, line.encode(), good], unread)
    assert found == [{"step": 7, "loss": 1.5}, *measured, {"step": 7, "loss": 1.5}]
    texts = unread.texts()
    assert bool(texts) == (problem is not None)
    assert all(text.startswith("metrics.jsonl: ") and LEFT_OUT in text for text in texts)
    assert problem is None or problem in texts[0]


@given(
    st.dictionaries(st.sampled_from(["step", "time", "loss", "acc", "note"]), ANYTHING),
    st.integers(0, 10**6),
    st.floats(-1e9, 1e9),
)
def test_whatever_a_line_has_its_good_values_are_kept_and_all_are_of_one_kind(
    odd: dict[str, Any], step: int, loss: float
) -> None:
    good = {"step": step, "loss": loss, "time": MOMENT_S + step}
    text = [json.dumps(each).encode() for each in (good, odd, {**odd, **good})]
    first, *others = run_records.metrics(text)
    assert first == good
    assert others[-1].items() >= good.items()
    for line in (first, *others):
        assert all(value is None or math.isfinite(value) for value in line.values())
        assert line.get("step", 0) >= 0
        assert run_records.FIRST_MOMENT_S <= line.get("time", MOMENT_S) < run_records.LAST_MOMENT_S


BEAT = {"rank": 0, "attempt": 0, "state": "stepping", "step": 3, "time": 5.0, "message": None, "pid": 7}
RESULT = {"outcome": "done", "attempt": 0, "steps": 3, "wall_s": 1.5, "time": 5.0, "error": None, "loss": 2.0}


@given(st.dictionaries(st.sampled_from([*BEAT, "warnings", "exit_code", "x"]), ANYTHING, max_size=3))
def test_a_heartbeat_has_fields_of_the_right_kind_or_is_none(odd: dict[str, Any]) -> None:
    assert run_records.heartbeat(BEAT, "b") == (BEAT, None)
    beat, problem = run_records.heartbeat({**BEAT, **odd}, "heartbeats/host-0.json")
    assert problem is None or problem.startswith("heartbeats/host-0.json: ")
    if beat is None:
        assert problem is not None
        return
    assert isinstance(beat["state"], str) and isinstance(beat["step"], int) and beat["time"] >= 0
    assert all(isinstance(text, str) for text in beat.get("warnings") or ())
    assert {key: beat[key] for key in BEAT if key not in odd} == {
        key: BEAT[key] for key in BEAT if key not in odd
    }


@given(st.dictionaries(st.sampled_from([*RESULT, "time_s", "warnings", "failed_host"]), ANYTHING, max_size=3))
def test_of_a_result_what_is_of_another_kind_is_left_out_and_named(odd: dict[str, Any]) -> None:
    assert run_records.result(RESULT, "r") == (RESULT, None)
    found, problem = run_records.result({**RESULT, **odd}, "result.json")
    left_out = {*RESULT, *odd} - {*found}
    assert bool(left_out) == (problem is not None)
    assert {key: found[key] for key in RESULT if key not in odd} == {
        key: RESULT[key] for key in RESULT if key not in odd
    }


AGAIN = [
    *({"step": step, "loss": step / 8} for step in (2, 4, 6, 8)),
    {"step": 8, "score": 0.5, "time": 9},
    *({"step": step, "loss": 1.0} for step in (5, 7)),
]


@pytest.mark.parametrize(
    ("lines", "attempts", "kept", "again"),
    [
        # A script that was resumed at step 5, and logs other steps since.
        (AGAIN, 2, [(2, "loss"), (4, "loss"), (8, "score"), (5, "loss"), (7, "loss")], "steps 6 to 8 were"),
        # Of a run that nobody resumed, lines may be out of order.
        (
            AGAIN,
            1,
            [(2, "loss"), (4, "loss"), (6, "loss"), (8, "loss"), (8, "score"), (5, "loss"), (7, "loss")],
            None,
        ),
        (
            [{"step": 3, "loss": 1.0, "lr": 1}, {"step": 3, "loss": 2.0}],
            1,
            [(3, "lr"), (3, "loss")],
            "step 3 was",
        ),
        ([{"loss": 1.0}, {"step": 0}, {"step": 0}], 2, [(None, "loss"), (0,), (0,)], None),
        ([{"step": 3, "loss": None}, {"step": 1, "loss": None}], 2, [(1, "loss")], "step 3 was"),
    ],
)
def test_of_what_was_measured_twice_the_later_attempt_counts(
    lines: list[dict[str, Any]], attempts: int, kept: list[tuple[Any, ...]], again: str | None
) -> None:
    found, messages = run_records.without_retaken(lines, attempts)
    assert [
        (line.get("step"), *(name for name in line if name not in ("step", "time"))) for line in found
    ] == kept
    assert found[-1] == lines[-1]
    expected = [f"metrics.jsonl: {again} measured again, as after a resume; the later values count"]
    assert messages == (expected if again else [])
