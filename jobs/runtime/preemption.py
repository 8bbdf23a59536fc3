"""Stops all processes of a run together when any host gets SIGTERM; nothing that they had computed is lost.

SIGTERM is noticed by a thread, whatever the main thread does (a compiler may hold that for minutes). Then, by way of
the group's key-value store:

1. every process publishes its Position, and from then on its main thread waits at the next place where it could stop;
2. process 0 decides at which place all leave (`decide`), and publishes that;
3. a process whose main thread has passed that place leaves by the thread, as soon as its checkpoint is complete; in the
   others the main thread continues to the place and leaves there.

The places are numbered alike in all processes: one after each step (`notified`), one after the start of each save
(`Checkpoints.save`). A process that gets SIGTERM while the group is still forming leaves by itself, and its agent tells
the others.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jobs.runtime.group import Board

STOP_REQUESTED = "stop-requested"
"""The file that the agent leaves in the control directory before it sends SIGTERM for a requested stop."""

STOP_REASON = "stop-reason"

STOP_NOTE = "stop"
"""The note that some process has got SIGTERM."""

LOOK_PERIOD_S = 1.0
"""Between two looks for a stop of another process."""
AGREE_PERIOD_S = 0.1
FORMING_LIMIT_S = 2.0
"""A process that gets SIGTERM while the group is forming waits this long for it, to be able to tell the others."""
UNHEARD_LIMIT_S = 10.0
"""How long process 0, if it has computed nothing, waits for the positions of processes that do not answer."""
LAST_LIMIT_S = 30.0
"""How long process 0, whose end ends the group, waits for the others to have left."""


class Preempted(Exception):
    """The run has been saved after `step` and can be resumed from there."""

    def __init__(self, step: int) -> None:
        super().__init__(f"saved after step {step}")
        self.step = step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """How far a process has come.

    passed: places passed at which all processes can stop together. computed: the last step that is known to be
    computed. saved: the last step whose checkpoint was begun, or restored. is_ending: the job's work is done, and the
    result is being written.
    """

    passed: int = 0
    computed: int = 0
    saved: int = 0
    is_ending: bool = False


def decide(positions: Sequence[Position]) -> int | None:
    """The place at which all processes leave; None: the run is as good as done, and nobody leaves.

    It is the one that the furthest have passed if that leaves nothing unsaved: at the start, while compiling, with a
    checkpoint begun and no step computed since. Otherwise it is the next one, where the state is saved.
    """
    if any(position.is_ending for position in positions):
        return None
    furthest = max(position.passed for position in positions)
    leaders = [position for position in positions if position.passed == furthest]
    return furthest if all(position.computed <= position.saved for position in leaders) else furthest + 1


class Watch:
    """Notices a stop in one process, agrees with the others on where to leave, and leaves where the main thread cannot.

    Made by the main thread, before anything that takes long.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._lock = threading.Condition()
        self._passed = self._computed = self._saved = 0
        self._is_held = self._is_decided = self._main_leaves = self._is_ending = self._is_over = False
        self._stop_at: int | None = None
        self._board: Board | None = None
        self._wait_for_checkpoint: Callable[[], None] | None = None
        self._flushes: list[Callable[[], None]] = []
        self._rank, self._size = 0, 1
        self._step_now: Callable[[], int] = lambda: 0
        self._leave: Callable[[int], object] = lambda _step: None
        self._told: Callable[[], object] = lambda: None

    # --- called by the process ---

    def listen(self) -> None:
        """Take SIGTERM.

        The interpreter's own handler, in C, writes to the pipe at once; one in Python would wait for the main thread.
        """
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)

    def listen_again(self) -> None:
        """Take SIGTERM again after a library has put a handler of its own, as libtpu does when it starts."""
        if self._pipe is not None:
            self.listen()

    def start(
        self,
        *,
        rank: int,
        size: int,
        step_now: Callable[[], int],
        leave: Callable[[int], object],
        told: Callable[[], object] = lambda: None,
    ) -> None:
        """Watch from now on.

        step_now: the last step that was reported. leave: ends the process, given the step that it is saved after.
        told: called once a stop is noticed.
        """
        self._rank, self._size, self._step_now, self._leave, self._told = rank, size, step_now, leave, told
        threading.Thread(target=self._watch, name="preemption", daemon=True).start()

    def formed(self, board: Board) -> None:
        """The group has formed, and this is where its processes leave each other notes."""
        with self._lock:
            self._give_way()
            self._board = board
            self._lock.notify_all()

    # --- called by the work of the main thread ---

    def on_leaving(self, flush: Callable[[], None]) -> None:
        """Register what is to be written before the process leaves; the thread that leaves calls it."""
        self._flushes.append(flush)

    def flush(self) -> None:
        for flush in self._flushes:
            flush()

    def restored(self, step: int) -> None:
        with self._lock:
            self._computed = self._saved = step

    def about_to_record(self) -> None:
        """Wait until it is decided whether what was computed is kept: a step that is not is not recorded either."""
        with self._lock:
            self._hold()

    def stepped(self, step: int) -> bool:
        """Pass the place after `step`; whether it is the one at which all leave."""
        with self._lock:
            self._computed = max(self._computed, step)
            self._hold()
            return self._pass()

    def about_to_save(self, step: int) -> None:
        with self._lock:
            self._computed = max(self._computed, step)
            self._hold()

    def save_begun(self, step: int, wait: Callable[[], None]) -> bool:
        """Pass the place after a save; whether it is the one at which all leave. wait: until it is complete."""
        with self._lock:
            self._saved, self._wait_for_checkpoint = step, wait
            return not self._main_leaves and self._pass()

    def end(self) -> None:
        """The job's work is done: from here on the process comes to its own end, with the others.

        Process 0 has the most to do, and its result says how the run ended: until then all can still be stopped.
        """
        with self._lock:
            self._hold()
            self._is_ending = self._rank == 0
            board = self._board
        if board is None:
            return
        if self._rank == 0:
            board.put("ending", "yes")
        while board.get("ending") is None:
            time.sleep(AGREE_PERIOD_S)
            with self._lock:
                self._hold()
        with self._lock:
            self._is_over = True

    def claim(self) -> None:
        """Called before the main thread ends the process for its own reason; waits if the other thread ends it."""
        with self._lock:
            self._give_way()
            self._is_over = True

    def part(self) -> None:
        """Leave the group without waiting for anybody; process 0, whose end ends the group, goes last."""
        if self._board is None:
            return
        try:
            self._board.put(f"left/{self._rank}", "yes")
            pending = [f"left/{rank}" for rank in range(self._size) if rank != self._rank]
            deadline = time.monotonic() + LAST_LIMIT_S
            while self._rank == 0 and pending and time.monotonic() < deadline:
                pending = [name for name in pending if self._board.get(name) is None]
                time.sleep(AGREE_PERIOD_S if pending else 0)
        except Exception as error:  # the store's own kinds: who kept it has gone already
            print(f"leaving a group that is gone ({type(error).__name__})", flush=True)

    # --- with the lock held, by the main thread ---

    def _hold(self) -> None:
        """Wait while it is being decided, and for ever where the other thread ends the process."""
        self._lock.wait_for(lambda: self._is_decided or not self._is_held)
        self._give_way()

    def _give_way(self) -> None:
        if self._has_to_leave_by_thread():
            self._lock.wait_for(lambda: False)

    def _has_to_leave_by_thread(self) -> bool:
        reached = self._stop_at is not None and self._passed >= self._stop_at
        return self._is_decided and reached and not self._main_leaves

    def _pass(self) -> bool:
        self._passed += 1
        if self._is_decided and self._passed == self._stop_at:
            self._main_leaves = True
        return self._main_leaves

    # --- the thread ---

    def _watch(self) -> None:
        if not self._is_told():
            return
        self._told()
        board = self._board_in_time()
        if board is not None:
            self._decided(self._agree(board))
        with self._lock:
            by_thread = not self._is_over and self._has_to_leave_by_thread()
            self._is_over = self._is_over or by_thread
        if by_thread:
            if self._wait_for_checkpoint is not None:
                self._wait_for_checkpoint()
            self.flush()
            self._leave(self._saved)

    def _is_told(self) -> bool:
        """Wait until some process of the group has got SIGTERM; whether this came before the process's own end."""
        assert self._pipe is not None, "listen() comes before start()"
        while not self._is_over:
            ready, _, _ = select.select([self._pipe[0]], [], [], LOOK_PERIOD_S)
            if ready and signal.SIGTERM in os.read(self._pipe[0], 4096):
                return not self._is_over
            if self._board is not None and _has(self._board, STOP_NOTE):
                return True
        return False

    def _board_in_time(self) -> Board | None:
        """None where the group has not formed: this process leaves by itself then, whether or not it forms later."""
        with self._lock:
            self._lock.wait_for(lambda: self._board is not None, FORMING_LIMIT_S)
            if self._board is None:
                self._is_decided, self._stop_at = True, self._passed
            return self._board

    def _decided(self, stop_at: int | None) -> None:
        with self._lock:
            self._is_decided, self._stop_at = True, stop_at
            self._lock.notify_all()

    def _agree(self, board: Board) -> int | None:
        """The place at which all leave; says this process's position, and holds the main thread meanwhile."""
        with self._lock:
            self._is_held = True
            computed = max(self._computed, self._step_now())
            mine = Position(
                passed=self._passed, computed=computed, saved=self._saved, is_ending=self._is_ending
            )
        try:
            board.put(STOP_NOTE, "yes")
            board.put(f"position/{self._rank}", json.dumps(dataclasses.asdict(mine)))
            if self._rank == 0:
                board.put("decision", json.dumps(decide(self._positions(board, mine))))
            while (decision := board.get("decision")) is None:
                time.sleep(AGREE_PERIOD_S)
        except Exception as error:  # the store's own kinds: process 0 is gone, and the group with it
            print(f"told to stop, and the group does not answer ({type(error).__name__})", flush=True)
            return self._passed if mine.computed <= mine.saved else None
        stop_at: int | None = json.loads(decision)
        return stop_at

    def _positions(self, board: Board, mine: Position) -> list[Position]:
        """Those of all processes; who stands still is waited for, unless there is nothing that could be lost."""
        positions: dict[int, Position] = {0: mine}
        deadline = time.monotonic() + UNHEARD_LIMIT_S
        while len(positions) < self._size:
            for rank in set(range(self._size)) - set(positions):
                text = board.get(f"position/{rank}")
                if text is not None:
                    positions[rank] = Position(**json.loads(text))
            if all(position.passed == 0 for position in positions.values()) and time.monotonic() > deadline:
                break
            time.sleep(AGREE_PERIOD_S)
        return list(positions.values())


def _has(board: Board, name: str) -> bool:
    try:
        return board.get(name) is not None
    except Exception:  # the store's own kinds: the group is gone, and whoever is left learns of it elsewhere
        return False


watch = Watch()
"""This process's; it notices nothing before `listen`."""


def notified(step: int) -> bool:
    """Whether all hosts are to save after `step` and leave. Called by every host after every step, in order."""
    return watch.stepped(step)


def stop_reason(control_dir: str | None) -> str | None:
    """Why the agent requested the stop itself: the run has spent its budget."""
    try:
        return (Path(control_dir or "") / STOP_REASON).read_text(encoding="utf-8") if control_dir else None
    except OSError:
        return None


def was_requested(control_dir: str | None) -> bool:
    """Whether the stop was requested (`fab stop`), as opposed to a preemption."""
    return control_dir is not None and (Path(control_dir) / STOP_REQUESTED).exists()
