"""A rehearsal whose slice is nodes of a cluster: that cluster, and the inventory that names it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import kubernetes.client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from contracts.inventory import Cluster as ClusterRecord
from contracts.inventory import Inventory, NodePool, Slice, Storage, to_json
from infra.catalogue import Accelerator
from rehearsal.daemon.cluster_faults import POOL_LABEL, ClusterFaults
from rehearsal.daemon.control_socket import Caller
from rehearsal.daemon.host_rehearsal import Setup
from rehearsal.daemon.rehearsal_stack import ACCOUNT, BUCKET, default_zone
from rehearsal.kubernetes import controllers
from rehearsal.kubernetes.control_plane import CLUSTER_PROGRAMS, CONTEXT, ProgramName, find_or_build
from rehearsal.kubernetes.nodes import ClusterNode
from rehearsal.kubernetes.rehearsal_cluster import NAMESPACE, SERVICE_ACCOUNT, RehearsalCluster
from rehearsal.state import SLICE, STACK, RehearsalError

CLUSTER = "rehearsal"
ANSWER_LIMIT_S = 30


def pool(accelerator: Accelerator, addresses: Sequence[str], slices: int) -> list[ClusterNode]:
    """Nodes as GKE makes them for spot slices of that type, one for each address, slice after slice. Pure."""
    assert accelerator.node_kind is not None and accelerator.machine_type is not None
    labels = {
        "cloud.google.com/gke-tpu-accelerator": accelerator.node_kind.label,
        "cloud.google.com/gke-tpu-topology": accelerator.topology,
        "cloud.google.com/gke-spot": "true",
        "node.kubernetes.io/instance-type": accelerator.machine_type,
    }

    def pool_name(index: int) -> str:
        return SLICE if slices == 1 else f"{SLICE}-{index // accelerator.hosts}"

    return [
        ClusterNode(
            index=index,
            name=f"node-{index}",
            address=address,
            chips=accelerator.chips_per_host,
            labels={**labels, POOL_LABEL: pool_name(index)},
        )
        for index, address in enumerate(addresses)
    ]


def inventory(
    accelerator: Accelerator,
    slices: int,
    bucket: str,
    cluster: RehearsalCluster,
    pod_environment: Mapping[str, str],
) -> str:
    """The inventory as `pulumi up` would export it: spot slices of a node pool each, and a bucket. Pure."""
    assert accelerator.node_kind is not None and accelerator.machine_type is not None
    tpu_slice = Slice(
        name=SLICE,
        accelerator_type=accelerator.type_name,
        generation=accelerator.generation.name,
        topology=accelerator.topology,
        zone=default_zone(accelerator),
        capacity="spot",
        origin=f"node-pool {SLICE}",
        count=slices,
        devices_per_host=accelerator.chips_per_host * accelerator.generation.devices_per_chip,
        hosts=(),
        pool=NodePool(
            machine_type=accelerator.machine_type,
            accelerator=accelerator.node_kind.label,
            nodes=accelerator.hosts,
        ),
    )
    record = ClusterRecord(
        name=CLUSTER,
        context=CONTEXT,
        kubeconfig=str(cluster.kubeconfig),
        namespace=NAMESPACE,
        service_account=SERVICE_ACCOUNT,
        pod_environment=dict(pod_environment),
    )
    return to_json(
        Inventory(
            stack=STACK,
            project=None,
            storage=Storage(bucket_url=f"gs://{bucket}", bucket_region=None, nfs_source=None, nfs_mount=None),
            images=dict(cluster.images),
            gateway=None,
            slices=(tpu_slice,),
            cluster=record,
        )
    )


def added(slices: int, queue: str) -> tuple[controllers.ControllerName, ...]:
    """The controllers that runs on several slices and in queues need, beside Kubernetes' own. Pure."""
    return (*(("jobset",) if slices > 1 else ()), *(("kueue",) if queue else ()))


def programs_for(slices: int, queue: str) -> tuple[ProgramName, ...]:
    """The programs of such a cluster. Pure."""
    return (*CLUSTER_PROGRAMS, *added(slices, queue))


class ClusterRehearsal:
    """A cluster with a node for each host of its slices. See `HostRehearsal`."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._folder, self._say = setup, setup.folder, setup.say
        self._exits = contextlib.ExitStack()
        self._cluster: RehearsalCluster | None = None
        self.environment: dict[str, str] = {}
        self.faults: ClusterFaults | None = None
        self.inventory = self.tpu_url = ""
        self.instances: dict[str, str] = {}

    def close(self) -> None:
        self._exits.close()

    def open(self) -> None:
        slices, queue = self._setup.request.slices, self._setup.request.queue
        programs = find_or_build(os.environ, self._say, programs_for(slices, queue))
        self._setup.require_going_on()
        machines = self._exits.enter_context(self._setup.machines())
        self._setup.require_going_on()
        accelerator = self._setup.accelerator
        addresses = machines.network.addresses(accelerator.hosts * slices)
        cluster = self._cluster = self._exits.enter_context(
            RehearsalCluster(
                folder=self._folder / "kubernetes",
                machines=machines,
                programs=programs,
                pool=pool(accelerator, addresses, slices),
                user=ACCOUNT,
                say=self._say,
                added=added(slices, queue),
                queue=queue,
            )
        )
        machines.storage.make_bucket(BUCKET)
        self.faults = ClusterFaults(cluster=cluster, machines=machines, say=self._say)
        self._exits.callback(self.faults.close)
        self.inventory = inventory(accelerator, slices, BUCKET, cluster, machines.environment)
        self.environment = {
            **machines.environment,
            "TPU_STACK_REHEARSAL_PYTHON": sys.executable,
            "KUBECONFIG": str(cluster.kubeconfig),
        }

    def is_ready(self) -> None:
        """Nothing is left to do."""

    def pulumi(self, _arguments: list[str], _caller: Caller) -> Mapping[str, Any]:
        raise RehearsalError("this rehearsal is a cluster that Pulumi has not made; fab rehearsal status")

    def destroy(self, _caller: Caller) -> None:
        """Everything goes with the containers."""

    def status(self) -> Mapping[str, Any]:
        """The state of nodes and pods from the API server, or the problem if it does not answer."""
        if self._cluster is None:
            return {}
        core = kubernetes.client.CoreV1Api(self._cluster.api)
        try:
            cluster_nodes = core.list_node(_request_timeout=ANSWER_LIMIT_S).items
            pods = core.list_namespaced_pod(NAMESPACE, _request_timeout=ANSWER_LIMIT_S).items
        except (ApiException, HTTPError) as error:
            problem = f"the API server does not answer: {error}"
            return {"cluster": {"nodes": [], "pods": [], "problem": problem}}
        cluster_state = {
            "nodes": [{"name": node.metadata.name, "is": _node_word(node)} for node in cluster_nodes],
            "pods": [
                {
                    "name": pod.metadata.name,
                    "node": pod.spec.node_name or "no node",
                    "is": pod.status.phase,
                }
                for pod in pods
            ],
            "problem": "",
        }
        return {"cluster": cluster_state}


def _node_word(node: Any) -> str:
    ready = {condition.type: condition.status for condition in node.status.conditions or []}.get(
        "Ready"
    ) == "True"
    word = "ready" if ready else "not ready"
    return f"{word}, takes no pods" if node.spec.unschedulable else word
