"""Contract 1, the inventory: which hosts there are and how they are reached. Standard library only.

`pulumi up` exports it, `launch` reads it; it can also be written by hand for machines that Pulumi did not make.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

VERSION = 1
CONTROL = "control"
"""The folder of a stack's bucket, beside `runs/`, whose documents say what is wanted. Jobs cannot write it."""
SPECIFICATION, RECORDED = "stack.json", "inventory.json"
"""Of the control documents: what `pulumi up` says the slices are made of, and which were made again since."""

Reach = Literal["local", "direct", "gateway", "iap"]
Capacity = Literal["on-demand", "spot", "reserved", "flex-start"]
"""flex-start: for at most seven days, from Google's queue."""


class InventoryError(ValueError):
    """The text is no inventory that this version can read; the message names the place and the rule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One worker. `index`: its place in worker order. `reach`: how a launcher connects to it (local: without SSH)."""

    index: int
    name: str
    internal_address: str
    external_address: str | None
    user: str | None
    host_keys: tuple[str, ...]
    reach: Reach


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodePool:
    """The nodes of a cluster that are one slice. A run's pods are its hosts, so that slice has no hosts of its own.

    accelerator: the nodes' label cloud.google.com/gke-tpu-accelerator; Slice.topology is their gke-tpu-topology.
    nodes: of each of the slice's `count` equal slices. reservation: the name that nodes of capacity reserved ask for.
    scales_to_zero: whether there are nodes only while a run wants them; in an existing cluster they are others'
    at all other times.
    """

    machine_type: str
    accelerator: str
    nodes: int
    reservation: str | None = None
    scales_to_zero: bool = False

    @property
    def chips_per_node(self) -> int:
        """The value of google.com/tpu in a pod's request: 4 for ct5lp-hightpu-4t; for TPU7x, half of the devices.

        Raises:
            InventoryError: the machine type does not end in a number of chips.
        """
        number = self.machine_type.rpartition("-")[2].removesuffix("t")
        if not number.isdecimal():
            raise InventoryError(
                f"inventory: machine type {self.machine_type!r} does not end in -Nt, N being its chips"
            )
        return int(number)


def is_made_again(before: str, now: str) -> bool:
    """Whether a slice whose `created` was `before` has been made again since. "": not known, which shows nothing."""
    return bool(before and now) and before != now


MOMENTS = ("created", "active_at", "ends_at")
"""Of the fields of a slice: they change when it is made again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """Hosts that train together, in worker order.

    origin: "queued-resource ID", "node ID", "group NAME", "instance NAME", "node-pool NAME" or "local".

    count: 1, or of how many equal slices it is made (multislice): `accelerator_type` and `topology` are those of each,
    and the hosts of the first come before those of the second.
    created: when Google made what it is now (RFC 3339), see `is_made_again`; of two entries of a slice it shows the
    newer. "": not known.
    active_at: when its hosts were there, from which on it costs (RFC 3339): `created` may be long before, as of a
    request that waited for capacity. "": not known.
    ends_at: when Google takes it back (RFC 3339), of capacity flex-start for one; "": it has no such time.
    granted_chips: how many of its chips a grant covers; None: not known.
    pool: where it is node pools of the inventory's cluster, called NAME, or NAME-0, NAME-1, … with a count.
    zones: where it may be, if that is more than one zone; `zone` is where it is.
    """

    name: str
    accelerator_type: str
    generation: str
    topology: str
    zone: str
    capacity: Capacity
    origin: str
    count: int
    devices_per_host: int
    hosts: tuple[Host, ...]
    created: str = ""
    active_at: str = ""
    ends_at: str = ""
    zones: tuple[str, ...] = ()
    granted_chips: int | None = None
    pool: NodePool | None = None

    @property
    def ends_s(self) -> float | None:
        """When Google takes it back, in Unix seconds; None: it has no such time."""
        # Python 3.10 reads no Z.
        moment = self.ends_at.replace("Z", "+00:00")
        return datetime.datetime.fromisoformat(moment).timestamp() if moment else None

    @property
    def is_usable(self) -> bool:
        """Whether runs can be started on it: it has hosts, or makes them for a run."""
        return bool(self.hosts) or self.pool is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """The storage of runs and data: a bucket, an NFS mount, both or none."""

    bucket_url: str | None
    bucket_region: str | None
    nfs_source: str | None
    nfs_mount: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gateway:
    """The small VM that serves NFS. It has an internal address only: SSH to it goes through IAP, by name and zone."""

    name: str
    zone: str
    address: str
    host_keys: tuple[str, ...]
    user: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Kubernetes cluster, reached by a kubeconfig or, on GKE, by its endpoint and the user's Google credentials.

    kubeconfig: a path; None: the user's own ($KUBECONFIG, else ~/.kube/config). context: of that file.
    endpoint: an https URL; ca_certificate: what it is checked against, PEM; None: the system's authorities.
    namespace, service_account: what runs of this stack are made in, and act as.
    pod_environment: what every pod finds in its environment besides, such as where a stand-in for a bucket is.
    """

    name: str
    context: str | None
    kubeconfig: str | None = None
    endpoint: str | None = None
    ca_certificate: str | None = None
    namespace: str
    service_account: str
    pod_environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything a launcher needs to know of a stack.

    idle_hours: after how long without a run a slice counts as idle; None: not configured.
    has_keeper: whether somebody resumes its runs and makes its slices again by itself.
    cluster: where the slices with a `pool` are; None: none has one.
    """

    stack: str
    project: str | None
    storage: Storage
    images: dict[str, str]
    gateway: Gateway | None
    slices: tuple[Slice, ...]
    has_keeper: bool = False
    idle_hours: float | None = None
    cluster: Cluster | None = None
    version: int = VERSION

    @property
    def control(self) -> str | None:
        """The folder of its control documents; None where the stack has no bucket."""
        bucket_url = self.storage.bucket_url
        return None if bucket_url is None else f"{bucket_url.rstrip('/')}/{CONTROL}"


def to_json(inventory: Inventory) -> str:
    return json.dumps(dataclasses.asdict(inventory), indent=2)


def from_json(text: str) -> Inventory:
    """The inventory that `text` holds.

    Raises:
        InventoryError: not JSON, another version, or a key that is unknown, of another type, or missing and without a
            default.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InventoryError(
            f"inventory: not JSON: {error}; `pulumi stack output inventory` prints one"
        ) from None
    version = value.get("version") if isinstance(value, dict) else None
    if version != VERSION:
        raise InventoryError(
            f"inventory: version {version!r} cannot be read, this tpu-stack reads version {VERSION}; "
            "run `pulumi up` and `fab` from the same checkout"
        )
    return typing.cast(Inventory, _decode(Inventory, value, "inventory"))


def slices_to_json(slices: Sequence[Slice]) -> str:
    return json.dumps(
        {"version": VERSION, "slices": [dataclasses.asdict(one_slice) for one_slice in slices]}, indent=2
    )


def slices_from_json(text: str) -> tuple[Slice, ...]:
    """The slices that `slices_to_json` has written.

    Raises:
        InventoryError: as `from_json`.
    """
    try:
        value = json.loads(text)
        return tuple(_decode(Slice, entry, f"slices[{index}]") for index, entry in enumerate(value["slices"]))
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, InventoryError):
            raise
        raise InventoryError(f"inventory: no list of slices: {error}") from None


def _decode(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        options = [option for option in arguments if option is not types.NoneType]
        return None if value is None else _decode(options[0], value, path)
    if origin is Literal:
        if value not in arguments:
            raise InventoryError(f"{path}: {value!r} is not one of {', '.join(arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise InventoryError(f"{path}: {value!r} is not a list")
        return tuple(_decode(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise InventoryError(f"{path}: {value!r} is not an object")
        return {key: _decode(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise InventoryError(f"{path}: {value!r} is not of type {kind.__name__}")
    return value


def _decode_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise InventoryError(f"{path}: {value!r} is not an object")
    hints = typing.get_type_hints(kind)
    optional = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    missing = [name for name in hints if name not in value and name not in optional]
    unknown = [name for name in value if name not in hints]
    if missing or unknown:
        parts = [f"{path}.{name} is missing" for name in missing]
        parts += [f"{path}.{name} is not known" for name in unknown]
        raise InventoryError("; ".join(parts))
    present = {name: hint for name, hint in hints.items() if name in value}
    return kind(**{name: _decode(hint, value[name], f"{path}.{name}") for name, hint in present.items()})
