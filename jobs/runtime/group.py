"""What the processes of a group do together, whatever its framework: leave each other notes, wait, and agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.process_environment import ProcessEnvironment

WAIT_LIMIT_S = 24 * 3600
"""For the slowest host to prepare a large corpus, or the one that does it for all."""
REPORT_PERIOD_S, POLL_PERIOD_S = 60.0, 0.2
REFUSAL_LIMIT_S = 30.0
"""For the slowest process to read that they do not agree, before the one that keeps the notes ends."""
PEER_SILENCE_LIMIT_S = 60
"""A peer whose machine vanished without closing its connections is given up after this long."""
SUPERVISED_PEER_SILENCE_LIMIT_S = 3600
"""The same under an agent, whose supervisors miss a lost host within seconds. A process that hangs is theirs to judge
too: a framework would end the others before their stacks are saved, and with them what they know of the hang."""


def peer_silence_limit_s(environment: ProcessEnvironment) -> int:
    return PEER_SILENCE_LIMIT_S if environment.control_dir is None else SUPERVISED_PEER_SILENCE_LIMIT_S


class Board(Protocol):
    """Where the processes of a group leave each other notes: the group's key-value store."""

    def put(self, name: str, text: str) -> None: ...

    def get(self, name: str) -> str | None:
        """None where there is no such note."""
        ...


class Membership(Protocol):
    """This process's place in its group: the `distributed` module of a framework."""

    def rank(self) -> int: ...

    def all_processes(self, condition: bool) -> bool:
        """Whether it holds for every process; all of them ask together."""
        ...


def agree(
    board: Board, rank: int, size: int, name: str, fingerprint: str, report: Callable[[str], None]
) -> None:
    """Make sure that every process holds the same `fingerprint` of `name`; waits for the slowest.

    Raises:
        RequestError: they differ, so training would silently mix different data or settings.
    """
    if size == 1:
        return
    board.put(f"agree/{name}/{rank}", fingerprint)
    prints = [
        wait_for(board, f"agree/{name}/{peer}", f"{name} of rank {peer}", report) for peer in range(size)
    ]
    different = [peer for peer in range(size) if prints[peer] != prints[0]]
    if different:
        _end_together(board, rank, size, f"agree/{name}/refused")
        raise RequestError(
            f"{name} is not the same on every host: ranks {different} differ from rank 0; "
            "give every host the same files and the same software"
        )


def _end_together(board: Board, rank: int, size: int, note: str) -> None:
    """Rank 0 keeps the notes: if it ended first, slower processes would take it for lost and not know the reason."""
    board.put(f"{note}/{rank}", "read")
    deadline_s = time.monotonic() + REFUSAL_LIMIT_S
    while rank == 0 and time.monotonic() < deadline_s:
        if all(board.get(f"{note}/{peer}") for peer in range(size)):
            return
        time.sleep(POLL_PERIOD_S)


def first_then_others[Result](
    board: Board, rank: int, work: Callable[[], Result], work_name: str, report: Callable[[str], None]
) -> Result:
    """Carry out `work` on rank 0 before the others, which then find what it has put where all can see it."""
    if rank == 0:
        result = work()
        board.put(f"first/{work_name}", "done")
        return result
    wait_for(board, f"first/{work_name}", f"{work_name} of rank 0", report)
    return work()


def wait_for(board: Board, name: str, awaited: str, report: Callable[[str], None]) -> str:
    """Wait for a note, and report from time to time that this process waits: one that is silent counts as hung.

    Raises:
        RuntimeError: it was not there after WAIT_LIMIT_S, or the process that keeps the notes was lost.
    """
    start_s = reported_s = time.monotonic()
    while (text := board.get(name)) is None:
        now_s = time.monotonic()
        if now_s - start_s > WAIT_LIMIT_S:
            raise RuntimeError(f"coordination service: {awaited} was not there after {spoken(WAIT_LIMIT_S)}")
        if now_s - reported_s > REPORT_PERIOD_S:
            reported_s = now_s
            report(f"waiting for {awaited}, for {spoken(now_s - start_s)} so far")
        time.sleep(POLL_PERIOD_S)
    return text


def require_platform(requested: str, actual: str, framework: str) -> None:
    """Raises RequestError where a framework has another platform than RUN_PLATFORM says: a run never falls back."""
    if actual != requested:
        raise RequestError(
            f"RUN_PLATFORM is {requested}, but {framework} found {actual}; nothing is trained on another platform than "
            "the one asked for"
        )
