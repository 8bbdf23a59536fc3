"""Launching of runs on pods, which are made for a run and end with it: all at once or not at all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backends.pods import manifests
from backends.pods.api_server import (
    CONFLICT,
    FORBIDDEN,
    MERGE,
    NOT_FOUND,
    ApiError,
    Connection,
    Right,
    may,
    patiently,
)
from backends.pods.cluster_runs import LOOK_S, REMOVE_LIMIT_S, ClusterRuns, unless
from backends.pods.manifests import Options
from backends.pods.pods import (
    BEGIN_BY,
    GRACE_S,
    LAUNCH_TOKEN,
    MANAGED_BY,
    OURS,
    RUN_LABEL,
    Object,
    ObservedRun,
    trouble,
)
from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import CLOCKS_DIFFER_S
from launch import plan as plans
from launch.code.bundles import Bundle
from launch.hosts import Answer, HostError, HostsError, wait_for_answer
from launch.runs import AtWorkError
from launch.targets import Plan, Target

WAIT_S = 15 * 60.0
"""For nodes to be there: an autoscaler takes some minutes to make them."""
QUEUE_WAIT_S = 12 * 3600.0
"""The same where pods wait in a queue, Kueue's or Google's for flex-start."""
BEGIN_LATER_S = CLOCKS_DIFFER_S + 3600
"""Beyond the wait for nodes, in which the pods of a launcher that was killed may begin: they fetch an image first."""
NOT_YET = "the cluster has not come to it yet"


class TakenError(RequestError):
    """The cluster has an object of that name already."""


_NO_IMAGE = (
    "--runtime bare: pods run images, and the stack {stack} has none of {framework}, or this leaves it out; "
    "`fab build --framework {framework}`, `fab push --stack {stack} --framework {framework}`, then `pulumi up`"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodLauncher:
    """A `launch.targets.Launcher` of runs on pods. runs: those that the cluster has. options: how this one is made.

    wait_s: for its nodes.
    """

    runs: ClusterRuns
    options: Options
    wait_s: float

    @classmethod
    def for_target(
        cls, runs: ClusterRuns, target: Target, options: Mapping[str, Any], *, wait_s: float | None
    ) -> PodLauncher:
        """Return the launcher for a target. options: as `Options` takes them. wait_s: None is the usual time."""
        chosen = Options(**options)
        in_queue = chosen.queue is not None or target.slice.capacity == "flex-start"
        usual_s = QUEUE_WAIT_S if in_queue else WAIT_S
        return cls(runs=runs, options=chosen, wait_s=usual_s if wait_s is None else wait_s)

    @property
    def record(self) -> Mapping[str, Any]:
        return {"pods": {"restarts": self.options.restarts, "queue": self.options.queue}}

    @property
    def _connection(self) -> Connection:
        return self.runs.connection

    def documents(self, plan: Plan) -> list[Object]:
        shown = {
            name: dataclasses.replace(secret, value=secret.value and "***")
            for name, secret in plan.secrets.items()
        }
        return manifests.manifests(dataclasses.replace(plan, secrets=shown), self.options)

    def placed(self, plan: Plan) -> Plan:
        """Return the plan with the run's pods as its hosts. Raises RequestError: they have no image."""
        if plan.container is None:
            raise RequestError(_NO_IMAGE.format(framework=plan.framework, stack=plan.target.name))
        return manifests.placed(plan)

    def prepare(
        self,
        plan: Plan,
        bundles: Sequence[Bundle],  # noqa: ARG002 - pods fetch them from the run directory
        say: Say,
        now_s: Callable[[], float] = time.time,  # noqa: ARG002 - the cluster has a clock of its own
    ) -> Plan:
        """Make sure that the cluster would take a run.

        Nothing of it is made but the namespace, and who it acts as.

        Raises:
            RequestError: it would not, and why.
            ApiError: it cannot be asked.
        """
        if plan.attempt:
            self._clear(plan.run_id)
        kind = "jobsets" if manifests.slice_count(plan) > 1 else "jobs"
        self._require_groups(kind)
        has_secrets = bool(plans.secret_values(plan))
        self._require_rights(manifests.rights(has_several_slices=kind == "jobsets", has_secrets=has_secrets))
        self._require_namespace()
        for manifest in manifests.manifests(plan, dataclasses.replace(self.options, suspended=True)):
            accepted = self._create(manifest, dryRun="All")
            queue = (accepted["metadata"].get("labels") or {}).get(manifests.QUEUE_LABEL)
            if queue != self.options.queue and manifest["kind"] in ("Job", "JobSet"):
                raise RequestError(
                    f"{self._connection.name}: Kueue puts every run of the namespace "
                    f"{self._connection.cluster.namespace} into its queue {queue}; say --queue {queue}"
                )
        say(f"{self._connection.name} takes the run")
        return plan

    def _require_groups(self, kind: str) -> None:
        needed = {"jobset.x-k8s.io": "JobSet, which runs on several slices need"} if kind == "jobsets" else {}
        if self.options.queue:
            needed["kueue.x-k8s.io"] = f"Kueue, which --queue {self.options.queue} needs"
        for group, purpose in needed.items():
            try:
                self._connection.get(f"/apis/{group}")
            except ApiError as error:
                if error.status != NOT_FOUND:
                    raise
                raise RequestError(
                    f"{self._connection.name} has no {purpose}; install it there (docs/kubernetes.md)"
                ) from None

    def _require_rights(self, rights: Sequence[Right]) -> None:
        namespace = self._connection.cluster.namespace
        has = functools.partial(may, self._connection.ask, namespace)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            missing = [
                right for right, has_it in zip(rights, pool.map(has, rights), strict=True) if not has_it
            ]
        if missing:
            named = ", ".join(f"{verb} {resource}" for _, resource, verb in missing)
            raise RequestError(
                f"{self._connection.name}: in the namespace {namespace} this user may not {named}; have it granted "
                "(docs/kubernetes.md)"
            )

    def _require_namespace(self) -> None:
        """Make the namespace and the service account, where they are missing."""
        cluster = self._connection.cluster
        account = self._connection.path("serviceaccounts")
        objects = [("/api/v1/namespaces", "Namespace", cluster.namespace)]
        objects += [(account, "ServiceAccount", cluster.service_account)]
        for path, kind, name in objects:
            manifest = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": MANAGED_BY}}
            try:
                self._connection.get(f"{path}/{name}")
            except ApiError as error:
                if error.status == NOT_FOUND:
                    with unless(CONFLICT):
                        self._connection.ask("POST", path, manifest)
                elif error.status != FORBIDDEN:  # who may not look at it may be right that it is there
                    raise

    def _clear(self, run_id: str) -> None:
        """Take away what is left of a run that has ended. Raises HostError: it cannot be, or the run goes on."""
        self.runs.conclude(run_id)  # what waits in vain
        until_s = time.monotonic() + REMOVE_LIMIT_S
        # The cluster says a little later than the run that it is over.
        while (now := self.runs.run_in_cluster(run_id)).begins_pods:
            if time.monotonic() > until_s:
                raise HostError(
                    host=self._connection.name,
                    reason=f"it goes on with {run_id}",
                    remedy=f"`fab stop {run_id}` ends that",
                )
            self._connection.watched("jobs", OURS).wait(LOOK_S)
        if now.work is not None:
            self.runs.remove(run_id, wait_s=0.0, uid=now.work["metadata"]["uid"])
        self.runs.await_gone(run_id, None, GRACE_S + REMOVE_LIMIT_S)

    def begin(self, plan: Plan, say: Say) -> None:
        """Make a run, and return when all its pods have nodes; otherwise all of it is taken away again.

        Raises:
            HostsError: they have none within the limit, and why.
            ApiError: the cluster refuses it, or cannot be reached.
        """
        begin_by_s = round(time.time() + self.wait_s + BEGIN_LATER_S)
        # A queue may begin it before the others are made; pods wait for each other, and by their names.
        waiting = dataclasses.replace(self.options, suspended=True, begin_by_s=begin_by_s)
        first, *further = manifests.manifests(plan, waiting)
        marks = {LAUNCH_TOKEN: secrets.token_hex(16), BEGIN_BY: str(begin_by_s)}
        first["metadata"]["annotations"] = {**first["metadata"].get("annotations", {}), **marks}
        try:
            try:
                owner = patiently(lambda: self._create_once(first), limit_s=REMOVE_LIMIT_S)
            except TakenError:
                raise AtWorkError(
                    f"{plan.run_id} is being launched by another process; `fab status` shows it"
                ) from None
            for manifest in further:
                self._create(manifests.owned(manifest, owner))
            if self.options.queue is None:
                path = self._connection.path(_kind(first), first["metadata"]["name"])
                self._connection.ask("PATCH", path, {"spec": {"suspend": False}}, content=MERGE)
            self._await_nodes(plan, say)
        except BaseException:
            own = patiently(lambda: self._find_own(first), limit_s=REMOVE_LIMIT_S)
            if own is not None:
                self.runs.remove(plan.run_id, wait_s=REMOVE_LIMIT_S, uid=own["metadata"]["uid"])
            raise

    def join(self, plan: Plan, *, limit_s: float, answer_limit_s: float) -> list[Answer]:
        futures = [
            self.runs.begin(
                host.name,
                limit_s + answer_limit_s,
                functools.partial(self.runs.join, plan.process(index), limit_s),
            )
            for index, host in enumerate(plan.target.hosts)
        ]
        return [*map(wait_for_answer, futures)]

    def _create_once(self, manifest: Object) -> Object:
        """Return what the cluster has made of a manifest, also where the answer to an earlier request was lost.

        Raises:
            TakenError: another launch has made an object of that name.
        """
        try:
            return self._create(manifest)
        except TakenError:
            if (own := self._find_own(manifest)) is None:
                raise
            return own

    def _find_own(self, manifest: Object) -> Object | None:
        """Return the object that has been made of this manifest by this launch, which its token shows."""
        metadata = manifest["metadata"]
        selector = f"{RUN_LABEL}={metadata['labels'][RUN_LABEL]}"
        for item in self._connection.get(self._connection.path(_kind(manifest)), labelSelector=selector)[
            "items"
        ]:
            annotations = item["metadata"].get("annotations") or {}
            if annotations.get(LAUNCH_TOKEN) == metadata["annotations"][LAUNCH_TOKEN]:
                return {**manifest, **item}
        return None

    def _create(self, manifest: Object, **query: str) -> Object:
        try:
            path = self._connection.path(_kind(manifest))
            return self._connection.ask("POST", path, manifest, fieldValidation="Strict", **query)
        except ApiError as error:
            if error.status not in (400, FORBIDDEN, CONFLICT, 422):
                raise
            refusal = TakenError if error.status == CONFLICT else RequestError
            raise refusal(
                f"{self._connection.name} does not take the {manifest['kind']} {manifest['metadata']['name']}: "
                f"{error.reason}" + (f" → {error.remedy}" if error.remedy else "")
            ) from None

    def _await_nodes(self, plan: Plan, say: Say) -> None:
        began_s, messages, was_there = time.monotonic(), [""], False

        def tell(text: str) -> None:
            if text != messages[-1]:
                messages.append(text)
                say(text)

        while True:
            left_s = self.wait_s - (time.monotonic() - began_s)
            now = patiently(lambda: self.runs.run_in_cluster(plan.run_id), limit_s=left_s, tell=tell)
            waiting = [index for index in range(plan.processes) if not _has_node(now.pods.get(index))]
            if not waiting:
                return
            was_there = was_there or now.work is not None
            is_over = was_there and not now.begins_pods
            reasons = self._why_waiting(now, waiting, is_over)
            hosts = plan.target.hosts
            if is_over or left_s < 0:
                limit = "" if is_over else f" within {spoken(self.wait_s)} (--wait)"
                raise HostsError(
                    f"{len(waiting)} of {plan.processes} pods could not be placed{limit}; all were taken away again:",
                    [HostError(host=hosts[index].name, reason=reasons[index]) for index in waiting],
                )
            if reasons[waiting[0]] != NOT_YET:
                tell(
                    f"waiting for {len(waiting)} of {plan.processes} pods to be placed: {reasons[waiting[0]]}"
                )
            self._connection.watched("pods", OURS).wait(min(LOOK_S, max(0.1, left_s)))

    def _why_waiting(self, now: ObservedRun, waiting: Sequence[int], is_over: bool) -> dict[int, str]:
        """Return for each process why it has no node."""
        job_reason = NOT_YET
        if is_over:
            job_reason = (now.verdict or {}).get("message") or "its Job was removed by somebody else"
        elif now.work is None:  # just made, and not seen yet
            pass
        elif self.options.queue is not None and now.work["spec"].get("suspend"):
            job_reason = f"the queue {self.options.queue} has not admitted it"
        elif any(index not in now.pods for index in waiting):
            job_reason = self._last_warning(now.work) or NOT_YET
        troubles = {index: trouble(pod) for index in waiting if (pod := now.pods.get(index)) is not None}
        return {index: troubles.get(index) or job_reason for index in waiting}

    def _last_warning(self, work: Object) -> str | None:
        name = work["metadata"]["name"]
        path = self._connection.path("events")
        with contextlib.suppress(ApiError):
            items = self._connection.get(path, fieldSelector=f"involvedObject.name={name},type=Warning")[
                "items"
            ]
            latest = max(items, key=lambda event: event["metadata"]["creationTimestamp"], default=None)
            # Before that it names the pod that was refused, which is another one at each try.
            return None if latest is None else str(latest["message"]).rpartition(" is forbidden: ")[2]
        return None


def _kind(manifest: Object) -> str:
    kind = manifest["kind"].lower()
    return "networkpolicies" if kind == "networkpolicy" else f"{kind}s"


def _has_node(pod: Object | None) -> bool:
    return pod is not None and bool(pod["spec"].get("nodeName"))
