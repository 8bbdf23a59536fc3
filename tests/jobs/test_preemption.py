"""Where a run that is told to stop is left: nothing that was computed is lost, and no process waits for another."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jobs.runtime import preemption
from jobs.runtime.preemption import Position, Watch, decide
from tests.waiting import until

LIMIT_S = 30.0


def at(passed: int, computed: int, saved: int, *, is_ending: bool = False) -> Position:
    return Position(passed=passed, computed=computed, saved=saved, is_ending=is_ending)


START, RESTORED = at(0, 0, 0), at(0, 20, 20)
"""Before the first step of an attempt, and with the checkpoint read that it goes on from."""


@pytest.mark.parametrize(
    ("doing", "positions", "leave_at"),
    [
        ("joining, preparing data", [START, START], 0),
        ("compiling or in the first step", [RESTORED, RESTORED], 0),
        ("one has its checkpoint, the other reads it yet", [RESTORED, START], 0),
        ("alone", [START], 0),
        # A place is passed after each step, and after each save that was begun.
        ("stepping", [at(3, 23, 20), at(3, 23, 20)], 4),
        ("the first step has been taken by one", [at(1, 21, 20), at(0, 20, 20)], 2),
        ("a step is computed, and its place not yet passed", [at(0, 21, 20), at(0, 20, 20)], 1),
        ("saving: one is through", [at(5, 24, 24), at(4, 24, 20)], 5),
        ("saving: none is through", [at(4, 24, 20), at(4, 24, 20)], 5),
        ("evaluating what is saved", [at(5, 24, 24), at(5, 24, 24)], 5),
        ("writing a checkpoint while the next step is computed", [at(5, 25, 24), at(5, 24, 24)], 6),
        ("the last step is taken, and not saved", [at(9, 30, 24), at(9, 30, 24)], 10),
        ("exporting", [at(10, 30, 30), at(10, 30, 30)], 10),
        ("process 0 writes the result", [at(10, 30, 30, is_ending=True), at(10, 30, 30)], None),
        ("so it does in a job that saves nothing", [at(9, 9, 0, is_ending=True), at(9, 9, 0)], None),
    ],
)
def test_all_leave_where_nothing_is_lost(doing: str, positions: list[Position], leave_at: int | None) -> None:
    assert decide(positions) == leave_at, doing
    assert decide(positions[::-1]) == leave_at, doing


class Notes:
    """A board in memory."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        self.notes[name] = text

    def get(self, name: str) -> str | None:
        return self.notes.get(name)


class Host:
    """A process of a group: the test is its main thread, unless it is given something to do in one of its own."""

    def __init__(self, rank: int, size: int) -> None:
        self.watch, self.left, self.reported = Watch(), list[int](), 0
        self.did: list[object] = []
        self.watch.listen()
        self.watch.start(rank=rank, size=size, step_now=lambda: self.reported, leave=self.left.append)

    def sigterm(self) -> None:
        assert self.watch._pipe is not None
        os.write(self.watch._pipe[1], bytes([signal.SIGTERM]))

    def do(self, work: Callable[[Watch], object]) -> None:
        threading.Thread(target=lambda: self.did.append(work(self.watch)), daemon=True).start()


@pytest.fixture(autouse=True)
def own_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What pytest has for SIGTERM is put back; processes look at the board often."""
    monkeypatch.setattr(preemption, "LOOK_PERIOD_S", 0.05)
    monkeypatch.setattr(preemption, "AGREE_PERIOD_S", 0.02)
    handler, descriptor = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    yield
    signal.signal(signal.SIGTERM, handler)
    signal.set_wakeup_fd(descriptor)


def hosts(size: int, board: Notes | None) -> list[Host]:
    made = [Host(rank, size) for rank in range(size)]
    for host in made:
        if board is not None:
            host.watch.formed(board)
    return made


def saved(watch: Watch, step: int) -> bool:
    watch.about_to_save(step)
    return watch.save_begun(step, lambda: None)


def test_sigterm_is_noticed_by_a_thread() -> None:
    (host,) = hosts(1, Notes())
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: host.left == [0], LIMIT_S)


def test_before_the_first_step_all_leave_by_themselves_and_the_main_thread_comes_no_further() -> None:
    both = hosts(2, Notes())
    for host in both:
        host.watch.restored(20)
    both[1].sigterm()
    until(lambda: [host.left for host in both] == [[20], [20]], LIMIT_S)
    both[0].do(lambda watch: watch.about_to_record())
    both[0].do(lambda watch: watch.stepped(21))
    both[0].do(lambda watch: watch.claim())
    time.sleep(0.3)
    assert both[0].did == []


def test_between_steps_the_main_threads_leave_after_the_same_step_though_one_is_ahead() -> None:
    both = hosts(2, Notes())
    assert [host.watch.stepped(1) for host in both] == [False, False]
    assert both[0].watch.stepped(2) is False
    both[1].sigterm()
    until(lambda: both[0].watch._is_decided and both[1].watch._is_decided, LIMIT_S)
    assert both[1].watch.stepped(2) is False
    assert [host.watch.stepped(3) for host in both] == [True, True]
    # What the job does on its way out is no place of anybody's.
    assert [saved(host.watch, 3) for host in both] == [False, False]
    assert [host.left for host in both] == [[], []]


def test_with_a_checkpoint_begun_it_is_completed_and_what_was_measured_is_written_before_the_end() -> None:
    both, order = hosts(2, Notes()), list[str]()
    for host in both:
        host.watch.on_leaving(lambda: order.append("flushed"))
        host.watch.stepped(1)
    both[0].watch.save_begun(1, lambda: order.append("complete"))
    both[0].sigterm()
    until(lambda: both[0].left == [1], LIMIT_S)
    assert order == ["complete", "flushed"]
    # The other comes to the same place in its main thread.
    assert saved(both[1].watch, 1) is True
    assert both[1].left == []


def test_who_is_told_before_the_group_has_formed_leaves_alone_and_does_not_join_it_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preemption, "FORMING_LIMIT_S", 0.1)
    (host,) = hosts(1, None)
    host.sigterm()
    until(lambda: host.left == [0], LIMIT_S)
    host.do(lambda watch: watch.formed(Notes()))
    time.sleep(0.3)
    assert host.did == []


def test_who_waits_for_the_result_of_process_0_can_be_stopped_until_that_is_being_written() -> None:
    both = hosts(2, Notes())
    for host in both:
        host.watch.stepped(1)
        saved(host.watch, 1)
    both[1].do(lambda watch: watch.end())  # process 0 exports meanwhile
    both[1].sigterm()
    until(lambda: [host.left for host in both] == [[1], [1]], LIMIT_S)
    assert both[1].did == []

    board = Notes()
    both = hosts(2, board)
    for host in both:
        host.do(lambda watch: watch.end())
    until(lambda: [len(host.did) for host in both] == [1, 1], LIMIT_S)
    both[0].sigterm()
    time.sleep(10 * preemption.LOOK_PERIOD_S)
    assert ([host.left for host in both], "decision" in board.notes) == ([[], []], False)


def test_process_0_goes_last_and_says_nothing_where_the_group_is_gone() -> None:
    board = Notes()
    both = hosts(2, board)
    both[0].do(lambda watch: watch.part())
    time.sleep(0.3)
    assert both[0].did == []
    both[1].watch.part()
    until(lambda: both[0].did == [None], LIMIT_S)


def test_where_process_0_is_gone_who_has_nothing_to_lose_leaves_and_who_has_goes_on_to_fail() -> None:
    class Gone(Notes):
        def put(self, name: str, text: str) -> None:
            raise RuntimeError("UNAVAILABLE")

    idle, stepping = hosts(2, Gone())
    stepping.watch.stepped(1)
    for host in (idle, stepping):
        host.sigterm()
    until(lambda: idle.left == [0], LIMIT_S)
    until(lambda: stepping.watch._is_decided, LIMIT_S)
    assert stepping.watch.stepped(2) is False


def test_what_a_process_has_computed_is_also_known_from_its_heartbeat() -> None:
    board = Notes()
    (host,) = hosts(1, board)
    host.watch.restored(20)
    host.reported = 21
    host.sigterm()
    until(lambda: "decision" in board.notes, LIMIT_S)
    assert json.loads(board.notes["decision"]) == 1
    assert host.watch.stepped(21) is True
