"""One process of one attempt, from its files and from /proc; and the verbs status, join, logs and stop."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import time

from contracts import atomic
from contracts.host_interface import PROFILE_REQUEST, profile_answer

from .containers.docker_command import REMOVAL_LIMIT_S, recorded_container
from .proc import members, start_ticks, wait_until
from .protocol import Failed
from .storage.host_files import beginning, last_lines, read_json, whole_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .containers.docker_command import Container
    from .protocol import Json


KILL_LIMIT_S = 5.0
MEMORY = "/dev/shm"
"""A file system in memory, on every Linux."""
START_LIMIT_S = 10.0
CONTAINER_START_LIMIT_S = 40.0


class Process:
    """One process of one attempt, read from its directory, which is also the job's RUN_CONTROL_DIR."""

    def __init__(self, root: str, run_id: str, attempt: int, process_id: int) -> None:
        self.run_id, self.attempt, self.process_id = run_id, attempt, process_id
        self.dir = os.path.join(root, "runs", run_id, f"{attempt}-{process_id}")
        self.lock_path = self.dir + ".lock"
        self.record_path = os.path.join(self.dir, "process.json")
        self.exit_path = os.path.join(self.dir, "exit.json")
        self.stop_path = os.path.join(self.dir, "stop-requested")
        self.stop_reason_path = os.path.join(self.dir, "stop-reason")
        self.log_path = os.path.join(self.dir, "supervisor.log")
        self.reserve_path = os.path.join(self.dir, "reserve")
        self.beat_path = os.path.join(self.dir, "heartbeat.json")
        self.stacks_path = os.path.join(self.dir, "stacks.txt")
        self.record = read_json(self.record_path)

    @property
    def secrets_dir(self) -> str:
        """The folder of the process's secrets, in memory where this host has such a place."""
        from hashlib import sha256

        name = f"tpu-stack-{sha256(self.dir.encode()).hexdigest()[:16]}"
        return os.path.join(MEMORY if os.path.isdir(MEMORY) else os.path.dirname(self.dir), name)

    def forget_secrets(self) -> None:
        import shutil

        shutil.rmtree(self.secrets_dir, ignore_errors=True)

    def is_alive(self) -> bool:
        return bool(self.record) and start_ticks(self.record["pid"]) == self.record["start_ticks"]

    @property
    def container(self) -> Container | None:
        """The container that Docker may still have; None if the process is bare or its container has been removed."""
        return recorded_container(self.dir)

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
    """The processes that the request selects, in order; an absent field selects all."""

    def listed(path: str) -> list[str]:
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    runs = os.path.join(request["root"], "runs")
    keys = []
    for run_id in [request["run_id"]] if request["run_id"] else listed(runs):
        for name in listed(os.path.join(runs, run_id)):
            parts = re.fullmatch(r"(\d+)-(\d+)", name)
            if parts:
                keys.append((run_id, int(parts.group(1)), int(parts.group(2))))
    return [
        Process(request["root"], run_id, attempt, process_id)
        for run_id, attempt, process_id in sorted(keys)
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


def status(request: Json) -> Json:
    """The state of each process that the request selects."""
    return {"processes": [entry(process) for process in processes(request)]}


def entry(process: Process) -> Json:
    """One process: its record, its state, and its last heartbeat on this host's disk."""
    state, ended = process.state()
    return {
        **{name: getattr(process, name) for name in ("run_id", "attempt", "process_id")},
        **{name: process.record.get(name) for name in ("pid", "started", "log_path", "container")},
        **{name: ended.get(name) for name in ("code", "signal", "reason")},
        "ended": ended.get("time"),
        "state": state,
        "beat": read_json(process.beat_path) or None,
        "supervised": process.is_supervised(),
    }


LOOK_PERIOD_S = 0.05
UNDER_WAY = ("joined", "stepping", "saving")


def join(request: Json) -> Json:
    """The state of the process once it has joined or ended, or the limit is over.

    A process that reports that it has failed or is done is waited for, so that the answer has its exit code.
    """
    process = known_process(request)
    current: Json = {}

    def is_decided() -> bool:
        current.update(entry(process))
        has_ended = current["state"] in ("exited", "lost")
        return has_ended or (current["beat"] or {}).get("state") in UNDER_WAY or is_unheard(1)

    wait_until(is_decided, request["limit_s"], LOOK_PERIOD_S)
    has_ended = current["state"] in ("exited", "lost")
    silent = current["state"] if has_ended else "starting"
    lines = last_lines(current["log_path"]) if has_ended else []
    return {
        "state": (current["beat"] or {}).get("state", silent),
        "beat": current["beat"],
        "process": {**current, "tail": lines},
    }


def is_unheard(descriptor: int) -> bool:
    """Whether nobody is left to read what is written there: the launcher is gone."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def profile(request: Json) -> Json:
    """Request a trace of `steps` steps from `first` on, which replaces an earlier request; 0 withdraws that. The answer
    is how far the process is, and what has become of the request of this `id` at each of its ranks."""
    process = known_process(request)
    path = os.path.join(process.dir, PROFILE_REQUEST)
    if request["steps"]:
        atomic.write_json(path, {name: request[name] for name in ("id", "steps", "first")})
    elif request["steps"] == 0:
        atomic.remove(path)
    names = [
        name for name in os.listdir(process.dir) if re.fullmatch(profile_answer(0).replace("0", r"\d+"), name)
    ]
    answers = [read_json(os.path.join(process.dir, name)) for name in sorted(names)]
    mine = [answer for answer in answers if answer.get("id") == request["id"]]
    return {"state": process.state()[0], "beat": read_json(process.beat_path) or None, "answers": mine}


def logs(request: Json) -> Json:
    """A piece of the log; a negative offset counts from the end and is moved back to a line's start."""
    process = known_process(request)
    ended = process.state()[0] in ("exited", "lost")
    limit, offset = request["limit_bytes"], request["offset"]
    try:
        log = os.open(process.record["log_path"], os.O_RDONLY)
    except FileNotFoundError:
        return {"text": "", "offset": 0, "next_offset": 0, "size": 0, "ended": ended}
    try:
        size = os.fstat(log).st_size
        begin = max(0, size + offset) if offset < 0 else min(offset, size)
        back = min(begin, limit) if offset < 0 else 0
        begin = beginning(begin, os.pread(log, back, begin - back), os.pread(log, 4, begin))
        data = whole_lines(os.pread(log, min(limit + 1, size - begin), begin), limit, ended)
    finally:
        os.close(log)
    text = data.decode(errors="replace")
    return {"text": text, "offset": begin, "next_offset": begin + len(data), "size": size, "ended": ended}


def stop(request: Json) -> Json:
    """SIGTERM to each process, time for a checkpoint, then SIGKILL to all that is left of it.

    Raises:
        Failed: something is still there after SIGKILL.
    """
    targets = processes(request)
    wait_until(
        lambda: not any(process.state()[0] == "starting" for process in targets),
        CONTAINER_START_LIMIT_S + KILL_LIMIT_S,
    )
    targets = processes(request)
    running = [process for process in targets if process.is_alive()]
    left_over = [process for process in targets if process not in running and process.is_left()]
    problems: dict[int, str | None] = {}
    for process in running:
        ask_to_stop(process)
    wait_until(lambda: not any(process.is_alive() for process in running), request["grace_s"])
    killed = [process for process in running if process.is_alive()] + left_over
    for process in targets:  # one that ended without a supervisor may have left children, or its container
        if process in killed or (not process.is_supervised() and (process in running or process.container)):
            problems[process.process_id] = process.kill()

    def is_settled(process: Process) -> bool:
        return not process.is_alive() and (os.path.exists(process.exit_path) or not process.is_supervised())

    limit_s = KILL_LIMIT_S + (REMOVAL_LIMIT_S if any(process.container for process in running) else 0)
    wait_until(lambda: all(is_settled(process) for process in running), limit_s)
    stuck = [process for process in running + left_over if process.is_left()]
    if stuck:
        names = ", ".join(
            f"process {process.process_id} (pid {process.record.get('pid')})" for process in stuck
        )
        raise Failed(f"{names} did not end within {KILL_LIMIT_S:g} s of SIGKILL", "restart this host")

    def stop_report(process: Process) -> Json:
        ended = read_json(process.exit_path)
        if process in killed:
            outcome = "killed"
        elif process in running:
            outcome = "exited by itself" if ended.get("code") is not None else "terminated"
        else:
            outcome = "not running"
        if process in running and not ended:
            reason = f"stopped ({outcome}) after its supervisor had gone"
            with contextlib.suppress(OSError):  # it is there already, or the disk is full
                record = exit_record(None, None, time.time(), reason, [])
                atomic.write_json(process.exit_path, record, replace=os.link)
        problem = problems.get(process.process_id)
        note = None if problem is None else f"Docker still has its container: {problem}"
        pid, code, signum = process.record.get("pid"), ended.get("code"), ended.get("signal")
        answer = {
            "process_id": process.process_id,
            "pid": pid,
            "how": outcome,
            "code": code,
            "signal": signum,
        }
        return {**answer, "note": note}

    return {"stopped": [stop_report(process) for process in targets]}


def ask_to_stop(process: Process) -> None:
    """Send SIGTERM once: a second one may end a job at once. The file tells the job that the stop was requested.

    A disk that is full, or went read-only, keeps no job from being stopped.
    """
    is_sent = False
    with contextlib.suppress(OSError), open(process.stop_path, "a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        is_sent = bool(file.read())
        if not is_sent:
            process.terminate()
            is_sent = True
            file.write("sent\n")
    if not is_sent:
        process.terminate()
