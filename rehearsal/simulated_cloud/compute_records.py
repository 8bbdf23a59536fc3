"""The things that the simulated Compute Engine answers about: instances, managed groups of them, operations.

Each is a record that the cloud changes as time goes on; `render` is the thing as the API answers.
"""

import base64
import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from contracts.aliases import Json
from rehearsal.simulated_cloud.capacity import ChipPool
from rehearsal.simulated_cloud.cloud import Operation
from rehearsal.simulated_cloud.hardware import Hardware
from rehearsal.simulator.api_error import ApiError
from rehearsal.simulator.discovery import timestamp

ROOT = "https://www.googleapis.com/compute/v1/"
STOCK_OUT = "ZONE_RESOURCE_POOL_EXHAUSTED"


def url(name: str) -> str:
    return f"{ROOT}{name}"


def last_part(name: str) -> str:
    return name.rpartition("/")[2]


def place(name: str) -> str:
    """The zone or region that a thing is in, projects/P/zones/Z."""
    return "/".join(name.split("/")[:4])


def fingerprint(value: object) -> str:
    """What a change has to name, so that it changes what its caller has read."""
    return base64.b64encode(hashlib.sha256(repr(value).encode()).digest()[:8]).decode()


@dataclasses.dataclass(kw_only=True)
class Instance:
    """name: projects/P/zones/Z/instances/N. properties: of its template, with its own labels and metadata.

    group: the name of the group that has made it. worker: its index there. valid_s: how long it waits for capacity;
    None: it does not. ends: when it is deleted by itself, unix seconds.
    """

    name: str
    properties: Json
    pool: ChipPool
    chips: int
    number: int
    created: float
    group: str | None = None
    worker: int = 0
    valid_s: float | None = None
    status: str = "PROVISIONING"
    ends: float | None = None
    operation: Operation | None = None
    addresses: tuple[tuple[str, str], ...] = ()
    host_key: str = ""

    @property
    def instances(self) -> list[str]:
        """The name of its machine."""
        return [last_part(self.name)]

    def boot(self, hardware: Hardware) -> None:
        if not self.addresses:
            (name,) = self.instances
            self.addresses, self.host_key = (hardware.addresses(name),), hardware.host_key(name)

    @property
    def guest_attributes(self) -> list[tuple[str, str, str]]:
        """(namespace, key, value) of what its guest agent and its start-up script publish once it runs."""
        if self.status != "RUNNING":
            return []
        return [
            ("hostkeys", "ssh-ed25519", self.host_key),
            ("tpu-stack", "worker-id", str(self.worker)),
        ]

    def render(self) -> Json:
        properties = self.properties
        metadata = [{"key": key, "value": value} for key, value in sorted(self.metadata.items())]
        answer: Json = {
            **_header("compute#instance", self),
            "status": self.status,
            "machineType": url(f"{place(self.name)}/machineTypes/{properties['machineType']}"),
            "labels": self.labels,
            "labelFingerprint": fingerprint(self.labels),
            "metadata": {"kind": "compute#metadata", "items": metadata, "fingerprint": fingerprint(metadata)},
            "tags": self.tags | {"fingerprint": fingerprint(self.tags)},
            "scheduling": copy.deepcopy(properties.get("scheduling", {})),
            "networkInterfaces": [self._interface()],
        }
        for name in ("serviceAccounts", "reservationAffinity"):
            if name in properties:
                answer[name] = copy.deepcopy(properties[name])
        if self.ends is not None:
            answer["resourceStatus"] = {"scheduling": {"terminationTimestamp": timestamp(self.ends)}}
        return answer

    def _interface(self) -> Json:
        asked: Json = copy.deepcopy(next(iter(self.properties.get("networkInterfaces", [])), {}))
        if self.addresses:
            inside, outside = self.addresses[0]
            asked["networkIP"] = inside
            for access in asked.get("accessConfigs", []):
                access["natIP"] = outside
        return {"name": "nic0"} | asked

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.properties.get("labels", {}))

    @property
    def tags(self) -> Json:
        return {"items": list(self.properties.get("tags", {}).get("items", []))}

    @property
    def metadata(self) -> dict[str, str]:
        items = self.properties.get("metadata", {}).get("items", [])
        own = {"created-by": self.group} if self.group else {}
        return {item["key"]: item.get("value", "") for item in items} | own


@dataclasses.dataclass(kw_only=True)
class Group:
    """name: projects/P/zones/Z/instanceGroupManagers/N. body: as it was asked for.

    phase: waiting (for capacity), creating, standing or deleting. topology: the state of its accelerator topology.
    trouble: of the last look for capacity. instances: none; its machines are things of their own.
    """

    name: str
    body: Json
    pool: ChipPool
    chips: int
    number: int
    created: float
    phase: str = "waiting"
    topology: str = "INCOMPLETE"
    trouble: ApiError | None = None
    operation: Operation | None = None
    instances: Sequence[str] = ()

    @property
    def state(self) -> str:
        """Of its topology, or of what is being done with it."""
        return self.topology if self.phase == "standing" else self.phase.upper()

    @property
    def size(self) -> int:
        return int(self.body["targetSize"])

    @property
    def has_policy(self) -> bool:
        return bool(self.body.get("resourcePolicies", {}).get("workloadPolicy"))

    def instance_name(self, number: int) -> str:
        """Of the base name's hash symbols each is a digit; without them it is followed by letters."""
        base = str(self.body["baseInstanceName"])
        digits = len(base) - len(base.rstrip("#"))
        return f"{base.rstrip('#')}{number + 1:0{digits}d}" if digits else f"{base}-{number:04x}"

    def render(self, topology: str, count: int) -> Json:
        """topology: of its policy. count: of its instances."""
        is_busy = self.phase in ("waiting", "creating")
        actions: dict[str, Any] = dict.fromkeys(
            ("abandoning", "creating", "creatingWithoutRetries", "deleting", "none", "recreating", "refreshing",
             "restarting", "resuming", "starting", "stopping", "suspending", "verifying"), 0,
        )  # fmt: skip
        actions["creating"] = self.size if is_busy else 0
        actions["deleting"] = max(count, 1) if self.phase == "deleting" else 0
        actions["none"] = 0 if is_busy or self.phase == "deleting" else count
        status: Json = {"isStable": self.phase == "standing"}
        if self.has_policy:
            bulk: Json = {"inProgress": is_busy}
            if self.trouble is not None:
                bulk["lastProgressCheck"] = {"error": errors(self.trouble)}
            status["bulkInstanceOperation"] = bulk
            status["appliedAcceleratorTopologies"] = [
                {"acceleratorTopology": topology, "state": self.topology}
            ]
        return copy.deepcopy(self.body) | {
            **_header("compute#instanceGroupManager", self),
            "fingerprint": fingerprint(self.body),
            "currentActions": actions,
            "status": status,
        }


def _header(kind: str, thing: Instance | Group) -> Json:
    """What all things of Compute Engine begin with."""
    return {
        "kind": kind,
        "id": str(thing.number),
        "name": last_part(thing.name),
        "zone": url(place(thing.name)),
        "selfLink": url(thing.name),
        "creationTimestamp": timestamp(thing.created),
    }


def render_operation(operation: Operation) -> Json:
    """As the API answers."""
    where, is_done = place(operation.name), operation.ended is not None
    answer: Json = {
        "kind": "compute#operation",
        "id": str(operation.number),
        "name": last_part(operation.name),
        where.split("/")[2].rstrip("s"): url(where),
        "operationType": operation.verb,
        "targetLink": url(operation.target),
        "insertTime": timestamp(operation.created),
        "status": "DONE" if is_done else "RUNNING",
        "progress": 100 if is_done else 0,
    }
    if isinstance(operation.outcome, ApiError):
        answer |= {"error": errors(operation.outcome), "httpErrorStatusCode": 503}
    return answer


def errors(error: ApiError) -> Json:
    """As operations and groups carry an error. Its status is a code of Compute Engine."""
    return {"errors": [{"code": error.status, "message": error.message}]}
