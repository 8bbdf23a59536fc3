"""A slice that is node pools: whether its cluster answers, what this user may do in it, and which nodes it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from backends.pods import manifests
from backends.pods.api_server import FORBIDDEN, NOT_FOUND, may
from console.doctor.check import Check, Finding, fail, ok, skip, warn
from contracts.inventory import Cluster, NodePool, Slice
from launch.hosts import HostError

AREA = "cluster"
ROLE = "an administrator gives them: docs/kubernetes.md#an-existing-cluster, on GKE tpu-stack:access"

Ask = Callable[[str, str, dict[str, Any] | None], Mapping[str, Any]]
"""Method, path and body of a request to the API server → its answer. Raises HostError, with `status` where it said one.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterChecks:
    """What the checks are about. ask: of the cluster, as this user."""

    ask: Ask
    cluster: Cluster
    one_slice: Slice
    pool: NodePool

    def checks(self) -> Iterator[Check]:
        """Of a cluster that is reached, from near to far; nothing is changed."""
        yield Check(AREA, "namespace", self.namespace)
        yield Check(AREA, "rights", self.rights)
        yield Check(AREA, "controllers", lambda: list(self.controllers()))
        yield Check(AREA, "nodes", lambda: list(self.nodes()))

    def reached(self) -> Finding:
        version = self.ask("GET", "/version", None)
        return ok(f"{self.cluster.name} answers: Kubernetes {version['gitVersion']}")

    def namespace(self) -> Finding:
        """The launcher makes what is missing, where it may."""
        name, account = self.cluster.namespace, self.cluster.service_account
        if self._is_there(f"/api/v1/namespaces/{name}") is False:
            if self._may("", "namespaces", "create"):
                return ok(f"{name} is not there yet: the first run makes it")
            return fail(f"{name} is not there, and you may not make it", f"`kubectl create namespace {name}`")
        exists = self._is_there(f"/api/v1/namespaces/{name}/serviceaccounts/{account}")
        if exists:
            return ok(f"{name}, with the service account {account}")
        if exists is None:
            return skip(f"you may not see what is in {name}")
        if self._may("", "serviceaccounts", "create"):
            return ok(f"{name}; the first run makes its service account {account}")
        remedy = f"`kubectl create serviceaccount {account} --namespace {name}`"
        return fail(f"{name} has no service account {account}, and you may not make it", remedy)

    def rights(self) -> Finding:
        required = manifests.rights(has_several_slices=self.one_slice.count > 1)
        missing = [
            f"{verb} {resource}" for group, resource, verb in required if not self._may(group, resource, verb)
        ]
        if missing:
            return fail(f"you may not {', '.join(missing)} in {self.cluster.namespace}", ROLE)
        return ok(f"you may launch in {self.cluster.namespace} ({len(required)} rights asked)")

    def controllers(self) -> Iterator[Finding]:
        groups = {group["name"] for group in self.ask("GET", "/apis", None)["groups"]}
        if "jobset.x-k8s.io" in groups:
            yield ok("JobSet is installed", name="jobset")
        elif self.one_slice.count > 1:
            yield fail(
                f"{self.one_slice.name} is {self.one_slice.count} slices, which train together as a JobSet, and its "
                "controller is not installed",
                "https://jobset.sigs.k8s.io: an administrator installs it once",
                name="jobset",
            )
        if "kueue.x-k8s.io" in groups:
            yield ok("Kueue is installed: `--queue NAME` waits in one of its queues", name="kueue")
        else:
            yield skip("Kueue is not installed: runs start in the order in which they come")

    def nodes(self) -> Iterator[Finding]:
        """Those that a run's pods look for, by the labels that GKE gives them."""
        labels = manifests.slice_labels(self.one_slice, self.pool)
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        try:
            nodes = self.ask("GET", f"/api/v1/nodes?labelSelector={selector}", None)["items"]
        except HostError as error:
            if _status(error) != FORBIDDEN:
                raise
            yield skip("you may not list nodes, so that nobody sees here whether they are there")
            return
        required, named = self.pool.nodes * self.one_slice.count, self.one_slice.accelerator_type
        ready = [node for node in nodes if _is_ready(node)]
        if len(ready) >= required:
            yield ok(f"{len(ready)} nodes of {named} are ready, a run takes {required}")
        elif not nodes:
            yield warn(
                f"no node has the labels {selector}, a run takes {required}",
                "with scale-to-zero or flex-start they come when a run asks; otherwise `pulumi up --refresh`, and the "
                "node pool's events in the console",
            )
        else:
            yield warn(
                f"{len(ready)} of {required} nodes of {named} are ready",
                "`kubectl get nodes` and `kubectl describe node` say why; a run waits for the others",
            )
        for node in nodes:
            has = node["status"].get("allocatable", {}).get(manifests.TPU, "0")
            if has != str(self.pool.chips_per_node):
                name = node["metadata"]["name"]
                yield warn(
                    f"{name} offers {manifests.TPU}: {has}, its machine type {self.pool.machine_type} has "
                    f"{self.pool.chips_per_node}",
                    "pods ask for all chips of a node and would not be placed there: see its device plugin's pod in "
                    "kube-system",
                )

    def _may(self, group: str, resource: str, verb: str) -> bool:
        return may(self.ask, self.cluster.namespace, (group, resource, verb))

    def _is_there(self, path: str) -> bool | None:
        """None: this user may not see it."""
        try:
            self.ask("GET", path, None)
        except HostError as error:
            if _status(error) in (NOT_FOUND, FORBIDDEN):
                return False if _status(error) == NOT_FOUND else None
            raise
        return True


def _status(error: HostError) -> int | None:
    status: int | None = getattr(error, "status", None)
    return status


def _is_ready(node: Mapping[str, Any]) -> bool:
    if node["spec"].get("unschedulable"):
        return False
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in node["status"]["conditions"]
    )
