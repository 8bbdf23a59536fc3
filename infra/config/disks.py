"""Reads the data disks of a slice: made with it, or there already. Pure.

Which generation takes which type, how many, and in which mode: https://cloud.google.com/tpu/docs/storage-options and
https://cloud.google.com/tpu/docs/attach-durable-block-storage; sizes: https://cloud.google.com/compute/docs/disks
(November 2026).
"""

from __future__ import annotations

import re
import typing

from infra import naming
from infra.catalogue import Accelerator
from infra.config import DataDisk, DiskMode, formats
from infra.config.fields import Section

MODES: tuple[DiskMode, ...] = typing.get_args(DiskMode)

TYPES = {
    "v5e": ("pd-balanced", "hyperdisk-ml"),
    "v5p": ("pd-balanced", "hyperdisk-ml"),
    "v6e": ("hyperdisk-balanced", "hyperdisk-ml"),
}
TYPES_OF_OTHERS = ("pd-balanced",)
ALL_TYPES = ("pd-balanced", "hyperdisk-balanced", "hyperdisk-ml")
LEAST_GIB = {"pd-balanced": 10, "hyperdisk-balanced": 4, "hyperdisk-ml": 4}
MOST_GIB = 65536

MOST_DISKS = {"v6e": 31}
MOST_DISKS_OF_OTHERS = 127
"""Beside the boot disk."""

LONGEST_NAME = 30
PATH = re.compile(r"projects/([^/]+)/zones/([^/]+)/disks/([^/]+)")


def read(
    section: Section, accelerator: Accelerator | None, project: str | None, zone: str | None, *, count: int
) -> tuple[DataDisk, ...]:
    """Of a slice. A disk that several VMs have is read-only, so it must be one that has data on it already.

    accelerator: None where that is a mistake; then any type of disk is taken.
    """
    generation = accelerator.generation.name if accelerator else ""
    alone = accelerator is None or accelerator.hosts * count == 1
    sections = section.sections("data-disks")
    disks = tuple(_disk(each, generation, project, zone, alone=alone) for each in sections)
    most = MOST_DISKS.get(generation, MOST_DISKS_OF_OTHERS)
    if len(disks) > most:
        section.say("data-disks", f"{len(disks)} disks; a {generation} VM takes {most}; remove some")
    for key, values in (("name", [disk.name for disk in disks]), ("source", [disk.source for disk in disks])):
        for index, value in enumerate(values):
            if value and value in values[:index]:
                first = sections[values.index(value)].path(key)
                sections[index].refuse(key, f"is {first} too; take another")
    return disks


def _disk(
    section: Section, generation: str, project: str | None, zone: str | None, *, alone: bool
) -> DataDisk:
    name = section.text(
        "name",
        "",
        rule=formats.name(longest=LONGEST_NAME),
        missing="each disk needs one, such as data",
    )
    types = TYPES.get(generation, TYPES_OF_OTHERS) if generation else ALL_TYPES
    wrong = f"is no type of disk that a {generation or 'TPU'} VM takes"
    disk_type = section.choice("type", types[0], types, wrong=wrong)
    size_gib = section.integer("size-gib", None, least=LEAST_GIB[disk_type], most=MOST_GIB)
    source = _source(section, project=project, zone=zone)
    made, exists = section.has("size-gib"), section.has("source")
    mode = section.choice("mode", "read-only" if exists else "read-write", MODES)
    if made and exists:
        section.say(
            "size-gib", "stands beside source; write size-gib for a new disk, or source for one that exists"
        )
    elif not made and not exists:
        section.say("size-gib", "missing; write it for a new disk, or source for one that exists")
    elif exists and section.has("type"):
        section.say("type", "is of new disks, the source has its own; remove it")
    elif made and not alone:
        section.say(
            "size-gib", "makes a disk, which one VM alone can write to; this slice has more: write source"
        )
    elif made and mode == "read-only":
        section.refuse("mode", "leaves a new disk empty for ever; write read-write, or a source")
    elif exists and not alone and mode == "read-write":
        section.refuse("mode", "is for one VM alone, this slice has more; write read-only")
    section.close()
    return DataDisk(
        name=name,
        disk_type=disk_type,
        size_gib=size_gib,
        source=source,
        mode=mode,
    )


def _source(section: Section, *, project: str | None, zone: str | None) -> str | None:
    """The full name, projects/P/zones/Z/disks/D, of a disk that a user may name alone."""
    text = section.text("source", None)
    if text is None:
        return None
    match = PATH.fullmatch(text)
    if "/" in text and match is None:
        section.refuse("source", "is no such path; write the name alone, or projects/P/zones/ZONE/disks/NAME")
        return None
    wrong = formats.name(longest=naming.LONGEST)(match[3] if match else text)
    if wrong is None and match and project is not None and match[1] != project:
        wrong = f"is not of project {project}; take one that is"
    wrong = wrong or (elsewhere(match[2], zone) if match else None)
    if wrong is not None:
        section.refuse("source", wrong)
        return None
    return text if match else f"projects/{project}/zones/{zone}/disks/{text}"


def elsewhere(found: str, zone: str | None) -> str | None:
    """What is wrong with a place that should be the slice's zone, if anything is."""
    return None if zone in (None, found) else f"is not in the slice's zone {zone}; take one that is"
