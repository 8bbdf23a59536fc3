"""The agent in a pod: begins an attempt together with the run's other pods, and stays until its process has ended.

`_pod` is the container's process 1. It reaps what others leave, and passes SIGTERM on to the one that does the work:

1. Pod 0 waits until all others have reached it. Then it begins an attempt, by way of the job's Python, which can read
   and write run.json (`launch.attempts`), and tells all which one it is.
2. Each pod starts its process and supervises it, as a host's agent does.
3. The pod ends with a code by which Kubernetes decides what follows (`exit_code`).

A pod that takes the place of one that was lost comes while the others are in the middle of an attempt: nobody answers
it before they have ended too, and the new pod 0 gathers them again.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

from contracts import run_directory
from contracts.errors import (
    DONE,
    FAILED_HERE,
    HUNG,
    INTERRUPTED,
    PEER_LOST,
    RESUME_ME,
    SUPERSEDED,
    UNAVAILABLE,
    WRONG_REQUEST,
    is_signal_exit,
)
from contracts.host_interface import HEARTBEAT_LIMIT_S, PROTOCOL_VERSION

from .attempt_process import Process, plain_environment
from .liveness_client import RETRY_S, Channel
from .liveness_server import listen, named
from .protocol import VERBS, Refused, checked
from .start import spawn
from .storage.host_files import note, read_json
from .supervisor import liveness_listener, watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .protocol import Json

GATHER_LIMIT_S = 3600.0
"""For all pods to be there: their nodes may come one after the other, and fetch gigabytes of an image. Longer before
the run has to begin: until then the launcher waits for nodes."""
SILENCE_S = 15.0
PING_S = 2.0
LOOK_S = 0.2
CONNECT_LIMIT_S = 5.0
LONELY_S = 60.0
BEGIN_LIMIT_S = 120.0
"""For the job's Python to begin an attempt in a bucket."""
LOOK_LIMIT_S = 20.0
"""For the job's Python to look into a bucket; a pod hears nothing meanwhile."""
LEFT_S = 900.0
"""How long a pod whose process was done is waited for: its node may be lost before the cluster has heard of its end."""
LAST_WORDS_S = 60.0
"""For the guard of a supervisor that was killed to put the end on record."""
ECHO_PERIOD_S = 0.2
ANSWER_S = 3.0
"""For the verb `stop`, which ends with the container, to answer whoever has sent it."""
STANDS_S = 180.0
"""Beyond the heartbeat limit: time in which a supervisor ends a process, hang dump included."""
TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes shows what is written there as the reason of the container's end."""


class Ended(Exception):
    """The pod ends before a process of it has begun."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Over(Ended):
    """There is nothing left to do of the run."""


def run() -> int:
    """Carry out the verb `_pod`; return the container's exit code."""
    settings = json.loads(os.environ.pop("TPU_STACK_POD"))
    # A TPU's driver pins what it transfers. Where the pod may not raise the limit, it keeps what the node gives.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    child = os.fork()
    if child == 0:
        code, reason = Pod(settings, os.environ).run()
        note(f"the pod ends with {code}: {reason}")
        with contextlib.suppress(OSError), open(TERMINATION_LOG, "w", encoding="utf-8") as file:
            file.write(reason[:4000])
        return code

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its guard has the last words
            os.kill(child, signal.SIGTERM)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])
    return reap(child)


def reap(child: int) -> int:
    """Wait for a child, and for whatever the kernel gives to process 1 meanwhile; return its exit code."""
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    deadline = time.monotonic() + LAST_WORDS_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(LOOK_S)
    return 128 + os.WTERMSIG(status)


class Pod:
    """One pod of a run. settings: as `backends.pods.manifests.pod_request` makes them."""

    def __init__(self, settings: Json, environ: Mapping[str, str]) -> None:
        self._settings, self._start = settings, settings["start"]
        self._index = int(environ["JOB_COMPLETION_INDEX"])
        self._index += settings["nodes"] * int(environ.get("TPU_STACK_POD_SLICE", "0"))
        self._name = environ.get("TPU_STACK_POD_NAME", socket.gethostname())
        self._size: int = self._start["num_processes"]
        self._began = time.monotonic()
        # A queue may give the nodes of a run hours apart, and whoever leaves it goes to its end.
        begin_by_s = settings["limits"]["begin_by_s"] or 0.0
        self._gather_limit_s = max(GATHER_LIMIT_S, begin_by_s - time.time())
        self._must_stop = threading.Event()
        self._process: Process | None = None
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])

    def _stop(self, *_: object) -> None:
        """Stop as at a host's shutdown: the process saves and ends, and the run can be resumed."""
        self._must_stop.set()
        # A second SIGTERM would cut short the saving that whoever asked for a stop has told it to do.
        if self._process is not None and not os.path.exists(self._process.stop_path):
            self._process.terminate()

    def run(self) -> tuple[int, str]:
        """Return the exit code and the reason."""
        try:
            agreed = self._lead() if self._index == 0 else self._follow()
            return self._carry_out(pod_start_request(self._settings, self._index, agreed))
        except Ended as ended:
            return ended.code, ended.reason
        except Refused as refusal:
            code = WRONG_REQUEST if refusal.status == WRONG_REQUEST else FAILED_HERE
            return code, f"{refusal.message}; {refusal.remedy}"
        except Exception as error:  # by itself Python would exit with 1, which ends the run for good
            traceback.print_exc()
            return FAILED_HERE, f"{type(error).__name__}: {error}"

    def _carry_out(self, request: Json) -> tuple[int, str]:
        process = Process(request["root"], request["run_id"], request["attempt"], request["process_id"])
        for folder in (process.dir, request["cwd"], request["env"]["RUN_CACHE_DIR"]):
            os.makedirs(folder, exist_ok=True)
        listener = liveness_listener(request)
        process.record = spawn(process, request)
        self._process = process
        if self._must_stop.is_set():
            process.terminate()
        over = threading.Event()
        echo = threading.Thread(target=copy_log, args=(request["log_path"], over), daemon=True)
        echo.start()
        ended = watch(process, request, listener)
        over.set()
        echo.join(10)
        if os.path.exists(process.stop_path):
            time.sleep(ANSWER_S)
        code = exit_code(ended, is_first=self._index == 0, was_asked=os.path.exists(process.stop_path))
        reason = (ended["verdict"] or {}).get("message") or read_json(process.exit_path).get("reason")
        return code, str(reason)

    def _check(self, awaited: str) -> None:
        if self._must_stop.is_set():
            raise Ended(128 + signal.SIGTERM, f"told to stop while it waited for {awaited}")
        if time.monotonic() > self._began + self._gather_limit_s:
            # No loss of a peer, which is not counted: the pods that wait keep their nodes, and nothing else ends that.
            raise Ended(UNAVAILABLE, f"{awaited} did not come within {self._gather_limit_s:.0f} s")

    def _look(self, channels: list[Channel], missing: list[int]) -> None:
        """End this pod and tell the others if the run is over. If that is not known now, keep waiting."""
        try:
            self._ask(self._program(), {**self._request(), "missing": missing}, LOOK_LIMIT_S)
        except Over as over:
            tell_over(channels, over)
            raise
        except Ended as ended:
            note(ended.reason)

    def _ask(self, program: subprocess.Popen[bytes], request: Json, limit_s: float) -> Json:
        """The answer of `launch.attempts`.

        Raises:
            Ended: it could not give one.
        """
        try:
            out, _ = program.communicate(json.dumps(request).encode(), limit_s)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            raise Ended(UNAVAILABLE, f"the run directory did not answer within {limit_s:g} s") from None
        if program.returncode:
            raise Ended(UNAVAILABLE, "the run directory cannot be read or written; the pod's log says why")
        answer: Json = json.loads(out)
        if "over" in answer:
            raise Over(answer["over"], answer["reason"])
        return answer

    def _request(self) -> Json:
        return {"first": self._start["attempt"], "pod": self._name, "limits": self._settings["limits"]}

    def _program(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._start["argv"][0], "-P", "-m", "launch.attempts", self._start["env"]["RUN_DIR"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={**plain_environment(), **self._start["env"]},
        )

    # --- pod 0 ---

    def _lead(self) -> Json:
        """Gather the other pods, begin an attempt, and tell them."""
        program = self._program()  # what it imports takes a second, in which the others come
        channels: list[Channel] = []
        try:
            channels = self._gather() if self._size > 1 else []
            try:
                answer = self._ask(program, self._request(), BEGIN_LIMIT_S)
                agreed = {**answer, "token": os.urandom(16).hex()}
            except Over as over:
                tell_over(channels, over)
                raise
            for channel in channels:
                channel.send(agreed)
            return agreed
        finally:
            for channel in channels:
                channel.close()
            program.kill()
            program.communicate()

    def _gather(self) -> list[Channel]:
        """Return a connection of each other pod, as soon as all are there."""
        pinged, announced = 0.0, [0]
        look_at = time.monotonic() + LONELY_S
        connected: dict[int, Channel] = {}
        strangers: list[Channel] = []
        listener = listen("0.0.0.0", self._settings["port"], 2 * self._size + 16)
        with contextlib.closing(listener):
            while True:
                missing = [index for index in range(1, self._size) if index not in connected]
                if not missing:
                    return [connected[index] for index in sorted(connected)]
                self._check(named(missing))
                if time.monotonic() > look_at:
                    # A Job starts no pod again whose process is done; a JobSet starts all.
                    has_waited = time.monotonic() > self._began + LEFT_S
                    is_job = self._settings["nodes"] == self._size
                    self._look([*connected.values()], missing if is_job and has_waited else [])
                    look_at = time.monotonic() + LONELY_S
                if missing != announced:
                    announced = missing
                    note(f"waiting for {named(missing)}")
                with contextlib.suppress(BlockingIOError):
                    strangers.append(Channel(listener.accept()[0]))
                    continue
                for channel in list(strangers):
                    for message in channel.receive():
                        if message.get("run_id") == self._start["run_id"] and message.get("index") in missing:
                            connected[message["index"]] = channel
                            strangers.remove(channel)
                            break
                if time.monotonic() - pinged > PING_S:
                    pinged = time.monotonic()
                    for channel in connected.values():
                        channel.send({"waiting_for": missing})
                for channel in connected.values():
                    channel.receive()
                connected = {index: channel for index, channel in connected.items() if channel.broken is None}
                strangers = [channel for channel in strangers if channel.broken is None]
                time.sleep(LOOK_S / 4)

    # --- the others ---

    def _follow(self) -> Json:
        """Ask pod 0 for the attempt until it answers; an earlier one that still lives does not.

        Where nobody answers for long it is looked whether the run is done: then pod 0 has left for good.
        """
        look_at = time.monotonic() + LONELY_S
        address = self._start["liveness_host"], self._settings["port"]
        note(f"waiting for pod 0 at {address[0]}:{address[1]}")
        while True:
            self._check("pod 0")
            if time.monotonic() > look_at:
                self._look([], [])
                look_at = time.monotonic() + LONELY_S
            try:
                sock = socket.create_connection(address, timeout=CONNECT_LIMIT_S)
            except OSError:
                time.sleep(RETRY_S)
                continue
            with contextlib.closing(Channel(sock)) as channel:
                channel.send({"run_id": self._start["run_id"], "index": self._index})
                agreed = self._answer(channel)
            look_at = time.monotonic() + LONELY_S
            if agreed is None:
                continue
            if "over" in agreed:
                raise Over(agreed["over"], agreed["reason"])
            return agreed

    def _answer(self, channel: Channel) -> Json | None:
        heard = time.monotonic()
        while channel.broken is None and time.monotonic() - heard < SILENCE_S:
            self._check("the other pods")
            for message in channel.receive():
                heard = time.monotonic()
                if "waiting_for" not in message:
                    return message
            time.sleep(LOOK_S / 4)
        return None


def tell_over(channels: list[Channel], over: Over) -> None:
    for channel in channels:
        channel.send({"over": over.code, "reason": over.reason})


def pod_start_request(settings: Json, index: int, agreed: Json) -> Json:
    """Return the start request of one pod's process, complete and checked.

    agreed: attempt, token, and the seconds that are left of a budget.
    """
    import dataclasses

    from contracts import process_environment as process_environment
    from contracts import ranks

    start, attempt = settings["start"], agreed["attempt"]
    mine = dataclasses.replace(process_environment.read(start["env"]), attempt=attempt, process_id=index)
    variables = mine.variables()
    if settings["ranks"] is not None:
        variables = ranks.rank_variables(mine, ranks.ranks_from_json(settings["ranks"]), 0)
    own = start["run_dir"] or os.path.join(start["root"], "runs", start["run_id"])
    request = {
        **start,
        "version": PROTOCOL_VERSION,
        "attempt": attempt,
        "process_id": index,
        "env": {**start["env"], **variables},
        "log_path": os.path.join(own, run_directory.log(attempt, index)),
        "liveness_token": agreed["token"],
    }
    if index == 0:  # by its own name, which the cluster's DNS may not know yet
        request["liveness_host"] = "0.0.0.0"
    if agreed.get("budget_s") is not None:
        request["budget_s"] = agreed["budget_s"]
    return checked("start", f"root:path {VERBS['start'][1]}", request)


def exit_code(ended: Json, *, is_first: bool, was_asked: bool) -> int:
    """Return the code by which Kubernetes decides what follows, by the Job's podFailurePolicy.

    0 done; 2 and 130 (wrong request, told to stop) end the run, as does 1, by which a pod ends that the policy has told
    so (`launch.attempts`). With all others the pod is started again, and the first one asks the policy.
    ended: as `supervisor.watch` returns it.
    """
    code, signum, order, verdict = (ended[name] for name in ("code", "signal", "order", "verdict"))
    if code == WRONG_REQUEST or (code == DONE and not (is_first and verdict is not None)):
        return int(code)
    if was_asked:
        return INTERRUPTED
    if code in (RESUME_ME, UNAVAILABLE, SUPERSEDED):
        return int(code)
    if (order or {}).get("outcome") == "superseded":
        return SUPERSEDED
    if "hung" in ((order or {}).get("outcome"), (verdict or {}).get("outcome")):
        return HUNG
    if is_first and verdict is not None and verdict["exit_code"] == WRONG_REQUEST:
        return WRONG_REQUEST
    if order is not None or code == PEER_LOST:
        return PEER_LOST
    if signum is not None or is_signal_exit(code):
        return int(code or 128 + signum)
    return FAILED_HERE


def copy_log(path: str, over: threading.Event) -> None:
    """Copy a log to stdout as it grows, for `kubectl logs`, until `over` is set and all of it has been copied."""
    with contextlib.suppress(OSError), open(path, "rb") as log:
        while True:
            was_over = over.wait(ECHO_PERIOD_S)
            while data := log.read(1 << 16):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            if was_over:
                return


def is_alive() -> bool:
    """Whether the supervisor of this pod does its work: one that does has ended a process whose heartbeat stopped."""
    settings = json.loads(os.environ["TPU_STACK_POD"])
    limit_s = (settings["start"].get("heartbeat_limit_s") or HEARTBEAT_LIMIT_S) + STANDS_S
    runs = os.path.join(settings["start"]["root"], "runs", settings["start"]["run_id"])
    for path in glob.glob(os.path.join(runs, "*", "heartbeat.json")):  # of the one attempt of a pod
        beat, end = read_json(path), os.path.join(os.path.dirname(path), "exit.json")
        if beat and not os.path.exists(end) and time.time() - beat["time"] > limit_s:
            print(f"no heartbeat for more than {limit_s:g} s, and the supervisor has not ended the process")
            return False
    return True
