"""What the hub makes of what it hears: one order to stop, and one host to blame, whatever comes in which order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.agent.liveness_server import Group, named

LOST_A_PEER = 76


def group(size: int = 4, here: bool = True) -> Group:
    made = Group(size, 0.0, assemble_s=30, silence_s=15)
    for rank in range(size) if here else ():
        made.came(rank, 0.0)
    return made


def report(code: int | None = 1, message: str = "a bug", **more: Any) -> dict[str, Any]:
    usual = {"ago_s": 0.0, "was_stopped": False, "step": 7, "lines": [], "ended_by_itself": None}
    return {**usual, "exit_code": code, "message": message, **more}


def progress(stood_s: float, **more: Any) -> dict[str, Any]:
    usual = {"step": 41, "is_silent": False, "limit_s": 120.0, "median_s": 0.5}
    usual.update(silent_s=0.0, heartbeat_limit_s=300.0)
    return {**usual, "stood_s": stood_s, **more}


def blamed(made: Group) -> int:
    verdict = made.verdict()
    assert verdict is not None
    return int(verdict["rank"])


def look_until(made: Group, until_s: float, speaking: tuple[int, ...] = ()) -> None:
    """Let time pass, a second at a time; those that speak are heard of."""
    start = int(made._looked)
    for second in range(start + 1, int(until_s) + 1):
        for rank in speaking:
            made.heard(rank, float(second))
        made.look(float(second))


def test_as_long_as_all_are_heard_of_there_is_no_order() -> None:
    made = group()
    look_until(made, 1000, speaking=(0, 1, 2, 3))
    assert (made.order, made.is_over(1000), made.verdict()) == (None, False, None)


def test_a_host_that_is_silent_for_the_limit_is_lost() -> None:
    made = group()
    look_until(made, 15, speaking=(0, 1, 3))
    assert made.order is None
    look_until(made, 16, speaking=(0, 1, 3))
    assert made.order is not None
    assert made.order["reason"] == "host 2 was lost: it has not been heard of for 15 s"
    assert blamed(made) == 2


def test_a_connection_that_comes_back_within_the_grace_time_is_forgiven() -> None:
    made = group()
    made.went(2, 0.0)
    look_until(made, 5, speaking=(0, 1, 3))
    made.came(2, 5.0)
    look_until(made, 20, speaking=(0, 1, 2, 3))
    assert made.order is None
    made.went(2, 20.0)
    look_until(made, 26, speaking=(0, 1, 3))
    assert made.order is not None
    assert "did not come back within 5 s" in made.order["reason"]


def test_who_was_lost_and_comes_back_is_told_to_stop_like_all() -> None:
    made = group()
    made.went(2, 0.0)
    look_until(made, 6, speaking=(0, 1, 3))
    made.came(2, 6.5)
    assert made.hosts[2].state == "lost"


def test_who_was_not_started_in_time_is_named_with_those_that_were() -> None:
    made = group(here=False)
    for rank in (0, 2):
        made.came(rank, 1.0)
    look_until(made, 30, speaking=(0, 2))
    assert made.order is None
    look_until(made, 31, speaking=(0, 2))
    assert made.order is not None
    assert made.order["reason"] == "only hosts 0, 2 of 4 were started"
    assert blamed(made) == 1


def test_the_first_failure_is_to_blame_by_when_it_happened_and_not_by_when_it_was_told() -> None:
    made = group()
    made.ended(1, report(message="second", ago_s=0.1), 10.0)
    made.ended(3, report(message="first", ago_s=0.5), 10.2)
    assert blamed(made) == 3


def test_who_only_lost_a_peer_is_not_to_blame_when_anybody_else_is() -> None:
    made = group()
    made.ended(1, report(LOST_A_PEER), 10.0)
    assert blamed(made) == 1
    made.ended(3, report(), 10.5)
    assert blamed(made) == 3


def test_a_lost_host_is_to_blame_for_those_that_lost_it() -> None:
    made = group()
    for rank in (0, 1, 3):
        made.ended(rank, report(LOST_A_PEER, was_stopped=rank != 1), 10.0)
    made.heard(2, 10.0)
    assert not made.is_over(10.0)
    look_until(made, 17)  # not the whole limit: the others are waiting for the result
    assert made.is_over(17.0)
    assert blamed(made) == 2


def test_who_failed_by_itself_just_after_the_order_is_to_blame_when_the_order_was_about_a_lost_peer() -> None:
    made = group()
    made.ended(1, report(LOST_A_PEER), 10.0)
    own = {"exit_code": 1, "message": "a bug"}
    made.ended(3, report(LOST_A_PEER, was_stopped=True, ended_by_itself=own), 10.1)
    verdict = made.verdict()
    assert verdict is not None
    assert (verdict["rank"], verdict["message"], verdict["exit_code"]) == (3, "a bug", 1)


def test_who_is_stopped_by_the_order_is_not_to_blame() -> None:
    made = group()
    made.ended(2, report(), 10.0)
    for rank in (0, 1, 3):
        made.ended(rank, report(None, was_stopped=True, ago_s=5.0), 11.0)
    assert made.is_over(11.0)
    assert blamed(made) == 2


def test_a_stop_that_somebody_asked_for_is_no_failure_of_those_that_lose_a_peer_by_it() -> None:
    made = group()
    made.left(0, was_asked=True)
    made.ended(1, report(LOST_A_PEER), 10.0)
    assert made.order is not None
    assert made.verdict() is None


def test_all_that_end_well_end_the_group_without_a_verdict() -> None:
    made = group()
    for rank in range(4):
        assert not made.is_over(1.0)
        made.left(rank, was_asked=False)
    assert made.is_over(1.0)
    assert made.verdict() is None


def test_when_a_host_has_left_to_be_resumed_those_that_stay_are_told_to_leave_too() -> None:
    made = group()
    made.left(3, was_asked=False)
    look_until(made, 20, speaking=(0, 1, 2))
    assert not made.has_to_leave(20.0)
    made.left(2, was_asked=False, is_saved=True)
    assert not made.has_to_leave(22.0)
    assert made.has_to_leave(24.0)
    made.ended(1, report(), 24.0)
    assert not made.has_to_leave(25.0)


def test_of_hosts_that_stand_still_those_are_named_that_did_so_first() -> None:
    made = group()
    for rank in range(4):
        made.heard(rank, 200.0, progress(150.0, limit_s=1800.0) if rank == 2 else progress(121.0))
    made.hung(0, 200.5)
    verdict = made.verdict()
    assert verdict is not None
    assert (verdict["outcome"], verdict["ranks"]) == ("hung", [2])
    assert verdict["message"].startswith("host 2 stood still at step 41 for 150 s (limit 120 s")


def test_of_hosts_that_stand_still_together_the_one_whose_heartbeat_does_so_too_is_named() -> None:
    made = group()
    for rank in range(4):
        made.heard(rank, 200.0, progress(121.0, is_silent=rank == 3))
    made.hung(0, 200.5)
    assert blamed(made) == 3


def test_a_silent_heartbeat_is_held_against_its_own_host_though_others_stand_still_for_longer() -> None:
    made = group()
    for rank in range(4):
        made.heard(rank, 400.0, progress(390.0, limit_s=1800.0, step=0))
    made.heard(2, 400.0, progress(302.0, limit_s=1800.0, step=0, silent_s=301.0, is_silent=True))
    made.hung(2, 400.5)
    verdict = made.verdict()
    assert verdict is not None
    assert (verdict["outcome"], verdict["ranks"]) == ("hung", [2])
    assert verdict["message"].startswith(
        "host 2 had no heartbeat for 302 s at step 0 (limit 300 s): stopped from"
    )


def test_hosts_that_stand_still_together_are_all_named() -> None:
    made = group()
    for rank in range(4):
        made.heard(rank, 200.0 - rank * 0.5, progress(121.0))
    made.hung(0, 200.5)
    verdict = made.verdict()
    assert verdict is not None
    assert verdict["message"].startswith("hosts 0-3 stood still")


def test_a_host_that_waits_for_a_ping_stands_still_meanwhile() -> None:
    made = group(2)
    made.heard(0, 200.0, progress(110.0))
    made.heard(1, 190.0, progress(105.0))
    made.hung(0, 201.0)
    assert blamed(made) == 1


def test_a_hub_that_did_not_run_itself_holds_it_against_nobody() -> None:
    made = group()
    look_until(made, 10, speaking=(0, 1, 2, 3))
    made.look(100.0)
    assert made.order is None


def test_after_a_stop_that_was_asked_for_a_host_that_never_came_is_not_waited_for() -> None:
    made = group(2, here=False)
    made.came(0, 1.0)
    made.look(1.0)
    made.left(0, was_asked=True)
    look_until(made, 7)
    assert not made.is_over(7)
    look_until(made, 8)
    assert (made.is_over(8), made.order, made.verdict()) == (True, None, None)


def test_after_the_order_nobody_is_waited_for_longer_than_the_limit() -> None:
    made = group()
    made.ended(2, report(), 0.0)
    look_until(made, 40, speaking=(0, 1, 3))
    assert made.is_over(40.0)
    assert blamed(made) == 2


def test_after_the_order_a_host_that_never_came_is_not_waited_for_until_the_group_should_be_whole() -> None:
    made = group(here=False)
    for rank in (0, 1, 2):
        made.came(rank, 0.0)
        made.ended(rank, report(2), 1.0)
    look_until(made, 8)
    assert made.is_over(8.0)
    assert blamed(made) == 0


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([2], "host 2"), ([0, 1], "hosts 0, 1"), ([0, 1, 2, 5], "hosts 0-2, 5"), ([3, 1, 7][:1], "host 3")],
)
def test_hosts_are_named_shortly(ranks: list[int], words: str) -> None:
    assert named(ranks) == words


EVENTS = st.tuples(
    st.sampled_from(["came", "went", "heard", "left", "asked", "ended", "lost a peer", "stopped", "hung"]),
    st.integers(0, 2),
    st.floats(0, 20),
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_there_is_one_order_and_somebody_to_blame(
    events: list[tuple[str, int, float]],
) -> None:
    made, now, first_order = group(3, here=False), 0.0, None
    for what, rank, seconds in events:
        now += seconds
        if what in ("came", "went"):
            getattr(made, what)(rank, now)
        elif what in ("left", "asked"):
            made.left(rank, was_asked=what == "asked")
        elif what == "heard":
            made.heard(rank, now, progress(seconds))
        elif what == "hung":
            made.hung(rank, now)
        else:
            code = 1 if what == "ended" else LOST_A_PEER
            made.ended(rank, report(code, was_stopped=what == "stopped"), now)
        made.look(now)
        first_order = first_order or made.order
        assert made.order is first_order
    look_until(made, now + 200)
    assert made.is_over(now + 200)
    verdict = made.verdict()
    if verdict is not None:
        assert 0 <= verdict["rank"] < 3
