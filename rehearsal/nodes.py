"""A TPU node: what was asked for, its state, its workers, and how the API shows it."""

import copy
import dataclasses
import hashlib
from typing import Any

from infra.catalogue import Accelerator
from rehearsal.clock import timestamp
from rehearsal.hardware import Hardware
from rehearsal.offers import config_of
from rehearsal.operations import Operation
from rehearsal.pools import Hold, Pool

Json = dict[str, Any]

# From a state to those that may follow. A node may also be gone at any time: then it has no state at all.
EDGES: dict[str, tuple[str, ...]] = {
    "CREATING": ("READY", "PREEMPTED", "TERMINATED", "DELETING"),
    "READY": ("PREEMPTED", "TERMINATED", "REPAIRING", "RESTARTING", "STOPPING", "DELETING"),
    "REPAIRING": ("READY", "PREEMPTED", "TERMINATED", "DELETING"),
    "RESTARTING": ("READY", "PREEMPTED", "TERMINATED", "DELETING"),
    "STOPPING": ("STOPPED", "DELETING"),
    "STOPPED": ("STARTING", "DELETING"),
    "STARTING": ("READY", "STOPPED", "PREEMPTED", "TERMINATED", "DELETING"),
    "PREEMPTED": ("DELETING",),
    "TERMINATED": ("DELETING",),
    "DELETING": (),
}
# In these it has lost its chips, and does not get them back by being deleted.
WITHOUT_CHIPS = ("STOPPED", "PREEMPTED", "TERMINATED")
PORT = 8470


@dataclasses.dataclass(kw_only=True)
class Node:
    """A record of the cloud, changed as time goes on. `spec` is what was asked for, less output-only fields.

    `placed`: it has its chips. `operation` is the one that it is busy with. `incarnation` is its number among all
    nodes ever. `addresses`: of each worker, inside and outside, from its first boot on.
    """

    name: str
    spec: Json
    accelerator: Accelerator
    pool: Pool
    created: float
    incarnation: int
    queued_resource: str | None = None
    multislice: bool = False
    state: str = "CREATING"
    placed: bool = False
    operation: Operation | None = None
    addresses: tuple[tuple[str, str], ...] = ()
    attributes: dict[tuple[int, str, str], str] = dataclasses.field(default_factory=dict)

    @property
    def parent(self) -> str:
        """projects/…/locations/…"""
        return self.name.rpartition("/nodes/")[0]

    @property
    def id(self) -> str:
        """The last part of its name."""
        return self.name.rpartition("/")[2]

    def hold(self) -> Hold:
        """The chips that it takes of its pool."""
        return Hold(pool=self.pool, chips=self.accelerator.chips)

    def boot(self, hardware: Hardware) -> None:
        """Its workers come up; the first time they get names, addresses and host keys, which stay theirs."""
        if self.addresses:
            return
        self.addresses = tuple(hardware.addresses(name) for name in self.instances)
        for worker, name in enumerate(self.instances):
            self.attributes.setdefault((worker, "instance", "hostname"), name)
            self.attributes.setdefault((worker, "hostkeys", "ssh-ed25519"), hardware.host_key(name))

    @property
    def instances(self) -> list[str]:
        """The instance names of its workers, in worker order: t1v-n-1a2b3c4d-w-0."""
        return [f"{self.instance_prefix}-w-{worker}" for worker in range(self.accelerator.hosts)]

    @property
    def instance_prefix(self) -> str:
        """What its workers' instance names begin with: t1v-n-1a2b3c4d."""
        return f"t1v-n-{hashlib.sha256(f'{self.name} {self.incarnation}'.encode()).hexdigest()[:8]}"

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
            "id": str(6_000_000_000_000_000_000 + self.incarnation),
            "createTime": timestamp(self.created),
            "apiVersion": "V2",
            "acceleratorType": self.accelerator.type_name,
            "acceleratorConfig": config_of(self.accelerator),
        }
        scheduling = answer.setdefault("schedulingConfig", {})
        if self.pool.tier != "on-demand":
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

    def guest_attributes(self, query_path: str, workers: list[int]) -> list[Json]:
        """Of each worker, what its guest agent has published below a path: "", "namespace/" or "namespace/key"."""
        namespace, _, key = query_path.strip("/").partition("/")
        found = []
        for worker in workers:
            items = [
                {"namespace": at, "key": name, "value": value}
                for (of, at, name), value in sorted(self.attributes.items())
                if of == worker and namespace in ("", at) and key in ("", name)
            ]
            found.append({"queryPath": query_path, "queryValue": {"items": items}})
        return found
