"""A duration reads the same in every message, table and configuration."""

from __future__ import annotations

import pytest

from contracts.durations import clock, spoken


@pytest.mark.parametrize(
    ("length_s", "on_a_display", "in_a_sentence", "in_one_unit"),
    [
        (-1, "0:00", "0 s", "0 s"),
        (7.4, "0:07", "7 s", "7 s"),
        (59.6, "1:00", "1 min", "1 min"),
        (750, "12:30", "12 min 30 s", "12 min"),
        (3599.9, "1:00:00", "1 h", "1 h"),
        (11_100, "3:05:00", "3 h 5 min", "3 h"),
        (12 * 86_400 + 90, "288:01:30", "12 d 1 min", "12 d"),
    ],
)
def test_a_duration_is_told_as_people_tell_it(
    length_s: float, on_a_display: str, in_a_sentence: str, in_one_unit: str
) -> None:
    assert clock(length_s) == on_a_display
    assert spoken(length_s) == in_a_sentence
    assert spoken(length_s, units=1) == in_one_unit
