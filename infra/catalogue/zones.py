"""Regions and zones of Google Cloud, and the machine types of the gateway's kind, from `regions.toml`.

Whoever refuses what is not there has to leave a way round (`tpu-stack:allow-unlisted`).
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ZONE = re.compile(r"([a-z]+-[a-z]+[0-9]+)-(?:ai[0-9]+)?([a-z])")
"""A zone, its region, and the letter that an AI zone shares with its parent."""

_TABLES = tomllib.loads(Path(__file__).with_name("regions.toml").read_text(encoding="utf-8"))

REGIONS: tuple[str, ...] = tuple(sorted(_TABLES["regions"]))
AI_ZONES: tuple[str, ...] = tuple(_TABLES["ai_zones"])
ZONES = tuple(
    sorted(
        [f"{region}-{letter}" for region, letters in _TABLES["regions"].items() for letter in letters]
        + [*AI_ZONES]
    )
)

MACHINE_TYPES = (
    *("e2-micro", "e2-small", "e2-medium"),
    *(f"{kind}-{cpus}" for kind, sizes in _TABLES["machine_types"].items() for cpus in sizes),
)
"""All of `FAMILIES` but custom ones."""
CUSTOM = re.compile(r"(?:(?:e2|n1|n2|n2d)-)?custom-[1-9][0-9]*-[1-9][0-9]*(?:-ext)?")
FAMILIES = tuple(dict.fromkeys(kind.partition("-")[0] for kind in _TABLES["machine_types"]))

GATEWAY = "e2-small"
GATEWAY_WITHOUT_E2 = "n1-standard-1"
"""As an e2 it counts against the quota CPUS, which every project has; n2, n2d and t2d have quotas of their own."""


def zones_in(region: str) -> tuple[str, ...]:
    """The standard zones of a region; none if the region is not known."""
    return tuple(f"{region}-{letter}" for letter in _TABLES["regions"].get(region, ""))


def families_in(zone: str) -> tuple[str, ...]:
    """The families that a zone is known to have; where nothing is known of it, all."""
    return tuple(_TABLES["families_by_zone"].get(zone, FAMILIES))


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
