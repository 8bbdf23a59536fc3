"""What a stack's configuration says, once read: frozen values that every rule and component takes. No I/O.

`Pulumi.example.yaml` explains every key as a user writes it; `infra.config.reader` makes these values of the keys.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Literal

from contracts.inventory import Capacity
from infra import catalogue
from infra.catalogue import Accelerator, zones

Provisioning = Literal["queued", "direct", "compute", "node-pool"]
DiskMode = Literal["read-write", "read-only"]
Strategy = Literal["first", "race"]
NfsKind = Literal["gateway", "filestore"]
ReleaseChannel = Literal["rapid", "regular", "stable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataDisk:
    """A disk beside the boot disk: made with the slice (`size_gib`), or one that exists (`source`); never both."""

    name: str
    disk_type: str
    size_gib: int | None
    source: str | None
    mode: DiskMode


DEFAULT_BOOT_GIB = 100
"""What the Cloud TPU API and GKE give a host, and what one of Compute Engine has by default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceConfig:
    """One slice, or `count` equal ones that train together (multislice).

    valid_until_s: the queue gives up when the request has waited so long; None: never.
    guaranteed_s: asks for capacity that is there for at least so long; None: no such demand.
    wait_s: how long one `pulumi up` waits for the slice; a request still queued then stays so, and the next waits on.
    reservation: full name, projects/P/locations/Z/reservations/R (or folders/…, organizations/…; R may be "-", any);
    there exactly when capacity is reserved.
    run_duration_s: after how long Google deletes it; None: never by itself. flex-start of TPU VMs has one.
    scale_to_zero: of a node pool: it has nodes only while a run asks for them.
    image, boot_disk_gib: of hosts on Compute Engine. reservation_bound: there, whether a reserved slice ends with its
    reservation. api_reason: why this API serves it where `provisioning` is not written, else empty.
    more_zones: where else than in `zone` it may be, in this order; strategy: whether one zone is asked at a time, each
    for zone_wait_s, or all at once.
    """

    name: str
    accelerator: Accelerator
    zone: str
    capacity: Capacity
    reservation: str | None
    provisioning: Provisioning
    count: int
    runtime_version: str
    valid_until_s: int | None
    guaranteed_s: int | None
    wait_s: int
    labels: Mapping[str, str]
    boot_disk_kms_key: str | None
    data_disks: tuple[DataDisk, ...]
    more_zones: tuple[str, ...] = ()
    strategy: Strategy = "first"
    zone_wait_s: int = 0
    scale_to_zero: bool = False
    run_duration_s: int | None = None
    image: str = ""
    boot_disk_gib: int = DEFAULT_BOOT_GIB
    reservation_bound: bool = False
    api_reason: str = ""

    @property
    def in_cluster(self) -> bool:
        """Whether it is node pools of a cluster, and no TPU VMs."""
        return self.provisioning == "node-pool"

    @property
    def on_compute(self) -> bool:
        """Whether Compute Engine makes it, and not the Cloud TPU API."""
        return self.provisioning == "compute"

    @property
    def boot_disk_type(self) -> str | None:
        """The type of the boot disks that are billed beside the chips; None: the Cloud TPU API's, which are not."""
        kind = self.accelerator.node_kind if self.in_cluster or self.on_compute else None
        return kind.boot_disk_type if kind else None

    @property
    def zones(self) -> tuple[str, ...]:
        """Every zone where it may be, `zone` first."""
        return (self.zone, *self.more_zones)

    @property
    def zones_text(self) -> str:
        """Its zones in words: us-central1-a, us-west4-a or europe-west4-b."""
        *other_zones, last = self.zones
        return f"{', '.join(other_zones)} or {last}" if other_zones else last

    @property
    def region(self) -> str:
        return catalogue.zone_region(self.zone)

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions of all its zones, without repetition."""
        return tuple(dict.fromkeys(catalogue.zone_region(zone) for zone in self.zones))

    @property
    def hosts(self) -> int:
        """VMs of all `count` slices together."""
        return self.accelerator.hosts * self.count

    @property
    def chips(self) -> int:
        """Chips of all `count` slices together."""
        return self.accelerator.chips * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketConfig:
    """The bucket for runs and data. Objects under `tmp/` are deleted after `temporary_days`."""

    name: str
    region: str
    soft_delete_days: int
    temporary_days: int


GATEWAY_BOOT_GIB = 20
GATEWAY_DISK_TYPE = "pd-balanced"
"""Of both disks of the gateway."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NfsConfig:
    """A file system that all hosts mount at `mount`: served by a small VM (gateway), or by Filestore."""

    kind: NfsKind
    zone: str
    size_gib: int
    machine_type: str
    mount: str

    @property
    def region(self) -> str:
        return catalogue.zone_region(self.zone)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """existing: the name of a network that is there already; None: one is made, with a subnet and NAT in each region.

    subnetwork: of the existing network, the same name in every region; None: that of the network (auto mode).
    """

    existing: str | None
    subnetwork: str | None
    external_addresses: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Who may open an SSH tunnel through IAP, as IAM principals (user:…, group:…, serviceAccount:…).

    Administrators are those that become root on the hosts; members log in as themselves.
    """

    members: tuple[str, ...]
    administrators: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """The repository of the training images, and their references by digest, by stack name, for the inventory."""

    repository: str
    region: str
    keep: int
    references: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Where the keeper sends notifications: for each channel, the secret in Secret Manager that holds its address."""

    slack: str | None
    webhook: str | None
    smtp: str | None

    @property
    def secrets(self) -> tuple[str, ...]:
        """The names of all secrets, each once."""
        return tuple(dict.fromkeys(secret for secret in (self.slack, self.webhook, self.smtp) if secret))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrantLine:
    """One line of a TPU Research Cloud grant. until: its last day; None: unknown."""

    generation: str
    zone: str
    chips: int
    capacity: Capacity
    until: datetime.date | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The cluster of the slices that are node pools: one that is made (GKE), or that of a kubeconfig's `context`.

    zone: of its control plane; slices may be in the other zones of the region. authorized_networks: who reaches the API
    server by its address, as CIDR blocks; empty: it has none, and is reached by its DNS endpoint.
    """

    context: str | None
    zone: str
    release_channel: ReleaseChannel
    authorized_networks: tuple[str, ...]
    namespace: str
    service_account: str

    @property
    def region(self) -> str:
        return catalogue.zone_region(self.zone)

    @property
    def machine_type(self) -> str:
        """Of the one node that GKE's own pods are on, and JobSet's and Kueue's where they are installed."""
        return "e2-standard-4" if "e2" in zones.families_in(self.zone) else "n1-standard-4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allowances:
    """What is refused unless the user allows it explicitly."""

    unlisted: bool
    billable: bool
    cross_region: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole stack. `grant` empty: everything is billed. `protect`: data is not deleted by `pulumi destroy`.

    keeper: runs are watched and brought back by a program on the gateway; it has a bucket then.
    """

    project: str
    stack: str
    slices: tuple[SliceConfig, ...]
    bucket: BucketConfig | None
    nfs: NfsConfig | None
    cluster: ClusterConfig | None
    network: NetworkConfig
    access: AccessConfig
    images: ImagesConfig
    keeper: bool
    notify: NotifyConfig
    grant: tuple[GrantLine, ...]
    allow: Allowances
    budget_usd_per_hour: float | None
    idle_hours: float | None
    protect: bool

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region that has a VM, in the order of the configuration."""
        slice_regions = [
            region
            for slice_config in self.slices
            for region in slice_config.regions
            if not self.is_elsewhere(slice_config)
        ]
        other_regions = [*([self.nfs.region] if self.nfs else []), *([self.gke.region] if self.gke else [])]
        return tuple(dict.fromkeys([*slice_regions, *other_regions]))

    @property
    def gke(self) -> ClusterConfig | None:
        """The cluster, where it is the stack's own."""
        return self.cluster if self.cluster is not None and self.cluster.context is None else None

    def is_elsewhere(self, slice_config: SliceConfig) -> bool:
        """Whether a slice is in a cluster that is not the stack's, so that nothing is made or paid for it here."""
        return slice_config.in_cluster and self.gke is None

    @property
    def has_machines(self) -> bool:
        """Whether people log in to machines of it: TPU VMs or a gateway. All else runs in a cluster.

        A stack with neither slices nor a cluster is one whose TPU VMs have been returned for now.
        """
        vms = any(not slice_config.in_cluster for slice_config in self.slices)
        return vms or self.gateway is not None or self.cluster is None

    @property
    def gateway(self) -> NfsConfig | None:
        """The NFS that is served by a VM of the stack, where it is."""
        return self.nfs if self.nfs is not None and self.nfs.kind == "gateway" else None


class ConfigError(ValueError):
    """The configuration is wrong. `problems`: every mistake, each with its path, value, rule and remedy."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
