"""One process of one attempt, by what is on disk and what lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal

from . import container as containers
from .files import read_json
from .proc import members, start_ticks
from .protocol import Failed
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .container import Container
    from .protocol import Json

KILL_LIMIT_S = 5.0


class Process:
    """One process of one attempt, by what is on disk: its directory is also the job's RUN_CONTROL_DIR."""

    def __init__(self, root: str, run_id: str, attempt: int, process_id: int) -> None:
        self.run_id, self.attempt, self.process_id = run_id, attempt, process_id
        self.dir = os.path.join(root, "runs", run_id, f"{attempt}-{process_id}")
        self.lock_path = self.dir + ".lock"
        self.record_path = os.path.join(self.dir, "process.json")
        self.exit_path = os.path.join(self.dir, "exit.json")
        self.stop_path = os.path.join(self.dir, "stop-requested")
        self.log_path = os.path.join(self.dir, "supervisor.log")
        self.reserve_path = os.path.join(self.dir, "reserve")
        self.beat_path = os.path.join(self.dir, "heartbeat.json")
        self.stacks_path = os.path.join(self.dir, "stacks.txt")
        self.record = read_json(self.record_path)

    def is_alive(self) -> bool:
        return bool(self.record) and start_ticks(self.record["pid"]) == self.record["start_ticks"]

    @property
    def container(self) -> Container | None:
        """What Docker may still have of it; None where it is bare, or all of it has been removed."""
        return containers.of(self.dir)

    def pid(self) -> int | None:
        """The job's own process. In a container it is none of ours, and there is none before the container runs."""
        container = self.container
        return self.record.get("pid") if container is None else container.job_pid()

    def is_supervised(self) -> bool:
        ticks = self.record.get("supervisor_start_ticks")
        return ticks is not None and start_ticks(self.record["supervisor_pid"]) == ticks

    def is_starting(self) -> bool:
        """Whether a start is under way: it and its supervisor hold the lock until the record is there."""
        try:
            with open(self.lock_path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def state(self) -> tuple[str, Json]:
        """starting, running, exited or lost, and the exit record."""
        alive, supervised = self.is_alive(), self.is_supervised()
        exit_record = read_json(self.exit_path)  # read last: whoever was gone above has written it by now
        if exit_record:
            return "exited", exit_record
        if not self.record and self.is_starting():
            return "starting", {}
        return ("running" if alive or supervised else "lost"), {}

    def terminate(self) -> None:
        """SIGTERM to the job's own process; to a container by way of Docker, not of its client, which passes on nothing
        before the container runs."""
        container = self.container
        try:
            if container is not None and container.signal(signal.SIGTERM, self.is_alive):
                return
        except Failed:
            pass
        if self.is_alive():
            signal_quietly(os.kill, self.record["pid"], signal.SIGTERM)

    def kill(self) -> str | None:
        """SIGKILL to the process group and to whatever else was started from it, until nothing is left.

        Why Docker still has its container, where that could not be removed.
        """

        def is_gone() -> bool:
            if self.is_alive():
                signal_quietly(os.killpg, self.record["pgid"], signal.SIGKILL)
            left = members(self.dir)
            for pid in left:
                signal_quietly(os.kill, pid, signal.SIGKILL)
            return not left and not self.is_alive()

        wait_until(is_gone, KILL_LIMIT_S)
        container = self.container
        problem = None if container is None else container.remove()
        if container is not None:
            wait_until(is_gone, KILL_LIMIT_S)
        return problem

    def is_left(self) -> bool:
        """Whether something of it still runs, or may run: nobody but Docker sees a container that is root's."""
        container = self.container
        return self.is_alive() or bool(members(self.dir)) or (container is not None and container.as_root)


def signal_quietly(send: Callable[[int, int], None], number: int, signum: int) -> None:
    """A process that ended meanwhile needs no signal; one that changed its user shows in what is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(number, signum)


def plain_environment() -> dict[str, str]:
    """This agent's environment without what it may have from being run inside a job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RUN_")}


def processes(request: Json) -> list[Process]:
    """The processes that the request means, in order; an absent field means all."""

    def listed(path: str) -> list[str]:
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    runs = os.path.join(request["root"], "runs")
    found = []
    for run_id in [request["run_id"]] if request["run_id"] else listed(runs):
        for name in listed(os.path.join(runs, run_id)):
            parts = re.fullmatch(r"(\d+)-(\d+)", name)
            if parts:
                found.append((run_id, int(parts.group(1)), int(parts.group(2))))
    return [
        Process(request["root"], run_id, attempt, process_id)
        for run_id, attempt, process_id in sorted(found)
        if request["attempt"] in (None, attempt) and request["process_id"] in (None, process_id)
    ]


def known_process(request: Json) -> Process:
    process = Process(request["root"], request["run_id"], request["attempt"], request["process_id"])
    if not process.record:
        name = f"process {process.process_id} of attempt {process.attempt} of {process.run_id}"
        raise Failed(f"{name} was never started on this host", "ask `status` which there are")
    return process


def exit_record(code: int | None, signum: int | None, ended: float, reason: str, lines: list[str]) -> Json:
    name = None if signum is None else signal_name(signum)
    return {
        "code": code,
        "signal": signum,
        "signal_name": name,
        "time": ended,
        "reason": reason,
        "tail": lines,
    }


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"
