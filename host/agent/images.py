"""The images of this host: whether one is here, what it is, and which of ours nobody needs any more."""

from __future__ import annotations

import json
import os

from . import engine
from .protocol import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from .protocol import Json

STACK_LABEL, PLATFORM_LABEL = "tpu-stack.stack", "tpu-stack.platform"
REMOVAL_LIMIT_S = 120.0
"""Gigabytes of small files on a slow disk."""


def is_local(image: str) -> bool:
    """Whether the image is named by the id of one that was built here, which nobody can pull."""
    return image.startswith("sha256:")


def look_up(image: str) -> Json | None:
    """Docker's own words on an image (Id, Size, Config.Labels …); None: it is not here.

    Raises:
        Failed: Docker does not answer.
    """
    found = engine.ask(["image", "inspect", image])
    if found.is_good:
        return dict(json.loads(found.out)[0])
    if "no such image" in found.complaint.lower():
        return None
    raise engine.failure(f"the image {image} cannot be looked for", found.complaint)


def labels_of(known: Json) -> dict[str, str]:
    return dict((known.get("Config") or {}).get("Labels") or {})


def names_of(known: Json) -> list[str]:
    return [*(known.get("RepoTags") or []), *(known.get("RepoDigests") or [])]


def unneeded(ours: list[Json], in_use: Collection[str], keep: Collection[str]) -> list[Json]:
    """Of our images those that no container has and nobody wants kept, the oldest first. Pure.

    in_use: ids. keep: ids, or names with a tag or a digest.
    """
    return sorted(
        (
            known
            for known in ours
            if STACK_LABEL in labels_of(known)
            and known["Id"] not in in_use
            and not {known["Id"], *names_of(known)} & set(keep)
        ),
        key=lambda known: str(known["Created"]),
    )


def ours_and_in_use() -> tuple[list[Json], set[str]]:
    """Every image of `fab build` on this host, and the ids of the images that containers have, ended ones too."""
    listed = said(["image", "ls", "--all", "--quiet", "--no-trunc", "--filter", f"label={STACK_LABEL}"])
    containers = said(["ps", "--all", "--quiet", "--no-trunc"])
    ours = inspected(["image"], listed)
    return ours, {str(found["Image"]) for found in inspected(["container"], containers)}


def said(arguments: list[str]) -> list[str]:
    answer = engine.ask(arguments)
    if not answer.is_good:
        raise engine.failure(f"`docker {' '.join(arguments[:2])}`", answer.complaint)
    return sorted(set(answer.out.split()))


def inspected(kind: list[str], names: list[str]) -> list[Json]:
    """What Docker knows of each; one that has gone meanwhile is left out."""
    if not names:
        return []
    answer = engine.ask([*kind, "inspect", *names])
    try:
        return list(json.loads(answer.out))
    except ValueError:
        raise engine.failure(f"`docker {kind[0]} inspect`", answer.complaint) from None


def remove(known: Json) -> str | None:
    """Take an image away under all its names; why it is still there, if it is. One in use is left alone by Docker."""
    for name in names_of(known) or [known["Id"]]:
        answer = engine.ask(["image", "rm", name], REMOVAL_LIMIT_S)
        if not answer.is_good and "no such image" not in answer.complaint.lower():
            return answer.complaint
    return None


def data_root() -> str:
    """Where Docker keeps images. Raises Failed: it does not answer."""
    answer = engine.ask(["info", "--format", "{{.DockerRootDir}}"])
    if not answer.is_good:
        raise engine.failure("Docker's directory is not known", answer.complaint)
    return answer.out.strip()


def free_bytes(place: str) -> int:
    """Of the file system on which Docker keeps images; its directory itself may be closed to this user."""
    while not os.path.exists(place):
        place = os.path.dirname(place)
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize


def gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def local_only(image: str) -> Failed:
    return Failed(f"the image {image[:19]} is not on this host", "build it here: `fab build`")
