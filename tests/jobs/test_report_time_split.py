"""Where the time went, in the report: the largest part first, and never a reason for there being no report."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from jobs.runtime.report.render import render
from jobs.runtime.report.time_split import MEANINGS, time_split
from jobs.runtime.time_split import Part

TIME_S = {"start": 20.0, "compute": 970.0, "input_wait": 0.0, "evaluation": 10.0}


def test_every_part_has_a_row_with_its_share_the_largest_first() -> None:
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", time_split({"time_s": TIME_S}))
    assert rows == [
        ("compute", "970.0 s", "97.0%"),
        ("start", "20.0 s", "2.0%"),
        ("evaluation", "10.0 s", "1.0%"),
        ("input wait", "0.0 s", "0.0%"),
    ]


def test_every_part_that_a_run_tells_apart_is_explained() -> None:
    assert set(get_args(Part)) == MEANINGS.keys()


def test_the_page_has_the_table_and_a_run_that_told_nothing_has_none() -> None:
    assert "Where the time went" in render({}, [], {"outcome": "done", "time_s": TIME_S}, [])
    assert "Where the time went" not in render({}, [], {"outcome": "done"}, [])


def test_a_name_is_no_markup() -> None:
    assert "<script>" not in time_split({"time_s": {"<script>": 1.0}})


@pytest.mark.parametrize("broken", [None, 3, [], {}, {"start": 0}, {"start": None, "x": "y"}, {"start": -1}])
def test_whatever_stands_there_instead_stops_no_page_and_shows_no_table(broken: Any) -> None:
    assert "Where the time went" not in render({}, [], {"outcome": "done", "time_s": broken}, [])
