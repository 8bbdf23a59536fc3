"""The faults that a person can cause in a rehearsal that is a cluster, by name: `fab rehearsal drain --host 1`.

Each tells in one line what was done, and what to look at now. The kubernetes package takes a second to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import kubernetes.client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from contracts.aliases import Say
from rehearsal.daemon.fault_commands import (
    AGAIN_S,
    EVERYWHERE_COMMANDS,
    Command,
    CommonFaults,
    FaultRequest,
    chosen_name,
    require,
)
from rehearsal.kubernetes.controllers import CHIPS
from rehearsal.kubernetes.rehearsal_cluster import NAMESPACE, RehearsalCluster
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.machines import Machines
from rehearsal.state import RehearsalError

RUN_LABEL = "tpu-stack/run"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
POOL_LABEL = "cloud.google.com/gke-nodepool"
CONTAINER = "run"
"""Of a run's pods: the job's."""
QUOTA = "chips"


class ClusterFaults:
    """The faults of one cluster. close: what was to come later does not."""

    def __init__(self, *, cluster: RehearsalCluster, machines: Machines, say: Say) -> None:
        self._cluster, self._machines, self._say = cluster, machines, say
        self.common_faults = CommonFaults(machines)
        self._core = kubernetes.client.CoreV1Api(cluster.api)

    def carry_out(self, name: str, request: FaultRequest) -> str:
        """The line that is told. Raises RehearsalError."""
        command = require(CLUSTER_COMMANDS, name, request)
        try:
            return command.run(self, request)
        except ApiException as error:
            raise RehearsalError(f"{name}: the API server answers {error.status}: {error.body}") from None
        except (HTTPError, MachinesError) as error:
            raise RehearsalError(f"{name}: {error}") from None

    def close(self) -> None:
        self.common_faults.close()

    # --- pods --------------------------------------------------------------------------------------------------

    def kill_pod(self, request: FaultRequest) -> str:
        pod = self._pod(request)
        container = next(
            container_status
            for container_status in pod.status.container_statuses
            if container_status.name == CONTAINER
        )
        task = container.container_id.removeprefix("containerd://")
        self._machines.containers.run_in(
            pod.spec.node_name, ["ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", task]
        )
        return f"the first process of {pod.metadata.name} is killed. Look: fab status"

    def evict(self, request: FaultRequest) -> str:
        pod = self._pod(request)
        self._evict(pod)
        return f"{pod.metadata.name} has to leave its node, as for maintenance. Look: fab status"

    def machine(self, request: FaultRequest) -> str:
        """Return the node of a pod."""
        return str(self._pod(request).spec.node_name)

    def _evict(self, pod: Any) -> None:
        body = {"metadata": {"name": pod.metadata.name, "namespace": NAMESPACE}}
        self._core.create_namespaced_pod_eviction(pod.metadata.name, NAMESPACE, body)

    def _pod(self, request: FaultRequest) -> Any:
        """The pod of this index in the newest run, counted through its slices."""
        running = self._core.list_namespaced_pod(
            NAMESPACE, label_selector=RUN_LABEL, field_selector="status.phase=Running"
        ).items
        if not running:
            raise RehearsalError("no pod of a run is running now; start one: fab train --stack rehearsal")
        newest = max(running, key=lambda pod: pod.metadata.creation_timestamp).metadata.labels[RUN_LABEL]
        pools = {node.labels[POOL_LABEL] for node in self._cluster.nodes.values()}
        hosts = len(self._cluster.nodes) // len(pools)
        pods = {
            str(
                hosts * int(pod.metadata.labels.get(SLICE_LABEL, 0)) + int(pod.metadata.labels[INDEX_LABEL])
            ): pod
            for pod in running
            if pod.metadata.labels[RUN_LABEL] == newest
        }
        if request.host not in pods:
            raise RehearsalError(
                f"--host {request.host}: {newest} has no such pod that runs; choose one of {', '.join(sorted(pods))}"
            )
        return pods[request.host]

    # --- nodes -------------------------------------------------------------------------------------------------

    def drain(self, request: FaultRequest) -> str:
        node = self._node(request)
        self._set_unschedulable(node, True)
        not_over = f"spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed"
        on_it = self._core.list_namespaced_pod(NAMESPACE, field_selector=not_over).items
        for pod in on_it:
            self._evict(pod)
        self._later(node, lambda: self._set_unschedulable(node, False), request)
        leave = ", ".join(pod.metadata.name for pod in on_it) or "no pod"
        return f"{node} is drained: {leave} must leave it. {self._again(request)}"

    def node_gone(self, request: FaultRequest) -> str:
        node = self._node(request)
        self._cluster.kill_node(node)
        self._later(node, lambda: self._cluster.restart_node(node), request)
        return f"{node} is gone, as when Google takes a spot machine back. {self._again(request)}"

    def node_back(self, request: FaultRequest) -> str:
        node = self._node(request)
        self._set_unschedulable(node, False)
        return f"{node} takes pods again"

    def cut(self, request: FaultRequest) -> str:
        node = self._node(request)
        self._machines.faults.cut(node)
        return f"the kubelet of {node} is cut off the network; its pods are not. Mend: fab rehearsal heal"

    def heal(self, request: FaultRequest) -> str:
        node = self._node(request)
        self._machines.faults.heal(node)
        return f"{node} is on the network again"

    def _node(self, request: FaultRequest) -> str:
        return chosen_name(list(self._cluster.nodes), request)

    def _set_unschedulable(self, node: str, value: bool) -> None:
        self._core.patch_node(node, {"spec": {"unschedulable": value}})

    def _later(self, node: str, act: Callable[[], None], request: FaultRequest) -> None:
        """Brings a node back, unless it is away for good."""

        def bring_back() -> None:
            try:
                act()
            except (ApiException, HTTPError, MachinesError) as error:
                self._say(f"{node} does not come back: {error}")

        if not request.for_good:
            self.common_faults.later(bring_back)

    @staticmethod
    def _again(request: FaultRequest) -> str:
        return "It stays so" if request.for_good else f"It is back in {AGAIN_S:.0f} s. Look: fab status"

    # --- the cluster -------------------------------------------------------------------------------------------

    def api_away(self, _request: FaultRequest) -> str:
        self._machines.containers.freeze("kube-apiserver", frozen=True)
        return "the API server does not answer; pods go on. Look: fab status; mend: fab rehearsal api-back"

    def api_back(self, _request: FaultRequest) -> str:
        self._machines.containers.freeze("kube-apiserver", frozen=False)
        return "the API server answers again"

    def quota(self, request: FaultRequest) -> str:
        assert request.amount is not None
        self._forget_quota()
        chips = f"{request.amount:.0f}"
        body = {"metadata": {"name": QUOTA}, "spec": {"hard": {f"requests.{CHIPS}": chips}}}
        self._core.create_namespaced_resource_quota(NAMESPACE, body)
        return f"the namespace {NAMESPACE} may have {chips} chips from now on. Mend: fab rehearsal no-quota"

    def no_quota(self, _request: FaultRequest) -> str:
        self._forget_quota()
        return f"the namespace {NAMESPACE} may have any number of chips"

    def _forget_quota(self) -> None:
        try:
            self._core.delete_namespaced_resource_quota(QUOTA, NAMESPACE)
        except ApiException as error:
            if error.status != 404:
                raise


def _cluster_command(
    help: str, run: Callable[[ClusterFaults, FaultRequest], str], *needs: str
) -> Command[ClusterFaults]:
    return Command(help=help, run=run, needs=needs)


CLUSTER_COMMANDS: Mapping[str, Command[ClusterFaults]] = {
    "kill-pod": Command(help="the first process of a run's pod is killed", run=ClusterFaults.kill_pod),
    "evict": Command(help="a run's pod has to leave its node", run=ClusterFaults.evict),
    **EVERYWHERE_COMMANDS,
    "drain": Command(help="a node takes no pods for a while, and has to be left", run=ClusterFaults.drain),
    "node-gone": Command(
        help="a node is gone; another takes its place (--for-good: not)", run=ClusterFaults.node_gone
    ),
    "node-back": Command(help="a drained node takes pods again", run=ClusterFaults.node_back),
    "cut": Command(help="a node's kubelet is cut off the network", run=ClusterFaults.cut),
    "heal": Command(help="it is back on the network", run=ClusterFaults.heal),
    "api-away": _cluster_command("the API server does not answer", ClusterFaults.api_away),
    "api-back": _cluster_command("it answers again", ClusterFaults.api_back),
    "quota": _cluster_command("the namespace may have --amount chips", ClusterFaults.quota, "amount"),
    "no-quota": _cluster_command("any number of chips", ClusterFaults.no_quota),
}
