"""Reading the logs of a run's hosts through their agents: all hosts at once, none waiting for another."""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contracts.run_directory import SILENCE_LIMIT_S
from launch.agents import Agent, PendingAnswer
from launch.errors import HostError
from launch.printable import Lines
from launch.runs import Run

CHUNK_BYTES = 256 * 1024
POLL_S = 0.5
ASK_AGAIN_S = 2.0
ANSWER_LIMIT_S = 10.0

Show = Callable[[int, str], None]
"""Is handed a host's index and a line of its log."""
Tell = Callable[[str], None]
"""Is told of hosts that do not answer."""


def show_all(
    agents: Sequence[Agent],
    run: Run,
    hosts: Sequence[int],
    *,
    lines: int,
    keep_on: bool,
    show: Show,
    tell: Tell,
) -> bool:
    """Hand the last `lines` lines of these hosts' logs (all where 0) to `show`, host by host, and with `keep_on` what
    comes until their processes have ended. Whether every host answered."""
    if lines == 0:
        return follow_all(agents, run, dict.fromkeys(hosts, 0), show, tell, keep_on=keep_on)
    offsets, unheard = {}, []
    with concurrent.futures.ThreadPoolExecutor(min(64, len(hosts))) as pool:
        tails = {host: pool.submit(tail, agents[host], run, host, lines=lines) for host in hosts}
    for host, reading in tails.items():
        try:
            found, offsets[host] = reading.result()
        except HostError as error:
            offsets[host] = -CHUNK_BYTES
            unheard.append(error)
            continue
        for line in found:
            show(host, line)
    if keep_on:
        return follow_all(agents, run, offsets, show, tell)
    for each in unheard:
        tell(str(each))
    return not unheard


def tail(agent: Agent, run: Run, host: int, *, lines: int) -> tuple[list[str], int]:
    """The last `lines` lines of one host's log, and the offset from where to go on.

    Raises:
        HostError: the host did not answer, or has no such log.
    """
    window = CHUNK_BYTES
    while True:
        answer = _ask(agent, run, host, -window).result()
        begin, size = answer["offset"], answer["size"]
        kept: collections.deque[str] = collections.deque(maxlen=lines)
        cut = Lines()
        while True:
            kept.extend(cut.feed(answer["text"]))
            # Only what was there when the reading began: a log that grows faster than it is read ends all the same.
            if not answer["text"] or answer["next_offset"] >= size:
                break
            answer = _ask(agent, run, host, answer["next_offset"]).result()
        kept.extend(cut.end())
        if len(kept) == lines or begin == 0:
            return list(kept), answer["next_offset"]
        window *= 8


def follow_all(
    agents: Sequence[Agent],
    run: Run,
    offsets: Mapping[int, int],
    show: Show,
    tell: Tell = lambda _: None,
    *,
    keep_on: bool = True,
) -> bool:
    """Hand every line of the hosts in `offsets` from there on to `show` until their processes have ended and all is
    read; without `keep_on` until what is there now is read. Whether every host answered in the end.

    A host that does not answer is told of once and asked again. When the others have ended and it has been silent for
    as long as a lost host's run may last, it is waited for no more.
    """
    reading = [_Reader(agents[host], run, host, offset, keep_on) for host, offset in offsets.items()]
    while open_readers := [reader for reader in reading if not reader.is_done]:
        for reader in open_readers:
            reader.ask_if_due()
        asked = [reader.pending.future for reader in open_readers if reader.pending]
        due_s = [reader.due_s for reader in open_readers if reader.pending is None]
        pause_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        if asked:
            concurrent.futures.wait(asked, pause_s, return_when=concurrent.futures.FIRST_COMPLETED)
        else:
            time.sleep(pause_s or 0.0)
        for reader in open_readers:
            reader.take_answer(show, tell)
        if all(reader.is_done or reader.is_lost() for reader in reading):
            break
    for reader in reading:
        if not reader.is_done and keep_on:
            tell(f"{reader.agent.host}: has not answered for {reader.silent_s():.0f} s; its log ends here")
    return all(reader.is_done for reader in reading)


class _Reader:
    """One host's log, read on from an offset; never more than one piece of it is in memory."""

    def __init__(self, agent: Agent, run: Run, host: int, offset: int, keep_on: bool) -> None:
        self.agent, self._run, self._host, self._offset, self._keep_on = agent, run, host, offset, keep_on
        self.pending: PendingAnswer | None = None
        self.is_done = False
        self.due_s = self._heard_s = time.monotonic()
        self._answers = True
        self._goal: int | None = None
        self._cut = Lines()

    def ask_if_due(self) -> None:
        if self.pending is None and time.monotonic() >= self.due_s:
            self.pending = _ask(self.agent, self._run, self._host, self._offset)

    def take_answer(self, show: Show, tell: Tell) -> None:
        """Show what has come, if something has."""
        if self.pending is None or not self.pending.future.done():
            return
        pending, self.pending = self.pending, None
        try:
            answer = pending.result()
        except HostError as error:
            if self._answers:
                tell(f"{error}; it is asked again" if self._keep_on else str(error))
            self._answers, self.due_s = False, time.monotonic() + ASK_AGAIN_S
            return
        if not self._answers:
            tell(f"{self.agent.host} answers again")
        self._answers, self._heard_s = True, time.monotonic()
        self._offset, size = answer["next_offset"], answer["size"]
        self._goal = size if self._goal is None else self._goal
        for line in self._cut.feed(answer["text"]):
            show(self._host, line)
        has_all = not answer["text"] or self._offset >= (size if self._keep_on else self._goal)
        if has_all and (answer["ended"] or not self._keep_on):
            self.is_done = True
            for line in self._cut.end():
                show(self._host, line)
        self.due_s = time.monotonic() + (POLL_S if has_all else 0.0)

    def silent_s(self) -> float:
        return 0.0 if self._answers else time.monotonic() - self._heard_s

    def is_lost(self) -> bool:
        """Whether it is waited for no more once the others have ended."""
        return not self._answers and (not self._keep_on or self.silent_s() > SILENCE_LIMIT_S)


def _ask(agent: Agent, run: Run, host: int, offset: int) -> PendingAnswer:
    request: dict[str, Any] = {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "process_id": host,
        "offset": offset,
        "limit_bytes": CHUNK_BYTES,
    }
    return agent.begin("logs", request, timeout_s=ANSWER_LIMIT_S)
