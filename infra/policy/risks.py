"""What is risky in a configuration: slices that may not come, what it opens to whom, and what can be lost. Pure."""

from __future__ import annotations

from infra.catalogue import generations, zones
from infra.config import Config, SliceConfig
from infra.policy.findings import Finding, note, refused, slice_path, warning

LARGE_SPOT_CHIPS = 64
OLD = ("v2", "v3")


def supply(config: Config) -> tuple[Finding, ...]:
    """How likely each slice comes as it is asked for, and what happens when it does not."""
    of_slices = tuple(
        found
        for index, each in enumerate(config.slices)
        for found in (
            *_unlisted(config, index, each),
            *_ai_zone(index, each),
            *_old(index, each),
            *_direct(config, index, each),
            *_large_spot(index, each),
        )
    )
    return (*of_slices, *_not_known(config))


def _not_known(config: Config) -> list[Finding]:
    """What the reader takes only where `allow-unlisted` is set: newer than our lists, or misspelt."""
    named: list[tuple[str, str, bool]] = []
    for index, each in enumerate(config.slices):
        version = each.runtime_version
        named.append((slice_path(index, "runtime-version"), version, generations.is_runtime_version(version)))
    for index, line in enumerate(config.grant):
        named.append((f"tpu-stack:grant[{index}].zone", line.zone, line.zone in zones.ZONES))
    if config.bucket is not None:
        region = config.bucket.region
        named.append(("tpu-stack:storage.bucket.region", region, region in zones.REGIONS))
    if config.nfs is not None:
        nfs = config.nfs
        named.append(("tpu-stack:storage.nfs.zone", nfs.zone, nfs.zone in zones.ZONES))
        if nfs.kind == "gateway":
            there = zones.family_of(nfs.machine_type) in zones.families_in(nfs.zone)
            known = there and zones.is_machine_type(nfs.machine_type)
            named.append(("tpu-stack:storage.nfs.machine-type", nfs.machine_type, known))
    region = config.images.region
    named.append(("tpu-stack:images.region", region, region in zones.REGIONS))
    return [
        warning(path, f'"{value}" is not known here; Google refuses it if it is misspelt')
        for path, value, known in named
        if not known
    ]


def _ai_zone(index: int, each: SliceConfig) -> list[Finding]:
    """https://cloud.google.com/compute/docs/regions-zones/ai-zones, November 2026."""
    if not zones.is_ai_zone(each.zone):
        return []
    return [
        warning(
            slice_path(index, "zone"),
            f"{each.zone} is an AI zone: a project uses it after AI zones were made visible to it, and with capacity "
            "that is reserved there; its storage is in the standard zones of the region",
        )
    ]


def _old(index: int, each: SliceConfig) -> list[Finding]:
    """A v3 that fails so: https://github.com/jax-ml/jax/issues/30834."""
    name = each.accelerator.generation.name
    if name not in OLD:
        return []
    return [
        warning(
            slice_path(index, "accelerator"),
            f"{name}: today's JAX may fail on it at the start (\"Couldn't mmap\"); take v4 or later where you can",
        )
    ]


def _unlisted(config: Config, index: int, each: SliceConfig) -> list[Finding]:
    zones = each.accelerator.zones
    if each.zone in zones:
        return []
    return [
        refused(
            slice_path(index, "zone"),
            f"{each.zone} does not list {each.accelerator.type_name}; these do: {', '.join(zones)}",
            unless="tpu-stack:allow-unlisted",
            allowed=config.allow.unlisted,
        )
    ]


def _direct(config: Config, index: int, each: SliceConfig) -> list[Finding]:
    """Google answers a used-up quota with 429, which the provider takes for a passing fault."""
    if each.provisioning != "direct":
        return []
    path = slice_path(index, "provisioning")
    made = [
        warning(
            path,
            f"direct: a refused quota (HTTP 429) is retried without a word until wait, {_duration(each.wait_s)}, is "
            "over; if `pulumi up` seems to hang, look at the quotas of Cloud TPU API in the console (IAM & Admin, "
            f"Quotas, project {config.project}); queued says at once what was refused",
        )
    ]
    if each.capacity == "spot":
        made.append(
            warning(
                path,
                "direct: a spot node that is preempted is not made again by the next `pulumi up`, only by `pulumi up "
                "--replace URN`; a queued one is, by `pulumi up --refresh`",
            )
        )
    return made


def _large_spot(index: int, each: SliceConfig) -> list[Finding]:
    chips = each.accelerator.chips
    if each.capacity != "spot" or chips < LARGE_SPOT_CHIPS:
        return []
    return [
        note(
            slice_path(index, "accelerator"),
            f"{each.accelerator.type_name} asks for {chips} spot chips at once, which seldom come; several smaller "
            "slices sooner do",
        )
    ]


def _duration(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


ADDRESSES_IN_USE = 8
"""The quota of external addresses in use that a project begins with."""


def exposure(config: Config) -> tuple[Finding, ...]:
    """Who can reach the hosts, and what can be lost."""
    return (*_addresses(config), *_existing_network(config), *_access(config), *_protection(config))


def _addresses(config: Config) -> list[Finding]:
    if not config.network.external_addresses:
        return []
    hosts = sum(each.hosts for each in config.slices)
    of = "more than" if hosts > ADDRESSES_IN_USE else "of"
    return [
        warning(
            "tpu-stack:network.external-addresses",
            f"true gives each of the {hosts} hosts an address on the internet, {of} the {ADDRESSES_IN_USE} that a "
            "project may use by default; the firewall still admits IAP alone",
        )
    ]


def _existing_network(config: Config) -> list[Finding]:
    name = config.network.existing
    if name is None:
        return []
    rules = (
        "default-allow-ssh admits all of the internet to port 22, default-allow-internal all its VMs to every port"
        if name == "default"
        else "see what they admit"
    )
    return [
        warning(
            "tpu-stack:network.existing",
            f'"{name}" has firewall rules of its own that this stack leaves as they are: {rules}; its subnets need '
            "Private Google Access, and Cloud NAT for what is not Google's",
        )
    ]


def _access(config: Config) -> list[Finding]:
    if config.access.members or config.access.administrators:
        return []
    return [
        warning(
            "tpu-stack:access",
            "names nobody, so nobody but the project's owners may open a tunnel to the hosts; add members",
        )
    ]


def _protection(config: Config) -> list[Finding]:
    if config.protect:
        return []
    lost = ["the image repository"]
    if any(not disk.source for each in config.slices for disk in each.data_disks):
        lost.insert(0, "data disks that were made with slices")
    if config.nfs is not None:
        lost.insert(0, "all data of the NFS server")
    if config.bucket is not None:
        lost.insert(0, f'bucket "{config.bucket.name}" (once it is empty)')
    return [
        warning(
            "tpu-stack:protect",
            f"false lets `pulumi destroy`, and a change that replaces them, delete {', '.join(lost)}",
        )
    ]
