"""The verb start: one process under a supervisor that outlives this agent."""

from __future__ import annotations

import fcntl
import json
import os
import sys

from .files import read_json, tail_of
from .process import KILL_LIMIT_S, Process, plain_environment
from .protocol import Failed
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

START_LIMIT_S = 10.0
CONTAINER_START_LIMIT_S = 40.0
ENTRY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")


def start(request: Json) -> Json:
    """Start one process under a supervisor that outlives this agent; a second start tells of the first."""
    import shutil

    process = Process(request["root"], request["run_id"], request["attempt"], request["process_id"])
    os.makedirs(os.path.dirname(process.dir), exist_ok=True)
    lock = os.open(process.lock_path, os.O_RDWR | os.O_CREAT, 0o600)

    def is_locked_by_us() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        if not wait_until(is_locked_by_us, limit_of(request) + KILL_LIMIT_S):
            raise Failed(f"another start of {process.dir} does not end", "ask `status`, then `stop` it")
        process.record = read_json(process.record_path)
        already = bool(process.record)
        if not already:
            # What is there is a start that came to nothing, and nobody else is at it.
            shutil.rmtree(process.dir, ignore_errors=True)
            os.mkdir(process.dir)
            try:
                process.record = spawn_supervisor(process, request, lock)
            except BaseException:
                process.kill()
                shutil.rmtree(process.dir, ignore_errors=True)
                raise
    finally:
        os.close(lock)
    return {**{name: process.record[name] for name in ("pid", "pgid", "started")}, "already": already}


def limit_of(request: Json) -> float:
    """Docker is asked two or three times before a process of its own begins."""
    return START_LIMIT_S if request["container"] is None else CONTAINER_START_LIMIT_S


def spawn_supervisor(process: Process, request: Json, lock: int) -> Json:
    """The record of the process that a new supervisor has started.

    Raises:
        Failed: the supervisor could not start it, or said nothing within the limit.
    """
    import select
    import subprocess

    log = os.open(process.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-S", "-E", ENTRY, "_supervise", process.dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=plain_environment(),
            start_new_session=True,
            pass_fds=[lock],
        )
    finally:
        os.close(log)
    if supervisor.stdin is None or supervisor.stdout is None:
        raise Failed("the supervisor has no pipes", "report it")
    # The request goes through a pipe, not a file: its environment may hold what no disk should keep.
    with supervisor.stdout, supervisor.stdin:
        try:
            supervisor.stdin.write(json.dumps({**request, "lock": lock}).encode())
            supervisor.stdin.close()
        except BrokenPipeError:
            pass
        answered = select.select([supervisor.stdout], [], [], limit_of(request))[0]
        answer = supervisor.stdout.readline() if answered else b""
    if answer:
        reply = json.loads(answer)
        supervisor.returncode = 0  # it lives on by design; without this Python warns that nobody waits for it
        if "record" in reply:
            return dict(reply["record"])
        raise Failed(reply["message"], reply["remedy"])
    supervisor.kill()
    supervisor.wait()
    said = " ".join(tail_of(process.log_path)[-1:]) or "nothing"
    raise Failed(
        f"start: the supervisor gave no answer; it said: {said}",
        f"start again; see the host's load, {sys.executable}",
    )
