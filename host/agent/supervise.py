"""The supervisor of one process: starts it, stays with it, and puts its end on record."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time

from .attempt import Attempt
from .container_end import look_back
from .ending import conclude
from .evidence import evidence
from .guardian import stand_guard
from .hub import listen
from .notes import note, tried
from .process import Process, signal_name, signal_quietly
from .protocol import Failed, Refused, reason_of, remedy_for
from .run_files import RunFiles
from .siblings import Siblings
from .spawn import spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from .protocol import Json

LOOK_PERIOD_S = 0.5
LAST_WORDS_S = 1.0


def supervise(state_dir: str) -> int:
    """Start one process, tell the waiting `start`, and stay until the end of the process is on record."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # A handler, not SIG_IGN, which the job would inherit. The job is told to end by whoever wants it to.
        signal.signal(signum, lambda number, _frame: note(f"{signal_name(number)} is not for the supervisor"))
    request = json.loads(sys.stdin.buffer.read())
    root, run_id = os.path.split(os.path.dirname(state_dir))
    process = Process(os.path.dirname(root), run_id, request["attempt"], request["process_id"])
    listener = None
    reply: Json
    try:
        listener = hub_listener(request)
        process.record = spawn(process, request)
        reply = {"record": process.record}
    except Refused as refusal:
        reply = {"message": refusal.message, "remedy": refusal.remedy}
    except OSError as error:
        reply = {"message": f"start: {reason_of(error)}", "remedy": remedy_for(error)}
    os.close(request["lock"])
    tried("telling start", lambda: os.write(1, json.dumps(reply).encode() + b"\n"))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if "record" in reply:
        watch(process, request, listener)
    return 0


def has_lifeline(request: Json) -> bool:
    return all(request.get(name) for name in ("hub_host", "hub_port", "hub_token"))


def hub_listener(request: Json) -> socket.socket | None:
    """The socket of the attempt's hub, on the host of process 0; bound before anything is started.

    Raises:
        Failed: the port is taken, or is no port of this host.
    """
    if not has_lifeline(request) or request["process_id"] != 0:
        return None
    try:
        return listen(request["hub_host"], request["hub_port"], 2 * request["num_processes"] + 16)
    except OSError as error:
        what = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror or error}"
        message = f"start: port {request['hub_port']} of {request['hub_host']}, for the lifeline, {what}"
        raise Failed(message, "start again: the preflight finds another one") from None


def watch(process: Process, request: Json, listener: socket.socket | None) -> None:
    """Wait for the end of the process, or bring it about when the others have to stop; then say how it ended."""
    files = RunFiles(request)
    news, over = threading.Event(), threading.Event()
    others: Siblings | Attempt
    dismiss_guard = None
    if has_lifeline(request):
        inherited = [] if listener is None else [listener.fileno()]
        dismiss_guard = stand_guard(lambda: avenge(process, request), inherited)
        others = Attempt(request, process, listener, news.set)
    else:
        others = Siblings(request)
    ended: Json = {}

    def reap() -> None:
        # WNOWAIT leaves a zombie, which keeps the pid and the group's number ours until all is done.
        found = os.waitid(os.P_PID, process.record["pid"], os.WEXITED | os.WNOWAIT)
        ended["time"] = time.time()
        own = found is not None and found.si_code == os.CLD_EXITED
        ended["code"] = found.si_status if found and own else None
        ended["signal"] = found.si_status if found and not own else None
        over.set()
        news.set()

    threading.Thread(target=reap, daemon=True).start()
    others.start()
    files.keep_log()
    order = None
    while not over.is_set() and order is None:
        news.wait(LOOK_PERIOD_S)
        news.clear()
        if not over.is_set():
            order = others.look()
    if order is not None:
        note(f"stopping because {order['reason']}")
        ended["was_killed"] = not over.wait(0 if order["outcome"] == "hung" else LAST_WORDS_S)
        if ended["was_killed"]:
            ended["texts"] = stop(process, order, over)
    if request["container"] is not None:
        container = process.container
        if container is not None:
            look_back(container, ended, request["log_path"])
    clear_group(process)
    conclude(process, files, others, ended, order)
    if dismiss_guard is not None:
        dismiss_guard()


def stop(process: Process, order: Json, over: threading.Event) -> dict[str, str]:
    """End the process; what there is to keep of it, by name in the run directory."""
    texts = {}
    if order["outcome"] == "hung":
        found = evidence(process)
        texts[f"stacks/{process.attempt}/host-{process.process_id}.txt"] = found
        tried("keeping the stacks", lambda: keep(os.path.join(process.dir, "hung.txt"), found))
    process.kill()
    while not over.wait(60):
        note(f"pid {process.record['pid']} is still there after SIGKILL")
    return texts


def keep(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def clear_group(process: Process) -> None:
    """End what the process has left behind; its zombie still keeps the group's number ours."""
    signal_quietly(os.killpg, process.record["pgid"], signal.SIGKILL)
    problem = process.kill()
    if problem is not None:
        note(f"its container is not removed: {problem}")


def avenge(process: Process, request: Json) -> None:
    """End a process whose supervisor has been killed: the others of the attempt have lost this host."""
    note("the supervisor is gone, and its process goes with it")
    process.kill()
    if not os.path.exists(process.exit_path):
        reason = {"outcome": "failed", "rank": process.process_id, "ranks": [process.process_id]}
        message = "its supervisor was killed"
        ended = {"code": None, "signal": int(signal.SIGKILL), "time": time.time()}
        order = {
            **reason,
            "reason": f"{message}, and a run goes on only where it is watched",
            "message": message,
        }
        alone = request["num_processes"] == 1
        conclude(process, RunFiles(request), Siblings(request) if alone else None, ended, order)
