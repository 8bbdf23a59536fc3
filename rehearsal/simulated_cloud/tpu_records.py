"""The things that the simulated Cloud TPU API answers about: nodes with their workers, queued resources, operations.

Each is a record that the cloud changes as time goes on; `render` is the thing as the API answers.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Sequence

from contracts.aliases import Json
from infra.catalogue import Accelerator
from rehearsal.simulated_cloud.capacity import ChipPool, accelerator_config
from rehearsal.simulated_cloud.cloud import Operation
from rehearsal.simulated_cloud.hardware import Hardware
from rehearsal.simulator.api_error import ApiError
from rehearsal.simulator.discovery import timestamp

EMPTY: Json = {"@type": "type.googleapis.com/google.protobuf.Empty"}
TYPES = "type.googleapis.com/google.cloud.tpu.v2."
PORT = 8470

# From a state to those that may follow. A node may also be gone at any time: then it has no state at all.
NODE_EDGES: dict[str, tuple[str, ...]] = {
    "CREATING": ("READY", "PREEMPTED", "TERMINATED", "DELETING"),
    "READY": ("PREEMPTED", "TERMINATED", "REPAIRING", "DELETING"),
    "REPAIRING": ("READY", "PREEMPTED", "TERMINATED", "DELETING"),
    "PREEMPTED": ("DELETING",),
    "TERMINATED": ("DELETING",),
    "DELETING": (),
}
# In these it has lost its chips, and does not get them back by being deleted.
WITHOUT_CHIPS = ("PREEMPTED", "TERMINATED")

# From a state to those that may follow. None leads back to the queue: what was preempted is not served again.
QUEUE_EDGES: dict[str, tuple[str, ...]] = {
    "ACCEPTED": ("WAITING_FOR_RESOURCES", "FAILED", "DELETING"),
    "WAITING_FOR_RESOURCES": ("PROVISIONING", "FAILED", "DELETING"),
    "PROVISIONING": ("ACTIVE", "SUSPENDING", "FAILED", "DELETING"),
    "ACTIVE": ("SUSPENDING", "DELETING"),
    "SUSPENDING": ("SUSPENDED", "DELETING"),
    "SUSPENDED": ("DELETING",),
    "FAILED": ("DELETING",),
    "DELETING": (),
}
QUEUED = ("ACCEPTED", "WAITING_FOR_RESOURCES")
_DATA = {
    "ACCEPTED": "acceptedData",
    "PROVISIONING": "provisioningData",
    "ACTIVE": "activeData",
    "SUSPENDING": "suspendingData",
    "SUSPENDED": "suspendedData",
    "DELETING": "deletingData",
}


@dataclasses.dataclass(kw_only=True)
class Node:
    """A record of the cloud, changed as time goes on. `spec` is what was asked for, less output-only fields.

    `operation` is the one that it is busy with. `number` is nobody else's. `addresses`: of each worker, inside and
    outside, from its first boot on.
    """

    name: str
    spec: Json
    accelerator: Accelerator
    pool: ChipPool
    created: float
    number: int
    queued_resource: str | None = None
    multislice: bool = False
    state: str = "CREATING"
    operation: Operation | None = None
    addresses: tuple[tuple[str, str], ...] = ()
    attributes: dict[tuple[int, str, str], str] = dataclasses.field(default_factory=dict)

    def boot(self, hardware: Hardware) -> None:
        """Boot the node's workers; the first time, they get names, addresses and host keys, which they keep."""
        if self.addresses:
            return
        self.addresses = tuple(hardware.addresses(name) for name in self.instances)
        for worker, name in enumerate(self.instances):
            self.attributes.setdefault((worker, "instance", "hostname"), name)
            self.attributes.setdefault((worker, "hostkeys", "ssh-ed25519"), hardware.host_key(name))

    @property
    def instances(self) -> list[str]:
        """The instance names of its workers, in worker order: t1v-n-1a2b3c4d-w-0."""
        unique = hashlib.sha256(f"{self.name} {self.number}".encode()).hexdigest()[:8]
        return [f"t1v-n-{unique}-w-{worker}" for worker in range(self.accelerator.hosts)]

    def _endpoints(self) -> list[Json]:
        external = self.spec.get("networkConfig", {}).get("enableExternalIps", False)
        endpoints = []
        for inside, outside in self.addresses:
            endpoint: Json = {"ipAddress": inside, "port": PORT}
            if external:
                endpoint["accessConfig"] = {"externalIp": outside}
            endpoints.append(endpoint)
        return endpoints

    def render(self) -> Json:
        """As the API answers."""
        answer = copy.deepcopy(self.spec)
        answer |= {
            "name": self.name,
            "state": self.state,
            "id": str(6_000_000_000_000_000_000 + self.number),
            "createTime": timestamp(self.created),
            "apiVersion": "V2",
            "acceleratorType": self.accelerator.type_name,
            "acceleratorConfig": accelerator_config(self.accelerator),
        }
        scheduling = answer.setdefault("schedulingConfig", {})
        if self.pool.tier in ("spot", "reserved"):
            scheduling[self.pool.tier] = True
        answer["networkConfig"] = {"network": "default", "subnetwork": "default"} | answer.get(
            "networkConfig", {}
        )
        if self.queued_resource is not None:
            answer["queuedResource"] = self.queued_resource
        if self.multislice:
            answer["multisliceNode"] = True
        if self.addresses:
            answer["networkEndpoints"] = self._endpoints()
            answer["health"] = "UNHEALTHY_MAINTENANCE" if self.state == "REPAIRING" else "HEALTHY"
        return answer

    def as_response(self) -> Json:
        """As the operation that made or changed it answers."""
        return self.render() | {"@type": f"{TYPES}Node"}

    def guest_attributes(self) -> list[Json]:
        """What the guest agent of each worker has published."""
        answers = []
        for worker in range(self.accelerator.hosts):
            items = [
                {"namespace": namespace, "key": key, "value": value}
                for (attribute_worker, namespace, key), value in sorted(self.attributes.items())
                if attribute_worker == worker
            ]
            answers.append({"queryPath": "", "queryValue": {"items": items}})
        return answers


@dataclasses.dataclass(kw_only=True)
class QueuedResource:
    """A record of the cloud, changed as time goes on. plans: the nodes that it asks for. limit_s: after which it fails
    if it still waits. run_s: after which its nodes are taken back, of flex-start."""

    name: str
    spec: Json
    plans: list[Node]
    created: float
    limit_s: float | None = None
    run_s: float | None = None
    state: str = "ACCEPTED"
    initiator: str = "USER"
    error: ApiError | None = None
    operation: Operation | None = None
    instances: Sequence[str] = ()

    @property
    def pool(self) -> ChipPool:
        """Of its nodes, which are alike."""
        return self.plans[0].pool

    def render(self) -> Json:
        """As the API answers."""
        state: Json = {"state": self.state, "stateInitiator": self.initiator}
        if self.state in _DATA:
            state[_DATA[self.state]] = {}
        if self.error is not None:
            state["failedData"] = {"error": self.error.as_status()}
        answer = copy.deepcopy(self.spec)
        return answer | {"name": self.name, "createTime": timestamp(self.created), "state": state}

    def as_response(self) -> Json:
        """As the operation that made it answers."""
        return self.render() | {"@type": f"{TYPES}QueuedResource"}


def render_operation(operation: Operation) -> Json:
    """As the API answers. `done` is absent while it runs, as false is from all of Google's answers."""
    metadata: Json = {
        "@type": f"{TYPES}OperationMetadata",
        "createTime": timestamp(operation.created),
        "target": operation.target,
        "verb": operation.verb,
        "apiVersion": "v2",
        "cancelRequested": False,
    }
    answer: Json = {"name": operation.name, "metadata": metadata}
    if operation.ended is not None:
        metadata["endTime"] = timestamp(operation.ended)
        answer["done"] = True
        if isinstance(operation.outcome, ApiError):
            answer["error"] = operation.outcome.as_status()
        else:
            answer["response"] = operation.outcome
    return answer
