"""Where a slice is: its zone, from itself or from the stack, and the full names of what it uses there. Pure."""

from __future__ import annotations

import dataclasses
import re

from infra import catalogue, naming
from infra.catalogue import Accelerator
from infra.config import formats
from infra.config.fields import Section

DISK = re.compile(r"projects/([^/]+)/zones/([^/]+)/disks/([^/]+)")
RESERVATION = re.compile(
    r"(?:projects|folders|organizations)/([^/]+)/(?:locations/([^/]+)/)?reservations/([^/]+)"
)
ANY = "-"
"""In place of a reservation's name: any in that zone of the project, folder or organisation, as gcloud's --reserved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Home:
    """Where slices are that do not say so: `tpu-stack:zone` or `tpu-stack:region`; fine: neither is wrong.

    project: None where it is missing, which somebody else has said. ignored: what to add where a zone is missing.
    unlisted: whether zones, regions and versions that are not known here are taken.
    """

    project: str | None
    zone: str | None
    region: str | None
    fine: bool
    ignored: str
    unlisted: bool


def zone(section: Section, accelerator: Accelerator | None, home: Home) -> str | None:
    """Of a slice; None where it is not known, which is then recorded here or with what it depends on."""
    own_zone = section.text("zone", None, rule=formats.zone(unlisted=home.unlisted))
    own_region = section.text("region", None, rule=formats.region(unlisted=home.unlisted))
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


def disk(section: Section, *, project: str | None, zone: str | None) -> str | None:
    """The full name, projects/P/zones/Z/disks/D, of a disk that a user may name alone."""
    text = section.text("source", None)
    if text is None:
        return None
    match = DISK.fullmatch(text)
    if "/" in text and match is None:
        section.refuse("source", "is no such path; write the name alone, or projects/P/zones/ZONE/disks/NAME")
        return None
    wrong = formats.name(longest=naming.LONGEST)(match[3] if match else text)
    if wrong is None and match and project is not None and match[1] != project:
        wrong = f"is not of project {project}; take one that is"
    wrong = wrong or (_elsewhere(match[2], zone) if match else None)
    if wrong is not None:
        section.refuse("source", wrong)
        return None
    return text if match else f"projects/{project}/zones/{zone}/disks/{text}"


def reservation(section: Section, *, project: str | None, zone: str | None) -> str | None:
    """The full name, projects/P/locations/Z/reservations/R, of a reservation.

    A user may write its name alone, `-` for any of the project's own, or one that another project, a folder or an
    organisation shares, with or without the zone.
    """
    text = section.text("reservation", None)
    if text is None:
        return None
    match = RESERVATION.fullmatch(text)
    if "/" in text and match is None:
        section.refuse(
            "reservation",
            "is no such path; write the name alone, - for any, or projects/P/reservations/NAME (also folders/…, "
            "organizations/…)",
        )
        return None
    name = match[3] if match else text
    wrong = None if name == ANY else formats.name(longest=naming.LONGEST)(name)
    wrong = wrong or (_elsewhere(match[2], zone) if match and match[2] else None)
    if wrong is not None:
        section.refuse("reservation", wrong)
        return None
    owner = "/".join(text.split("/")[:2]) if match else f"projects/{project}"
    return f"{owner}/locations/{zone}/reservations/{name}"


def _elsewhere(found: str, zone: str | None) -> str | None:
    return None if zone in (None, found) else f"is not in the slice's zone {zone}; take one that is"


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
