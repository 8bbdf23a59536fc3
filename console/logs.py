"""`fab logs`: the logs of a run's hosts, their last lines or all, and what follows until the run ends."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from console import follow as following
from contracts import run_directory
from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import SILENCE_LIMIT_S
from launch import runs
from launch.hosts import HostError, in_thread
from launch.output import Lines
from launch.runs import Run
from launch.targets import Target

CHUNK_BYTES = 256 * 1024
POLL_S = 0.5
RETRY_S = 2.0
WAITING_PIECES = 64
"""Pieces of logs that wait until they are printed; hosts are not asked for more meanwhile."""

Show = Callable[[int, str], None]
"""Receives a host's index and a line of its log."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLog:
    """The log of one host of a run. host: its index."""

    target: Target
    run: Run
    host: int

    @property
    def host_name(self) -> str:
        return str(self.run.described["hosts"][self.host]["name"])

    def read(self, offset: int) -> dict[str, Any]:
        """Return a piece of it; of a run that has ended, also where its host is gone or was made again since.

        Raises:
            HostError: the host did not answer, or has no such log, and neither has the run directory.
        """
        try:
            return self.target.backend.logs(self.run, self.host, offset=offset, limit_bytes=CHUNK_BYTES)
        except HostError:
            stored = self._read_stored(offset)
            if stored is None:
                raise
            return stored

    def _read_stored(self, offset: int) -> dict[str, Any] | None:
        """Return a piece of it from the run directory; None where the run may be active, or has no such log."""
        with contextlib.suppress(HostError, OSError, RequestError):
            run = runs.read(self.run.directory)
            if run is None or _may_be_active(run, self.run.attempt):
                return None
            piece = run.directory.read_log(self.run.attempt, self.host, offset, CHUNK_BYTES)
            if piece is not None:
                position = {"offset": piece.offset, "next_offset": piece.next_offset, "size": piece.size}
                return {"text": piece.data.decode(errors="replace"), **position, "ended": True}
        return None


def _may_be_active(run: Run, attempt: int) -> bool:
    """Return whether an attempt of a run may be active, as far as the run directory says."""
    state = runs.state(run, (), unanswered=run.processes, now_s=time.time())
    return run.attempt == attempt and state in run_directory.ACTIVE


def logs(target: Target, name: str, *, host: int | None, follow: bool, lines: int) -> int:
    """Print the last lines of the hosts' logs (0: all) and, with `follow`, what comes until the run ends."""
    run = runs.find(target.runs, name)
    if host is not None and host >= run.processes:
        raise RequestError(f"--host {host}: {run.run_id} has the hosts 0 to {run.processes - 1}")
    hosts = [host] if host is not None else list(range(run.processes))

    def show(index: int, line: str) -> None:
        print(line if host is not None else f"[{index}] {line}", flush=True)

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def show_attempt(run: Run, lines: int) -> bool:
        selected = [HostLog(target=target, run=run, host=index) for index in hosts]
        return show_logs(selected, lines=lines, follow=follow, show=show, tell=tell)

    all_answered = show_attempt(run, lines)
    while (
        follow and target.capabilities.restarts_runs and (resumed := _next_attempt(target, run)) is not None
    ):
        tell(f"attempt {resumed.attempt}")
        run, all_answered = resumed, show_attempt(resumed, 0)
    return 0 if all_answered else 1


def _next_attempt(target: Target, run: Run) -> Run | None:
    """Wait for the next attempt of a run that its cluster starts again; None: it has ended."""
    until_s = time.monotonic() + following.UNHEARD_LIMIT_S
    while True:
        fresh = runs.read(run.directory)
        if fresh is None or fresh.attempt > run.attempt:
            return fresh
        look = target.backend.status([fresh]).for_run(fresh)
        state = runs.state_by(fresh, look)
        is_in_doubt = runs.may_be_restarted(fresh, look, state) and time.monotonic() < until_s
        if state not in run_directory.ACTIVE and not is_in_doubt:
            return None
        time.sleep(RETRY_S)


def show_logs(logs: Sequence[HostLog], *, lines: int, follow: bool, show: Show, tell: Say) -> bool:
    """Show the last `lines` lines of logs (0: all), host by host, and with `follow` what comes until the processes have
    ended. Return whether all hosts answered."""
    if lines == 0:
        return _show_from([(log, 0) for log in logs], show, tell, follow=follow)
    with concurrent.futures.ThreadPoolExecutor(min(64, len(logs))) as pool:
        tails = [pool.submit(tail, log, lines) for log in logs]
    offsets, errors = [], []
    for log, reading in zip(logs, tails, strict=True):
        try:
            last_lines, offset = reading.result()
        except HostError as error:
            last_lines, offset = [], -CHUNK_BYTES
            errors.append(error)
        offsets.append((log, offset))
        for line in last_lines:
            show(log.host, line)
    if follow:
        return _show_from(offsets, show, tell, follow=True)
    for unanswered in errors:
        tell(str(unanswered))
    return not errors


def tail(log: HostLog, lines: int) -> tuple[list[str], int]:
    """Return the last `lines` lines of a log, and the offset at which to continue.

    Raises:
        HostError: the host did not answer, or has no such log.
    """
    window = CHUNK_BYTES
    while True:
        answer, cut = log.read(-window), Lines()
        begin, size = answer["offset"], answer["size"]
        last_lines = collections.deque(cut.feed(answer["text"]), maxlen=lines)
        # Only up to the size at the beginning: a log may grow faster than it is read.
        while answer["text"] and answer["next_offset"] < size:
            answer = log.read(answer["next_offset"])
            last_lines.extend(cut.feed(answer["text"]))
        last_lines.extend(cut.end())
        if len(last_lines) == lines or begin == 0:
            return list(last_lines), answer["next_offset"]
        window *= 8


def _show_from(offsets: Sequence[tuple[HostLog, int]], show: Show, tell: Say, *, follow: bool) -> bool:
    """Show logs from offsets on; return whether all hosts answered in the end. Each is read in a thread of its own."""
    pieces: queue.Queue[tuple[int, Sequence[str]] | str | None] = queue.Queue(WAITING_PIECES)

    def read(log: HostLog, offset: int) -> bool:
        try:
            return _read_on(
                log, offset, lambda lines: pieces.put((log.host, lines)), pieces.put, follow=follow
            )
        finally:
            pieces.put(None)

    readers = [in_thread(functools.partial(read, log, offset)) for log, offset in offsets]
    active = len(readers)
    while active:
        match pieces.get():
            case None:
                active -= 1
            case str(message):
                tell(message)
            case host, lines:
                for line in lines:
                    show(host, line)
    return all(reader.result() for reader in readers)


def _read_on(
    log: HostLog, offset: int, show: Callable[[Sequence[str]], None], tell: Say, *, follow: bool
) -> bool:
    """Read a log to its present end or, with `follow`, until the process has ended; return whether the host answered.

    A host that does not answer is asked again for SILENCE_LIMIT_S, within which the run of a lost host ends.
    """
    cut, end, last_answer_s, is_silent = Lines(), None, time.monotonic(), False
    while True:
        try:
            answer = log.read(offset)
        except HostError as error:
            if not follow or not is_silent:
                tell(f"{error}; it is asked again" if follow else str(error))
            is_silent, silence_s = True, time.monotonic() - last_answer_s
            if follow and silence_s > SILENCE_LIMIT_S:
                tell(f"{log.host_name}: has not answered for {spoken(silence_s)}; its log ends here")
            if not follow or silence_s > SILENCE_LIMIT_S:
                return False
            time.sleep(RETRY_S)
            continue
        if is_silent:
            tell(f"{log.host_name} answers again")
        is_silent, last_answer_s = False, time.monotonic()
        offset, size = answer["next_offset"], answer["size"]
        end = size if end is None or follow else end
        show(cut.feed(answer["text"]))
        is_complete = not answer["text"] or offset >= end
        if is_complete and (answer["ended"] or not follow):
            show(cut.end())
            return True
        if is_complete:
            time.sleep(POLL_S)
