"""The verb stop: time for a checkpoint, then the end of everything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from .container import REMOVAL_LIMIT_S
from .files import read_json, write_json
from .process import KILL_LIMIT_S, Process, exit_record, processes
from .protocol import Failed
from .start import CONTAINER_START_LIMIT_S
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def stop(request: Json) -> Json:
    """SIGTERM to each process, time for a checkpoint, then SIGKILL to all that is left of it.

    Raises:
        Failed: something is still there after SIGKILL.
    """
    found = processes(request)
    wait_until(
        lambda: not any(process.state()[0] == "starting" for process in found),
        CONTAINER_START_LIMIT_S + KILL_LIMIT_S,
    )
    found = processes(request)
    running = [process for process in found if process.is_alive()]
    left_over = [process for process in found if process not in running and process.is_left()]
    problems: dict[int, str | None] = {}
    for process in running:
        ask_to_stop(process)
    wait_until(lambda: not any(process.is_alive() for process in running), request["grace_s"])
    killed = [process for process in running if process.is_alive()] + left_over
    for process in found:  # one that ended without a supervisor may have left children, or its container
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

    def one(process: Process) -> Json:
        ended = read_json(process.exit_path)
        if process in killed:
            how = "killed"
        elif process in running:
            how = "exited by itself" if ended.get("code") is not None else "terminated"
        else:
            how = "not running"
        if process in running and not ended:
            reason = f"stopped ({how}) after its supervisor had gone"
            with contextlib.suppress(OSError):  # it is there already, or the disk is full
                write_json(process.exit_path, exit_record(None, None, time.time(), reason, []), os.link)
        problem = problems.get(process.process_id)
        note = None if problem is None else f"Docker still has its container: {problem}"
        pid, code, signum = process.record.get("pid"), ended.get("code"), ended.get("signal")
        answer = {"process_id": process.process_id, "pid": pid, "how": how, "code": code, "signal": signum}
        return {**answer, "note": note}

    return {"stopped": [one(process) for process in found]}


def ask_to_stop(process: Process) -> None:
    """SIGTERM, once: a job may take a second one for impatience. The file tells it that this was wanted.

    A disk that is full, or went read-only, keeps no job from being stopped.
    """
    asked = False
    with contextlib.suppress(OSError), open(process.stop_path, "a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        asked = bool(file.read())
        if not asked:
            process.terminate()
            asked = True
            file.write("sent\n")
    if not asked:
        process.terminate()
