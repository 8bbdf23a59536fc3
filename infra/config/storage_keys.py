"""Reads `tpu-stack:storage`: the bucket, and the file system that all hosts mount. Pure.

Sizes: a disk of the gateway https://cloud.google.com/compute/docs/disks, Filestore's basic HDD tier (1 to 63.9 TiB)
https://cloud.google.com/filestore/docs/service-tiers; soft delete https://cloud.google.com/storage/docs/soft-delete
(November 2026).
"""

from __future__ import annotations

import posixpath
import re
import typing

from infra import catalogue, naming
from infra.catalogue import zones
from infra.config import BucketConfig, NfsConfig, NfsKind, formats
from infra.config.section import Section

KINDS: tuple[NfsKind | typing.Literal["none"], ...] = (*typing.get_args(NfsKind), "none")
DEFAULT_GIB: dict[NfsKind, int] = {"gateway": 200, "filestore": 1024}
LEAST_GIB: dict[NfsKind, int] = {"gateway": 10, "filestore": 1024}
MOST_GIB: dict[NfsKind, int] = {"gateway": 65536, "filestore": 65433}
MOUNT = "/mnt/share"

# Nothing is mounted over these, nor over anything below the first kind: programs, people's homes, Docker's images.
SYSTEM = (
    *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "lost+found", "proc", "root"),
    *("run", "sbin", "snap", "sys", "tmp", "usr", "var"),
)
SHARED = ("media", "mnt", "opt", "srv")
OF_IMAGES = ("/opt/venv", "/opt/tpu-stack")
"""What the images of `images/` keep there; the share is seen in containers under the same path."""

LEAST_SOFT_DELETE_DAYS, MOST_SOFT_DELETE_DAYS = 7, 90
MOST_TEMPORARY_DAYS = 365
DEFAULT_DAYS = 7


def read(
    root: Section, *, project: str | None, stack: str, zone: str | None, unlisted: bool
) -> tuple[BucketConfig | None, NfsConfig | None]:
    """zone: of the first slice, where everything is that does not say otherwise; None: unknown, and said so.

    unlisted: take places and machine types that are not known here too.
    """
    section = root.section("storage")
    bucket = _bucket(section, project=project, stack=stack, zone=zone, unlisted=unlisted)
    nfs = _nfs(section.section("nfs"), zone, unlisted)
    section.close()
    return bucket, nfs


def _bucket(
    section: Section, *, project: str | None, stack: str, zone: str | None, unlisted: bool
) -> BucketConfig | None:
    if section.is_false("bucket"):
        return None
    bucket = section.section("bucket")
    # A legal value of a label is a legal name of a bucket where it begins with the project's letter.
    default = naming.label_value(f"{project or 'project'}-{stack}-{naming.PREFIX}")
    name = bucket.text("name", None, rule=formats.bucket)
    if not bucket.has("name") and (wrong := formats.bucket(default)) is not None:
        bucket.say("name", f'missing, and the default "{default}" {wrong}')
    region = bucket.text("region", None, rule=formats.region(unlisted=unlisted))
    soft_delete_days = bucket.integer("soft-delete-days", DEFAULT_DAYS, least=0, most=MOST_SOFT_DELETE_DAYS)
    if 0 < soft_delete_days < LEAST_SOFT_DELETE_DAYS:
        bucket.refuse("soft-delete-days", "is not 0 (off) or 7 to 90")
    temporary_days = bucket.integer("temporary-days", DEFAULT_DAYS, least=1, most=MOST_TEMPORARY_DAYS)
    bucket.close()
    return BucketConfig(
        name=name or default,
        region=region or (catalogue.region_of(zone) if zone else ""),
        soft_delete_days=soft_delete_days,
        temporary_days=temporary_days,
    )


def _nfs(section: Section, slice_zone: str | None, unlisted: bool) -> NfsConfig | None:
    kind = section.choice("kind", "gateway", KINDS)
    # An AI zone has accelerators, and hardly the small machines and the file service of its parent.
    default_zone = zones.parent_of(slice_zone) if slice_zone else ""
    zone = section.text("zone", default_zone, rule=formats.zone(unlisted=unlisted))
    machine_type = section.text("machine-type", None, rule=formats.machine_type(unlisted=unlisted))
    default_type = zones.gateway_machine_type(zone)
    if machine_type is not None and not unlisted:
        there = zones.families_in(zone)
        if zones.family_of(machine_type) not in there:
            section.refuse(
                "machine-type",
                f"is not to be had in {zone}, which has {', '.join(there)}; write {default_type}, or leave it out",
            )
    mount = section.text("mount", MOUNT, rule=_mount_rule)
    if kind == "none":
        for key in ("zone", "size-gib", "machine-type", "mount"):
            if section.has(key):
                section.say(key, "is of no use with kind none; remove it, or take gateway or filestore")
        section.close()
        return None
    size_gib = section.integer(
        "size-gib",
        DEFAULT_GIB[kind],
        least=LEAST_GIB[kind],
        most=MOST_GIB[kind],
        unit=f", which is what {kind} takes",
    )
    if kind == "filestore" and section.has("machine-type"):
        section.say("machine-type", "is only for the gateway; remove it, or write kind: gateway")
    section.close()
    return NfsConfig(
        kind=kind,
        zone=zone,
        size_gib=size_gib,
        machine_type=machine_type or default_type,
        mount=mount,
    )


def _mount_rule(text: str) -> str | None:
    if re.fullmatch(r"/[-._a-zA-Z0-9/]*", text) is None:
        return f"is not an absolute path of letters, digits, dots, hyphens and underscores; write one such as {MOUNT}"
    if posixpath.normpath(text) != text:
        return "is not the shortest form of that path; leave out dots, doubled slashes and the last slash"
    first, _, rest = text[1:].partition("/")
    in_image = any(f"{text}/".startswith(f"{each}/") for each in OF_IMAGES)
    if not first or first in SYSTEM or (first in SHARED and not rest) or in_image:
        return f"would hide a folder of the system, of people or of the images; write one such as {MOUNT}"
    # It also lands in /etc/fstab and in a unit of systemd, where no other name needs quotes.
    if re.search(r"/[-.]", text):
        return f"has a folder whose name begins with a dot or a hyphen; write one such as {MOUNT}"
    return None
