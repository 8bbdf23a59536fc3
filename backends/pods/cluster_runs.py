"""The runs of a stack in its cluster: looked at through one watch, asked by programs in their pods, removed."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from backends.pods.api_server import CONFLICT, FORBIDDEN, NOT_FOUND, ApiError, Connection, patiently
from backends.pods.pods import (
    AGENT,
    AGENT_ROOT,
    CONTAINER,
    GRACE_S,
    OURS,
    Object,
    ObservedRun,
    code_failure,
    has_begun,
    is_alive,
    job_name,
    label,
    main_container,
    observed_runs,
    trouble,
    waits_in_vain,
)
from contracts import run_directory
from contracts.durations import spoken
from contracts.errors import FAILED, failure_kind
from contracts.files import Files
from contracts.host_interface import PROTOCOL_VERSION
from contracts.inventory import Cluster
from launch.hosts import HostError, accepted, in_thread
from launch.remote_files import with_time_limit
from launch.runs import Conclusion

WORKS = ("jobs", "jobsets")
NO_START_LIMIT_S = 60.0
"""How long a pod may wait for what does not come by itself: an image may be there the next time it is pulled."""
NO_RESTART_LIMIT_S = 15 * 60.0
"""The same of a run that has been at work: a registry that is away comes back."""
REMOVE_LIMIT_S = 60.0
"""For a run to be gone, beyond its grace; and for an API server that is away to be back."""
TOO_LATE = "its launcher was gone before all of its pods were there, and their time to begin is over"
LOOK_S = 1.0
BEGIN_POLL_S = 0.3
BUCKET_POLL_S = 3.0
ANSWER_LIMIT_S = 10.0
KILLED = 128 + 9
SESSION = (
    "import signal, sys; sys.path[0] = sys.argv[1]; from host.agent.protocol import serve; signal.alarm(900); "
    "sys.exit(serve(sys.stdin.buffer.readline(1 << 28), sys.stdin.buffer, sys.stdout, 900))"
)
"""Answers lines with lines, by the agent of the code bundle."""


class ClusterRuns:
    """The runs of a stack in its cluster. files, url: of the runs' folder, which is in a bucket."""

    def __init__(self, cluster: Cluster, files: Files, url: str) -> None:
        self.connection = Connection(cluster)
        self._files, self._url = files, url
        self._sessions: dict[str, _Session] = {}
        self._in_vain_since_s: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    def begin[T](self, host: str, limit_s: float, action: Callable[[], T]) -> Future[T]:
        """Begin something that the API server is asked for. The Future may hold HostError, also where it takes longer.

        host: what it is about, as messages name it.
        """
        self.connection.load()

        def carry_out() -> T:
            try:
                return with_time_limit(
                    limit_s, host, action, server=f"the API server of {self.connection.name}"
                )
            except (HostError, OSError) as error:
                raise HostError.from_error(host, error) from None

        return in_thread(carry_out)

    def observed_runs(self) -> dict[str, ObservedRun]:
        """Return every run that the cluster has something of. Raises ApiError."""
        works = [work for kind in WORKS for work in self.connection.watched(kind, OURS).objects()]
        return observed_runs(works, self.connection.watched("pods", OURS).objects())

    def run_in_cluster(self, run_id: str) -> ObservedRun:
        return self.observed_runs().get(label(run_id)) or ObservedRun(run_id=run_id, work=None, pods={})

    def running_pod(self, run_id: str, index: int) -> Object:
        """Return the pod of a run's process, which runs. Raises HostError: it does not."""
        pod = self.run_in_cluster(run_id).pods.get(index)
        if pod is None or "running" not in main_container(pod):
            reason = "the cluster has no pod of it" if pod is None else trouble(pod) or "its pod does not run"
            raise HostError(host=f"process {index}", reason=reason, remedy="`fab status` says how the run is")
        return pod

    def in_vain_s(self, run_id: str, index: int, pod: Object) -> float:
        """Return for how long a process has been seen to wait for what does not come by itself, in this pod and in
        those before it that did not begin; 0.0: it does not wait for that now."""
        since_s, process, now_s = self._in_vain_since_s, (label(run_id), index), time.monotonic()
        if has_begun(pod):
            since_s.pop(process, None)
        if waits_in_vain(pod) is None:
            return 0.0
        return now_s - since_s.setdefault(process, now_s)

    def entries(self, observed: ObservedRun) -> list[dict[str, Any]]:
        """Return each process as an agent's `status` does. Where one waits in vain, the run has come to its end."""
        ended = {"state": "exited", "supervised": False} if self._is_stuck(observed) else {}
        return [{**entry, **ended} for entry in observed.entries()]

    def _is_stuck(self, observed: ObservedRun) -> bool:
        waits_s = [self.in_vain_s(observed.run_id, index, pod) for index, pod in observed.pods.items()]
        return max(waits_s, default=0.0) > NO_RESTART_LIMIT_S or self._has_missed_its_time(observed)

    def _has_missed_its_time(self, observed: ObservedRun) -> bool:
        """Return whether the pods of a run, whose launcher is gone, can begin no attempt any more, and never have."""
        is_late = observed.begins_pods and time.time() > observed.begin_by_s + run_directory.CLOCKS_DIFFER_S
        if not is_late or any("running" in main_container(pod) for pod in observed.pods.values()):
            return False
        try:
            described = self._directory(observed.run_id).read_json(run_directory.RUN)
        except (HostError, OSError):  # nothing is known of it just now
            return False
        return described is not None and "pod" not in described["attempts"][-1]

    def conclude(self, run_id: str) -> Conclusion | None:
        """Return what the cluster says of a run that has ended without a word of its own; one that waits in vain is
        removed. None as well where somebody has just begun it anew."""
        now = self.run_in_cluster(run_id)
        if now.begins_pods and not self._is_stuck(now):
            return None
        reasons = [str(now.verdict.get("message") or now.verdict["reason"])] if now.verdict else []
        reasons += [TOO_LATE] if self._has_missed_its_time(now) else []
        reasons += [
            f"process {index}: {reason}"
            for index, pod in sorted(now.pods.items())
            if (reason := trouble(pod))
        ]
        if reasons and now.begins_pods and now.work is not None:
            self.remove(run_id, wait_s=REMOVE_LIMIT_S, uid=now.work["metadata"]["uid"])
        codes = [code_failure(pod) for pod in now.pods.values() if waits_in_vain(pod)]
        exit_code = (failure_kind(codes) or FAILED) if codes else None
        return Conclusion(error="; ".join(reasons), exit_code=exit_code) if reasons else None

    def session(self, pod: Object) -> _Session:
        with self._lock:
            return self._sessions.setdefault(pod["metadata"]["uid"], _Session(self.connection, pod))

    def _directory(self, run_id: str) -> run_directory.RunDirectory:
        return run_directory.RunDirectory(f"{self._url}/{run_id}", self._files)

    def heartbeat(self, run_id: str, attempt: int, index: int) -> dict[str, Any] | None:
        """Return what a process that has joined says of itself in the bucket; None: nothing yet."""
        beat = self._directory(run_id).read_json(run_directory.heartbeat(index)) or {}
        has_joined = beat.get("attempt") == attempt and beat.get("state") not in (None, "starting")
        return beat if has_joined else None

    def attempt(self, run_id: str) -> int | None:
        """Return the latest attempt of a run, as its directory tells it."""
        described = self._directory(run_id).read_json(run_directory.RUN)
        return None if described is None else int(described["attempts"][-1]["attempt"])

    def read_log(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the verb `logs` from the run directory, where its pod cannot. Raises HostError."""
        process = (request["attempt"], request["process_id"])
        piece = self._directory(request["run_id"]).read_log(
            *process, request["offset"], request["limit_bytes"]
        )
        if piece is None:
            raise HostError(
                host="", reason="its pod is gone, and its log did not come into the run directory"
            )
        text = piece.data.decode(errors="replace")
        position = {"offset": piece.offset, "next_offset": piece.next_offset, "size": piece.size}
        return {"text": text, **position}

    def remove(self, run_id: str, *, wait_s: float, uid: str | None = None) -> None:
        """Take away all that the cluster has of a run. uid: only of this Job or JobSet, and of none that was made under
        its name since.

        An API server that is away is asked again, for `wait_s` at most.

        Raises:
            ApiError: it cannot be done.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        options |= {} if uid is None else {"preconditions": {"uid": uid}}

        def ask() -> None:
            for kind in reversed(WORKS):
                passed_over = [NOT_FOUND, *([] if uid is None else [CONFLICT])]
                if kind == "jobsets":  # who has no right to any has none
                    passed_over.append(FORBIDDEN)
                with unless(*passed_over):
                    self.connection.ask("DELETE", self.connection.path(kind, job_name(run_id)), options)

        patiently(ask, limit_s=wait_s)

    def end_pod(self, run_id: str, index: int, grace_s: float) -> None:
        """Give a pod of a run that is being removed less time than its own. Raises ApiError."""
        if grace_s < GRACE_S and (pod := self.run_in_cluster(run_id).pods.get(index)) is not None:
            path, seconds = self.connection.path("pods", pod["metadata"]["name"]), max(1, round(grace_s))
            with unless(NOT_FOUND):
                self.connection.ask("DELETE", path, gracePeriodSeconds=str(seconds))

    def await_gone(self, run_id: str, index: int | None, limit_s: float) -> Object | None:
        """Wait until a run's pod is gone, or all of the run; return the last that was known of the pod.

        Raises:
            HostError: it is not gone within the limit.
        """
        until_s, pods = time.monotonic() + limit_s, self.connection.watched("pods", OURS)
        while True:
            now = patiently(lambda: self.run_in_cluster(run_id), limit_s=until_s - time.monotonic())
            left = (
                now.pods
                if index is None
                else {number: pod for number, pod in now.pods.items() if number == index}
            )
            if not any(is_alive(pod) for pod in left.values()) and (index is not None or now.work is None):
                last = observed_runs([], pods.gone()).get(run_id, now).pods
                return left.get(index) or last.get(index) if index is not None else None
            if time.monotonic() > until_s:
                reason = f"its pod is not gone after {spoken(limit_s)}"
                host = self.connection.name if index is None else ""
                raise HostError(host=host, reason=reason, remedy="`kubectl get pods` shows what it waits for")
            pods.wait(LOOK_S)

    def stop(self, run_id: str, attempt: int, index: int, grace_s: float) -> dict[str, Any]:
        request = {"run_id": run_id, "attempt": attempt, "process_id": index, "grace_s": grace_s}
        before = None
        # By its agent it ends as stopped; a pod that is only deleted would say that it was preempted. In a session of
        # its own: in the other one somebody may wait for the process to join.
        with contextlib.suppress(HostError):
            before = self.run_in_cluster(run_id).pods.get(index)
            session = _Session(self.connection, self.running_pod(run_id, index))
            session.ask("stop", request, grace_s + ANSWER_LIMIT_S)
        self.remove(run_id, wait_s=REMOVE_LIMIT_S)
        patiently(lambda: self.end_pod(run_id, index, grace_s), limit_s=REMOVE_LIMIT_S)
        pod = self.await_gone(run_id, index, grace_s + REMOVE_LIMIT_S)
        if before is None or not is_alive(before):
            return {"stopped": []}
        code = (main_container(pod or before).get("terminated") or {}).get("exitCode")
        ending = {None: "terminated", KILLED: "killed"}.get(code, f"exited by itself (exit code {code})")
        return {"stopped": [{"process_id": index, "pid": None, "how": ending, "code": code}]}

    def join(self, process: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Wait for a process as its agent does, from before its pod has begun. process: as the agent names it."""
        run_id, index = process["run_id"], process["process_id"]
        until_s, last = time.monotonic() + limit_s, None
        while (left_s := until_s - time.monotonic()) > 0:
            pods = patiently(lambda: self.run_in_cluster(run_id), limit_s=left_s).pods
            pod = pods.get(index)
            if last is not None and (pod is None or pod["metadata"]["uid"] != last["metadata"]["uid"]):
                raise HostError(host="", reason=f"its pod was lost: {trouble(last) or 'somebody removed it'}")
            last = pod
            if any(map(code_failure, pods.values())):
                break  # nobody joins without the others
            if pod is not None and not is_alive(pod):
                if not has_begun(pod):
                    raise HostError(host="", reason=trouble(pod) or "its pod ended before it began")
                code = (main_container(pod).get("terminated") or {}).get("exitCode")
                return {"state": "failed" if code else "done", "beat": None, "process": {"state": "exited"}}
            if pod is not None and self.in_vain_s(run_id, index, pod) > NO_START_LIMIT_S:
                remedy = "see that the cluster's nodes may pull this image"
                raise HostError(host="", reason=str(waits_in_vain(pod)), remedy=remedy)
            if pod is None or "running" not in main_container(pod):
                self.connection.watched("pods", OURS).wait(LOOK_S)
                continue
            pause_s = BEGIN_POLL_S
            try:
                session = self.session(pod)
                if session.ask("status", process, ANSWER_LIMIT_S).get("processes"):
                    return session.ask("join", {**process, "limit_s": left_s}, left_s + ANSWER_LIMIT_S)
            except HostError:  # no program can be started there: what its process has said of itself will do
                if beat := self.heartbeat(run_id, process["attempt"], index):
                    return {"state": beat["state"], "beat": beat, "process": {"state": "running"}}
                pause_s = BUCKET_POLL_S
            time.sleep(pause_s)
        if last is not None and (code := code_failure(last)):
            beat = {"exit_code": code, "message": trouble(last)}
            return {"state": "failed", "beat": beat, "process": {"state": "exited"}}
        return {"state": "starting", "beat": None, "process": {"state": "starting"}}

    def logs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        run_id, index, pod = request["run_id"], request["process_id"], None
        with contextlib.suppress(HostError):
            pod = self.run_in_cluster(run_id).pods.get(index)
            return self.session(self.running_pod(run_id, index)).ask("logs", request, ANSWER_LIMIT_S)
        goes_on = pod is not None and is_alive(pod) and self.attempt(run_id) == request["attempt"]
        return {**self.read_log(request), "ended": not goes_on}


@contextlib.contextmanager
def unless(*statuses: int) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status not in statuses:
            raise


class _Session:
    """The agent in a pod, which answers a line with a line; started at the first question."""

    def __init__(self, connection: Connection, pod: Object) -> None:
        (main,) = (container for container in pod["spec"]["containers"] if container["name"] == CONTAINER)
        code = next(word for word in main["command"] if word.endswith(AGENT))
        argv = ["python", "-S", "-E", "-c", SESSION, code.removesuffix(f"/{AGENT}")]
        name = pod["metadata"]["name"]
        self._begin = functools.partial(connection.program, name, CONTAINER, argv)
        self._program: Any = None
        self._lock = threading.Lock()

    def ask(self, verb: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer. Raises HostError: there is none, or the agent says that it could not."""
        import websocket

        common = {"version": PROTOCOL_VERSION, "root": AGENT_ROOT, "verb": verb}
        line = json.dumps({**common, **request}).encode() + b"\n"
        with self._lock:
            try:
                if self._program is None or not self._program.is_open():
                    self._program = self._begin()
                self._program.write_channel(0, line)
                answer = self._program.readline_channel(1, timeout=timeout_s)
                if answer is None and not self._program.is_open():
                    raise HostError(host="", reason=f"the agent in its pod ended while it was asked ({verb})")
                if answer is None:
                    self._program.close()
                    raise HostError(host="", reason=f"no answer to {verb} within {timeout_s:g} s")
            except (websocket.WebSocketException, OSError) as error:
                self._program = None
                raise HostError(host="", reason=f"the connection to its pod was lost ({error})") from None
        return accepted("", json.loads(answer))
