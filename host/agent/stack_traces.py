"""Where the threads of a running process are: the verb stacks, by py-spy or by the process's own SIGUSR1 handler, and
the dump of a process that hangs, with the kernel's view of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

from .attempt_process import Process, known_process, signal_quietly
from .proc import catches, descendants, members, wait_until
from .protocol import Failed, Refused
from .storage.staged_bundles import bundle_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .containers.docker_command import Container
    from .protocol import Json

PY_SPY = "py-spy"
DUMP_LIMIT_S = 30.0
"""For one process: py-spy reads the symbols of large libraries, and the machine is at work."""
AT_ONCE = 4
MOST_PROCESSES = 64
RUNTIME_PROCESSES = re.compile(r"-m\0jobs\.runtime\.(ranks\.rank_supervisor|monitoring\.sampler)\0")
"""Command lines of processes that compute nothing of the run."""
NO_PYTHON = re.compile("python version|process executable name", re.IGNORECASE)
NO_ANSWER = f"py-spy gave no answer within {DUMP_LIMIT_S:g} s"
STACKS_LIMIT_S = 5.0
PROCESSES, THREADS = 16, 64
"""As many are described; a TPU process has hundreds of threads, all but a few of them asleep in the same place."""
DENIED_REMEDY = (
    "the kernel lets nobody trace this process but root: allow the agent's user sudo without a password, or on pods "
    "start the run with --container-access privileged"
)


def stacks(request: Json) -> Json:
    """The stacks of all threads: of each Python process of the run, where `py_spy` names a staged bundle with that
    program, which does not disturb them; otherwise, and where that is denied, as the process writes them itself.

    own_command: whether the ranks are a user's own program, which may mean something else by SIGUSR1. The answer:
    `processes`, each with `rank` (null: not known), `pid`, `command` and `text`; `text`, all of it; and `note`, why
    py-spy was not used.
    """
    process = running_process(request)
    note = None
    if request["py_spy"] is not None:
        program = os.path.join(bundle_dir(request["root"], request["py_spy"]), PY_SPY)
        dumps, note = by_py_spy(process, program)
        if dumps:
            return {"processes": dumps, "text": "\n".join(dump["text"] for dump in dumps), "note": note}
    if request["own_command"]:
        raise Failed(
            f"no stacks of process {process.process_id}: {note or 'py-spy was not sent'}", DENIED_REMEDY
        )
    text = by_signal(process, request["timeout_s"])
    dump = {"rank": None, "pid": process.record["pid"], "command": "", "text": text}
    return {"processes": [dump], "text": text, "note": note}


def running_process(request: Json) -> Process:
    process = known_process(request)
    if not process.is_alive():
        raise Failed(
            f"process {process.process_id} (pid {process.record['pid']}) is not running",
            "ask `status` how it ended",
        )
    return process


def processes_of_ranks(process: Process) -> list[int]:
    """The processes that the agent has started and all that they have started, parents first; of a container those that
    are in it, as this host numbers them. What only looks after the ranks is left out."""
    container = process.container
    if container is None:
        pids = [process.record["pid"], *descendants(process.record["pid"])]
    else:
        init = container.state().get("Pid") or 0
        pids = descendants(init) if init else []
    return [pid for pid in pids if not RUNTIME_PROCESSES.search(command_line(pid))]


def by_py_spy(process: Process, program: str) -> tuple[list[Json], str | None]:
    """What py-spy says of each Python process of a run, and why it says nothing of some; usually None."""
    from concurrent.futures import ThreadPoolExecutor

    pids = processes_of_ranks(process)[:MOST_PROCESSES]
    container = process.container
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda pid: dump(program, pid, container), pids))
    dumps: list[Json] = []
    problems: list[str] = []
    for pid, (text, problem) in zip(pids, answers, strict=True):
        if text is not None:
            command = command_line(pid).replace("\0", " ").strip()
            dumps.append({"rank": process_rank(pid), "pid": pid, "command": command[:300], "text": text})
        elif problem is not None and problem not in problems:
            problems.append(problem)
    return dumps, "; ".join(problems) or None


def dump(program: str, pid: int, container: Container | None) -> tuple[str | None, str | None]:
    """The threads of one process with the functions of native libraries, or without these where py-spy cannot have
    them; and why there is nothing. Both None: it is no Python process, or has ended."""
    problem = None
    for options in (["--native"], []):
        for prefix, number in ways_to(pid, container):
            text, problem = run_py_spy([*prefix, program, "dump", *options, "--pid", str(number)])
            if text is not None:
                return text, None
            if problem == NO_ANSWER:
                return None, problem
            if NO_PYTHON.search(problem):
                return None, None
    return None, problem


def ways_to(pid: int, container: Container | None) -> Iterator[tuple[list[str], int]]:
    """What py-spy is begun by, so that the kernel lets it look at a process, and that process as it is numbered there.

    Only inside a container are the libraries found whose functions it is to name.
    """
    if container is not None:
        exec_there = [container.docker, "exec"]
        inside = number_inside(pid)
        yield [*exec_there, "--privileged", "--user", "0", container.name], inside
        yield [*exec_there, container.name], inside
    if os.geteuid() != 0:
        yield ["sudo", "-n", "--"], pid
    yield [], pid


def number_inside(pid: int) -> int:
    """A process as its own PID namespace numbers it."""
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file,
    ):
        numbers = re.search(r"^NSpid:\s*(.*)$", file.read(), re.MULTILINE)
        return int(numbers.group(1).split()[-1]) if numbers else pid
    return pid


def run_py_spy(command: list[str]) -> tuple[str | None, str]:
    import subprocess

    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DUMP_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, NO_ANSWER
    except OSError as error:
        return None, f"{command[0]} cannot be run: {error.strerror}"
    if done.returncode == 0:
        text = done.stdout.decode(errors="replace")
        # Before it: the command line, which the answer has.
        begin = re.search(r"^Thread ", text, re.MULTILINE)
        return text[begin.start() :] if begin else text, ""
    complaint = done.stderr.decode(errors="replace").partition("Stack backtrace:")[0]
    return None, " ".join(complaint.split())[:300] or f"py-spy ended with exit code {done.returncode}"


def command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(65536).decode(errors="replace")
    except OSError:
        return ""


def process_environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none where it is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().decode(errors="surrogateescape").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def process_rank(pid: int) -> int | None:
    text = process_environment(pid).get("RUN_PROCESS_ID", "")
    return int(text) if text.isdigit() else None


def by_signal(process: Process, timeout_s: float) -> str:
    """The stacks of all threads of a process, as its own SIGUSR1 handler writes them."""
    name = f"process {process.process_id}"
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

    if not wait_until(is_written, timeout_s):
        message = f"{name} (pid {pid}) did not answer SIGUSR1 within {timeout_s:g} s"
        raise Failed(message, "it hangs outside Python's reach; `stop` it")
    with open(process.stacks_path, "rb") as stacks_file:
        stacks_file.seek(before)
        return stacks_file.read().decode(errors="replace")


def hang_dump(process: Process) -> str:
    """The stack traces of the process, if it still answers, and /proc's state of it and its descendants."""
    try:
        own = by_signal(process, STACKS_LIMIT_S)
    except Refused as refusal:
        own = f"no stacks: {refusal.message}\n"
    except OSError as error:  # it has ended
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
