"""How long a process may stand still is learned from its own steps, and nothing else is held against it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.agent.liveness_client import FLOOR_S, PATIENCE_S, Watchdog

START_S = 1000.0


def beat(step: int, step_time: float, state: str = "stepping", **more: Any) -> dict[str, Any]:
    return {"step": step, "step_time": step_time, "state": state, "time": step_time, "message": None, **more}


def trained(step_s: float, steps: int = 10, floor_s: float = FLOOR_S) -> tuple[Watchdog, float]:
    """A watchdog that has seen so many steps of that length, and the time then."""
    watchdog, now = Watchdog(floor_s), START_S
    for step in range(steps + 1):
        for part in range(max(1, round(step_s))):
            watchdog.look(beat(step, START_S + step * step_s), now + part)
        now += step_s
    return watchdog, now - step_s


def test_the_limit_is_twenty_times_the_median_step_and_at_least_the_floor() -> None:
    assert trained(30.0)[0].limit_s == 600
    assert trained(0.2)[0].limit_s == FLOOR_S
    assert trained(0.2, floor_s=2)[0].limit_s == pytest.approx(4)


def test_a_process_hangs_when_its_step_has_stood_still_for_longer_than_the_limit() -> None:
    watchdog, now = trained(1.0)
    last = beat(10, START_S + 10)
    for second in range(int(FLOOR_S) + 1):
        watchdog.look(last, now + second)
        assert not watchdog.is_hung
    watchdog.look(last, now + FLOOR_S + 1)
    assert watchdog.is_hung
    assert watchdog.progress()["stood_s"] == pytest.approx(FLOOR_S + 1)


def test_a_few_slow_steps_among_quick_ones_do_not_move_the_limit() -> None:
    watchdog, now = trained(1.0, steps=20)
    for step in (21, 22, 23):
        now += 90
        for second in range(90):
            watchdog.look(beat(step - 1, now - 90), now - 90 + second)
        watchdog.look(beat(step, now), now)
    assert watchdog.limit_s == FLOOR_S


@pytest.mark.parametrize("state", ["starting", "joined", "saving", "done", "failed"])
def test_whatever_is_not_stepping_has_half_an_hour(state: str) -> None:
    watchdog, now = trained(1.0)
    for second in (1, 2, 3):  # whether it ticks or not
        watchdog.look(beat(10, START_S + 10 + second, state), now + second)
        assert watchdog.limit_s == PATIENCE_S


def test_the_first_steps_have_half_an_hour_as_nothing_is_known_of_them() -> None:
    assert trained(1.0, steps=2)[0].limit_s == PATIENCE_S
    assert trained(1.0, steps=3)[0].limit_s == FLOOR_S


def test_many_quick_steps_between_two_looks_are_enough_to_know_them() -> None:
    watchdog = Watchdog()
    for second in range(3):
        watchdog.look(beat(1 + 100 * second, START_S + second), START_S + second)
    assert watchdog.median_s == pytest.approx(0.01)
    assert watchdog.limit_s == FLOOR_S


def test_the_compilation_before_the_first_step_is_no_step_to_learn_from() -> None:
    watchdog = Watchdog()
    for second in range(60):
        watchdog.look(beat(0, START_S, "joined"), START_S + second)
    watchdog.look(beat(1, START_S + 60, "joined"), START_S + 60)
    for step in (1, 2, 3):
        watchdog.look(beat(step, START_S + 59 + step), START_S + 60 + step)
    assert watchdog.median_s is None


def test_a_first_evaluation_has_half_an_hour_until_it_has_ticked() -> None:
    watchdog, now = trained(1.0)
    watchdog.look(beat(10, START_S + 10, message="evaluating"), now + 1)
    assert watchdog.limit_s == PATIENCE_S  # it may be compiling
    watchdog.look(beat(10, START_S + 12, message="evaluating"), now + 2)
    assert watchdog.limit_s == FLOOR_S
    watchdog.look(beat(10, START_S + 12), now + 3)
    watchdog.look(beat(20, START_S + 22, message="evaluating"), now + 4)
    assert watchdog.limit_s == FLOOR_S  # it is compiled since the first


def test_a_tick_is_progress_and_no_step_to_learn_from() -> None:
    watchdog, now = trained(1.0)
    for tick in range(1, 200):
        watchdog.look(beat(10, START_S + 10 + 10 * tick, message="evaluating"), now + 5 * tick)
        assert not watchdog.is_hung
    assert watchdog.median_s == pytest.approx(1)


def test_a_change_of_state_is_progress() -> None:
    watchdog, now = trained(1.0)
    for second in range(100):
        watchdog.look(beat(10, START_S + 10), now + second)
    watchdog.look(beat(10, START_S + 10, "saving"), now + 100)
    assert watchdog.stood_s == 0


def test_time_in_which_the_watcher_did_not_run_is_not_held_against_the_process() -> None:
    watchdog, now = trained(1.0)
    watchdog.look(beat(10, START_S + 10), now + 86400)
    assert not watchdog.is_hung


def test_a_clock_that_is_set_on_or_back_changes_nothing() -> None:
    watchdog, now = trained(1.0)
    for number, jump_s in enumerate((3600.0, -7200.0), 1):
        watchdog.look(beat(10 + number, START_S + 10 + number + jump_s), now + number)
    assert watchdog.limit_s == FLOOR_S
    assert watchdog.stood_s == 0


def test_a_process_without_a_heartbeat_is_not_judged() -> None:
    watchdog = Watchdog(1)
    for second in range(10000):
        watchdog.look({}, float(second))
    assert not watchdog.is_hung


def test_a_heartbeat_that_cannot_be_read_for_once_is_no_news() -> None:
    watchdog, now = trained(1.0)
    watchdog.look({}, now + 1)
    assert (watchdog.beat["step"], watchdog.stood_s) == (10, 1)


@pytest.mark.parametrize("state", ["starting", "joined", "stepping", "saving", "done"])
def test_a_heartbeat_that_is_not_renewed_is_a_hang_in_any_state(state: str) -> None:
    watchdog = Watchdog(heartbeat_limit_s=20)
    for second in range(600):  # standing still, and alive: compiling, say
        watchdog.look(beat(0, START_S, state, time=START_S + second), START_S + second)
        assert not watchdog.is_hung
    for second in range(20):
        watchdog.look(beat(0, START_S, state, time=START_S + 599), START_S + 600 + second)
        assert not watchdog.is_hung
    watchdog.look({}, START_S + 620)
    assert watchdog.is_hung
    watchdog.look(beat(0, START_S, state, time=START_S + 621), START_S + 621)
    assert not watchdog.is_hung


def test_a_process_is_silent_when_even_its_heartbeat_is_not_renewed() -> None:
    watchdog, now = trained(1.0)
    for second in range(7):
        watchdog.look(beat(10, START_S + 10, time=START_S + second), now + second)
    assert not watchdog.progress()["is_silent"]
    for second in range(7, 20):
        watchdog.look(beat(10, START_S + 10), now + second)
    assert watchdog.progress()["is_silent"]


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["step", "step_time", "state", "time", "message"]),
            ODD.filter(lambda value: not isinstance(value, list)),
            max_size=5,
        )
    )
)
def test_odd_heartbeats_end_nothing(beats: list[dict[str, Any]]) -> None:
    watchdog = Watchdog()
    for now, odd in enumerate(beats):
        watchdog.look(odd, float(now))
        watchdog.progress()
        assert watchdog.limit_s >= FLOOR_S
