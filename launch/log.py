"""Reading the logs of a run's hosts through their agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from launch import follow, runs
from launch.agents import Agent
from launch.runs import Run

CHUNK_BYTES = 256 * 1024
POLL_S = 0.5


def tail(agent: Agent, run: Run, host: int, *, lines: int) -> tuple[list[str], int]:
    """The last `lines` lines of one host's log (all where 0), and the offset from where to go on.

    Raises:
        HostError: the host did not answer, or has no such log.
    """
    pieces = list(_pieces(agent, run, host, 0 if lines == 0 else -CHUNK_BYTES))
    text = "".join(piece for piece, _ in pieces)
    return text.splitlines()[-lines:], pieces[-1][1]


def follow_all(
    agents: Sequence[Agent], run: Run, offsets: dict[int, int], show: Callable[[int, str], None]
) -> None:
    """Hand every new line of the hosts in `offsets` to `show` until the run has ended and all is read."""
    while True:
        ended = follow.state(agents, runs.read(run.directory) or run) not in runs.ACTIVE
        for host, offset in list(offsets.items()):
            for text, next_offset in _pieces(agents[host], run, host, offset):
                offsets[host] = next_offset
                for line in text.splitlines():
                    show(host, line)
        if ended:
            return
        time.sleep(POLL_S)


def _pieces(agent: Agent, run: Run, host: int, offset: int) -> Iterator[tuple[str, int]]:
    """What the log holds now from `offset` on, in pieces of whole lines, each with the offset after it."""
    end: int | None = None
    while True:
        answer = _ask(agent, run, host, offset)
        offset = answer["next_offset"]
        # Only what was there when the reading began: a log that grows faster than it is read ends all the same.
        end = answer["size"] if end is None else end
        yield answer["text"], offset
        if not answer["text"] or offset >= end:
            return


def _ask(agent: Agent, run: Run, host: int, offset: int) -> dict[str, Any]:
    return agent.ask(
        "logs",
        {
            "run_id": run.run_id,
            "attempt": run.attempt,
            "process_id": host,
            "offset": offset,
            "limit_bytes": CHUNK_BYTES,
        },
    )
