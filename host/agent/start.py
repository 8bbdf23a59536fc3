"""The verb start: one process in its own session, under a supervisor that outlives this agent."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time

from contracts import atomic
from contracts.errors import remedy_for
from contracts.host_interface import SECRETS_FILE

from .attempt_process import CONTAINER_START_LIMIT_S, KILL_LIMIT_S, START_LIMIT_S, Process, plain_environment
from .proc import parse_stat, start_ticks, wait_until
from .protocol import Failed, Refused
from .storage.host_files import last_lines, read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .containers.container_start import ContainerStart
    from .protocol import Json


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
        if not wait_until(is_locked_by_us, start_limit_s(request) + KILL_LIMIT_S):
            raise Failed(f"another start of {process.dir} does not end", "ask `status`, then `stop` it")
        process.record = read_json(process.record_path)
        run_dir = request["env"].get("RUN_DIR")
        already = bool(process.record) and is_of(process.record, run_dir)
        if not already:
            refuse_copy(process)
            refuse_older(process, run_dir)
            # What is there is a start that came to nothing, and nobody else is at it.
            shutil.rmtree(process.dir, ignore_errors=True)
            os.mkdir(process.dir)
            try:
                process.record = spawn_supervisor(process, request, lock)
            except BaseException:
                process.kill()
                process.forget_secrets()
                shutil.rmtree(process.dir, ignore_errors=True)
                raise
    finally:
        os.close(lock)
    return {**{name: process.record[name] for name in ("pid", "pgid", "started")}, "already": already}


def is_of(record: Json, run_dir: str | None) -> bool:
    """Whether a record is of that run directory, and not of a copy. Agents of old recorded none."""
    return record.get("run_dir") in (None, run_dir)


def refuse_copy(process: Process) -> None:
    """Refuse to start a process beside that of a copy of its run: both would be one to all verbs.

    Raises:
        Refused: the copy's runs. One that has ended leaves its place.
    """
    if process.record and process.state()[0] == "running":
        place = process.record["run_dir"]
        message = (
            f"start: attempt {process.attempt} of {process.run_id} runs on this host for its copy {place}"
        )
        raise Refused(message, "stop that first (`fab stop`), or wait for its end")


def refuse_older(process: Process, run_dir: str | None) -> None:
    """Refuse to start a process of an attempt that is older than one that was started here for the same directory.

    Raises:
        Refused: it is.
    """
    folder, requested = os.path.dirname(process.dir), process.attempt
    names = [name for name in os.listdir(folder) if re.fullmatch(r"\d+-\d+", name)]
    # A run may have had many attempts: only records of newer ones are read.
    newer = {name: number for name in names if (number := int(name.partition("-")[0])) > requested}
    for name, number in sorted(newer.items(), key=lambda item: item[1], reverse=True):
        if is_of(read_json(os.path.join(folder, name, "process.json")), run_dir):
            message = f"start: attempt {number} of {process.run_id} has begun on this host"
            message += f"; attempt {requested} is older"
            raise Refused(message, "see `fab status`; `fab train --resume` begins the next one")


def start_limit_s(request: Json) -> float:
    """A container takes longer: Docker is asked two or three times before its process begins."""
    return START_LIMIT_S if request["container"] is None else CONTAINER_START_LIMIT_S


def spawn_supervisor(process: Process, request: Json, lock: int) -> Json:
    """Start a supervisor. Returns the record of the process that it has started.

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
        answered = select.select([supervisor.stdout], [], [], start_limit_s(request))[0]
        answer = supervisor.stdout.readline() if answered else b""
    if answer:
        reply = json.loads(answer)
        supervisor.returncode = 0  # it lives on by design; without this Python warns that nobody waits for it
        if "record" in reply:
            return dict(reply["record"])
        raise Failed(reply["message"], reply["remedy"])
    supervisor.kill()
    supervisor.wait()
    complaint = " ".join(last_lines(process.log_path)[-1:]) or "nothing"
    raise Failed(
        f"start: the supervisor gave no answer; it said: {complaint}",
        f"start again; see the host's load, {sys.executable}",
    )


RESERVE_BYTES = 65536


def spawn(process: Process, request: Json) -> Json:
    """Start the job's process and record it; a process that cannot be recorded is ended again."""
    with open(
        process.reserve_path, "wb"
    ) as file:  # what exit.json will need when the job has filled the disk
        file.write(bytes(RESERVE_BYTES))
    keep_secrets(process, request)
    if request["worker_env"] and not knows_its_place():
        request["env"] = {**request["worker_env"], **request["env"]}
    container = prepared_container(process, request)
    if not os.path.isdir(request["cwd"]):
        message = f"start: cwd {request['cwd']} is not a directory of this host"
        raise Failed(message, "stage the bundle first, or correct cwd")
    argv = request["argv"] if container is None else container.argv
    bare = {**plain_environment(), **request["env"], "RUN_CONTROL_DIR": process.dir}
    environment = bare if container is None else container.environment
    try:
        os.makedirs(os.path.dirname(request["log_path"]), exist_ok=True)
        log = os.open(request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise Failed(
            f"start: the log {request['log_path']} cannot be written: {error.strerror}", remedy_for(error)
        ) from None
    everything = os.sched_getaffinity(0)
    cpus = everything if request["cpus"] is None else set(request["cpus"])
    try:
        choose_cpus(cpus)
        if container is not None and container.log_preamble is not None:
            os.write(log, container.log_preamble.encode())
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
        "run_dir": request["env"].get("RUN_DIR"),
        "container": None if container is None else container.name,
    }
    try:
        if container is not None:
            container.wait(child.pid, request["log_path"])
        atomic.write_json(process.record_path, record)
    except (OSError, Failed):
        process.record = record
        process.kill()
        raise
    return record


def keep_secrets(process: Process, request: Json) -> None:
    """Write the secrets of a process where it reads and removes them: in memory, for this user alone."""
    if not request["secrets"]:
        return
    process.forget_secrets()
    os.mkdir(process.secrets_dir, 0o700)  # another user may have made it: then this fails
    path = os.path.join(process.secrets_dir, "values.json")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(request["secrets"], file)
    request["env"] = {**request["env"], SECRETS_FILE: path}
    if request["container"] is not None:
        request["container"]["mounts"] = [*request["container"]["mounts"], process.secrets_dir]


def knows_its_place() -> bool:
    """Whether the metadata server has this host's number in its slice, which is then what the TPU runtime goes by."""
    from .host_facts import WORKER_NUMBER, ask_metadata  # with urllib, which only this needs

    attributes = ask_metadata("attributes/?recursive=true")
    return isinstance(attributes, dict) and WORKER_NUMBER in attributes


def prepared_container(process: Process, request: Json) -> ContainerStart | None:
    if request["container"] is None:
        return None

    from .containers.container_start import prepare_container  # with what only containers need

    return prepare_container(process, request)


def choose_cpus(cpus: set[int]) -> None:
    """Put this thread, and so what it starts, on these CPUs.

    Raises:
        Failed: this host does not have all of them; the kernel itself takes what there is and says nothing.
    """
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    if os.sched_getaffinity(0) != cpus:
        message = f"start: cpus {sorted(cpus)} are not all on this host"
        raise Failed(message, f"choose from {sorted(allowed)}")
