"""Runs whose hosts are pods: made all at once or not at all, looked at through one watch, asked by programs in them.

What a cluster says of a run has the shape in which agents of hosts say it, so that whoever follows, stops or lists runs
needs to know of no cluster.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from contracts import run_directory
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.files import Files
from contracts.inventory import Cluster
from launch import kubernetes
from launch.cluster import CONFLICT, FORBIDDEN, MERGE, NOT_FOUND, ApiError, Connection, Object, shell
from launch.hosts import Agent, Completed, HostError, HostsError, in_thread
from launch.jobs import Bundle
from launch.kubernetes import Options
from launch.plan import Plan
from launch.remote_files import within

Say = Callable[[str], None]

OURS = ",".join(f"{name}={value}" for name, value in kubernetes.MANAGED_BY.items())
WORKS = ("jobs", "jobsets")
INDEX = "batch.kubernetes.io/job-completion-index"
SLICE_INDEX = "jobset.sigs.k8s.io/job-index"
OVER = ("Complete", "Completed", "SuccessCriteriaMet", "Failed", "FailureTarget")
"""Conditions of a Job or JobSet that starts no pod any more."""
NO_START = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
)
"""Why a pod that has a node may wait for ever."""
NO_START_LIMIT_S = 60.0
"""How long it may: an image that could not be pulled once may be there the next time."""
WAIT_S = 15 * 60.0
"""For nodes to be there: an autoscaler takes some minutes to make them."""
QUEUE_WAIT_S = 12 * 3600.0
"""The same where pods wait in a queue, Kueue's or Google's for flex-start."""
DEADLINE_LATER_S = 120
"""After which the cluster ends a Job whose launcher was to take it away, and has not: somebody killed it."""
REMOVE_LIMIT_S = 60.0
"""For a run to be gone, beyond its grace; and for an API server that is away to be back."""
LOOK_S = 1.0
BEGIN_POLL_S = 0.3
BUCKET_POLL_S = 3.0
ANSWER_LIMIT_S = 10.0
KILLED = 128 + 9
SHELL = ("sh", "-c", "exec $(command -v bash || echo sh)")
SESSION = (
    "import signal, sys; sys.path[0] = sys.argv[1]; from host.agent.protocol import serve; signal.alarm(900); "
    "sys.exit(serve(sys.stdin.buffer.readline(1 << 28), sys.stdin.buffer, sys.stdout, 900))"
)
"""Answers lines with lines, by the agent of the code bundle."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What a cluster has of a run. work: its Job or JobSet. pods: of each process that has one, the newest."""

    run_id: str
    work: Object | None
    pods: Mapping[int, Object]

    @property
    def processes(self) -> int:
        if self.work is None:
            return max(self.pods, default=-1) + 1
        job, slices = _job_of(self.work)
        return int(job["completions"]) * slices

    @property
    def begins_pods(self) -> bool:
        """Whether the cluster starts each pod again that fails."""
        return self.work is not None and "deletionTimestamp" not in self.work["metadata"] and not self.verdict

    @property
    def verdict(self) -> Object | None:
        """The condition by which the run is over for the cluster."""
        conditions = ((self.work or {}).get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if each["type"] in OVER and each["status"] == "True"), None)

    def entries(self) -> list[dict[str, Any]]:
        """Return each process as an agent's `status` does, of the latest attempt (None). pod: its name, or None."""
        found = (self._entry(index) for index in range(self.processes))
        return [entry for entry in found if entry is not None]

    def _entry(self, index: int) -> dict[str, Any] | None:
        pod = self.pods.get(index)
        told: dict[str, Any] = {
            "run_id": self.run_id,
            "attempt": None,
            "process_id": index,
            "pid": None,
            "code": None,
            "beat": None,
        }
        told |= {"started": None, "ended": None, "supervised": False, "reason": None}
        told["pod"] = pod and pod["metadata"]["name"]
        if pod is None:
            return {**told, "state": "starting"} if self.begins_pods else None
        state, phase = main_of(pod), pod["status"].get("phase")
        over, is_over = state.get("terminated") or {}, phase in ("Succeeded", "Failed")
        told |= {"code": over.get("exitCode"), "reason": trouble(pod)}
        if "running" in state and not is_over:
            return {
                **told,
                "state": "running",
                "started": _time(state["running"]["startedAt"]),
                "supervised": True,
            }
        if phase == "Pending" or (phase != "Succeeded" and self.begins_pods):
            return {**told, "state": "starting"}
        return {**told, "state": "exited", "ended": _time(over.get("finishedAt"))}


def seen(works: Sequence[Object], pods: Sequence[Object]) -> dict[str, Seen]:
    """Return what there is of each run, by its id."""
    mine = {_run(work): work for work in works if _run(work) and not work["metadata"].get("ownerReferences")}
    newest: dict[str, dict[int, Object]] = {}
    for pod in sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], _is_alive(pod))):
        labels = pod["metadata"].get("labels") or {}
        index = labels.get(INDEX) or (pod["metadata"].get("annotations") or {}).get(INDEX)
        if index is None or not _run(pod):
            continue
        work = mine.get(_run(pod))
        nodes = int(_job_of(work)[0]["completions"]) if work else 0
        newest.setdefault(_run(pod), {})[int(labels.get(SLICE_INDEX, 0)) * nodes + int(index)] = pod
    return {
        run_id: Seen(run_id=run_id, work=mine.get(run_id), pods=newest.get(run_id, {}))
        for run_id in mine.keys() | newest.keys()
    }


def _run(found: Object) -> str:
    return str((found["metadata"].get("labels") or {}).get(kubernetes.RUN_LABEL, ""))


def _job_of(work: Object) -> tuple[Object, int]:
    """The specification of a run's Job, and how many of it there are."""
    if work["kind"] == "Job":
        return work["spec"], 1
    (one,) = work["spec"]["replicatedJobs"]
    return one["template"]["spec"], int(one["replicas"])


def _is_alive(pod: Object) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _time(text: str | None) -> float | None:
    return None if text is None else datetime.datetime.fromisoformat(text).timestamp()


def main_of(pod: Object) -> Object:
    """Return the state of the container in which the run's process is."""
    found = {each["name"]: each for each in pod["status"].get("containerStatuses") or ()}
    state: Object = (found.get(kubernetes.CONTAINER) or {}).get("state") or {}
    return state


def _containers(pod: Object) -> Iterator[Object]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        yield from pod["status"].get(kind) or ()


def waits_in_vain(pod: Object) -> str | None:
    """Return why a pod that has a node does not start, where it will not by itself."""
    for each in _containers(pod):
        waiting = each["state"].get("waiting") or {}
        if waiting.get("reason") in NO_START:
            return f"{waiting['reason']}: {waiting.get('message') or each['image']}"
    return None


def trouble(pod: Object) -> str | None:
    """Return why a pod does not run, or ended badly; None where nothing is wrong."""
    status = pod["status"]
    if status.get("reason"):  # Evicted, NodeLost, …
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    for each in _containers(pod):
        over = each["state"].get("terminated") or {}
        if over.get("exitCode"):
            said = over.get("message") or (over.get("reason") if over.get("reason") != "Error" else None)
            why = said.strip().splitlines()[-1] if said else f"exit code {over['exitCode']}"
            return why if each["name"] == kubernetes.CONTAINER else f"its code could not be had: {why}"
    for each in status.get("conditions") or ():
        is_unplaced = each["type"] == "PodScheduled" and each["status"] == "False"
        if is_unplaced or (each["type"] == "DisruptionTarget" and each["status"] == "True"):
            return str(each.get("message") or each.get("reason"))
    return waits_in_vain(pod)


class ClusterRuns:
    """The runs of a stack in its cluster. files, url: of the runs' folder, which is in a bucket."""

    def __init__(self, cluster: Cluster, files: Files, url: str) -> None:
        self.connection = Connection(cluster)
        self._files, self._url = files, url
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()

    def seen(self) -> dict[str, Seen]:
        """Return every run that the cluster has something of. Raises ApiError."""
        works = [work for kind in WORKS for work in self.connection.watched(kind, OURS).objects()]
        return seen(works, self.connection.watched("pods", OURS).objects())

    def of(self, run_id: str) -> Seen:
        label = kubernetes.label(run_id)
        return self.seen().get(label) or Seen(run_id=run_id, work=None, pods={})

    def agents(self, described: Mapping[str, Any]) -> tuple[Agent, ...]:
        """Return the agents of a run's pods, in worker order."""
        return self.agents_called([host["name"] for host in described["hosts"]])

    def agents_called(self, names: Sequence[str]) -> tuple[Agent, ...]:
        return tuple(Agent(host=name, link=PodLink(self), root=kubernetes.AGENT_ROOT) for name in names)

    def running_pod(self, run_id: str, index: int) -> Object:
        """Return the pod of a run's process, which runs. Raises HostError: it does not."""
        pod = self.of(run_id).pods.get(index)
        if pod is None or "running" not in main_of(pod):
            why = "the cluster has no pod of it" if pod is None else trouble(pod) or "its pod does not run"
            raise HostError(host=f"process {index}", reason=why, remedy="`fab status` says how the run is")
        return pod

    @contextlib.contextmanager
    def forward(self, run_id: str, index: int, port: int) -> Iterator[int]:
        """Open a port of this machine that leads to one of a run's pod."""
        pod = self.running_pod(run_id, index)["metadata"]["name"]
        with self.connection.forwarded(pod, port) as here:
            yield here

    def shell(self, run_id: str, index: int) -> int:
        """Join this terminal to a shell in a run's pod; return its exit code."""
        pod = self.running_pod(run_id, index)["metadata"]["name"]
        return shell(self.connection.program(pod, kubernetes.CONTAINER, SHELL, terminal=True))

    def why(self, run_id: str) -> str | None:
        """Return what the cluster says of a run that has ended without a word of its own."""
        now = self.of(run_id)
        said = [str(now.verdict.get("message") or now.verdict["reason"])] if now.verdict else []
        said += [
            f"process {index}: {found}" for index, pod in sorted(now.pods.items()) if (found := trouble(pod))
        ]
        return "; ".join(said) or None

    def session(self, pod: Object) -> _Session:
        with self._lock:
            return self._sessions.setdefault(pod["metadata"]["uid"], _Session(self.connection, pod))

    def heartbeat(self, run_id: str, attempt: int, index: int) -> dict[str, Any] | None:
        """Return what a process that has joined says of itself in the bucket; None: nothing yet."""
        directory = run_directory.RunDirectory(f"{self._url}/{run_id}", self._files)
        beat = directory.read_json(run_directory.heartbeat(index)) or {}
        has_joined = beat.get("attempt") == attempt and beat.get("state") not in (None, "starting")
        return beat if has_joined else None

    def attempt(self, run_id: str) -> int | None:
        """Return the latest attempt of a run, as its directory tells it."""
        described = run_directory.RunDirectory(f"{self._url}/{run_id}", self._files).read_json(
            run_directory.RUN
        )
        return None if described is None else int(described["attempts"][-1]["attempt"])

    def read_log(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the verb `logs` from the run directory, where its pod cannot. Raises HostError."""
        name = run_directory.log(request["attempt"], request["process_id"])
        place = (f"{self._url}/{request['run_id']}", name)
        (found,) = self._files.read_inside([place], [request["offset"]], request["limit_bytes"])
        if found is None or found.error is not None:
            raise HostError(
                host="", reason="its pod is gone, and its log did not come into the run directory"
            )
        text = found.data.decode(errors="replace")
        told = {"offset": found.offset, "next_offset": found.next_offset, "size": found.size}
        return {"text": text, **told}

    def check(self, plan: Plan, options: Options) -> None:
        """Make sure that the cluster would take a run; nothing of it is made but the namespace, and who it acts as.

        Raises:
            RequestError: it would not, and why.
            ApiError: it cannot be asked.
        """
        kind = "jobsets" if plan.target.slice.count > 1 else "jobs"
        self._require_groups(kind, options)
        self._require_rights(kubernetes.rights(several=kind == "jobsets"))
        self._require_namespace()
        for manifest in kubernetes.manifests(plan, dataclasses.replace(options, suspended=True)):
            self._create(manifest, dryRun="All")

    def _require_groups(self, kind: str, options: Options) -> None:
        needed = (
            [("jobset.x-k8s.io", "JobSet, which runs on several slices need")] if kind == "jobsets" else []
        )
        needed += [("kueue.x-k8s.io", f"Kueue, which --queue {options.queue} needs")] if options.queue else []
        for group, what in needed:
            try:
                self.connection.get(f"/apis/{group}")
            except ApiError as error:
                if error.status != NOT_FOUND:
                    raise
                raise RequestError(
                    f"{self.connection.name} has no {what}; install it there (docs/kubernetes.md)"
                ) from None

    def _require_rights(self, wanted: Sequence[tuple[str, str, str]]) -> None:
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

        def may(right: tuple[str, str, str]) -> bool:
            (group, whole, verb), cluster = right, self.connection.cluster
            resource, _, part = whole.partition("/")
            asked = {"namespace": cluster.namespace, "verb": verb, "group": group}
            asked |= {"resource": resource, "subresource": part}
            review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
            answer = self.connection.ask("POST", path, {**review, "spec": {"resourceAttributes": asked}})
            return bool(answer["status"]["allowed"])

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            missing = [right for right, has in zip(wanted, pool.map(may, wanted), strict=True) if not has]
        if missing:
            named = ", ".join(f"{verb} {resource}" for _, resource, verb in missing)
            raise RequestError(
                f"{self.connection.name}: in the namespace {self.connection.cluster.namespace} this user may not "
                f"{named}; have it granted (docs/kubernetes.md)"
            )

    def _require_namespace(self) -> None:
        """Make the namespace and the service account, where they are missing."""
        cluster = self.connection.cluster
        account = self.connection.path("serviceaccounts")
        wanted = [("/api/v1/namespaces", "Namespace", cluster.namespace)]
        wanted += [(account, "ServiceAccount", cluster.service_account)]
        for path, kind, name in wanted:
            made = {
                "apiVersion": "v1",
                "kind": kind,
                "metadata": {"name": name, "labels": kubernetes.MANAGED_BY},
            }
            try:
                self.connection.get(f"{path}/{name}")
            except ApiError as error:
                if error.status == NOT_FOUND:
                    with _unless(CONFLICT):
                        self.connection.ask("POST", path, made)
                elif error.status != FORBIDDEN:  # who may not look at it may be right that it is there
                    raise

    def clear(self, run_id: str) -> None:
        """Take away what is left of a run that has ended. Raises HostError: it cannot be, or the run goes on."""
        until_s = time.monotonic() + REMOVE_LIMIT_S
        # The cluster says a little later than the run that it is over.
        while (now := self.of(run_id)).begins_pods:
            if time.monotonic() > until_s:
                raise HostError(
                    host=self.connection.name,
                    reason=f"it goes on with {run_id}",
                    remedy=f"`fab stop --run {run_id}` ends that",
                )
            self.connection.watched("jobs", OURS).wait(LOOK_S)
        if now.work is not None:
            self.remove(run_id, grace_s=None, wait_s=0.0, uid=now.work["metadata"]["uid"])
        self.await_gone(run_id, None, kubernetes.GRACE_S + REMOVE_LIMIT_S)

    def put(self, plan: Plan, bundles: Sequence[Bundle]) -> int:
        """Put what the pods fetch into the bucket; return how many of these were missing. Raises HostError."""
        urls = {kubernetes.bundle_url(plan, bundle.sha256): bundle for bundle in bundles}
        folder = next(iter(urls)).rpartition("/")[0]
        there = {f"{folder}/{name}" for name in self._files.list(folder)}
        for url in urls.keys() - there:
            self._files.write(url, urls[url].archive)
        return len(urls.keys() - there)

    def start(self, plan: Plan, options: Options, say: Say, *, wait_s: float | None) -> None:
        """Make a run, and return when all its pods have nodes; otherwise all of it is taken away again.

        wait_s: for the nodes; None: as it is usual for what is asked.

        Raises:
            HostsError: they have none within the limit, and why.
            ApiError: the cluster refuses it, or cannot be reached.
        """
        if wait_s is None:
            in_queue = options.queue is not None or plan.target.slice.capacity == "flex-start"
            wait_s = QUEUE_WAIT_S if in_queue else WAIT_S
        uid = None
        try:
            first, *others = kubernetes.manifests(plan, dataclasses.replace(options, suspended=True))
            has_deadline = first["kind"] == "Job"
            if has_deadline:  # for a launcher that is killed meanwhile
                first["spec"]["activeDeadlineSeconds"] = round(wait_s) + DEADLINE_LATER_S
            owner = self._create(first)
            uid = owner["metadata"]["uid"]
            for manifest in others:
                self._create(kubernetes.owned(manifest, owner))
            path = self.connection.path(_kind(first), first["metadata"]["name"])
            if options.queue is None:
                self.connection.ask("PATCH", path, {"spec": {"suspend": False}}, content=MERGE)
            self._await_nodes(plan, options, say, wait_s)
            if has_deadline:
                self._end_deadline(path)
        except BaseException as error:
            # Where the first was refused nothing was made; what has its name is another launcher's.
            if uid is not None or not isinstance(error, RequestError):
                self.remove(plan.run_id, grace_s=None, wait_s=REMOVE_LIMIT_S, uid=uid)
            raise

    def _end_deadline(self, path: str) -> None:
        until_s = time.monotonic() + REMOVE_LIMIT_S
        while True:
            try:
                self.connection.ask("PATCH", path, {"spec": {"activeDeadlineSeconds": None}}, content=MERGE)
                return
            except ApiError as error:
                if error.status is not None or time.monotonic() > until_s:
                    raise
                time.sleep(LOOK_S)

    def _create(self, manifest: Object, **query: str) -> Object:
        try:
            path = self.connection.path(_kind(manifest))
            return self.connection.ask("POST", path, manifest, fieldValidation="Strict", **query)
        except ApiError as error:
            if error.status not in (400, FORBIDDEN, CONFLICT, 422):
                raise
            raise RequestError(
                f"{self.connection.name} does not take the {manifest['kind']} {manifest['metadata']['name']}: "
                f"{error.reason}" + (f" → {error.remedy}" if error.remedy else "")
            ) from None

    def _await_nodes(self, plan: Plan, options: Options, say: Say, wait_s: float) -> None:
        began_s, told, was_there = time.monotonic(), "", False
        while True:
            left_s = wait_s - (time.monotonic() - began_s)
            try:
                now = self.of(plan.run_id)
            except ApiError as error:
                if left_s < 0:
                    raise
                told = _say_once(say, f"{error}; it is asked again", told)
                time.sleep(LOOK_S)
                continue
            waiting = [index for index in range(plan.processes) if not _has_node(now.pods.get(index))]
            if not waiting:
                return
            was_there = was_there or now.work is not None
            is_over = was_there and not now.begins_pods
            why = self._why_waiting(now, waiting, options, is_over)
            hosts = plan.target.hosts
            if is_over or left_s < 0:
                limit = "" if is_over else f" within {spoken(wait_s)} (--wait)"
                raise HostsError(
                    f"{len(waiting)} of {plan.processes} pods could not be placed{limit}; all were taken away again:",
                    [HostError(host=hosts[index].name, reason=why[index]) for index in waiting],
                )
            text = f"waiting for {len(waiting)} of {plan.processes} pods to be placed: {why[waiting[0]]}"
            if why[waiting[0]] != NOT_YET:
                told = _say_once(say, text, told)
            self.connection.watched("pods", OURS).wait(min(LOOK_S, max(0.1, left_s)))

    def _why_waiting(
        self, now: Seen, waiting: Sequence[int], options: Options, is_over: bool
    ) -> dict[int, str]:
        """Return for each process why it has no node."""
        of_work = NOT_YET
        if is_over:
            of_work = (now.verdict or {}).get("message") or "its Job was removed by somebody else"
        elif now.work is None:  # just made, and not seen yet
            pass
        elif options.queue is not None and now.work["spec"].get("suspend"):
            of_work = f"the queue {options.queue} has not admitted it"
        elif any(index not in now.pods for index in waiting):
            of_work = self._last_warning(now.work) or NOT_YET
        found = {index: trouble(pod) for index in waiting if (pod := now.pods.get(index)) is not None}
        return {index: found.get(index) or of_work for index in waiting}

    def _last_warning(self, work: Object) -> str | None:
        name = work["metadata"]["name"]
        path = self.connection.path("events")
        with contextlib.suppress(ApiError):
            items = self.connection.get(path, fieldSelector=f"involvedObject.name={name},type=Warning")[
                "items"
            ]
            latest = max(items, key=lambda each: each["metadata"]["creationTimestamp"], default=None)
            return None if latest is None else str(latest["message"])
        return None

    def remove(self, run_id: str, *, grace_s: float | None, wait_s: float, uid: str | None = None) -> None:
        """Take away all that the cluster has of a run. grace_s: for its pods; None: their own. uid: only of this Job or
        JobSet, and of none that was made under its name since.

        An API server that is away is asked again, for `wait_s` at most.

        Raises:
            ApiError: it cannot be done.
        """
        name, until_s = kubernetes.name_of(run_id), time.monotonic() + wait_s
        how: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        how |= {} if uid is None else {"preconditions": {"uid": uid}}
        while True:
            try:
                for kind in reversed(WORKS):
                    passed_over = [NOT_FOUND, *([] if uid is None else [CONFLICT])]
                    if kind == "jobsets":  # who has no right to any has none
                        passed_over.append(FORBIDDEN)
                    with _unless(*passed_over):
                        self.connection.ask("DELETE", self.connection.path(kind, name), how)
                if grace_s is not None and grace_s < kubernetes.GRACE_S:
                    for pod in self.of(run_id).pods.values():
                        with _unless(NOT_FOUND):
                            path = self.connection.path("pods", pod["metadata"]["name"])
                            self.connection.ask(
                                "DELETE", path, gracePeriodSeconds=str(max(1, round(grace_s)))
                            )
                return
            except ApiError as error:
                if error.status is not None or time.monotonic() > until_s:
                    raise
                time.sleep(LOOK_S)

    def await_gone(self, run_id: str, index: int | None, limit_s: float) -> Object | None:
        """Wait until a run's pod is gone, or all of the run; return the last that was known of the pod.

        Raises:
            HostError: it is not gone within the limit.
        """
        until_s, pods = time.monotonic() + limit_s, self.connection.watched("pods", OURS)
        while True:
            try:
                now = self.of(run_id)
            except ApiError:  # an API server that is away comes back
                if time.monotonic() > until_s:
                    raise
                time.sleep(LOOK_S)
                continue
            left = (
                now.pods if index is None else {each: pod for each, pod in now.pods.items() if each == index}
            )
            if not any(_is_alive(pod) for pod in left.values()) and (index is not None or now.work is None):
                last = seen([], pods.gone()).get(run_id, now).pods
                return left.get(index) or last.get(index) if index is not None else None
            if time.monotonic() > until_s:
                reason = f"its pod is not gone after {spoken(limit_s)}"
                host = self.connection.name if index is None else ""
                raise HostError(host=host, reason=reason, remedy="`kubectl get pods` shows what it waits for")
            pods.wait(LOOK_S)


NOT_YET = "the cluster has not come to it yet"


def _kind(manifest: Object) -> str:
    kind = manifest["kind"].lower()
    return "networkpolicies" if kind == "networkpolicy" else f"{kind}s"


def _say_once(say: Say, text: str, told: str) -> str:
    if text != told:
        say(text)
    return text


def _has_node(pod: Object | None) -> bool:
    return pod is not None and bool(pod["spec"].get("nodeName"))


@contextlib.contextmanager
def _unless(*statuses: int) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status not in statuses:
            raise


class _Session:
    """The agent in a pod, which answers a line with a line; started at the first question."""

    def __init__(self, connection: Connection, pod: Object) -> None:
        (main,) = (each for each in pod["spec"]["containers"] if each["name"] == kubernetes.CONTAINER)
        code = next(word for word in main["command"] if word.endswith(kubernetes.AGENT))
        argv = ["python", "-S", "-E", "-c", SESSION, code.removesuffix(f"/{kubernetes.AGENT}")]
        name = pod["metadata"]["name"]
        self._begin = functools.partial(connection.program, name, kubernetes.CONTAINER, argv)
        self._program: Any = None
        self._lock = threading.Lock()

    def ask(self, verb: str, request: str, timeout_s: float) -> Completed:
        """Return the answer. Raises HostError: the program cannot be started, or has ended."""
        import websocket

        line = json.dumps({**json.loads(request), "verb": verb}).encode() + b"\n"
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
            except (websocket.WebSocketException, OSError) as error:
                self._program = None
                raise HostError(host="", reason=f"the connection to its pod was lost ({error})") from None
        return Completed(exit_code=None if answer is None else 0, stdout=(answer or b"").decode(), stderr="")


@dataclasses.dataclass(frozen=True)
class PodLink:
    """The agents of all pods: a request says of which run and process it is, and without them `status` is of all."""

    runs: ClusterRuns
    knows_all = True

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        self.runs.connection.load()
        asked = json.loads(request)
        own = {"status": self._status, "stop": self._stop, "join": self._join, "logs": self._logs}.get(verb)
        if own is None:
            return in_thread(lambda: self._session(asked).ask(verb, request, timeout_s))

        def carry_out() -> Completed:
            answer = within(timeout_s, self.runs.connection.name, functools.partial(own, asked))
            return Completed(exit_code=0, stdout=json.dumps({"ok": True, **answer}), stderr="")

        return in_thread(carry_out)

    def _session(self, asked: Mapping[str, Any]) -> _Session:
        return self.runs.session(self.runs.running_pod(asked["run_id"], asked["process_id"]))

    def _status(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        wanted = asked["run_id"]
        chosen = self.runs.seen().values() if wanted is None else [self.runs.of(wanted)]
        entries = [entry for one in chosen for entry in one.entries()]
        return {"processes": [each for each in entries if asked["process_id"] in (None, each["process_id"])]}

    def _stop(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        run_id, index, grace_s = asked["run_id"], asked["process_id"], asked["grace_s"]
        before = None
        # By its agent it ends as stopped; a pod that is only deleted would say that it was preempted. In a session of
        # its own: in the other one somebody may wait for the process to join.
        with contextlib.suppress(HostError):
            before = self.runs.of(run_id).pods.get(index)
            session = _Session(self.runs.connection, self.runs.running_pod(run_id, index))
            _said(session.ask("stop", json.dumps(asked), grace_s + ANSWER_LIMIT_S))
        self.runs.remove(run_id, grace_s=grace_s, wait_s=REMOVE_LIMIT_S)
        pod = self.runs.await_gone(run_id, index, grace_s + REMOVE_LIMIT_S)
        if before is None or not _is_alive(before):
            return {"stopped": []}
        code = (main_of(pod or before).get("terminated") or {}).get("exitCode")
        how = {None: "terminated", KILLED: "killed"}.get(code, f"exited by itself (exit code {code})")
        return {"stopped": [{"process_id": index, "pid": None, "how": how, "code": code}]}

    def _join(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for a process as its agent does, from before its pod has begun."""
        run_id, index = asked["run_id"], asked["process_id"]
        until_s, first, in_vain_s = time.monotonic() + asked["limit_s"], None, float("inf")
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                pod = self.runs.of(run_id).pods.get(index)
            except ApiError:  # an API server that is away comes back
                time.sleep(LOOK_S)
                continue
            first = first or pod
            if first is not None and (pod is None or pod["metadata"]["uid"] != first["metadata"]["uid"]):
                raise HostError(
                    host="", reason=f"its pod was lost: {trouble(first) or 'somebody removed it'}"
                )
            if pod is not None and not _is_alive(pod):
                if not main_of(pod):
                    raise HostError(host="", reason=trouble(pod) or "its pod ended before it began")
                code = (main_of(pod).get("terminated") or {}).get("exitCode")
                return {"state": "failed" if code else "done", "beat": None, "process": {"state": "exited"}}
            why = None if pod is None else waits_in_vain(pod)
            in_vain_s = min(in_vain_s, time.monotonic()) if why else float("inf")
            if why and time.monotonic() - in_vain_s > NO_START_LIMIT_S:
                raise HostError(
                    host="", reason=why, remedy="see that the cluster's nodes may pull this image"
                )
            if pod is None or "running" not in main_of(pod):
                self.runs.connection.watched("pods", OURS).wait(LOOK_S)
                continue
            pause_s = BEGIN_POLL_S
            try:
                session = self.runs.session(pod)
                if _said(session.ask("status", json.dumps(asked), ANSWER_LIMIT_S)).get("processes"):
                    request = json.dumps({**asked, "limit_s": left_s})
                    return _said(session.ask("join", request, left_s + ANSWER_LIMIT_S))
            except HostError:  # no program can be started there: what its process has said of itself will do
                if beat := self.runs.heartbeat(run_id, asked["attempt"], index):
                    return {"state": beat["state"], "beat": beat, "process": {"state": "running"}}
                pause_s = BUCKET_POLL_S
            time.sleep(pause_s)
        return {"state": "starting", "beat": None, "process": {"state": "starting"}}

    def _logs(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        pod = None
        with contextlib.suppress(HostError):
            pod = self.runs.of(asked["run_id"]).pods.get(asked["process_id"])
            return _said(self._session(asked).ask("logs", json.dumps(asked), ANSWER_LIMIT_S))
        goes_on = (
            pod is not None and _is_alive(pod) and self.runs.attempt(asked["run_id"]) == asked["attempt"]
        )
        return {**self.runs.read_log(asked), "ended": not goes_on}


def _said(answer: Completed) -> dict[str, Any]:
    """Return what an agent has answered. Raises HostError: it could not, or nothing came."""
    try:
        found: dict[str, Any] = json.loads(answer.stdout)
        if found["ok"]:
            return found
        raise HostError(host="", reason=found["error"]["message"], remedy=found["error"].get("remedy") or "")
    except (ValueError, KeyError, TypeError):
        raise HostError(host="", reason="its agent gave no answer") from None
