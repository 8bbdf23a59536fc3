"""What preflight looks at where a job is to run in a container: Docker, the image, room for it, and the mounts."""

from __future__ import annotations

import os

from . import engine, images
from .checks import check
from .facts import user_name
from .protocol import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

NEEDED_BYTES = {"tpu": 15_000_000_000, "gpu": 20_000_000_000, "cpu": 6_000_000_000}
"""Room for an image of unknown size, its layers as they come and as they are unpacked."""
LAYERS_AS_THEY_COME = 1.4
INSTALL = "`fab deploy` installs Docker; or launch with `--runtime bare`"
FACTS = {
    "image_present": False,
    "image_size_bytes": None,
    "image_needs_bytes": None,
    "docker_version": None,
    "docker_root_free_bytes": None,
}


def check_docker(request: Json) -> tuple[list[Json], Json]:
    """The findings, and the facts that FACTS names; image_needs_bytes: room for one that is to be pulled."""
    wanted = request["container"]
    known: Json = dict(FACTS)
    checks = check_mounts(wanted["mounts"])
    path = engine.program()
    if path is None:
        return [check("docker", "there is no `docker` on this host's PATH", INSTALL), *checks], known
    answer = engine.ask(["version", "--format", "{{.Server.Version}}"], docker=path)
    if not answer.is_good:
        message = f"Docker does not answer this user: {answer.complaint}"
        return [check("docker", message, engine.remedy_of(answer.complaint, user_name())), *checks], known
    known["docker_version"] = answer.out.strip()
    snap = (
        "; it is a snap's, which sees no files outside of /home"
        if os.path.realpath(path) == "/usr/bin/snap"
        else ""
    )
    checks.insert(0, check("docker", f"Docker {known['docker_version']} answers{snap}"))
    try:
        found = images.look_up(wanted["image"])
        known["docker_root_free_bytes"] = images.free_bytes(images.data_root())
    except Failed as failure:
        return [*checks, check("image", failure.message, failure.remedy)], known
    known.update(image_present=found is not None, image_size_bytes=found["Size"] if found else None)
    checks.append(check_image(wanted["image"], found, request["platform"]))
    if found is None and not images.is_local(wanted["image"]):
        needed = needed_bytes(wanted.get("size_bytes"), request["platform"])
        free = known["docker_root_free_bytes"]
        known["image_needs_bytes"] = needed
        checks.append(
            check_docker_disk(free, needed, 0 if free >= needed else removable_bytes(wanted["image"]))
        )
    return checks, known


def removable_bytes(image: str) -> int:
    """What our own images that nobody needs take at most; layers that two of them share count twice."""
    ours, in_use = images.ours_and_in_use()
    return sum(int(known["Size"]) for known in images.unneeded(ours, in_use, [image]))


def check_image(image: str, found: Json | None, platform: str) -> Json:
    """An image that has to be pulled is no fault. Pure."""
    if found is None:
        if images.is_local(image):
            missing = images.local_only(image)
            return check("image", missing.message, missing.remedy)
        return check("image", f"{image} is not here yet; it will be pulled")
    made_for = images.labels_of(found).get(images.PLATFORM_LABEL)
    if made_for is not None and made_for != platform:
        message = f"{image} was built for {made_for}, and the run is for {platform}"
        return check("image", message, f"`fab build --platform {platform}`, and name that one")
    return check("image", f"{image} is here ({images.gigabytes(found['Size'])})")


def needed_bytes(size_bytes: int | None, platform: str) -> int:
    """Room for an image while it is pulled. Pure. size_bytes: of the image unpacked, where that is known."""
    return NEEDED_BYTES[platform] if size_bytes is None else int(size_bytes * LAYERS_AS_THEY_COME)


def check_docker_disk(free: int, needed: int, removable: int) -> Json:
    """Pure. removable: what the pull may remove to make room."""
    have, want = images.gigabytes(free), images.gigabytes(needed)
    if free >= needed:
        return check("docker_disk", f"Docker's disk has {have} free for the image, which needs {want}")
    if free + removable >= needed:
        message = f"Docker's disk has {have} free of {want}; old images of ours will be removed to make room"
        return check("docker_disk", message)
    remedy = "`docker image ls` on that host shows what is there; or take a larger disk"
    return check("docker_disk", f"Docker's disk has {have} free and the image needs {want}", remedy)


def check_mounts(paths: list[str]) -> list[Json]:
    missing = [path for path in paths if not os.path.exists(path)]
    return [
        check("mounts", f"{path} is to be seen in the container and is not on this host", "mount or make it")
        for path in missing
    ]
