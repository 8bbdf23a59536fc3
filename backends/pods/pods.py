"""What a cluster has of a run: how its objects are called, and what its Job and pods say of its processes. Pure.

It has the shape in which agents of hosts say it, so that whoever follows or lists runs needs to know of no cluster.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from contracts.host_interface import STOP_GRACE_S

Object = dict[str, Any]
"""A Kubernetes object, as its JSON says it."""

ROOT = "/tpu-stack"
"""What is the project's in a pod: an empty folder of the pod's own."""
AGENT_ROOT = f"{ROOT}/agent"
CACHE_DIR = f"{ROOT}/cache"
AGENT = "host/agent/__main__.py"
"""In the code bundle."""
CONTAINER, CODE_CONTAINER = "run", "code"
"""The run's process, and what fetches its code before."""
LONGEST_NAME = 40
"""Of 63 characters (RFC 1123), less what Job and JobSet add for a pod: "-slice-0-1234-abcde"."""
LONGEST_LABEL = 63
RUN_LABEL = "tpu-stack/run"
BEGIN_BY, LAUNCH_TOKEN = "tpu-stack/begin-by", "tpu-stack/launch"
"""Annotations of a run's Job or JobSet: when its first attempt has to begin at the latest, in Unix seconds, and the
launch that has made it."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "tpu-stack"}
OURS = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
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
GRACE_S = int(STOP_GRACE_S)
"""Between SIGTERM and SIGKILL. A spot node gives what its kubelet's shutdownGracePeriod leaves."""


def job_name(run_id: str) -> str:
    """Return what a run's objects are called: a DNS label, one for each run, that leaves room for what is added."""
    text = re.sub("[^a-z0-9-]+", "-", run_id.lower()).strip("-")
    text = text if text[:1].isalpha() else f"run-{text}"
    if len(text) <= LONGEST_NAME and text == run_id.replace("_", "-"):
        return text
    return f"{text[: LONGEST_NAME - 9].rstrip('-')}-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def label(text: str) -> str:
    """Return a text as the value of a label: what may not be in one becomes "-"."""
    return re.sub("[^A-Za-z0-9._-]", "-", text)[:LONGEST_LABEL].strip("-._")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """What a cluster has of a run. work: its Job or JobSet. pods: of each process that has one, the newest."""

    run_id: str
    work: Object | None
    pods: Mapping[int, Object]

    @property
    def processes(self) -> int:
        if self.work is None:
            return max(self.pods, default=-1) + 1
        job, slices = _find_job(self.work)
        return int(job["completions"]) * slices

    @property
    def begins_pods(self) -> bool:
        """Whether the cluster starts each pod again that fails."""
        return self.work is not None and "deletionTimestamp" not in self.work["metadata"] and not self.verdict

    @property
    def verdict(self) -> Object | None:
        """The condition by which the run is over for the cluster."""
        conditions = ((self.work or {}).get("status") or {}).get("conditions") or ()
        return next(
            (
                condition
                for condition in conditions
                if condition["type"] in OVER and condition["status"] == "True"
            ),
            None,
        )

    @property
    def begin_by_s(self) -> float:
        """When the first attempt has to begin at the latest, in Unix seconds."""
        annotations = ((self.work or {}).get("metadata") or {}).get("annotations") or {}
        return float(annotations.get(BEGIN_BY, "inf"))

    def entries(self) -> list[dict[str, Any]]:
        """Return each process as an agent's `status` does, of the latest attempt, with its pod's name or None."""
        entries = (self._entry(index) for index in range(self.processes))
        return [entry for entry in entries if entry is not None]

    def _entry(self, index: int) -> dict[str, Any] | None:
        pod = self.pods.get(index)
        entry: dict[str, Any] = {"run_id": self.run_id, "process_id": index, "supervised": False}
        entry |= dict.fromkeys(("attempt", "pid", "code", "beat", "started", "ended", "reason"))
        entry["pod"] = pod and pod["metadata"]["name"]
        if pod is None:
            return {**entry, "state": "starting"} if self.begins_pods else None
        state, phase = main_container(pod), pod["status"].get("phase")
        over, is_over = state.get("terminated") or {}, phase in ("Succeeded", "Failed")
        entry |= {"code": over.get("exitCode"), "reason": trouble(pod)}
        if "running" in state and not is_over:
            began_s = _time(state["running"]["startedAt"])
            return {**entry, "state": "running", "started": began_s, "supervised": True}
        if phase == "Pending" or (phase != "Succeeded" and self.begins_pods):
            return {**entry, "state": "starting"}
        return {**entry, "state": "exited", "ended": _time(over.get("finishedAt"))}


def observed_runs(works: Sequence[Object], pods: Sequence[Object]) -> dict[str, ObservedRun]:
    """Return what there is of each run, by its id."""
    mine = {_run(work): work for work in works if _run(work) and not work["metadata"].get("ownerReferences")}
    newest: dict[str, dict[int, Object]] = {}
    for pod in sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], is_alive(pod))):
        labels = pod["metadata"].get("labels") or {}
        index = labels.get(INDEX) or (pod["metadata"].get("annotations") or {}).get(INDEX)
        if index is None or not _run(pod):
            continue
        work = mine.get(_run(pod))
        nodes = int(_find_job(work)[0]["completions"]) if work else 0
        newest.setdefault(_run(pod), {})[int(labels.get(SLICE_INDEX, 0)) * nodes + int(index)] = pod
    return {
        run_id: ObservedRun(run_id=run_id, work=mine.get(run_id), pods=newest.get(run_id, {}))
        for run_id in mine.keys() | newest.keys()
    }


def _run(item: Object) -> str:
    return str((item["metadata"].get("labels") or {}).get(RUN_LABEL, ""))


def _find_job(work: Object) -> tuple[Object, int]:
    """The specification of a run's Job, and how many of it there are."""
    if work["kind"] == "Job":
        return work["spec"], 1
    (replicated_job,) = work["spec"]["replicatedJobs"]
    return replicated_job["template"]["spec"], int(replicated_job["replicas"])


def is_alive(pod: Object) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")


def _time(text: str | None) -> float | None:
    return None if text is None else datetime.datetime.fromisoformat(text).timestamp()


def main_container(pod: Object) -> Object:
    """Return the state of the container in which the run's process is."""
    statuses = {status["name"]: status for status in pod["status"].get("containerStatuses") or ()}
    state: Object = (statuses.get(CONTAINER) or {}).get("state") or {}
    return state


def _containers(pod: Object) -> Iterator[Object]:
    for kind in ("initContainerStatuses", "containerStatuses"):
        yield from pod["status"].get(kind) or ()


def has_begun(pod: Object) -> bool:
    """Return whether the container of the run's process has been started."""
    return not main_container(pod).keys().isdisjoint(("running", "terminated"))


def code_failure(pod: Object) -> int | None:
    """Return the exit code by which the run's code could not be fetched, as contracts.errors has them; None: it was, or
    may still be."""
    for container in pod["status"].get("initContainerStatuses") or ():
        code = (container["state"].get("terminated") or {}).get("exitCode")
        if code and container["name"] == CODE_CONTAINER:
            return int(code)
    return None


def waits_in_vain(pod: Object) -> str | None:
    """Return why a pod that has a node does not start, where it will not by itself; of one whose code could not be
    fetched the next may have more luck."""
    if code_failure(pod):
        return trouble(pod)
    for container in _containers(pod):
        waiting = container["state"].get("waiting") or {}
        if waiting.get("reason") in NO_START:
            return f"{waiting['reason']}: {waiting.get('message') or container['image']}"
    return None


def trouble(pod: Object) -> str | None:
    """Return why a pod does not run, or ended badly; None where nothing is wrong."""
    status = pod["status"]
    if status.get("reason"):  # Evicted, NodeLost, …
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    for item in _containers(pod):
        over = item["state"].get("terminated") or {}
        if over.get("exitCode"):
            message = over.get("message") or (over.get("reason") if over.get("reason") != "Error" else None)
            reason = message.strip().splitlines()[-1] if message else f"exit code {over['exitCode']}"
            return reason if item["name"] == CONTAINER else f"its code could not be had: {reason}"
    for item in status.get("conditions") or ():
        is_unplaced = item["type"] == "PodScheduled" and item["status"] == "False"
        if is_unplaced or (item["type"] == "DisruptionTarget" and item["status"] == "True"):
            return str(item.get("message") or item.get("reason"))
    return waits_in_vain(pod)
