"""Every second of an attempt is in one part of its time, and the parts add up to all of it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.runtime.time_split import Part, TimeSplit


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make() -> tuple[TimeSplit, Clock]:
    clock = Clock()
    return TimeSplit(clock), clock


def test_time_is_the_start_s_until_a_part_is_entered() -> None:
    split, clock = make()
    clock.now_s += 3
    split.enter("compute")
    clock.now_s += 5
    assert split.seconds() == {"start": 3.0, "compute": 5.0}


def test_a_part_within_a_part_has_its_time_alone() -> None:
    split, clock = make()
    split.enter("compute")
    with split.part("evaluation"):
        clock.now_s += 1
        with split.part("logging"):
            clock.now_s += 2
        clock.now_s += 4
    clock.now_s += 8
    assert split.seconds() == {"start": 0.0, "evaluation": 5.0, "logging": 2.0, "compute": 8.0}


def test_a_part_that_was_none_in_the_end_is_told_as_0_and_its_time_is_that_of_the_one_around() -> None:
    split, clock = make()
    split.enter("compute")
    with split.part("input_wait", unless=lambda: True):
        clock.now_s += 1
    assert split.seconds() == {"start": 0.0, "compute": 1.0, "input_wait": 0.0}
    with split.part("input_wait", unless=lambda: False):
        clock.now_s += 2
    assert split.seconds() == {"start": 0.0, "compute": 1.0, "input_wait": 2.0}


def test_what_is_entered_within_a_part_begins_when_that_part_has_ended() -> None:
    split, clock = make()
    with split.part("evaluation"):
        split.enter("finish")
        clock.now_s += 1
    clock.now_s += 2
    assert split.seconds() == {"evaluation": 1.0, "start": 0.0, "finish": 2.0}


def test_a_part_that_ends_by_an_error_is_over() -> None:
    split, clock = make()
    with pytest.raises(OSError, match="full"), split.part("checkpoint"):
        clock.now_s += 1
        raise OSError("full")
    clock.now_s += 2
    assert split.seconds() == {"checkpoint": 1.0, "start": 2.0}


def test_a_part_may_be_a_function_s_own_and_counts_every_call() -> None:
    split, clock = make()

    @split.part("evaluation")
    def evaluate() -> None:
        clock.now_s += 2

    clock.now_s += 1
    evaluate()
    evaluate()
    assert split.seconds() == {"start": 1.0, "evaluation": 4.0}


def test_a_part_that_is_open_is_told_so_far() -> None:
    split, clock = make()
    with split.part("checkpoint"):
        clock.now_s += 1
        assert split.spent_s("checkpoint", "start") == 1.0
        clock.now_s += 1
        assert split.spent_s("checkpoint") == 2.0
    assert split.spent_s("evaluation") == 0.0


PARTS: list[Part] = ["compute", "input_wait", "evaluation", "checkpoint", "logging", "profile", "finish"]
Events = list[tuple[str, Part, float]]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "open", "open unless", "close", "look"]),
            st.sampled_from(PARTS),
            st.floats(0, 10),
        )
    )
)
def test_whatever_is_done_in_whatever_order_the_parts_add_up_to_the_wall_time(events: Events) -> None:
    split, clock = make()
    began_s = clock.now_s
    with contextlib.ExitStack() as stack:
        opened: list[contextlib.ExitStack] = []
        for what, part, seconds in events:
            clock.now_s += seconds
            if what == "enter":
                split.enter(part)
            elif what.startswith("open"):
                inner = stack.enter_context(contextlib.ExitStack())
                inner.enter_context(split.part(part, unless=lambda what=what: what == "open unless"))  # type: ignore[misc]
                opened.append(inner)
            elif what == "close" and opened:
                opened.pop().close()
            else:
                split.seconds()
    assert split.wall_s() == pytest.approx(clock.now_s - began_s)
    assert sum(split.seconds().values()) == pytest.approx(clock.now_s - began_s, abs=0.01)
    assert all(seconds >= 0 for seconds in split.seconds().values())
