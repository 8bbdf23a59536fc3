"""Rates count stepping alone: compilation, evaluations and checkpoints are left out."""

from __future__ import annotations

import pytest

from jobs.runtime.rates import Rates
from jobs.runtime.time_split import Part, TimeSplit


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(**peak: float) -> tuple[Rates, TimeSplit, Clock]:
    clock = Clock()
    split = TimeSplit(clock)
    return Rates(split, name="tokens_per_s", per_step=10, flops_per_step=3 * 10**12, **peak), split, clock


def no() -> bool:
    return False


def yes() -> bool:
    return True


def test_the_first_step_which_compiles_is_not_counted() -> None:
    rates, split, clock = make()
    clock.now_s += 60
    rates.step_done()
    assert rates.take() == {}
    rates.start()
    clock.now_s += 2
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 5.0, "step_s": 2.0, "input_wait_s": 0.0}
    assert split.seconds() == {"start": 60.0, "compute": 2.0}


def test_waiting_for_input_is_counted_per_step_and_as_part_of_the_step() -> None:
    rates, split, clock = make()
    rates.start()
    for _ in range(4):
        with rates.input(no):
            clock.now_s += 0.25
        clock.now_s += 0.75
        rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.25}
    assert split.seconds() == {"start": 0.0, "compute": 3.0, "input_wait": 1.0}


def test_input_that_is_made_while_the_devices_are_busy_is_part_of_the_step_and_no_waiting() -> None:
    rates, split, clock = make()
    rates.start()
    with rates.input(yes):
        clock.now_s += 0.25
    clock.now_s += 0.75
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.0}
    assert split.seconds() == {"start": 0.0, "compute": 1.0, "input_wait": 0.0}


def test_whether_the_devices_are_busy_is_asked_when_the_batch_is_made() -> None:
    """They may have fallen idle in between."""
    rates, _, clock = make()
    rates.start()
    with rates.input(lambda: clock.now_s < 100.1):
        clock.now_s += 0.25
    rates.step_done()
    assert rates.take()["input_wait_s"] == 0.25


def test_input_before_the_first_step_is_not_counted() -> None:
    rates, split, clock = make()
    with rates.input(no):
        clock.now_s += 50
    rates.start()
    clock.now_s += 1
    rates.step_done()
    assert rates.take()["input_wait_s"] == 0.0
    assert split.seconds() == {"start": 50.0, "compute": 1.0}


@pytest.mark.parametrize("part", ["evaluation", "checkpoint", "profile"])
def test_what_is_no_stepping_is_not_counted(part: Part) -> None:
    rates, split, clock = make()
    rates.start()
    clock.now_s += 1
    rates.step_done()
    with split.part(part):
        clock.now_s += 1000
    clock.now_s += 1
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.0}


def test_writing_metrics_is_part_of_the_step() -> None:
    rates, split, clock = make()
    rates.start()
    with split.part("logging"):
        clock.now_s += 1
    rates.step_done()
    assert rates.take()["step_s"] == 1.0


def test_each_take_begins_anew_and_the_overall_rate_is_of_all_of_them() -> None:
    rates, _, clock = make()
    assert rates.overall() is None
    rates.start()
    for step_s in (1.0, 4.0):
        clock.now_s += step_s
        rates.step_done()
        assert rates.take()["step_s"] == step_s
        assert rates.take() == {}
    assert rates.overall() == 2 * 10 / 5


def test_mfu_is_the_steps_operations_over_what_the_devices_could_do_in_that_time() -> None:
    rates, _, clock = make(peak_flops_per_s=10**13)
    rates.start()
    for _ in range(4):
        clock.now_s += 0.5
        rates.step_done()
    assert rates.take()["mfu"] == 0.6


def test_there_is_no_mfu_where_nobody_knows_the_peak() -> None:
    rates, _, clock = make()
    rates.start()
    clock.now_s += 1
    rates.step_done()
    assert "mfu" not in rates.take()
