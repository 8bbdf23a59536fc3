"""Liveness between hosts: one order to stop and one host to blame, limits learned from a job's own steps, channels
that whatever the other side does never hold up this one."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.host_interface import HANG_FLOOR_S
from host.agent.liveness_client import (
    CONNECT_LIMIT_S,
    LINE_LIMIT,
    PATIENCE_S,
    Channel,
    LivenessClient,
    Watchdog,
)
from host.agent.liveness_server import Group, named
from tests.servers import free_port

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


def verdict(made: Group) -> dict[str, Any]:
    found = made.verdict()
    assert found is not None
    return found


def look_until(made: Group, until_s: float, speaking: tuple[int, ...] = ()) -> None:
    """Let time pass, a second at a time; those that speak are heard of."""
    start = int(made._looked)
    for second in range(start + 1, int(until_s) + 1):
        for rank in speaking:
            made.heard(rank, float(second))
        made.look(float(second))


def order(made: Group) -> str:
    assert made.order is not None
    return str(made.order["reason"])


def test_a_host_that_is_silent_for_the_limit_is_lost_and_a_server_that_did_not_run_loses_nobody() -> None:
    made = group()
    look_until(made, 1000, speaking=(0, 1, 2, 3))
    made.look(1090.0)
    assert (made.order, made.is_over(1090), made.verdict()) == (None, False, None)
    look_until(made, 1105, speaking=(0, 1, 3))
    assert made.order is None
    look_until(made, 1106, speaking=(0, 1, 3))
    assert order(made) == "host 2 was lost: it has not been heard of for 15 s"
    assert verdict(made)["rank"] == 2


def test_a_connection_that_comes_back_within_the_grace_time_is_forgiven_and_later_never() -> None:
    made = group()
    made.went(2, 0.0)
    look_until(made, 5, speaking=(0, 1, 3))
    made.came(2, 5.0)
    look_until(made, 20, speaking=(0, 1, 2, 3))
    assert made.order is None
    made.went(2, 20.0)
    look_until(made, 26, speaking=(0, 1, 3))
    assert "did not come back within 5 s" in order(made)
    made.came(2, 26.5)
    assert made.hosts[2].state == "lost"


Ended = tuple[int, dict[str, Any], float]
OWN = {"exit_code": 1, "message": "a bug"}
LOST, STOPPED = report(LOST_A_PEER), report(None, was_stopped=True, ago_s=5.0)


@pytest.mark.parametrize(
    ("ended", "blamed"),
    [
        # By when it happened and not by when it was told.
        ([(1, report(message="second", ago_s=0.1), 10.0), (3, report(ago_s=0.5), 10.2)], 3),
        # Who only lost a peer is to blame where nobody else is.
        ([(1, LOST, 10.0)], 1),
        ([(1, LOST, 10.0), (3, report(), 10.5)], 3),
        # One that failed by itself before it could lose the peer that the order was about.
        ([(1, LOST, 10.0), (3, report(LOST_A_PEER, was_stopped=True, ended_by_itself=OWN), 10.1)], 3),
        # Who is stopped by the order.
        ([(2, report(), 10.0), *((rank, STOPPED, 11.0) for rank in (0, 1, 3))], 2),
    ],
)
def test_the_first_that_failed_by_itself_is_to_blame(ended: list[Ended], blamed: int) -> None:
    made = group()
    for rank, told, now in ended:
        made.ended(rank, told, now)
    found = verdict(made)
    assert (found["rank"], found["outcome"], found["message"]) == (blamed, "failed", "a bug")
    assert made.is_over(11.0) == (len(ended) == 4)


def test_an_aborted_process_is_to_blame_only_where_nobody_says_another_reason() -> None:
    aborted = report(None, "killed by signal 6 (SIGABRT)")
    full = report(
        LOST_A_PEER, was_stopped=True, ended_by_itself={"exit_code": 1, "message": "the disk is full"}
    )
    for others, message in [
        ([(0, full, 10.4)], "the disk is full"),
        ([(0, report(1, "a bug"), 10.4)], "a bug"),
        ([(0, report(LOST_A_PEER), 10.4)], "killed by signal 6 (SIGABRT)"),
    ]:
        made = group()
        for rank, told, now in [(1, aborted, 10.0), *others]:
            made.ended(rank, told, now)
        assert verdict(made)["message"] == message


def test_a_command_whose_last_lines_say_that_its_peer_is_gone_is_blamed_only_where_nobody_failed_by_itself() -> (
    None
):
    gone = "Gloo AllGather failed: Connection closed by peer [::1]:4"
    failed = "the command ended with exit code 1"
    own = {"exit_code": 3, "message": "the command ended with exit code 3"}
    ended = report(LOST_A_PEER, was_stopped=True, ended_by_itself=own)
    lost = report(1, failed, lines=[gone])
    sibling_lost = report(1, "rank 0 ended with exit code 1", lines=["[0] ValueError: a bug", f"[1] {gone}"])
    explained = report(1, f"{failed}: the disk is full", lines=[gone])
    for first, other, rank in [
        (lost, ended, 1),
        (lost, report(3), 1),
        (lost, report(LOST_A_PEER), 0),
        (sibling_lost, report(1, failed, lines=["what nobody knows"]), 0),
        (explained, report(1, failed, lines=["what nobody knows"]), 0),
    ]:
        made = group()
        made.ended(0, first, 10.0)
        made.ended(1, other, 10.1)
        assert verdict(made)["rank"] == rank


def test_a_lost_host_is_to_blame_for_those_that_lost_it() -> None:
    made = group()
    for rank in (0, 1, 3):
        made.ended(rank, report(LOST_A_PEER, was_stopped=rank != 1), 10.0)
    made.heard(2, 10.0)
    assert not made.is_over(10.0)
    look_until(made, 17)  # not the whole limit: the others are waiting for the result
    assert made.is_over(17.0)
    assert verdict(made)["rank"] == 2


@pytest.mark.parametrize(("end", "another", "steps"), [(7, 3, 7), (7, 9, 9), (0, 2, 5), (None, None, 0)])
def test_the_steps_of_a_failed_run_are_the_most_that_a_host_has_told_at_its_end_or_before(
    end: int | None, another: int | None, steps: int
) -> None:
    made = group()
    if another is not None:
        made.heard(1, 1.0, progress(0.0, step=5))
        made.heard(2, 1.0, progress(0.0, step=another))
    made.ended(1, report(step=end), 10.0)
    assert verdict(made)["steps"] == steps


def test_a_good_end_and_a_stop_that_was_asked_for_have_no_verdict() -> None:
    made = group()
    for rank in range(4):
        assert not made.is_over(1.0)
        made.left(rank, was_asked=False)
    assert (made.is_over(1.0), made.verdict()) == (True, None)
    asked = group()
    asked.left(0, was_asked=True)
    asked.ended(1, LOST, 10.0)
    assert asked.order is not None
    assert asked.verdict() is None


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


SLOW = {"limit_s": 1800.0, "step": 0}


@pytest.mark.parametrize(
    ("said", "judge", "message"),
    [
        # Those that stood still first.
        ({2: progress(150.0, limit_s=1800.0)}, 0, "host 2 stood still at step 41 for 150 s (limit 120 s"),
        # Of those that do so together, the one whose heartbeat does so too.
        ({3: progress(121.0, is_silent=True)}, 0, "host 3 stood still at step 41"),
        ({}, 0, "hosts 0-3 stood still"),
        # A heartbeat is held against its own host though others stand still for longer.
        (
            {
                **{rank: progress(390.0, **SLOW) for rank in (0, 1, 3)},
                2: progress(302.0, silent_s=301.0, is_silent=True, **SLOW),
            },
            2,
            "host 2 had no heartbeat for 302 s at step 0 (limit 300 s): stopped from outside",
        ),
    ],
)
def test_the_hosts_that_hung_first_are_named(
    said: dict[int, dict[str, Any]], judge: int, message: str
) -> None:
    made = group()
    for rank in range(4):
        made.heard(rank, 200.0 - (0 if said else rank * 0.5), said.get(rank, progress(121.0)))
    made.hung(judge, 200.5)
    found = verdict(made)
    assert found["outcome"] == "hung"
    assert found["message"].startswith(message)
    assert named(found["ranks"]) == message.partition(" stood")[0].partition(" had")[0]
    assert named([0, 1, 2, 5]) == "hosts 0-2, 5"


def test_a_host_that_waits_for_a_ping_stands_still_meanwhile() -> None:
    made = group(2)
    made.heard(0, 200.0, progress(110.0))
    made.heard(1, 190.0, progress(105.0))
    made.hung(0, 201.0)
    assert verdict(made)["rank"] == 1


def test_after_a_stop_that_was_asked_for_a_host_that_never_came_is_not_waited_for() -> None:
    made = group(2, here=False)
    made.came(0, 1.0)
    made.look(1.0)
    made.left(0, was_asked=True)
    look_until(made, 7)
    assert not made.is_over(7)
    look_until(made, 8)
    assert (made.is_over(8), made.order, made.verdict()) == (True, None, None)


@pytest.mark.parametrize(
    ("came", "ended", "over_s", "blamed"),
    [((0, 1, 2, 3), {2: report()}, 40, 2), ((0, 1, 2), dict.fromkeys(range(3), report(2)), 8, 0)],
    ids=["one that does not end", "one that never came"],
)
def test_after_the_order_nobody_is_waited_for_longer_than_the_limit(
    came: tuple[int, ...], ended: dict[int, dict[str, Any]], over_s: int, blamed: int
) -> None:
    made = group(here=False)
    for rank in came:
        made.came(rank, 0.0)
    for rank, told in ended.items():
        made.ended(rank, told, 1.0)
    look_until(made, over_s, speaking=tuple(rank for rank in came if rank not in ended))
    assert made.is_over(float(over_s))
    assert verdict(made)["rank"] == blamed


EVENTS = st.tuples(
    st.sampled_from(["came", "went", "heard", "left", "asked", "ended", "lost a peer", "stopped", "hung"]),
    st.integers(0, 2),
    st.floats(0, 20),
)


@given(st.lists(EVENTS, max_size=30))
def test_whatever_happens_there_is_one_order_and_one_to_blame(events: list[tuple[str, int, float]]) -> None:
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
    found = made.verdict()
    if found is not None:
        assert 0 <= found["rank"] < 3


START_S = 1000.0


def beat(step: int, step_time: float, state: str = "stepping", **more: Any) -> dict[str, Any]:
    return {"step": step, "step_time": step_time, "state": state, "time": step_time, "message": None, **more}


def trained(step_s: float, steps: int = 10, floor_s: float = HANG_FLOOR_S) -> tuple[Watchdog, float]:
    """A watchdog that has seen so many steps of that length, and the time then."""
    watchdog, now = Watchdog(floor_s), START_S
    for step in range(steps + 1):
        for part in range(max(1, round(step_s))):
            watchdog.look(beat(step, START_S + step * step_s), now + part)
        now += step_s
    return watchdog, now - step_s


@pytest.mark.parametrize(
    ("step_s", "steps", "floor_s", "limit_s"),
    [
        (30.0, 10, HANG_FLOOR_S, 600),
        (0.2, 10, HANG_FLOOR_S, HANG_FLOOR_S),
        (0.2, 10, 2, 4),
        (1.0, 2, HANG_FLOOR_S, PATIENCE_S),  # nothing is known of the first steps
        (1.0, 3, HANG_FLOOR_S, HANG_FLOOR_S),
    ],
)
def test_the_limit_is_twenty_median_steps_or_the_floor(
    step_s: float, steps: int, floor_s: float, limit_s: float
) -> None:
    assert trained(step_s, steps, floor_s)[0].limit_s == pytest.approx(limit_s)


def test_a_process_hangs_when_it_has_stood_still_for_the_limit_which_a_few_slow_steps_do_not_move() -> None:
    watchdog, now = trained(1.0, steps=20)
    for step in (21, 22, 23):
        now += 90
        for second in range(90):
            watchdog.look(beat(step - 1, now - 90), now - 90 + second)
        watchdog.look(beat(step, now), now)
    assert watchdog.limit_s == HANG_FLOOR_S
    for second in range(int(HANG_FLOOR_S) + 1):
        watchdog.look(beat(23, now), now + second)
        assert not watchdog.is_hung
    watchdog.look(beat(23, now), now + HANG_FLOOR_S + 1)
    assert watchdog.is_hung
    assert watchdog.progress()["stood_s"] == pytest.approx(HANG_FLOOR_S + 1)


def test_a_heartbeat_may_ask_for_the_floor_from_the_start() -> None:
    watchdog = Watchdog(10)
    for second in range(12):
        assert not watchdog.is_hung
        watchdog.look(
            {**beat(0, START_S, "starting", time=START_S + second), "hangs_at_floor": True}, START_S + second
        )
    assert watchdog.is_hung


@pytest.mark.parametrize("state", ["starting", "saving", "failed"])
def test_whatever_is_not_stepping_has_half_an_hour_and_a_change_of_state_is_progress(state: str) -> None:
    watchdog, now = trained(1.0)
    watchdog.look(beat(10, START_S + 10), now + 1)
    for second in (2, 3, 4):  # whether it ticks or not
        watchdog.look(beat(10, START_S + 10 + second, state), now + second)
        assert (watchdog.limit_s, watchdog.stood_s) == (PATIENCE_S, 0)


def test_quick_steps_between_two_looks_count_and_compilation_does_not() -> None:
    quick, compiling = Watchdog(), Watchdog()
    for second in range(3):
        quick.look(beat(1 + 100 * second, START_S + second), START_S + second)
    assert quick.median_s == pytest.approx(0.01)
    assert quick.limit_s == HANG_FLOOR_S
    for second in range(60):
        compiling.look(beat(0, START_S, "joined"), START_S + second)
    compiling.look(beat(1, START_S + 60, "joined"), START_S + 60)
    for step in (1, 2, 3):
        compiling.look(beat(step, START_S + 59 + step), START_S + 60 + step)
    assert compiling.median_s is None


def test_a_first_evaluation_has_half_an_hour_until_it_has_ticked_and_a_tick_is_no_step() -> None:
    watchdog, now = trained(1.0)
    watchdog.look(beat(10, START_S + 10, message="evaluating"), now + 1)
    assert watchdog.limit_s == PATIENCE_S  # it may be compiling
    for tick in range(1, 200):
        watchdog.look(beat(10, START_S + 10 + 10 * tick, message="evaluating"), now + 1 + 5 * tick)
        assert (watchdog.limit_s, watchdog.is_hung) == (HANG_FLOOR_S, False)
    watchdog.look(beat(10, START_S + 2000), now + 1001)
    watchdog.look(beat(20, START_S + 2010, message="evaluating"), now + 1002)
    assert watchdog.limit_s == HANG_FLOOR_S  # it is compiled since the first
    assert watchdog.median_s == pytest.approx(1)


def test_a_watcher_that_did_not_run_a_set_clock_and_a_heartbeat_that_cannot_be_read_are_no_hang() -> None:
    watchdog, now = trained(1.0)
    watchdog.look(beat(10, START_S + 10), now + 86400)
    assert not watchdog.is_hung
    for number, jump_s in enumerate((3600.0, -7200.0), 1):
        watchdog.look(beat(10 + number, START_S + 10 + number + jump_s), now + 86400 + number)
    assert (watchdog.limit_s, watchdog.stood_s) == (HANG_FLOOR_S, 0)
    watchdog.look({}, now + 86403)
    assert (watchdog.beat["step"], watchdog.stood_s) == (12, 1)
    unheard = Watchdog(1)
    for second in range(10000):
        unheard.look({}, float(second))
    assert not unheard.is_hung


@pytest.mark.parametrize("state", ["starting", "stepping", "saving"])
def test_a_heartbeat_that_is_not_renewed_is_a_hang_in_any_state(state: str) -> None:
    watchdog = Watchdog(heartbeat_limit_s=20)
    for second in range(600):  # standing still, and alive: compiling, say
        watchdog.look(beat(0, START_S, state, time=START_S + second), START_S + second)
        assert not (watchdog.is_hung or watchdog.progress()["is_silent"])
    for second in range(20):
        watchdog.look(beat(0, START_S, state, time=START_S + 599), START_S + 600 + second)
        assert not watchdog.is_hung
    assert watchdog.progress()["is_silent"]
    watchdog.look({}, START_S + 620)
    assert watchdog.is_hung
    watchdog.look(beat(0, START_S, state, time=START_S + 621), START_S + 621)
    assert not watchdog.is_hung


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


NAMES = st.sampled_from(["step", "step_time", "state", "time", "message"])


@given(st.lists(st.dictionaries(NAMES, ODD, max_size=5)))
def test_odd_heartbeats_end_nothing(beats: list[dict[str, Any]]) -> None:
    watchdog = Watchdog()
    for now, odd in enumerate(beats):
        watchdog.look(odd, float(now))
        watchdog.progress()
        assert watchdog.limit_s >= HANG_FLOOR_S


Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A channel and the other side's bare socket."""
    near, far = socket.socketpair()
    channel = Channel(near)
    with far:
        yield channel, far
    channel.close()


def test_messages_arrive_in_order_however_they_are_cut_and_before_the_end(pair: Pair) -> None:
    channel, far = pair
    found: list[dict[str, Any]] = []
    for part in (b'{"a"', b': 1}\n{"b": 2}\n{', b'"c": 3}\n'):
        far.sendall(part)
        found += channel.receive()
    assert found == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert channel.broken is None
    far.sendall(b'{"last": "words"}\n')
    far.shutdown(socket.SHUT_WR)
    assert channel.receive() == [{"last": "words"}]
    assert channel.broken == "the connection ended"


def test_what_is_no_short_json_object_breaks_the_channel(pair: Pair) -> None:
    channel, far = pair
    for line in (b"[]", b"\xff", b"[" * 5000, b'{"a": ' + b" " * LINE_LIMIT + b"1}"):
        channel.broken = None
        far.sendall(line + b"\n")
        assert channel.receive() == []
        assert channel.broken is not None


def test_what_did_not_fit_goes_later_and_who_never_reads_is_given_up(pair: Pair) -> None:
    channel, far = pair
    sent = 0
    while not channel.has_unsent:
        channel.send({"text": "x" * 10000})
        sent += 1
    received = b""
    while received.count(b"\n") < sent:
        received += far.recv(65536)
        channel.flush()
    assert not channel.has_unsent
    assert channel.broken is None
    for _ in range(1000):
        channel.send({"text": "x" * 10000})
        if channel.broken is not None:
            break
    assert channel.broken == "it does not read what it is sent"
    assert not channel.has_unsent


def test_a_client_that_never_reached_its_server_ends_when_its_process_does() -> None:
    orders: list[str] = []
    client = LivenessClient("127.0.0.1", free_port(), {}, lambda: orders.append("stop"))
    client.start()
    before = time.monotonic()
    assert not client.end(0.0)
    assert time.monotonic() - before < CONNECT_LIMIT_S
    assert (client.order, orders) == (None, [])
