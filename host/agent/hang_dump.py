"""What a process that hangs is doing, by itself and the kernel."""

from __future__ import annotations

import os
import re

from .proc import members
from .process import Process
from .protocol import Refused
from .stack_traces import by_signal

STACKS_LIMIT_S = 5.0
PROCESSES, THREADS = 16, 64
"""As many are described; a TPU process has hundreds of threads, all but a few of them asleep in the same place."""


def hang_dump(process: Process) -> str:
    """The stack traces of the process, if it still answers, and /proc's state of it and its descendants."""
    try:
        own = by_signal(process, STACKS_LIMIT_S)
    except Refused as refusal:
        own = f"no stacks: {refusal.message}\n"
    except OSError as error:  # it ended meanwhile
        own = f"no stacks: {error}\n"
    other_pids = sorted({*members(process.dir), *in_container(process)} - {process.record["pid"]})
    parts = [own, *(by_kernel(pid) for pid in [process.record["pid"], *other_pids][:PROCESSES])]
    return "\n".join(parts)


def in_container(process: Process) -> list[int]:
    """The job's own process, where another user's container has it."""
    try:
        pid = None if process.container is None else process.pid()
    except Refused:
        return []
    return [] if pid is None else [pid]


def by_kernel(pid: int) -> str:
    """State, place in the kernel and system call of the threads of a process, as far as this user may see."""
    command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    lines = [f"pid {pid}: {command[:300]}"]
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return lines[0] + ": it has ended"
    lines += _threads(pid, threads[:THREADS])
    if len(threads) > THREADS:
        lines.append(f"  and {len(threads) - THREADS} more threads")
    return "\n".join(lines)


def _threads(pid: int, threads: list[int]) -> list[str]:
    lines = []
    for thread in threads:
        place = f"/proc/{pid}/task/{thread}"
        name = _read(f"{place}/comm").strip()
        match = re.search(r"^State:\s*(.*)$", _read(f"{place}/status"), re.MULTILINE)
        state = match.group(1) if match else "gone"
        waits_in, call = _read(f"{place}/wchan").strip(), _read(f"{place}/syscall").strip()
        lines.append(f"  thread {thread} {name}: {state}; wchan {waits_in or '?'}; syscall {call or '?'}")
        lines += [f"    {line}" for line in _read(f"{place}/stack").splitlines()]
    return lines


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(65536).decode(errors="replace")
    except OSError:
        return ""
