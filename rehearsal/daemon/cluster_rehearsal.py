"""A rehearsal whose slice is nodes of a cluster: that cluster, and the inventory that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes.client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from contracts.aliases import Say
from contracts.inventory import Cluster as ClusterRecord
from contracts.inventory import Inventory, NodePool, Slice, Storage, to_json
from infra.catalogue import Accelerator
from rehearsal.daemon.cluster_faults import POOL_LABEL, ClusterFaults
from rehearsal.daemon.rehearsal_stack import ACCOUNT, BUCKET, default_zone
from rehearsal.kubernetes import controllers
from rehearsal.kubernetes.cluster import NAMESPACE, SERVICE_ACCOUNT, RehearsalCluster
from rehearsal.kubernetes.control_plane import CLUSTER_PROGRAMS, CONTEXT
from rehearsal.kubernetes.control_plane import ProgramName as ProgramName
from rehearsal.kubernetes.nodes import ClusterNode
from rehearsal.machines.machines import Machines
from rehearsal.state import SLICE, STACK

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
    """A context: a cluster with a node for each host of its slices.

    folder: a new one. programs: of `programs_for`. accelerator: of each slice. faults: what can go wrong.
    """

    inventory: str
    faults: ClusterFaults

    def __init__(
        self,
        *,
        folder: Path,
        machines: Machines,
        programs: Mapping[ProgramName, Path],
        accelerator: Accelerator,
        slices: int,
        queue: str,
        say: Say,
    ) -> None:
        addresses = machines.network.addresses(accelerator.hosts * slices)
        self._accelerator, self._slices, self._machines, self._say = accelerator, slices, machines, say
        self.cluster = RehearsalCluster(
            folder=folder,
            machines=machines,
            programs=programs,
            pool=pool(accelerator, addresses, slices),
            user=ACCOUNT,
            say=say,
            added=added(slices, queue),
            queue=queue,
        )

    def __enter__(self) -> ClusterRehearsal:
        """Raises MachinesError."""
        cluster, storage = self.cluster.__enter__(), self._machines.storage
        storage.make_bucket(BUCKET)
        self.faults = ClusterFaults(cluster=cluster, machines=self._machines, say=self._say)
        self.inventory = inventory(self._accelerator, self._slices, BUCKET, cluster, storage.environment)
        return self

    def __exit__(self, *_: object) -> None:
        self.faults.close()
        self.cluster.__exit__()

    def status(self) -> Mapping[str, Any]:
        """The state of nodes and pods from the API server, or the problem if it does not answer."""
        core = kubernetes.client.CoreV1Api(self.cluster.api)
        try:
            cluster_nodes = core.list_node(_request_timeout=ANSWER_LIMIT_S).items
            pods = core.list_namespaced_pod(NAMESPACE, _request_timeout=ANSWER_LIMIT_S).items
        except (ApiException, HTTPError) as error:
            return {"nodes": [], "pods": [], "problem": f"the API server does not answer: {error}"}
        return {
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


def _node_word(node: Any) -> str:
    ready = {condition.type: condition.status for condition in node.status.conditions or []}.get(
        "Ready"
    ) == "True"
    word = "ready" if ready else "not ready"
    return f"{word}, takes no pods" if node.spec.unschedulable else word
