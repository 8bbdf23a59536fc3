"""What a queued resource is to be, read from Pulumi's properties, which the configuration's reader has checked. Pure.

Pulumi hands numbers over as floats and leaves out what is None, so every value is brought into its own form here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pulumi.output import Unknown

from infra import naming

Props = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """A disk that exists. mode: "read-write" or "read-only"."""

    source_disk: str
    mode: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """The properties of `infra.queued_resource.QueuedResourceArgs`, all known. `labels` has the owner's."""

    project: str
    zone: str
    queued_resource_id: str
    owner: str
    accelerator_type: str
    accelerator_generation: str
    topology: str
    runtime_version: str
    capacity: str
    reservation_name: str
    node_count: int
    guaranteed_s: int
    valid_until_s: int
    wait_s: int
    network: str
    subnetwork: str
    external_addresses: bool
    service_account_email: str
    metadata: Mapping[str, str]
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    data_disks: tuple[Disk, ...]
    boot_disk_kms_key: str
    description: str

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    @property
    def name(self) -> str:
        return f"{self.parent}/queuedResources/{self.queued_resource_id}"

    @property
    def node_ids(self) -> tuple[str, ...]:
        """In their order: the queued resource's own id, or, of several, with their numbers behind it."""
        if self.node_count == 1:
            return (self.queued_resource_id,)
        return tuple(f"{self.queued_resource_id}-{number}" for number in range(self.node_count))

    @property
    def hardware(self) -> str:
        """For messages: 2 × v5litepod-16 (spot) in us-central1-a."""
        kind = self.accelerator_type or f"{self.accelerator_generation} {self.topology}"
        many = f"{self.node_count} × " if self.node_count > 1 else ""
        return f"{many}{kind} ({self.capacity}) in {self.zone}"

    @property
    def how_to_delete(self) -> str:
        """The command by which a person deletes it."""
        return (
            f"gcloud compute tpus queued-resources delete {self.queued_resource_id}"
            f" --project={self.project} --zone={self.zone} --force"
        )

    @classmethod
    def of(cls, props: Props) -> Spec:
        """Of properties that are all known; what is absent is empty, zero or false."""
        values = {
            field.name: FORMS[str(field.type)](props.get(field.name)) for field in dataclasses.fields(cls)
        }
        labels = {**values["labels"], naming.OWNER_LABEL: values["owner"]}
        return cls(**values | {"labels": labels, "node_count": values["node_count"] or 1})


FORMS: dict[str, Callable[[Any], Any]] = {
    "str": lambda value: str(value or ""),
    "int": lambda value: int(value or 0),
    "bool": bool,
    "Mapping[str, str]": lambda value: {str(key): str(each) for key, each in (value or {}).items()},
    "tuple[str, ...]": lambda value: tuple(str(each) for each in value or ()),
    "tuple[Disk, ...]": lambda value: tuple(
        Disk(source_disk=str(each["source_disk"]), mode=str(each.get("mode") or "read-write"))
        for each in value or ()
    ),
}
"""By the type of a field: its form, of a value as Pulumi hands it over."""


def is_unknown(value: object) -> bool:
    """In a preview, what is known only when something before has been made; Pulumi gives a mark in its place."""
    if isinstance(value, Mapping):
        return any(is_unknown(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(is_unknown(item) for item in value)
    return isinstance(value, Unknown)
