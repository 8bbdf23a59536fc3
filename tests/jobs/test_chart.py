"""The curves of a report and their axes: what is measured is drawn in its place, and nothing odd is lost."""

import math
from typing import Any

import pytest

from jobs.runtime.report.axis import step_axis, value_axis
from jobs.runtime.report.chart import thin
from jobs.runtime.report.curves import curve, input_wait, resumes, smooth
from jobs.runtime.report.fields import number


def test_a_resume_is_marked_at_the_first_line_written_after_the_attempt_started() -> None:
    attempts = [
        {"attempt": 0, "started": "2026-11-20T21:45:00Z"},
        {"attempt": 1, "started": "2026-11-20T22:00:00Z"},
    ]
    lines = [
        {"step": step, "time": 1795211100.0 + 15 * step} for step in range(1, 100)
    ]  # from 21:45, 15 s each
    assert [(mark.step, mark.label) for mark in resumes({"attempts": attempts}, lines)] == [
        (60.0, "attempt 1")
    ]


def test_of_two_lines_with_one_step_the_later_counts() -> None:
    lines = [
        {"step": 2, "loss": 3.0},
        {"step": 3, "loss": 2.0},
        {"step": 2, "loss": 5.0},
        {"step": 1, "loss": 9.0},
    ]
    assert curve(lines, "loss") == [(1.0, 9.0), (2.0, 5.0), (3.0, 2.0)]


def test_the_input_wait_is_the_share_of_the_step() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "input_wait_s": 0.05, "step_s": 0.2},
        {"step": 2, "input_wait_s": 1, "step_s": 0},
    ]
    [(_, share), (_, gap)] = input_wait(lines)
    assert share == pytest.approx(25.0) and math.isnan(gap)


def test_smoothing_lets_no_single_spike_through() -> None:
    points = [(float(step), 1e9 if step == 500 else 2.0) for step in range(1000)]
    assert {value for _, value in smooth(points)} == {2.0}


def test_thinning_keeps_a_spike_a_dip_and_a_gap_among_many_points() -> None:
    points = [(float(step), 1.0 + (step % 7) / 10) for step in range(10_000)]
    points[5003], points[5007], points[5011] = (5003.0, 99.0), (5007.0, -99.0), (5011.0, math.nan)
    kept = thin(points, 600, lambda step: step / 10_000)
    assert len(kept) <= 1801
    assert (5003.0, 99.0) in kept and (5007.0, -99.0) in kept
    assert [step for step, value in kept if math.isnan(value)] == [5011.0]


def test_thinning_leaves_a_curve_of_few_points_as_it_is() -> None:
    points = [(0.0, 1.0), (10.0, math.nan), (20.0, 3.0)]
    assert [step for step, _ in thin(points, 600, lambda step: step / 20)] == [0.0, 10.0, 20.0]


def test_ticks_are_round_numbers_with_labels_that_differ() -> None:
    axis = value_axis([4.13, 9.87], from_zero=False)
    assert axis.ticks == (4.0, 6.0, 8.0, 10.0) and axis.labels() == ["4", "6", "8", "10"]
    assert step_axis(1, 1200).labels() == ["0", "200", "400", "600", "800", "1,000", "1,200"]
    narrow = value_axis([6.93141, 6.93149], from_zero=False).labels()
    assert len(set(narrow)) == len(narrow)


def test_values_too_near_each_other_for_ticks_get_an_axis_around_them() -> None:
    axis = value_axis([5.0, 5.0 + 1e-15], from_zero=False)
    assert axis.low <= 4.5 and axis.high >= 5.5 and len(set(axis.labels())) == len(axis.ticks) < 10


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, 10**400, 1e101, [1]])
def test_what_is_no_measurement_is_no_number(value: object) -> None:
    assert number(value) is None


def test_a_value_too_small_for_a_log_scale_counts_as_zero() -> None:
    assert number(5e-324) == 0.0


def test_what_lies_beyond_an_axis_is_drawn_at_its_end() -> None:
    axis = step_axis(0, 10)
    assert (axis.part(-1), axis.part(5), axis.part(11)) == (0.0, 0.5, 1.0)


def test_a_divergence_turns_the_axis_to_a_log_scale() -> None:
    axis = value_axis([5.0, 5.1, 4.9, 2e6], from_zero=False)
    assert axis.log and axis.part(5.0) > 0.05 and axis.part(2e6) > 0.9
