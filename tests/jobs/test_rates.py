"""Rates count stepping alone: compilation, evaluations and checkpoints are left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobs.runtime.rates import Rates


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make() -> tuple[Rates, Clock]:
    clock = Clock()
    return Rates(tokens_per_step=10, clock=clock), clock


def test_the_first_step_which_compiles_is_not_counted() -> None:
    rates, clock = make()
    clock.now_s += 60
    rates.step_done()
    assert rates.take() == {}
    rates.start()
    clock.now_s += 2
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 5.0, "step_s": 2.0, "input_wait_s": 0.0}


def test_waiting_for_input_is_counted_per_step_and_as_part_of_the_step() -> None:
    rates, clock = make()
    rates.start()
    for _ in range(4):
        with rates.input():
            clock.now_s += 0.25
        clock.now_s += 0.75
        rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.25}


def test_input_before_the_first_step_is_not_counted() -> None:
    rates, clock = make()
    with rates.input():
        clock.now_s += 50
    rates.start()
    clock.now_s += 1
    rates.step_done()
    assert rates.take()["input_wait_s"] == 0.0


def test_what_lies_between_pause_and_start_is_not_counted() -> None:
    rates, clock = make()
    rates.start()
    clock.now_s += 1
    rates.step_done()
    rates.pause()
    clock.now_s += 1000
    rates.start()
    clock.now_s += 1
    rates.step_done()
    assert rates.take() == {"tokens_per_s": 10.0, "step_s": 1.0, "input_wait_s": 0.0}


def test_each_take_begins_anew_and_the_overall_rate_is_of_all_of_them() -> None:
    rates, clock = make()
    assert rates.overall() is None
    rates.start()
    for step_s in (1.0, 4.0):
        clock.now_s += step_s
        rates.step_done()
        assert rates.take()["step_s"] == step_s
        assert rates.take() == {}
    assert rates.overall() == 2 * 10 / 5


@given(st.lists(st.tuples(st.sampled_from(["step", "pause", "start"]), st.floats(0.001, 10)), max_size=30))
def test_however_it_is_paused_only_stepping_time_is_counted(events: list[tuple[str, float]]) -> None:
    rates, clock = make()
    rates.start()
    is_on, counted_s, steps = True, 0.0, 0
    for event, seconds in events:
        clock.now_s += seconds
        counted_s += seconds if is_on else 0.0
        if event == "step":
            rates.step_done()
            steps += is_on
        elif event == "pause":
            rates.pause()
            is_on = False
        elif not is_on:
            rates.start()
            is_on = True
    rates.pause()
    taken = rates.take()
    if steps == 0:
        assert taken == {}
    else:
        assert abs(taken["step_s"] - counted_s / steps) < 1e-5


def test_mfu_is_the_steps_operations_over_what_the_devices_could_do_in_that_time() -> None:
    clock = Clock()
    rates = Rates(tokens_per_step=10, flops_per_step=3 * 10**12, peak_flops_per_s=10**13, clock=clock)
    rates.start()
    for _ in range(4):
        clock.now_s += 0.5
        rates.step_done()
    assert rates.take()["mfu"] == 0.6


def test_there_is_no_mfu_where_nobody_knows_the_peak() -> None:
    clock = Clock()
    rates = Rates(tokens_per_step=10, flops_per_step=3 * 10**12, clock=clock)
    rates.start()
    clock.now_s += 1
    rates.step_done()
    assert "mfu" not in rates.take()
