"""Regions and zones of Google Cloud, and which machine types of the gateway's kind there are where. Look-ups, no I/O.

Regions and the letters of their zones: https://cloud.google.com/compute/docs/regions-zones, the AI zones and their
parents …/ai-zones; us-central2 is not listed there and is open only to projects with v4. Machine types:
https://cloud.google.com/compute/docs/general-purpose-machines. What us-central2-b has:
https://github.com/keras-team/kinetic/issues/305. All read in November 2026. New ones come: what is not here may still
be right, so whoever refuses it has to leave a way round (`tpu-stack:allow-unlisted`).
"""

from __future__ import annotations

import re

ZONE = re.compile(r"([a-z]+-[a-z]+[0-9]+)-(?:ai[0-9]+)?([a-z])")
"""A zone, its region, and the letter that an AI zone shares with its parent."""

_THREE_ZONE_REGIONS = (
    *("africa-south1", "asia-east1", "asia-east2", "asia-northeast1", "asia-northeast2", "asia-northeast3"),
    *("asia-south1", "asia-south2", "asia-southeast1", "asia-southeast2", "asia-southeast3"),
    *("australia-southeast1", "australia-southeast2", "europe-central2", "europe-north1", "europe-north2"),
    *("europe-southwest1", "europe-west2", "europe-west3", "europe-west4", "europe-west6", "europe-west8"),
    *("europe-west9", "europe-west10", "europe-west12", "me-central1", "me-central2"),
    *("me-west1", "northamerica-northeast1", "northamerica-northeast2", "northamerica-south1"),
    *("southamerica-east1", "southamerica-west1", "us-east4", "us-east5", "us-south1", "us-west1"),
    *("us-west2", "us-west3", "us-west4"),
)
_LETTERS = dict.fromkeys(_THREE_ZONE_REGIONS, "abc") | {
    "europe-west1": "bcd",
    "us-central1": "abcf",
    "us-central2": "b",
    "us-east1": "bcd",
}
AI_ZONES = ("us-central1-ai1a", "us-south1-ai1b")

REGIONS = tuple(sorted(_LETTERS))
ZONES = tuple(
    sorted([f"{region}-{letter}" for region, letters in _LETTERS.items() for letter in letters] + [*AI_ZONES])
)

FAMILIES = ("e2", "n1", "n2", "n2d", "t2d")
"""x86 with Persistent Disk: newer ones take only Hyperdisk."""

_DOUBLED = (2, 4, 8, 16)
_N1 = (*_DOUBLED, 32, 64, 96)
_N2 = (*_DOUBLED, 32, 48, 64, 80, 96)
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "e2": {"standard": (*_DOUBLED, 32), "highmem": _DOUBLED, "highcpu": (*_DOUBLED, 32)},
    "n1": {"standard": (1, *_N1), "highmem": _N1, "highcpu": _N1},
    "n2": {"standard": (*_N2, 128), "highmem": (*_N2, 128), "highcpu": _N2},
    "n2d": {"standard": (*_N2, 128, 224), "highmem": _N2, "highcpu": (*_N2, 128, 224)},
    "t2d": {"standard": (1, *_DOUBLED, 32, 48, 60)},
}
MACHINE_TYPES = (
    *("e2-micro", "e2-small", "e2-medium"),
    *(
        f"{family}-{kind}-{cpus}"
        for family, kinds in _SHAPES.items()
        for kind, sizes in kinds.items()
        for cpus in sizes
    ),
)
"""All of `FAMILIES` but custom ones."""
CUSTOM = re.compile(r"(?:(?:e2|n1|n2|n2d)-)?custom-[1-9][0-9]*-[1-9][0-9]*(?:-ext)?")

_FAMILIES_BY_ZONE = {"us-central2-b": ("n1", "n2", "n2d", "t2d")}
"""Of zones that do not have all of `FAMILIES`."""

GATEWAY = "e2-small"
GATEWAY_WITHOUT_E2 = "n1-standard-1"
"""As an e2 it counts against the quota CPUS, which every project has; n2, n2d and t2d have quotas of their own."""


def zones_in(region: str) -> tuple[str, ...]:
    """The standard zones of a region; none if the region is not known."""
    return tuple(f"{region}-{letter}" for letter in _LETTERS.get(region, ""))


def families_in(zone: str) -> tuple[str, ...]:
    """The families that a zone is known to have; where nothing is known of it, all."""
    return _FAMILIES_BY_ZONE.get(zone, FAMILIES)


def gateway_machine_type(zone: str) -> str:
    """The small machine that the gateway is by default, of those that its zone has."""
    return GATEWAY if "e2" in families_in(zone) else GATEWAY_WITHOUT_E2


def machine_family(machine_type: str) -> str:
    """e2 of e2-small; n1 of custom-4-8192, which has no family in front."""
    first = machine_type.partition("-")[0]
    return "n1" if first == "custom" else first


def is_machine_type(name: str) -> bool:
    """Whether there is such a type in some zone, of `FAMILIES`."""
    return name in MACHINE_TYPES or CUSTOM.fullmatch(name) is not None


def is_ai_zone(zone: str) -> bool:
    """Whether it is one of the zones that have accelerators and little else (us-south1-ai1b)."""
    match = ZONE.fullmatch(zone)
    return match is not None and parent_zone(zone) != zone


def parent_zone(zone: str) -> str:
    """The standard zone beside an AI zone: us-south1-ai1b → us-south1-b; of any other zone itself."""
    match = ZONE.fullmatch(zone)
    return f"{match[1]}-{match[2]}" if match else zone
