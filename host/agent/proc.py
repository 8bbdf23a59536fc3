"""/proc: which processes there are, what they are and what they hold open; and waiting for them, with a limit."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def parse_stat(text: str) -> tuple[str, int]:
    """State letter and start time (ticks since boot) of a /proc/<pid>/stat; its name may hold anything."""
    fields = text[text.rindex(")") + 1 :].split()
    return fields[0], int(fields[19])


def start_ticks(pid: int) -> int | None:
    """When `pid` was started, which distinguishes it from a later process of that number; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, ticks = parse_stat(file.read())
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else ticks


def children(parent: int) -> list[int]:
    """The child processes of `parent`, of any user."""
    return children_of_all().get(parent, [])


def children_of_all() -> dict[int, list[int]]:
    """The child processes of every process that has some, of any user."""
    by_parent: dict[int, list[int]] = {}
    for pid in pids():
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue
        parent = int(text[text.rindex(")") + 1 :].split()[1])
        by_parent.setdefault(parent, []).append(pid)
    return by_parent


def descendants(ancestor: int) -> list[int]:
    """The processes that `ancestor` has started, and those that these have, parents first."""
    by_parent = children_of_all()
    pids_below = sorted(by_parent.get(ancestor, []))
    for pid in pids_below:
        pids_below += sorted(by_parent.get(pid, []))
    return pids_below


def catches(status_text: str, signum: int) -> bool:
    """Whether a process of this /proc/<pid>/status has a handler for the signal."""
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status_text, re.MULTILINE)
    return mask is not None and bool(int(mask.group(1), 16) >> (signum - 1) & 1)


def pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def controlled() -> Iterator[tuple[int, str]]:
    """Every live process with a control directory in its environment, in whatever session it is, and that."""
    mark = b"RUN_CONTROL_DIR="
    for pid in pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # it ended, or it is another user's and so not ours
            continue
        if mark not in environment or pid == os.getpid() or start_ticks(pid) is None:
            continue
        for item in environment.split(b"\0"):
            if item.startswith(mark):
                yield pid, os.fsdecode(item[len(mark) :])


def members(control_dir: str) -> list[int]:
    """The live processes of one control directory."""
    return [pid for pid, directory in controlled() if directory == control_dir]


NO_MEMORY = "the kernel killed it for want of memory (OOMKilled)"


def oom_kills(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """How many processes of this one's control group, which is a pod's own, the kernel killed for lack of memory."""
    counters = [
        f"{root}/memory/memory.oom_control"
    ]  # of version 1, where a container sees only its own group
    with contextlib.suppress(OSError, StopIteration):
        with open(proc) as file:  # "0::/a/b"; another number is of version 1
            group = next(line.split(":", 2)[2] for line in file.read().splitlines() if line.startswith("0::"))
        counters.insert(0, f"{root}{group}/memory.events")
    for path in counters:
        with contextlib.suppress(OSError, ValueError, KeyError), open(path) as file:
            return int(dict(line.split() for line in file.read().splitlines())["oom_kill"])
    return 0


def holders(targets: Iterable[str]) -> dict[str, list[int]]:
    """The processes that have each target open: a path, or socket:[inode]. Only root sees other users' processes."""
    pids_by_target: dict[str, list[int]] = {target: [] for target in targets}
    for pid in pids():
        if pid == os.getpid():
            continue
        descriptors = f"/proc/{pid}/fd"
        try:
            opened = {os.readlink(f"{descriptors}/{name}") for name in os.listdir(descriptors)}
        except OSError:
            continue
        for target in opened & set(pids_by_target):
            pids_by_target[target].append(pid)
    return pids_by_target


def described(held_by: list[int]) -> str:
    """The processes for a message: pid and command line."""
    parts = []
    for pid in held_by:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            line = "ended meanwhile"
        parts.append(f"pid {pid} ({line[:120]})")
    return ", ".join(parts) or "a process that this user may not see"


def parse_listeners(text: str, port: int) -> list[str]:
    """socket:[inode] of everything that listens on `port` in a /proc/net/tcp or tcp6."""
    rows = (line.split() for line in text.splitlines()[1:])
    return [
        f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    ]


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.02) -> bool:
    """Whether `condition` came to hold within the time limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        # time.sleep goes by a clock that libfaketime may have moved, and fails.
        select.select([], [], [], pause_s)
    return True


def user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run as a number that has no name
        return str(os.getuid())
