"""Rules over several keys of a slice: which API serves it, and which of them cannot stand together. Pure."""

from __future__ import annotations

import re

from contracts.durations import DAY_S, HOUR_S, spoken
from contracts.inventory import Capacity
from infra import naming
from infra.catalogue import GENERATIONS, Accelerator
from infra.config import Provisioning, SliceConfig
from infra.config.section import Section

ONE_ZONE_ONLY = "of one zone, and the slice has several; write one of them as zone, or remove this"
NODE_POOLS_ONLY = "is only for provisioning node-pool"
NOT_OF_NODE_POOLS = (
    "runtime-version", "valid-until", "guaranteed-for", "zones", "anywhere-in-grant", "strategy", "zone-wait",
    "data-disks", "max-run-duration",
)  # fmt: skip
QUEUED_ONLY = "works only with provisioning queued; remove it, or take queued"
COMPUTE_ONLY = "works only with provisioning compute; remove it, or take compute"
ANY = "-"
"""In place of a reservation's name: any in that zone of the project, folder or organisation, as gcloud's --reserved."""
MOST_FLEX_S = 7 * DAY_S
"""https://cloud.google.com/tpu/docs/request-using-flex-start, November 2026."""
MOST_HELD_S = 2 * HOUR_S
"""params.requestValidForDuration of instances.insert, as Compute Engine answers to a longer one."""
QUEUED_FLEX = ", ".join(tpu.name for tpu in GENERATIONS if tpu.queued_flex_start)


def serving_api(accelerator: Accelerator, capacity: Capacity, *, has_grant: bool) -> tuple[Provisioning, str]:
    """How a slice is made whose configuration does not say it, and why so; empty where there is no choice."""
    generation = accelerator.generation
    if not generation.offered:
        return "compute", f"the Cloud TPU API does not have {generation.name}"
    if generation.compute is None:
        return "queued", ""
    if capacity == "flex-start" and not generation.queued_flex_start:
        return "compute", f"the Cloud TPU API has flex-start for {QUEUED_FLEX} only"
    if has_grant:
        return "queued", "a grant of the TPU Research Cloud is quota of that API"
    return "queued", f"it is the default for {generation.name}, and its queue keeps a request in its place"


def check(
    section: Section, slice_config: SliceConfig, accelerator: Accelerator | None, wait_s: int | None
) -> None:
    """Record every mistake. accelerator: None if that is one. wait_s: as it is configured."""
    if slice_config.in_cluster:
        _check_node_pool(section, slice_config, accelerator)
    else:
        _check_tpu_vms(section, slice_config, wait_s)
        _check_zones(section, slice_config)
        _check_flex_start(section, slice_config, accelerator)
    if slice_config.on_compute:
        _check_compute(section, slice_config)
        return
    for key in ("image", "reservation-bound"):
        if section.has(key):
            section.say(key, COMPUTE_ONLY)


def _check_tpu_vms(section: Section, slice_config: SliceConfig, wait_s: int | None) -> None:
    if slice_config.valid_until_s is not None and wait_s is not None and wait_s > slice_config.valid_until_s:
        gives_up = f"valid-until {spoken(slice_config.valid_until_s)}, when the queue gives up"
        section.refuse("wait", f"is longer than {gives_up}; shorten it")
    if slice_config.capacity in ("spot", "flex-start") and section.has("guaranteed-for"):
        section.say(
            "guaranteed-for",
            f"nothing is guaranteed for capacity {slice_config.capacity}; remove it, or take on-demand",
        )
    if slice_config.provisioning == "direct" and slice_config.capacity == "reserved":
        section.say("provisioning", "direct cannot name a reservation; write queued")
    if slice_config.provisioning == "direct":
        for key in ("valid-until", "guaranteed-for", *(["count"] if slice_config.count > 1 else [])):
            if section.has(key):
                section.say(key, QUEUED_ONLY)
    if section.has("scale-to-zero"):
        section.say("scale-to-zero", f"{NODE_POOLS_ONLY}; write that, or remove it")


def _check_flex_start(section: Section, slice_config: SliceConfig, accelerator: Accelerator | None) -> None:
    """Refuse flex-start where no API has it, and without its end."""
    has_end, run_duration_s = section.has("max-run-duration"), slice_config.run_duration_s
    if slice_config.capacity != "flex-start":
        if has_end and not slice_config.on_compute:
            section.say(
                "max-run-duration", "is only for capacity flex-start or provisioning compute; remove it"
            )
    elif slice_config.provisioning == "direct":
        section.say("capacity", "flex-start does not work with provisioning direct; write queued or compute")
    elif accelerator and not slice_config.on_compute and not accelerator.generation.queued_flex_start:
        others = "compute or node-pool" if accelerator.generation.compute else "node-pool"
        section.say(
            "capacity",
            f"flex-start of {accelerator.generation.name} is not in the Cloud TPU API, which has it for {QUEUED_FLEX}; "
            f"write provisioning {others}, or take spot or on-demand",
        )
    elif not has_end:
        section.say("max-run-duration", "missing; capacity flex-start needs it, up to 7d")
    elif run_duration_s is not None and run_duration_s > MOST_FLEX_S:
        section.refuse("max-run-duration", "is longer than 7d, after which flex-start ends; shorten it")


def _check_compute(section: Section, slice_config: SliceConfig) -> None:
    """Refuse what only the Cloud TPU API has."""
    if section.has("runtime-version"):
        section.say(
            "runtime-version",
            "is software of the Cloud TPU API, and Compute Engine's hosts have an image; remove it, or write image",
        )
    if section.has("guaranteed-for") and slice_config.capacity not in ("spot", "flex-start"):
        section.say("guaranteed-for", QUEUED_ONLY)
    if section.has("anywhere-in-grant") and section.fine("anywhere-in-grant"):
        section.say(
            "anywhere-in-grant",
            "a grant is quota of the Cloud TPU API, not of Compute Engine; write zones, or provisioning queued",
        )
    if section.has("reservation-bound") and slice_config.capacity != "reserved":
        section.say("reservation-bound", "is only for capacity reserved; write that, or remove it")
    _check_image(section, slice_config)
    is_held = slice_config.capacity == "flex-start" and slice_config.accelerator.hosts == 1
    if is_held and (slice_config.valid_until_s or 0) > MOST_HELD_S:
        section.refuse(
            "valid-until",
            f"is longer than {spoken(MOST_HELD_S)}, for which Google keeps a request for one flex-start instance; "
            "shorten it, or remove it",
        )
    _check_named_reservation(section, slice_config, "Compute Engine")


def _check_image(section: Section, slice_config: SliceConfig) -> None:
    """Refuse Google's image for another generation, which has another kernel and driver."""
    own = slice_config.accelerator.generation.compute
    families = {generation.compute.image: generation.name for generation in GENERATIONS if generation.compute}
    if own and slice_config.image in families and slice_config.image != own.image:
        generation = slice_config.accelerator.generation.name
        section.refuse(
            "image", f"is Google's for {families[slice_config.image]}, not for {generation}; remove it"
        )


def _check_named_reservation(section: Section, slice_config: SliceConfig, user: str) -> None:
    """Refuse a reservation that has no name or is not of a project. user: what needs both, in a message."""
    reservation = slice_config.reservation or ""
    if reservation and not re.match(r"projects/[^/]+/", reservation):
        section.refuse(
            "reservation", f"is not of a project, as {user}'s must be; write projects/P/reservations/NAME"
        )
    elif reservation.endswith(f"/{ANY}"):
        section.refuse("reservation", f"names none, and {user} needs one; write its name")


def _check_zones(section: Section, slice_config: SliceConfig) -> None:
    """Refuse what a slice with several zones cannot have, and what one with a single zone has no use for."""
    key = "zones" if section.has("zones") else "anywhere-in-grant"
    if slice_config.more_zones:
        if slice_config.provisioning == "direct":
            section.say(key, QUEUED_ONLY)
        for other_key, is_set in (
            ("reservation", slice_config.capacity == "reserved"),
            ("data-disks", slice_config.data_disks),
        ):
            if is_set:
                section.say(other_key, f"is {ONE_ZONE_ONLY}")
    elif not section.has("zones") and not section.has("anywhere-in-grant"):
        for other_key in ("strategy", "zone-wait"):
            if section.has(other_key):
                section.say(
                    other_key, "is only for a slice with several zones; write zones: [A, B], or remove it"
                )
    if slice_config.more_zones and slice_config.strategy == "race" and section.has("zone-wait"):
        section.say("zone-wait", "is for strategy first; a race waits in every zone at once; remove it")


def _check_node_pool(section: Section, slice_config: SliceConfig, accelerator: Accelerator | None) -> None:
    """Refuse what only TPU VMs have, and what Google refuses for node pools.

    Multislice needs pools of several hosts: https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice;
    flex-start makes nodes only when they are asked for: …/docs/concepts/dws (November 2026).
    """
    if slice_config.name == naming.SYSTEM_POOL:
        section.refuse("name", "is the name of the cluster's own node pool; take another")
    for key in NOT_OF_NODE_POOLS:
        if section.has(key):
            section.say(key, "is of TPU VMs, and this slice is node pools; remove it")
    if slice_config.count > 1 and accelerator is not None and accelerator.hosts == 1:
        section.refuse(
            "count",
            f"slices of one host each ({accelerator.type_name}) do not train together on GKE; take a larger type, or 1",
        )
    if slice_config.capacity == "flex-start" and not slice_config.scale_to_zero:
        section.say(
            "scale-to-zero", "false: nodes of capacity flex-start come only when a run asks; remove it"
        )
    _check_named_reservation(section, slice_config, "a node pool")
