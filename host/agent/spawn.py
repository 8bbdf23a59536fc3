"""The start of a job's process: in its own session, on its own CPUs, on record before anybody is told of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

from .files import write_json
from .proc import parse_stat, start_ticks
from .process import plain_environment
from .protocol import Failed, remedy_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .enclosure import Enclosure
    from .process import Process
    from .protocol import Json

RESERVE_BYTES = 65536


def spawn(process: Process, request: Json) -> Json:
    """Start the job's process and put it on record; if it cannot be put on record it is ended again."""
    with open(
        process.reserve_path, "wb"
    ) as file:  # what exit.json will need when the job has filled the disk
        file.write(bytes(RESERVE_BYTES))
    enclosure = enclosure_of(process, request)
    if not os.path.isdir(request["cwd"]):
        message = f"start: cwd {request['cwd']} is not a directory of this host"
        raise Failed(message, "stage the bundle first, or correct cwd")
    argv = request["argv"] if enclosure is None else enclosure.argv
    bare = {**plain_environment(), **request["env"], "RUN_CONTROL_DIR": process.dir}
    environment = bare if enclosure is None else enclosure.environment
    try:
        os.makedirs(os.path.dirname(request["log_path"]), exist_ok=True)
        log = os.open(request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise Failed(
            f"start: the log {request['log_path']} cannot be written: {error.strerror}", remedy_for(error)
        ) from None
    everything = os.sched_getaffinity(0)
    wanted = everything if request["cpus"] is None else set(request["cpus"])
    try:
        choose_cpus(wanted)
        if enclosure is not None and enclosure.words is not None:
            os.write(log, enclosure.words.encode())
        child = subprocess.Popen(
            argv,
            cwd=request["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        message = f"start: no such executable: {argv[0]!r}: {error.strerror}"
        raise Failed(message, "name a program that is on this host and may be run") from None
    finally:
        os.close(log)
        os.sched_setaffinity(0, everything)
    child.returncode = 0  # it is waited for by number, with the exact time
    with open(f"/proc/{child.pid}/stat", encoding="utf-8", errors="replace") as stat:
        ticks = parse_stat(stat.read())[1]
    record = {
        "pid": child.pid,
        "pgid": child.pid,
        "start_ticks": ticks,
        "supervisor_pid": os.getpid(),
        "supervisor_start_ticks": start_ticks(os.getpid()),
        "started": time.time(),
        "log_path": request["log_path"],
        "container": None if enclosure is None else enclosure.name,
    }
    try:
        if enclosure is not None:
            enclosure.wait(child.pid, request["log_path"])
        write_json(process.record_path, record)
    except (OSError, Failed):
        process.record = record
        process.kill()
        raise
    return record


def enclosure_of(process: Process, request: Json) -> Enclosure | None:
    if request["container"] is None:
        return None
    from .enclosure import enclose  # with what only containers need

    return enclose(process, request)


def choose_cpus(wanted: set[int]) -> None:
    """Put this thread, and so what it starts, on these CPUs.

    Raises:
        Failed: this host does not have all of them; the kernel itself takes what there is and says nothing.
    """
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, wanted)
    if os.sched_getaffinity(0) != wanted:
        message = f"start: cpus {sorted(wanted)} are not all on this host"
        raise Failed(message, f"choose from {sorted(allowed)}")
