"""Stack traces of a process: the verb stacks, and what a process that hangs is doing, by itself and the kernel."""

from __future__ import annotations

import os
import re
import signal
import time

from .proc import catches, members, wait_until
from .process import Process, known_process, signal_quietly
from .protocol import Failed, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def stacks(request: Json) -> Json:
    """The stacks of all threads of a process, as its own SIGUSR1 handler writes them."""
    process = known_process(request)
    name, pid = f"process {process.process_id}", process.record["pid"]
    if not process.is_alive():
        raise Failed(f"{name} (pid {pid}) is not running", "ask `status` how it ended")
    pid = process.pid()
    if pid is None:
        raise Failed(
            f"the container of {name} has not started it yet", "ask again when it is past its start-up"
        )
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        if not catches(file.read(), signal.SIGUSR1):
            message = f"{name} (pid {pid}) has no SIGUSR1 handler, and the signal would kill it"
            raise Failed(message, "ask again when it is past its start-up")

    def written() -> int:
        try:
            return os.path.getsize(process.stacks_path)
        except OSError:
            return 0

    before = size = written()
    container = process.container
    if container is None:
        signal_quietly(os.kill, pid, signal.SIGUSR1)
    else:
        container.signal(signal.SIGUSR1)
    changed = time.monotonic()

    def is_written() -> bool:
        nonlocal size, changed
        if written() != size:
            size, changed = written(), time.monotonic()
        return size > before and time.monotonic() - changed >= 0.2

    if not wait_until(is_written, request["timeout_s"]):
        message = f"{name} (pid {pid}) did not answer SIGUSR1 within {request['timeout_s']:g} s"
        raise Failed(message, "it hangs outside Python's reach; `stop` it")
    with open(process.stacks_path, "rb") as stacks_file:
        stacks_file.seek(before)
        return {"text": stacks_file.read().decode(errors="replace")}


STACKS_LIMIT_S = 5.0
PROCESSES, THREADS = 16, 64
"""As many are described; a TPU process has hundreds of threads, all but a few of them asleep in the same place."""


def hang_dump(process: Process) -> str:
    """The stack traces of the process, if it still answers, and /proc's state of it and its descendants."""
    request = {
        "root": os.path.dirname(os.path.dirname(os.path.dirname(process.dir))),
        "run_id": process.run_id,
        "attempt": process.attempt,
        "process_id": process.process_id,
        "timeout_s": STACKS_LIMIT_S,
    }
    try:
        own = str(stacks(request)["text"])
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
