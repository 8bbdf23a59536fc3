"""Reads `tpu-stack:slices`: what TPUs there should be, where, with which disks, and how they are asked for. Pure.

In which mode disks are attached: https://cloud.google.com/tpu/docs/attach-durable-block-storage; sizes of disks:
https://cloud.google.com/compute/docs/disks (November 2026).
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from typing import TypedDict

from contracts.durations import DAY_S, HOUR_S, MINUTE_S
from contracts.inventory import Capacity
from infra import catalogue, naming
from infra.catalogue import Accelerator, CatalogueError, Generation, Offer
from infra.config import (
    DEFAULT_BOOT_GIB,
    DataDisk,
    DiskMode,
    GrantLine,
    Provisioning,
    SliceConfig,
    Strategy,
    formats,
    slice_rules,
)
from infra.config.section import Section

CAPACITIES: tuple[Capacity, ...] = typing.get_args(Capacity)
PROVISIONINGS: tuple[Provisioning, ...] = typing.get_args(Provisioning)
STRATEGIES: tuple[Strategy, ...] = typing.get_args(Strategy)

LONGEST_NAME = 30
"""So that the names made of it, with stack and part beside it, stay readable in 63 characters."""

ANY_ACCELERATOR = next(iter(catalogue.ACCELERATORS.values()))
"""Stands for an accelerator that is a mistake, so that reading continues."""

MOST_SLICES_IN_ONE = 256
LEAST_S, MOST_S = MINUTE_S, 30 * DAY_S
ZONE_WAIT_S = 30 * MINUTE_S
"""A queued request is often served within minutes or not for hours."""
WAIT_S: dict[Provisioning, int] = {
    "queued": 12 * HOUR_S,
    "direct": 15 * MINUTE_S,
    "compute": 12 * HOUR_S,
    "node-pool": 30 * MINUTE_S,
}
OFFER: dict[Provisioning, Offer] = {
    "queued": "cloud-tpu",
    "direct": "cloud-tpu",
    "compute": "compute",
    "node-pool": "gke",
}
MOST_RUN_S = 120 * DAY_S
"""https://cloud.google.com/compute/docs/instances/limit-vm-runtime, November 2026."""

MOST_LABELS = 64 - len(naming.RESERVED_LABELS) - 1
"""Google takes 64 on a resource; beside ours the provider sets one too (goog-pulumi-provisioned)."""

RESERVATION = re.compile(
    r"(?:projects|folders|organizations)/([^/]+)/(?:locations/([^/]+)/)?reservations/([^/]+)"
)
NAMES_CHIP = re.compile(r"tpuv([0-9]+[ep]?)-?(lite)?")

DISK_MODES: tuple[DiskMode, ...] = typing.get_args(DiskMode)

ALL_DISK_TYPES = ("pd-balanced", "hyperdisk-balanced", "hyperdisk-ml")
LEAST_BOOT_GIB = 10
"""As large as the images."""
LEAST_DISK_GIB = {"pd-balanced": 10, "hyperdisk-balanced": 4, "hyperdisk-ml": 4}
MOST_DISK_GIB = 65536

LONGEST_DISK_NAME = 30
DISK = re.compile(r"projects/([^/]+)/zones/([^/]+)/disks/([^/]+)")


class BootDisk(TypedDict):
    """Fields of `SliceConfig`."""

    boot_disk_kms_key: str | None
    boot_disk_gib: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Home:
    """The default place of slices: `tpu-stack:zone` or `tpu-stack:region`; fine: neither is wrong.

    project: None if it is missing, which the caller reports. ignored: what to add to a message about a missing zone.
    unlisted: whether zones, regions, versions and machine types that are not known here are taken.
    grant: for a slice that may be wherever the grant has its type.
    """

    project: str | None
    stack: str
    zone: str | None
    region: str | None
    fine: bool
    ignored: str
    unlisted: bool
    grant: tuple[GrantLine, ...] = ()

    @property
    def storage_region(self) -> str:
        """The default region of all but slices; empty if the zone is not known, for which a mistake is recorded."""
        return catalogue.zone_region(self.zone) if self.zone else ""


def read(root: Section, home: Home) -> tuple[SliceConfig, ...]:
    """Read every slice. The result is invalid if a mistake was recorded."""
    sections = root.sections("slices", missing="write a list of at least one slice, see Pulumi.example.yaml")
    if root.has("slices") and root.fine("slices") and not sections and home.zone is None:
        root.say("slices", "is empty; write a slice, or tpu-stack:zone, where the storage without slices is")
    slices = []
    for section in sections:
        with section:
            slices.append(_slice(section, home))
    _refuse_twins(list(zip(sections, slices, strict=True)))
    return tuple(slices)


def _slice(section: Section, home: Home) -> SliceConfig:
    name_rule = formats.name(longest=LONGEST_NAME)
    name = section.text("name", "", rule=name_rule, missing="each slice needs one, such as main")
    provisioning = section.choice("provisioning", "queued", PROVISIONINGS)
    accelerator = _accelerator(section, OFFER[provisioning] if section.has("provisioning") else "any")
    capacity = section.choice("capacity", "on-demand", CAPACITIES)
    api_reason = ""
    if accelerator is not None and not section.has("provisioning"):
        provisioning, api_reason = slice_rules.serving_api(accelerator, capacity, has_grant=bool(home.grant))
    count = section.integer("count", 1, minimum=1, maximum=MOST_SLICES_IN_ONE)
    zones = _zones(section, accelerator, home, capacity, count)
    zone = zones[0] if zones else None
    strategy = section.choice("strategy", "first", STRATEGIES)
    zone_wait_s = section.duration("zone-wait", None, least_s=LEAST_S, most_s=MOST_S)
    valid_until_s = section.duration("valid-until", None, least_s=LEAST_S, most_s=MOST_S)
    guaranteed_s = section.duration("guaranteed-for", None, least_s=LEAST_S, most_s=MOST_S)
    wait_s = section.duration("wait", None, least_s=LEAST_S, most_s=MOST_S)
    kind = accelerator.generation.compute if accelerator and provisioning == "compute" else None
    # Where it can have no disks at all, that is said of them, and not how each of them could be mended.
    disk_accelerator = None if provisioning == "node-pool" or len(zones) > 1 else accelerator
    slice_config = SliceConfig(
        name=name,
        accelerator=accelerator or ANY_ACCELERATOR,
        zone=zone or "",
        capacity=capacity,
        reservation=_reservation(section, capacity, home.project, zone),
        provisioning=provisioning,
        count=count,
        runtime_version=_runtime_version(section, accelerator, home) if provisioning != "compute" else "",
        valid_until_s=valid_until_s,
        guaranteed_s=guaranteed_s,
        wait_s=wait_s or min(WAIT_S[provisioning], valid_until_s or MOST_S),
        labels=_labels(section),
        data_disks=_data_disks(section, disk_accelerator, home.project, zone, count=count),
        more_zones=zones[1:],
        strategy=strategy,
        zone_wait_s=(zone_wait_s or ZONE_WAIT_S) if len(zones) > 1 and strategy == "first" else 0,
        scale_to_zero=section.flag(
            "scale-to-zero", default=capacity == "flex-start" and provisioning == "node-pool"
        ),
        run_duration_s=section.duration("max-run-duration", None, least_s=LEAST_S, most_s=MOST_RUN_S),
        image=section.text("image", kind.image if kind else "", rule=formats.image),
        reservation_bound=section.flag("reservation-bound", default=True) and capacity == "reserved",
        api_reason=api_reason,
        **_boot_disk(section, provisioning, zones),
    )
    slice_rules.check(section, slice_config, accelerator, wait_s)
    return slice_config


def _accelerator(section: Section, offer: Offer) -> Accelerator | None:
    type_name = section.text("accelerator", None)
    generation = section.text("generation", None)
    shape = section.text("topology", None)
    keys = ("accelerator", "generation", "topology")
    by_type, by_shape = section.has(keys[0]), section.has(keys[1]) or section.has(keys[2])
    if not section.fine(*keys):
        return None
    if by_type and by_shape:
        section.refuse(
            "accelerator", "stands beside generation or topology; write only the type, or those two"
        )
    elif not by_type and not by_shape:
        section.say("accelerator", "missing; write a type such as v5litepod-16, or generation and topology")
    elif by_shape and generation is None:
        section.say("generation", "missing; topology needs it, such as v5e")
    elif by_shape and shape is None:
        section.say("topology", "missing; generation needs it, such as 4x4")
    elif type_name is not None:
        try:
            return catalogue.accelerator(type_name, offer)
        except CatalogueError as error:
            section.say("accelerator", str(error))
    elif generation is not None and shape is not None:
        try:
            return catalogue.by_topology(generation, shape, offer)
        except CatalogueError as error:
            about_generation = str(error).startswith(f'"{generation}"')
            section.say("generation" if about_generation else "topology", str(error))
    return None


def _zones(
    section: Section, accelerator: Accelerator | None, home: Home, capacity: Capacity, count: int
) -> tuple[str, ...]:
    """The zones that a slice may be in; empty if they are not known, for which a mistake is then recorded."""
    zones = section.texts("zones", rule=formats.zone(unlisted=home.unlisted))
    is_anywhere = section.flag("anywhere-in-grant", default=False)
    other_keys = [key for key in ("zone", "region") if section.has(key)]
    if section.has("zones") and (other_keys or is_anywhere):
        section.say("zones", f"stands beside {(*other_keys, 'anywhere-in-grant')[0]}; write one of the two")
    elif section.has("zones"):
        if not zones and section.fine("zones"):
            section.say("zones", "is empty; write at least one zone")
        if section.fine("zones"):
            _require_listed(section, "zones", zones, accelerator, home)
            return zones
    elif is_anywhere and other_keys:
        section.say("anywhere-in-grant", f"stands beside {other_keys[0]}; write one of the two")
    elif is_anywhere:
        return _granted_zones(section, accelerator, home, capacity, count)
    else:
        zone = _zone(section, accelerator, home)
        if zone and section.fine("zone"):
            _require_listed(section, "zone", (zone,), accelerator, home)
        return (zone,) if zone else ()
    return ()


def _require_listed(
    section: Section, key: str, zones: Sequence[str], accelerator: Accelerator | None, home: Home
) -> None:
    """Refuse zones in which the type is not listed, unless that is allowed: `infra.policy` warns of it then."""
    if accelerator is None or home.unlisted:
        return
    for zone in zones:
        if zone not in accelerator.zones:
            section.say(
                key, f"{accelerator.unlisted_in(zone)}; if that is meant, set {formats.UNLISTED}: true"
            )


def _granted_zones(
    section: Section, accelerator: Accelerator | None, home: Home, capacity: Capacity, count: int
) -> tuple[str, ...]:
    """The zones in which the grant has enough of its type, in the order of the grant."""
    if accelerator is None:
        return ()
    generation, chips = accelerator.generation, accelerator.chips * count
    lines = [line for line in home.grant if line.generation == generation.name and line.capacity == capacity]
    granted = [
        line.zone
        for line in lines
        if line.chips >= chips and line.zone and (home.unlisted or line.zone in accelerator.zones)
    ]
    if not granted:
        has = ", ".join(f"{line.chips} in {line.zone}" for line in lines) or "none"
        section.say(
            "anywhere-in-grant",
            f"tpu-stack:grant has no zone with {chips} {generation.name} {capacity} chips for "
            f"{accelerator.type_name} ({has}); write zones, ask for less, or complete the grant",
        )
    return tuple(dict.fromkeys(granted))


def _zone(section: Section, accelerator: Accelerator | None, home: Home) -> str | None:
    """The zone of a slice; None if it is not known, for which a mistake is then recorded."""
    own_zone = section.text("zone", None, rule=formats.zone(unlisted=home.unlisted))
    own_region = section.text("region", None, rule=formats.region(unlisted=home.unlisted))
    if section.has("zone") and section.has("region"):
        section.say("region", "stands beside zone; write one of the two")
        return None
    if section.has("zone") or section.has("region"):
        problem = f'"{own_region}"'
        return _only_zone(section, "region", problem, accelerator, own_region) if own_region else own_zone
    if home.zone is not None or not home.fine:
        return home.zone
    if home.region is not None:
        problem = f"missing, and tpu-stack:region {home.region}"
        return _only_zone(section, "zone", problem, accelerator, home.region)
    section.say("zone", f"missing; write it here, or tpu-stack:zone for all slices{home.ignored}")
    return None


def _only_zone(
    section: Section, key: str, problem: str, accelerator: Accelerator | None, region: str
) -> str | None:
    if accelerator is None:
        return None
    zones = [zone for zone in accelerator.zones if catalogue.zone_region(zone) == region]
    if len(zones) == 1:
        return zones[0]
    type_name = accelerator.type_name
    if zones:
        section.say(
            key, f"{problem} has {len(zones)} zones with {type_name}; write zone: {' or '.join(zones)}"
        )
    else:
        listed_zones = " or ".join(accelerator.zones)
        section.say(key, f"{problem} has no zone in which {type_name} is listed; write zone: {listed_zones}")
    return None


def _reservation(section: Section, capacity: Capacity, project: str | None, zone: str | None) -> str | None:
    """The full name, projects/P/locations/Z/reservations/R, of the slice's reservation.

    A user may write only its name, `-` for any of the project's own, or one that another project, a folder or an
    organisation shares, with or without the zone.
    """
    text = section.text("reservation", None)
    match = RESERVATION.fullmatch(text or "")
    wrong = None
    if text is not None and "/" in text and match is None:
        wrong = (
            "is no such path; write only the name, - for any, or projects/P/reservations/NAME (also folders/…, "
            "organizations/…)"
        )
    elif text is not None:
        name = match[3] if match else text
        wrong = None if name == slice_rules.ANY else formats.name(longest=naming.LONGEST)(name)
        wrong = wrong or (_elsewhere(match[2], zone) if match and match[2] else None)
    if wrong is not None:
        section.refuse("reservation", wrong)
    if section.fine("capacity"):
        if capacity == "reserved" and not section.has("reservation"):
            section.say(
                "reservation",
                "missing; capacity reserved needs a name, or, of the Cloud TPU API, - for any of the project's own",
            )
        if capacity != "reserved" and section.has("reservation"):
            section.say("reservation", "is used only with capacity reserved; write that, or remove it")
    if text is None or wrong is not None:
        return None
    owner = "/".join(text.split("/")[:2]) if match else f"projects/{project}"
    return f"{owner}/locations/{zone}/reservations/{match[3] if match else text}"


def _runtime_version(section: Section, accelerator: Accelerator | None, home: Home) -> str:
    text = section.text("runtime-version", None, rule=formats.runtime_version(unlisted=home.unlisted))
    if accelerator is None:
        return text or ""
    default = accelerator.generation.runtime_version or ""
    match = NAMES_CHIP.search(text or "")
    if match is None:
        return text or default
    number, lite = match.groups()
    named = {"5": "v5e" if lite else "v5p"}.get(number, f"v{number}")
    generation = accelerator.generation.name
    if named != generation:
        section.refuse(
            "runtime-version", f"is for {named}, the slice is {generation}; write {default}, or leave it out"
        )
    return text or default


def _boot_disk(section: Section, provisioning: Provisioning, zones: Sequence[str]) -> BootDisk:
    """A key of a region is of use only in that region; one of a multi-region, or global, is Google's to judge."""
    with section.section("boot-disk") as boot_disk:
        kms_key = boot_disk.text("kms-key", None, rule=formats.kms_key)
        if boot_disk.has("kms-key") and provisioning == "direct":
            boot_disk.say("kms-key", slice_rules.QUEUED_ONLY)
        elif kms_key is not None:
            location = kms_key.split("/")[3]
            elsewhere = [region for region in map(catalogue.zone_region, zones) if region != location]
            if elsewhere and formats.REGION.fullmatch(location):
                region = elsewhere[0]
                wrong = f"is a key of {location}, the slice is in {region}; take one of {region} or global"
                boot_disk.refuse("kms-key", wrong)
        size_gib = DEFAULT_BOOT_GIB
        if provisioning == "compute":
            size_gib = boot_disk.integer("size-gib", size_gib, minimum=LEAST_BOOT_GIB, maximum=MOST_DISK_GIB)
        elif boot_disk.has("size-gib") and provisioning == "node-pool":
            boot_disk.say(
                "size-gib", "nodes have the 100 GiB that GKE gives them; remove it and use the bucket"
            )
        elif boot_disk.has("size-gib"):
            boot_disk.say(
                "size-gib",
                "the Cloud TPU API has no size for a boot disk; remove it and use data-disks, a bucket or NFS",
            )
        return {"boot_disk_kms_key": kms_key, "boot_disk_gib": size_gib}


def _labels(section: Section) -> dict[str, str]:
    labels = section.mapping("labels", key_rule=formats.label_key, value_rule=formats.label_value)
    if len(labels) > MOST_LABELS:
        section.say(
            "labels", f"{len(labels)} labels; Google takes 64, and {MOST_LABELS} beside ours; remove some"
        )
    return labels


def _data_disks(
    section: Section, accelerator: Accelerator | None, project: str | None, zone: str | None, *, count: int
) -> tuple[DataDisk, ...]:
    """The data disks of a slice. A disk that several VMs share is read-only, so it must have data on it already.

    accelerator: None where that is a mistake; then any type of disk is taken.
    """
    generation = accelerator.generation if accelerator else None
    is_single_host = accelerator is None or accelerator.hosts * count == 1
    sections = section.sections("data-disks")
    disk_configs = []
    for disk_section in sections:
        with disk_section:
            disk_configs.append(_disk(disk_section, generation, project, zone, is_single_host=is_single_host))
    disks = tuple(disk_configs)
    if generation and len(disks) > generation.most_disks:
        limit = f"a {generation.name} VM takes {generation.most_disks}"
        section.say("data-disks", f"{len(disks)} disks; {limit}; remove some")
    for key, values in (("name", [disk.name for disk in disks]), ("source", [disk.source for disk in disks])):
        for index, value in enumerate(values):
            if value and value in values[:index]:
                first = sections[values.index(value)].path(key)
                sections[index].refuse(key, f"is {first} too; take another")
    return disks


def _disk(
    section: Section,
    generation: Generation | None,
    project: str | None,
    zone: str | None,
    *,
    is_single_host: bool,
) -> DataDisk:
    name_rule = formats.name(longest=LONGEST_DISK_NAME)
    name = section.text("name", "", rule=name_rule, missing="each disk needs one, such as data")
    types = generation.disk_types if generation else ALL_DISK_TYPES
    wrong = f"is no type of disk that a {generation.name if generation else 'TPU'} VM takes"
    disk_type = section.choice("type", types[0], types, wrong=wrong)
    size_gib = section.integer("size-gib", None, minimum=LEAST_DISK_GIB[disk_type], maximum=MOST_DISK_GIB)
    source = _source(section, project=project, zone=zone)
    is_new, exists = section.has("size-gib"), section.has("source")
    mode = section.choice("mode", "read-only" if exists else "read-write", DISK_MODES)
    if is_new and exists:
        section.say(
            "size-gib", "stands beside source; write size-gib for a new disk, or source for one that exists"
        )
    elif not is_new and not exists:
        section.say("size-gib", "missing; write it for a new disk, or source for one that exists")
    elif exists and section.has("type"):
        section.say("type", "is of new disks, the source has its own; remove it")
    elif is_new and not is_single_host:
        section.say(
            "size-gib", "makes a disk, which only one VM can write to; this slice has more: write source"
        )
    elif is_new and mode == "read-only":
        section.refuse("mode", "leaves a new disk empty for ever; write read-write, or a source")
    elif exists and not is_single_host and mode == "read-write":
        section.refuse("mode", "is only for one VM, this slice has more; write read-only")
    return DataDisk(name=name, disk_type=disk_type, size_gib=size_gib, source=source, mode=mode)


def _source(section: Section, *, project: str | None, zone: str | None) -> str | None:
    """The full name, projects/P/zones/Z/disks/D, of a disk of which a user may write only the name."""
    text = section.text("source", None)
    if text is None:
        return None
    match = DISK.fullmatch(text)
    if "/" in text and match is None:
        section.refuse("source", "is no such path; write only the name, or projects/P/zones/ZONE/disks/NAME")
        return None
    wrong = formats.name(longest=naming.LONGEST)(match[3] if match else text)
    if wrong is None and match and project is not None and match[1] != project:
        wrong = f"is not of project {project}; take one that is"
    wrong = wrong or (_elsewhere(match[2], zone) if match else None)
    if wrong is not None:
        section.refuse("source", wrong)
        return None
    return text if match else f"projects/{project}/zones/{zone}/disks/{text}"


def _elsewhere(place: str, zone: str | None) -> str | None:
    """What is wrong with a place that should be the slice's zone, or None."""
    return None if zone in (None, place) else f"is not in the slice's zone {zone}; take one that is"


def _refuse_twins(slices: Sequence[tuple[Section, SliceConfig]]) -> None:
    """Refuse two slices or hosts of one name, and a disk that one slice writes to while another has it."""
    named: dict[str, Section] = {}
    for section, slice_config in slices:
        # Google calls the slices of a multislice NAME-0, NAME-1 and so on.
        numbered = (
            [f"{slice_config.name}-{number}" for number in range(slice_config.count)]
            if slice_config.count > 1
            else []
        )
        for name in [slice_config.name, *numbered]:
            first = named.setdefault(name, section)
            if name and first is not section:
                owner = first.path("name").removesuffix(".name")
                section.say("name", f'"{name}" is the name of {owner} or a part of it too; take another')
                break
    disk_sections: dict[str, Section] = {}
    for section, slice_config in slices:
        for disk in slice_config.data_disks:
            full_name = f"{slice_config.name}-{disk.name}"
            if not disk.source and (first := disk_sections.setdefault(full_name, section)) is not section:
                section.say(
                    "data-disks",
                    f'one would be called "{full_name}", as one in {first.path("data-disks")} is; rename it',
                )
    held: dict[str, tuple[Section, DataDisk]] = {}
    for section, disk in _existing_disks(slices):
        holder, other_disk = held.setdefault(disk.source or "", (section, disk))
        if holder is not section and "read-write" in (disk.mode, other_disk.mode):
            section.say(
                "data-disks",
                f'"{disk.source}" is in {holder.path("data-disks")} too; write mode: read-only in both',
            )


def _existing_disks(slices: Sequence[tuple[Section, SliceConfig]]) -> Iterator[tuple[Section, DataDisk]]:
    return (
        (section, disk) for section, slice_config in slices for disk in slice_config.data_disks if disk.source
    )
