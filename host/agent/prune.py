"""The verb prune: our own images that nobody needs any more leave the disk."""

from __future__ import annotations

from . import images

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from .protocol import Json


def prune(request: Json) -> Json:
    """Remove the images of `fab build` that no container has and that are not to be kept; what that freed.

    Raises:
        Failed: Docker does not answer.
    """
    return cleared(request["keep"])


def cleared(keep: Collection[str]) -> Json:
    """removed, left (with why), kept (how many), freed_bytes as the disk shows it, and docker_root_free_bytes."""
    place = images.data_root()
    before = images.free_bytes(place)
    ours, in_use = images.ours_and_in_use()
    removed, left = [], []
    for known in images.unneeded(ours, in_use, keep):
        problem = images.remove(known)
        name = (images.names_of(known) or [known["Id"]])[0]
        found = {"image": name, "id": known["Id"], "size_bytes": known["Size"]}
        if problem is None:
            removed.append(found)
        else:
            left.append({**found, "reason": problem})
    free = images.free_bytes(place)
    return {
        "removed": removed,
        "left": left,
        "kept": len(ours) - len(removed) - len(left),
        "freed_bytes": max(0, free - before),
        "docker_root_free_bytes": free,
    }
