"""What a queued resource is to be, read from Pulumi's properties, which the configuration's reader has checked. Pure.

Pulumi hands numbers over as floats and leaves out what is None, so every value is brought into its own form here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
        """Of properties that are all known."""

        def text(key: str) -> str:
            return str(props.get(key) or "")

        def number(key: str, default: int = 0) -> int:
            return int(props.get(key) or default)

        def table(key: str) -> dict[str, str]:
            return {str(name): str(value) for name, value in (props.get(key) or {}).items()}

        return cls(
            project=text("project"),
            zone=text("zone"),
            queued_resource_id=text("queued_resource_id"),
            owner=text("owner"),
            accelerator_type=text("accelerator_type"),
            accelerator_generation=text("accelerator_generation"),
            topology=text("topology"),
            runtime_version=text("runtime_version"),
            capacity=text("capacity"),
            reservation_name=text("reservation_name"),
            node_count=number("node_count", 1),
            guaranteed_s=number("guaranteed_s"),
            valid_until_s=number("valid_until_s"),
            wait_s=number("wait_s"),
            network=text("network"),
            subnetwork=text("subnetwork"),
            external_addresses=bool(props.get("external_addresses")),
            service_account_email=text("service_account_email"),
            metadata=table("metadata"),
            labels=table("labels") | {naming.OWNER_LABEL: text("owner")},
            tags=tuple(str(tag) for tag in props.get("tags") or ()),
            data_disks=tuple(
                Disk(source_disk=str(disk["source_disk"]), mode=str(disk.get("mode") or "read-write"))
                for disk in props.get("data_disks") or ()
            ),
            boot_disk_kms_key=text("boot_disk_kms_key"),
            description=text("description"),
        )


def is_unknown(value: object) -> bool:
    """In a preview, what is known only when something before has been made; Pulumi gives a mark in its place."""
    if isinstance(value, Mapping):
        return any(is_unknown(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(is_unknown(item) for item in value)
    return isinstance(value, Unknown)
