"""The supervisor of one process: starts it, watches it, and records its end."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import signal
import sys
import threading
import time

from contracts import atomic, run_directory
from contracts.causes import cause, lines_before
from contracts.errors import DONE, PEER_LOST, RESUME_ME, WRONG_REQUEST, os_error_reason, remedy_for
from contracts.host_interface import STOP_GRACE_S
from contracts.run_directory import first_failure, own_failures

from .attempt_process import Process, ask_to_stop, exit_record, signal_name, signal_quietly
from .containers.docker_command import look_back
from .liveness_client import LivenessClient, Watchdog
from .liveness_server import Group, LivenessServer, listen
from .proc import NO_MEMORY, oom_kills, wait_until
from .protocol import Failed, Refused, is_number
from .stack_traces import hang_dump
from .start import spawn
from .storage.host_files import last_lines, note, read_json, tried
from .storage.run_files import RunFiles

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from .protocol import Json


LOOK_PERIOD_S = 0.5
LAST_WORDS_S = 1.0
OTHERS_LATER_S = 30.0
SLICE_END_NOTICE_S = 300.0
"""Before Google takes a slice back: enough to agree on a step and to write a checkpoint of a large model."""
FULL_DISK_LIMIT_S = 30.0
"""For a disk to be freed, before the end of a process goes unrecorded."""


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
        listener = liveness_listener(request)
        process.record = spawn(process, request)
        reply = {"record": process.record}
    except Refused as refusal:
        reply = {"message": refusal.message, "remedy": refusal.remedy}
    except OSError as error:
        reply = {"message": f"start: {os_error_reason(error)}", "remedy": remedy_for(error)}
    os.close(request["lock"])
    tried("telling start", lambda: os.write(1, json.dumps(reply).encode() + b"\n"))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if "record" in reply:
        watch(process, request, listener)
    return 0


def liveness_listener(request: Json) -> socket.socket | None:
    """The socket of the attempt's liveness server, on the host of process 0; bound before anything is started.

    Raises:
        Failed: the port is taken, or is no port of this host.
    """
    if request["process_id"] != 0:
        return None
    host, port = request["liveness_host"], request["liveness_port"]
    try:
        return listen(host, port, 2 * request["num_processes"] + 16)
    except OSError as error:
        problem = (
            "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror or error}"
        )
        message = f"start: port {port} of {host}, for the liveness server, {problem}"
        raise Failed(message, "start again: the preflight finds another one") from None


def watch(process: Process, request: Json, listener: socket.socket | None) -> Json:
    """Wait for the end of the process, or end it when the others have to stop; then record how it ended.

    Return its code and signal, the order by which it was stopped (`order`), and on process 0 how the attempt ended
    (`verdict`, as of `liveness_server.Group`); each None where there is none.
    """
    files = RunFiles(request)
    wake, over = threading.Event(), threading.Event()
    inherited = [] if listener is None else [listener.fileno()]
    dismiss_guard = start_guard(lambda: end_orphan(process, request), inherited)
    attempt = Attempt(request, process, listener, wake.set)
    killed_before = oom_kills()
    budget, slice_end = Budget(process, request), SliceEnd(process, request["slice_ends_s"])
    ended: Json = {}

    def reap() -> None:
        # WNOWAIT leaves a zombie, which keeps the pid and the group's number ours until all is done.
        status = os.waitid(os.P_PID, process.record["pid"], os.WEXITED | os.WNOWAIT)
        ended["time"] = time.time()
        own = status is not None and status.si_code == os.CLD_EXITED
        ended["code"] = status.si_status if status and own else None
        ended["signal"] = status.si_status if status and not own else None
        over.set()
        wake.set()

    threading.Thread(target=reap, daemon=True).start()
    attempt.start()
    files.keep_log()
    order = None
    while not over.is_set() and order is None:
        wake.wait(LOOK_PERIOD_S)
        wake.clear()
        if not over.is_set():
            budget.look(time.monotonic())
            slice_end.look(time.time())
            newer = files.look()
            order = attempt.look() if newer is None else superseded(process, newer)
    if order is not None:
        note(f"stopping because {order['reason']}")
        ended["was_killed"] = not over.wait(0 if order["outcome"] in ("hung", "superseded") else LAST_WORDS_S)
        if ended["was_killed"]:
            ended["texts"] = stop(process, order, over)
    if request["container"] is not None:
        container = process.container
        if container is not None:
            look_back(container, ended, request["log_path"])
    elif lacked_memory(ended, order, killed_before):
        ended["words"] = NO_MEMORY
    if order is None and not ended.get("words"):
        ended.update(cause_in_log(process, request, ended))
    clear_group(process)
    finalize(process, files, ended, order, attempt)
    if request["secrets"]:
        process.forget_secrets()
    dismiss_guard()
    return {**ended, "order": order, "verdict": attempt.verdict()}


def superseded(process: Process, reason: str) -> Json:
    """The order to stop a process because a newer attempt has begun."""
    ranks = [process.process_id]
    return {"outcome": "superseded", "rank": ranks[0], "ranks": ranks, "reason": reason, "message": reason}


def lacked_memory(ended: Json, order: Json | None, killed_before: int) -> bool:
    """Whether a process ended badly by itself, and the kernel has killed here meanwhile: it, or what it had started."""
    return order is None and ended["code"] not in (DONE, RESUME_ME) and oom_kills() > killed_before


def cause_in_log(process: Process, request: Json, ended: Json) -> Json:
    """The known cause of the end of a process that did not report one itself; usually none."""
    if ended["code"] in (DONE, RESUME_ME) or read_json(process.beat_path).get("state") == "failed":
        return {}
    environment = request["env"]
    places = [environment[name] for name in ("RUN_DIR", "RUN_CACHE_DIR") if name in environment]
    places += [process.dir, request["cwd"]]
    coordinator = environment.get("RUN_COORDINATOR", "")
    count = lines_before(ended["code"] if ended["signal"] is None else -ended["signal"])
    cause_text = cause(
        "\n".join(last_lines(request["log_path"], count)), coordinator=coordinator, places=places
    )
    # What is printed by a process that a signal ends is the stack trace of a library.
    return {} if cause_text is None else {"words": cause_text, "says_all": ended["signal"] is not None}


class Budget:
    """Stops a process when its run has spent what it may, with nobody else's help: as `fab stop` would, with a reason.

    Process 0 is told first, and by it the others; they are told here only if that has not reached them.
    """

    def __init__(self, process: Process, request: Json) -> None:
        self._process, self._reason = process, request["budget_reason"]
        later_s = OTHERS_LATER_S if process.process_id else 0.0
        limit_s = request["budget_s"]
        self._due_s = math.inf if limit_s is None else time.monotonic() + limit_s + later_s
        self._kill_s = math.inf

    def look(self, now_s: float) -> None:
        if now_s >= self._kill_s:
            self._kill_s = math.inf
            note(f"the process has not saved within {STOP_GRACE_S:g} s")
            self._process.kill()
        if now_s < self._due_s:
            return
        self._due_s, self._kill_s = math.inf, now_s + STOP_GRACE_S
        note(f"stopping because {self._reason}")
        path = self._process.stop_reason_path
        tried("keeping the reason", lambda: atomic.write(path, self._reason))
        ask_to_stop(self._process)


class SliceEnd:
    """Tells a process, as a preemption does, that its slice is about to be taken back: it saves and leaves.

    ends_s: in Unix seconds; None: the slice has no end.
    """

    def __init__(self, process: Process, ends_s: float | None) -> None:
        self._process = process
        self._due_s = math.inf if ends_s is None else ends_s - SLICE_END_NOTICE_S

    def look(self, now_s: float) -> None:
        if now_s >= self._due_s:
            self._due_s = math.inf
            note(
                f"its slice is taken back in {SLICE_END_NOTICE_S / 60:g} min, so the process is told to save and leave"
            )
            self._process.terminate()


def stop(process: Process, order: Json, over: threading.Event) -> dict[str, str]:
    """End the process. Returns the texts to keep, by name in the run directory."""
    texts = {}
    if order["outcome"] == "hung":
        dump = hang_dump(process)
        texts[run_directory.stacks(process.attempt, process.process_id)] = dump
        tried("keeping the stacks", lambda: keep(os.path.join(process.dir, "hung.txt"), dump))
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


def end_orphan(process: Process, request: Json) -> None:
    """End a process whose supervisor has been killed: the others of the attempt have lost this host."""
    note("the supervisor is gone, and its process goes with it")
    process.kill()
    if os.path.exists(process.exit_path):
        return
    message = "its supervisor was killed"
    order = {
        "outcome": "failed",
        "rank": process.process_id,
        "ranks": [process.process_id],
        "reason": f"{message}, and a run goes on only where it is watched",
        "message": message,
    }
    ended = {"code": None, "signal": int(signal.SIGKILL), "time": time.time()}
    finalize(process, RunFiles(request), ended, order, None)


LINES, LINE_LENGTH = 20, 400
"""Of a failed process's log, as much as fits into one message whatever its characters."""
NOTED_LIMIT_S = 10.0
BACKUP_S = 4.0
"""When host 0 is lost, the first host that is left writes the result; the others only if it has not by then."""
SETTLE_S = 1.5
"""A host that failed a moment before host 0 was lost may not have said so in the run directory yet."""


class Attempt:
    """One process among those of its attempt: its liveness client, and the liveness server when it is process 0.

    listener: where the server listens; None on all hosts but that of process 0.
    """

    def __init__(
        self,
        request: Json,
        process: Process,
        listener: socket.socket | None,
        notify: Callable[[], None],
    ) -> None:
        self._request, self._run_dir, self._rank = request, request["run_dir"], request["process_id"]
        self._process, self._beat_path = process, process.beat_path
        hello = {
            "token": request["liveness_token"],
            "run_id": request["run_id"],
            "attempt": request["attempt"],
        }
        limits = {name: request[name] for name in ("assemble_s", "silence_s") if request[name] is not None}
        self._group = Group(request["num_processes"], time.monotonic(), **limits)
        self._server = LivenessServer(listener, self._group, hello, note) if listener is not None else None
        address = request["liveness_host"], request["liveness_port"]
        self._client = LivenessClient(*address, {**hello, "rank": self._rank}, notify, **limits)
        limits = {"floor_s": request["hang_floor_s"], "heartbeat_limit_s": request["heartbeat_limit_s"]}
        self._watchdog = Watchdog(
            **{name: limit_s for name, limit_s in limits.items() if limit_s is not None}
        )
        self._has_reported_hang = self._has_passed_on = False

    def start(self) -> None:
        self._client.progress(self._watchdog.progress())
        if self._server is not None:
            self._server.start()
        self._client.start()

    def look(self) -> Json | None:
        """The order to stop, when there is one; called once or twice a second."""
        self._watchdog.look(read_json(self._beat_path), time.monotonic())
        self._client.progress(self._watchdog.progress())
        if self._watchdog.is_hung and not self._has_reported_hang:
            self._has_reported_hang = True
            note(
                f"no progress for {self._watchdog.stood_s:.1f} s, no heartbeat for {self._watchdog.silent_s:.1f} s"
            )
            self._client.tell({"hung": self._watchdog.progress()})
        if self._client.has_to_leave and not self._has_passed_on:
            self._has_passed_on = True
            note("another host was told to stop and has left, so this process stops too")
            self._process.terminate()
        return self._client.order

    def tell(self, ending: Json) -> None:
        """Say to the others how the process ended; they are told before any disk is written."""
        if ending["is_good"] or ending["was_asked"]:
            self._client.tell({"left": {"was_asked": ending["was_asked"], "is_saved": ending["is_saved"]}})
            return
        beat = ending["beat"]
        report = {
            "message": str(beat["message"])[:2000],
            "says_all": beat["says_all"],
            "exit_code": beat["exit_code"],
            "step": beat_step(beat),
            "ago_s": max(0.0, time.time() - beat["time"]),
            "was_stopped": ending["was_stopped"],
            # It may have failed by itself, before it could lose the peer that the order is about.
            "ended_by_itself": None if ending["was_killed"] else ending["how"],
            "lines": [line[:LINE_LENGTH] for line in ending["lines"][-LINES:]],
        }
        self._client.tell({"ended": report})

    def result(self, ending: Json) -> Json | None:
        """result.json, where it is this host's to write: it is process 0, or that one is lost."""
        is_noted = self._client.end(NOTED_LIMIT_S)
        if self._server is not None:
            while not self._server.wait(60):
                note(f"waiting for hosts {self._group.left_over()} to end")
            return self._verdict_of_all(ending["beat"])
        if is_noted or ending["is_good"] or ending["was_asked"]:
            return None
        left = [rank for rank in self._client.left_over if rank != 0] or [self._rank]
        time.sleep(SETTLE_S if left[0] == self._rank else SETTLE_S + BACKUP_S)
        return self._verdict_without_host_0(ending)

    def verdict(self) -> Json | None:
        """How the attempt ended for all its processes; None except on process 0 of an attempt that ended badly."""
        return None if self._server is None else self._group.verdict()

    def _verdict_of_all(self, beat_of_host_0: Json) -> Json | None:
        verdict = self.verdict()
        if verdict is None:
            return None
        lines = verdict["lines"]
        if verdict["outcome"] == "hung":
            folder = "{}/stacks/{}".format(self._request["env"].get("RUN_DIR"), self._request["attempt"])
            verdict["message"] += f"; what every process was doing then is in {folder}"
        elif not lines:
            lines = shared_log_tail(self._run_dir, self._request["attempt"], verdict["rank"])
        blamed = {**verdict, "attempt": self._request["attempt"], "time": time.time()}
        return failed_result(blamed, verdict["steps"], lines, beat_warnings([beat_of_host_0]))

    def _verdict_without_host_0(self, ending: Json) -> Json:
        mine = ending["beat"]
        beats = heartbeats(self._run_dir, mine["attempt"])
        order = self._client.order or {"reason": "its connection ended"}
        lost = {**mine, "rank": 0, "message": f"lost: {order['reason']}"}
        lost.update(exit_code=None, says_all=False)
        blamed = first_failure(own_failures(beats)) or lost
        lines: list[str] = shared_log_tail(self._run_dir, mine["attempt"], blamed["rank"])
        return failed_result(blamed, max(map(beat_step, [*beats, mine])), lines, beat_warnings(beats))


def shared_log_tail(run_dir: str | None, attempt: int, rank: int) -> list[str]:
    """The end of another host's log, where it lies on a shared disk."""
    return last_lines(os.path.join(run_dir, run_directory.log(attempt, rank))) if run_dir else []


def finalize(
    process: Process, files: RunFiles, ended: Json, order: Json | None, attempt: Attempt | None
) -> None:
    """Record the end: in exit.json and, unless it was a good one, in the heartbeat and the result.

    ended: code, signal and time. order: why the process was ended by its supervisor, if it was. attempt: None where
    the supervisor was killed: the others learn of it by the connection that is lost.
    """
    end_text = end_cause(ended)
    reason = end_text if order is None else f"stopped because {order['reason']}"
    lines = last_lines(process.record["log_path"])
    record = exit_record(ended["code"], ended["signal"], ended["time"], reason, lines)
    tried("removing the reserve", lambda: atomic.remove(process.reserve_path))
    recorded = tried("writing exit.json", lambda: atomic.write_json(process.exit_path, record))
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.record["pid"], 0)
    ending = process_ending(process, files.dir, record, ended, order)
    beat, is_good, not_begun = ending["beat"], ending["is_good"], ending["not_begun"]
    if attempt is not None:
        attempt.tell(ending)
    texts = dict(ended.get("texts", {}))
    if not is_good or not_begun:
        # What the job kept free for its last words; one that was killed could not give it back itself.
        files.remove(run_directory.reserve(process.process_id))
        texts[run_directory.heartbeat(process.process_id)] = json.dumps(beat)
        tried("writing the heartbeat", lambda: atomic.write_json(process.beat_path, beat))
    files.end_log()
    if not files.is_remote:
        files.publish(texts)  # by which the others on a shared disk learn of it
        texts = {}
    if attempt is not None:
        result = attempt.result(ending)
    elif files.request["num_processes"] == 1 and not ending["was_asked"]:  # nobody else is there to write it
        result = failed_result(beat, beat_step(beat), lines, beat_warnings([beat]))
    else:
        result = None
    spent = last_lines(process.stop_reason_path)[:1]
    if result is None and (not_begun or (spent and not ending["is_saved"])) and process.process_id == 0:
        steps = saved_step(files.dir)
        measured = run_directory.out_of_budget(spent[0]) if spent else None
        result = run_directory.result(
            beat["state"], attempt=beat["attempt"], steps=steps, time=beat["time"], measured=measured
        )
    once = {} if result is None else {run_directory.RESULT: json.dumps(result)}

    def published() -> bool:
        return files.publish(texts, once) or not os.path.isdir(str(files.dir))

    def exit_recorded() -> bool:
        return recorded or tried("writing exit.json", lambda: atomic.write_json(process.exit_path, record))

    # A disk that is full now may be freed: by a person, or by another host that gives back what it had reserved.
    wait_until(published, FULL_DISK_LIMIT_S, 1)
    wait_until(exit_recorded, FULL_DISK_LIMIT_S, 1)


def end_cause(ended: Json) -> str:
    """The exit code or the signal in words, with the explanation if there is one."""
    code, signum = ended["code"], ended["signal"]
    end_text = f"exit code {code}" if signum is None else f"killed by signal {signum} ({signal_name(signum)})"
    return f"{end_text}: {ended['words']}" if ended.get("words") else end_text


def process_ending(
    process: Process, run_dir: str | None, record: Json, ended: Json, order: Json | None
) -> Json:
    """How the process ended, as the other hosts are told, with its last heartbeat (`beat`) as it will be published."""
    code, signum, lines = record["code"], record["signal"], record["tail"]
    end_text = end_cause(ended)
    # A job takes SIGTERM from the moment on that it has a heartbeat: whoever dies of it had not begun.
    not_begun = signum == signal.SIGTERM and order is None and not os.path.exists(process.beat_path)
    was_asked = os.path.exists(process.stop_path)  # who asked knows why, and what the outcome is called
    beat = last_heartbeat(process, run_dir, record)
    explanation = None if beat["says_all"] else ended.get("words")  # what befell it may be another process's
    message = end_text if signum is not None or explanation or not lines else str(beat["message"])
    if explanation:
        beat.update(message=end_text, says_all=ended.get("says_all", False))
    if was_asked:
        beat["state"] = "stopped"
    elif not_begun:
        beat["state"] = "preempted"
    elif order is not None and process.process_id in order.get("ranks", ()):
        beat["message"] = order["message"]
    elif order is not None:
        beat.update(message=record["reason"], exit_code=PEER_LOST, says_all=False)
    return {
        "is_good": code in (DONE, RESUME_ME) or not_begun,
        "is_saved": code == RESUME_ME or not_begun,
        "not_begun": not_begun,
        "was_asked": was_asked,
        "was_stopped": order is not None,
        "was_killed": ended.get("was_killed", False),
        "how": {"exit_code": code, "message": message},
        "lines": lines,
        "beat": beat,
    }


def last_heartbeat(process: Process, run_dir: str | None, record: Json) -> Json:
    """The last heartbeat, written for a process that has ended. A message of its own is kept."""
    in_run_dir: Json = next(
        (beat for beat in heartbeats(run_dir, process.attempt) if beat["rank"] == process.process_id), {}
    )
    mine = read_json(process.beat_path) or in_run_dir
    own_words = mine.get("message") if mine.get("state") == "failed" else None
    last_line = next((line for line in reversed(record["tail"]) if line.strip()), None)
    says_all = bool(own_words and mine.get("says_all") and record["code"] is not None)
    return {
        "rank": process.process_id,
        "attempt": process.attempt,
        "state": "failed",
        "step": beat_step(mine),
        "time": record["time"],
        "step_time": mine.get("step_time"),
        **({"timing": mine["timing"]} if "timing" in mine else {}),
        "pid": process.record["pid"],
        "message": own_words
        if own_words and record["code"] is not None
        else f"{record['reason']}: {own_words}"  # in a container the signal may have been a rank's
        if own_words
        else record["reason"]
        if record["code"] is None or not last_line
        else f"exit code {record['code']}: {last_line}",
        "says_all": says_all,
        "warnings": mine.get("warnings") or [],
        "exit_code": record["code"],
    }


def heartbeats(run_dir: str | None, attempt: int) -> list[Json]:
    """The heartbeats of an attempt that can be read now, each with the rank that its name gives."""
    directory = os.path.join(run_dir or "", run_directory.HEARTBEATS)
    beats: list[Json] = []
    try:
        names = os.listdir(directory) if run_dir else []
    except OSError:
        return beats
    for name in names:
        rank = re.fullmatch(r"host-(\d+)\.json", name)
        beat = read_json(os.path.join(directory, name)) if rank else {}
        if rank and beat.get("attempt") == attempt and is_number(beat.get("time"), 0, math.inf):
            beats.append({**beat, "rank": int(rank.group(1))})
    return beats


def beat_step(beat: Json) -> int:
    step = beat.get("step")
    return step if isinstance(step, int) else 0


def saved_step(run_dir: str | None) -> int:
    """The newest step that has a checkpoint; 0 where there is none, or where the run directory cannot be seen here."""
    try:
        names = os.listdir(os.path.join(run_dir or "", run_directory.CHECKPOINTS)) if run_dir else []
    except OSError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def beat_warnings(beats: list[Json]) -> list[str]:
    return [text for beat in beats for text in beat.get("warnings") or ()]


def failed_result(blamed: Json, steps: int, lines: list[str], warnings: list[str]) -> Json:
    """result.json of a run that failed, in the words of the host that was first to fail.

    blamed: rank, message, exit_code, attempt and time, as in a heartbeat, and outcome where it is not `failed`. The
    lines of its log are left out where its message says all, and the last one where the message ends with it. warnings:
    of the whole run.
    """
    outcome = blamed.get("outcome", "failed")
    # A hang is told of all hosts that hang; their logs have nothing to add.
    message = str(
        blamed["message"] if outcome == "hung" else f"host {blamed['rank']}: {blamed.get('message')}"
    )
    while lines and (not lines[-1].strip() or message.endswith(f": {lines[-1].strip()}")):
        lines = lines[:-1]
    return run_directory.result(
        outcome,
        attempt=blamed["attempt"],
        steps=steps,
        time=blamed["time"],
        error="\n".join([message, *([] if blamed.get("says_all") else lines)]),
        failed_host=blamed["rank"],
        measured={"exit_code": blamed.get("exit_code"), **({"warnings": warnings} if warnings else {})}
        | ({"request": True} if blamed.get("exit_code") == WRONG_REQUEST else {}),
    )


ALL_IS_WELL = b"."


def start_guard(on_death: Callable[[], object], inherited: list[int]) -> Callable[[], None]:
    """Fork a process that calls `on_death` if this one ends without having called what is returned.

    Called while this process has no threads. inherited: descriptors that the guard must not keep open.
    """
    reading, writing = os.pipe()
    standing, stands = os.pipe()
    if os.fork():
        os.close(reading)
        os.close(stands)
        os.read(standing, 1)  # until the guard is out of this session, or has failed and ended
        os.close(standing)
        return lambda: dismiss(writing)
    try:
        os.setsid()  # whoever ends the supervisor with its whole session does not end this one
        for descriptor in [writing, standing, *inherited, stands]:
            os.close(descriptor)
        if os.read(reading, 1) != ALL_IS_WELL:
            on_death()
    finally:
        os._exit(0)


def dismiss(writing: int) -> None:
    with contextlib.suppress(OSError):  # somebody has ended the guard: nothing is left to dismiss
        os.write(writing, ALL_IS_WELL)
    os.close(writing)
