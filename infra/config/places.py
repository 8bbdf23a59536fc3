"""Where a slice is: its zone, from itself or from the stack, and the full names of what it uses there. Pure."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from infra import catalogue, naming
from infra.catalogue import Accelerator
from infra.config import formats
from infra.config.fields import Section

PART = re.compile(r"projects/([^/]+)/(locations|zones)/([^/]+)/([a-z]+)/([^/]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Home:
    """Where slices are that do not say so: `tpu-stack:zone` or `tpu-stack:region`; fine: neither is wrong.

    project: None where it is missing, which somebody else has said. ignored: what to add where a zone is missing.
    """

    project: str | None
    zone: str | None
    region: str | None
    fine: bool
    ignored: str


def zone(section: Section, accelerator: Accelerator | None, home: Home) -> str | None:
    """Of a slice; None where it is not known, which is then recorded here or with what it depends on."""
    own_zone = section.text("zone", None, rule=formats.zone)
    own_region = section.text("region", None, rule=formats.region)
    if section.has("zone") and section.has("region"):
        section.say("region", "stands beside zone; write one of the two")
        return None
    if section.has("zone") or section.has("region"):
        said = f'"{own_region}"'
        return _only_zone(section, "region", said, accelerator, own_region) if own_region else own_zone
    if home.zone is not None or not home.fine:
        return home.zone
    if home.region is not None:
        said = f"missing, and tpu-stack:region {home.region}"
        return _only_zone(section, "zone", said, accelerator, home.region)
    section.say("zone", f"missing; write it here, or tpu-stack:zone for all slices{home.ignored}")
    return None


def full_name(
    section: Section,
    key: Literal["reservation", "source"],
    parent: Literal["locations", "zones"],
    *,
    project: str | None,
    zone: str | None,
) -> str | None:
    """Of a reservation (projects/P/locations/Z/reservations/R) or a disk (projects/P/zones/Z/disks/D).

    A user may write its name alone.
    """
    text = section.text(key, None)
    if text is None:
        return None
    collection = "reservations" if key == "reservation" else "disks"
    match = PART.fullmatch(text)
    if "/" in text and (match is None or (match[2], match[4]) != (parent, collection)):
        section.refuse(
            key, f"is no such path; write the name alone, or projects/P/{parent}/ZONE/{collection}/NAME"
        )
        return None
    wrong = formats.name(longest=naming.LONGEST)(match[5] if match else text)
    if wrong is None and match and project is not None and match[1] != project:
        wrong = f"is not of project {project}; take one that is"
    if wrong is None and match and zone is not None and match[3] != zone:
        wrong = f"is not in the slice's zone {zone}; take one that is"
    if wrong is not None:
        section.refuse(key, wrong)
        return None
    return text if match else f"projects/{project}/{parent}/{zone}/{collection}/{text}"


def _only_zone(
    section: Section, key: str, said: str, accelerator: Accelerator | None, region: str
) -> str | None:
    if accelerator is None:
        return None
    zones = [each for each in accelerator.zones if catalogue.region_of(each) == region]
    if len(zones) == 1:
        return zones[0]
    which = accelerator.type_name
    if zones:
        section.say(key, f"{said} has {len(zones)} zones with {which}; write zone: {' or '.join(zones)}")
    else:
        others = " or ".join(accelerator.zones)
        section.say(key, f"{said} has no zone in which {which} is listed; write zone: {others}")
    return None
