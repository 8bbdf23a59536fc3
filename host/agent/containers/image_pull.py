"""The images of this host: the verb pull, and preflight's checks of Docker and of a job's image."""

from __future__ import annotations

import json
import os
import re
import time

from ..proc import user_name, wait_until
from ..protocol import Failed, check
from . import docker_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from ..protocol import Json


PLATFORM_LABEL = "tpu-stack.platform"
REMOVAL_LIMIT_S = 120.0
"""Gigabytes of small files on a slow disk."""


def is_local(image: str) -> bool:
    """Whether the image is named by the id of one that was built here, which nobody can pull."""
    return image.startswith("sha256:")


def look_up(image: str) -> Json | None:
    """Docker's details of an image (Id, Size, Config.Labels …); None if the host does not have it.

    Raises:
        Failed: Docker does not answer.
    """
    answer = docker_command.ask(["image", "inspect", image])
    if answer.is_good:
        return dict(json.loads(answer.out)[0])
    if "no such image" in answer.complaint.lower():
        return None
    raise docker_command.failure(f"the image {image} cannot be looked for", answer.complaint)


def image_labels(details: Json) -> dict[str, str]:
    return dict((details.get("Config") or {}).get("Labels") or {})


def image_names(details: Json) -> list[str]:
    return [*(details.get("RepoTags") or []), *(details.get("RepoDigests") or [])]


def unneeded(ours: list[Json], in_use: Collection[str], keep: Collection[str]) -> list[Json]:
    """Our images that no container uses and that are not in `keep`, the oldest first. Pure.

    in_use: ids. keep: ids, or names with a tag or a digest.
    """
    return sorted(
        (
            details
            for details in ours
            if PLATFORM_LABEL in image_labels(details)
            and details["Id"] not in in_use
            and not {details["Id"], *image_names(details)} & set(keep)
        ),
        key=lambda details: str(details["Created"]),
    )


def ours_and_in_use() -> tuple[list[Json], set[str]]:
    """Every image of `fab build` on this host, and the ids of the images that containers have, ended ones too."""
    listed = docker_words(
        ["image", "ls", "--all", "--quiet", "--no-trunc", "--filter", f"label={PLATFORM_LABEL}"]
    )
    containers = docker_words(["ps", "--all", "--quiet", "--no-trunc"])
    ours = inspected(["image"], listed)
    return ours, {str(container["Image"]) for container in inspected(["container"], containers)}


def docker_words(arguments: list[str]) -> list[str]:
    answer = docker_command.ask(arguments)
    if not answer.is_good:
        raise docker_command.failure(f"`docker {' '.join(arguments[:2])}`", answer.complaint)
    return sorted(set(answer.out.split()))


def inspected(kind: list[str], names: list[str]) -> list[Json]:
    """Docker's details of each; one that is gone meanwhile is left out."""
    if not names:
        return []
    answer = docker_command.ask([*kind, "inspect", *names])
    try:
        return list(json.loads(answer.out))
    except ValueError:
        raise docker_command.failure(f"`docker {kind[0]} inspect`", answer.complaint) from None


def remove(details: Json) -> bool:
    """Remove an image under all its names. Returns whether it is gone; Docker keeps one that is in use."""
    for name in image_names(details) or [details["Id"]]:
        answer = docker_command.ask(["image", "rm", name], REMOVAL_LIMIT_S)
        if not answer.is_good and "no such image" not in answer.complaint.lower():
            return False
    return True


def data_root() -> str:
    """The folder where Docker keeps images. Raises Failed if Docker does not answer."""
    answer = docker_command.ask(["info", "--format", "{{.DockerRootDir}}"])
    if not answer.is_good:
        raise docker_command.failure("Docker's directory is not known", answer.complaint)
    return answer.out.strip()


def free_bytes(place: str) -> int:
    """The free bytes of the file system on which Docker keeps images; the folder itself may be closed to this user."""
    while not os.path.exists(place):
        place = os.path.dirname(place)
    room = os.statvfs(place)
    return room.f_bavail * room.f_frsize


def gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def local_only(image: str) -> Failed:
    return Failed(f"the image {image[:19]} is not on this host", "build it here: `fab build`")


PULL_LIMIT_S = 3000.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
DENIED = (
    "the account of this host's VM needs roles/artifactregistry.reader on the repository (`pulumi up` grants it), and"
    " Docker has to log in as it (`fab deploy` sees to that)"
)
NOT_THERE = "`fab push` puts it there, and its digest into the configuration; then `pulumi up`"
WRONG = "what the registry has under that digest is something else: `fab push` anew, and see who writes to it"
ROOM = "remove images that nobody needs (`docker image ls` on that host), or take a larger disk"
# What cannot get better by itself, with its remedy. The first that is found counts.
FINAL = (
    ("denied|unauthorized|forbidden|no basic auth credentials|authentication required|credential helper", DENIED),
    ("error getting credentials", DENIED),
    ("manifest unknown|manifest for .* not found|name unknown|repository .* not found|does not exist", NOT_THERE),
    ("manifest verification failed|digest did not match|unexpected digest|filesystem layer verification failed", WRONG),
    ("no matching manifest for|invalid reference format", NOT_THERE),
    ("no space left on device", ROOM),
)  # fmt: skip
# Docker may not be up yet: the first boot of a VM installs and restarts it.
PERMISSION = "permission denied while trying to connect"


def pull(request: Json) -> Json:
    """Pull an image, unless the host has it.

    What may pass (the network, a busy registry, a Docker that is not up yet) is tried again after a pause that the
    answer reports.

    Raises:
        Failed: the image cannot be pulled, or the disk is too full even after unneeded images were removed.
    """
    image, began = request["image"], time.monotonic()
    deadline = began + (PULL_LIMIT_S if request["limit_s"] is None else request["limit_s"])
    retries: list[str] = []
    removed: list[Json] = []
    answer = {"pulled": False, "attempts": 0, "retries": retries, "pruned": removed}
    for attempt in range(1, request["attempts"] + 1):
        try:
            details = look_up(image)
            if details is None:
                if is_local(image):
                    raise local_only(image)
                removed += make_room(image, request["min_free_bytes"])
                answer.update(pulled=True, attempts=attempt)
                fetched = docker_command.ask(
                    ["pull", "--quiet", image], max(1.0, deadline - time.monotonic())
                )
                details = look_up(image) if fetched.is_good else None
                problem = fetched.complaint or "Docker says that it was pulled, and does not have it"
            if details is not None:
                return {**answer, "size_bytes": details["Size"]}
        except Failed as failure:
            if not docker_command.is_no_answer(failure.message):
                raise
            problem = failure.message
        remedy = final_remedy(problem)
        if remedy is not None:
            raise Failed(f"{image} could not be pulled: {problem}", remedy)
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
        if attempt == request["attempts"] or time.monotonic() + pause_s >= deadline:
            break
        retries.append(f"attempt {attempt} of {request['attempts']}: {problem}; again after {pause_s:g} s")
        wait_until(lambda: False, pause_s, pause_s)
    otherwise = (
        "see that the host reaches the registry (Private Google Access or Cloud NAT), then launch again"
    )
    tried = f"{attempt} attempts in {time.monotonic() - began:.0f} s"
    raise Failed(
        f"{image} could not be pulled, {tried}: {problem}",
        docker_command.docker_remedy(problem, user_name(), otherwise),
    )


def final_remedy(problem: str) -> str | None:
    """The remedy for a problem that another attempt cannot solve; None: another attempt may help. Pure."""
    if re.search(PERMISSION, problem, re.IGNORECASE):
        return docker_command.docker_remedy(problem, user_name())
    for pattern, remedy in FINAL:
        if re.search(pattern, problem, re.IGNORECASE):
            return remedy
    return None


def make_room(image: str, needed_bytes: int) -> list[Json]:
    """If the disk is too full, remove our own unneeded images. Returns those removed.

    Raises:
        Failed: the disk is still too full, or Docker does not answer.
    """
    place = data_root()
    before = free_bytes(place)
    if before >= needed_bytes:
        return []
    removed = remove_unneeded([image])
    free = free_bytes(place)
    if free < needed_bytes:
        freed = f"{len(removed)} old images were removed, which freed {gigabytes(max(0, free - before))}"
        have, want = gigabytes(free), gigabytes(needed_bytes)
        raise Failed(f"{place} has {have} free and the pull needs {want}; {freed}", ROOM)
    return removed


def remove_unneeded(keep: Collection[str]) -> list[Json]:
    """Remove the images of `fab build` that no container uses and that are not in `keep`. Returns those removed."""
    ours, in_use = ours_and_in_use()
    return [
        {
            "image": (image_names(details) or [details["Id"]])[0],
            "id": details["Id"],
            "size_bytes": details["Size"],
        }
        for details in unneeded(ours, in_use, keep)
        if remove(details)
    ]


NEEDED_BYTES = {"tpu": 15_000_000_000, "gpu": 20_000_000_000, "cpu": 6_000_000_000}
"""Room for an image of unknown size, its layers as they come and as they are unpacked."""
LAYERS_AS_THEY_COME = 1.4
INSTALL = "`fab deploy` installs Docker; or launch with `--runtime bare`"


def check_docker(request: Json) -> tuple[list[Json], Json]:
    """The checks, and two facts: image_present, and image_needs_bytes, the room that a pull would take."""
    container = request["container"]
    facts: Json = {"image_present": False, "image_needs_bytes": None}
    checks = check_mounts(container["mounts"])
    path = docker_command.program()
    if path is None:
        return [check("docker", "there is no `docker` on this host's PATH", INSTALL), *checks], facts
    answer = docker_command.ask(["version", "--format", "{{.Server.Version}}"], docker=path)
    if not answer.is_good:
        message = f"Docker does not answer this user: {answer.complaint}"
        remedy = docker_command.docker_remedy(answer.complaint, user_name())
        return [check("docker", message, remedy), *checks], facts
    is_snap = os.path.realpath(path) == "/usr/bin/snap"
    snap = "; it is a snap's, which sees no files outside of /home" if is_snap else ""
    checks.insert(0, check("docker", f"Docker {answer.out.strip()} answers{snap}"))
    try:
        details = look_up(container["image"])
        free = free_bytes(data_root())
    except Failed as failure:
        return [*checks, check("image", failure.message, failure.remedy)], facts
    facts["image_present"] = details is not None
    checks.append(check_image(container["image"], details, request["platform"]))
    if details is None and not is_local(container["image"]):
        facts["image_needs_bytes"] = needed = needed_bytes(container.get("size_bytes"), request["platform"])
        removable = 0 if free >= needed else removable_bytes(container["image"])
        checks.append(check_docker_disk(free, needed, removable))
    return checks, facts


def removable_bytes(image: str) -> int:
    """The most bytes that removing our unneeded images could free; layers that two of them share count twice."""
    ours, in_use = ours_and_in_use()
    return sum(int(details["Size"]) for details in unneeded(ours, in_use, [image]))


def check_image(image: str, details: Json | None, platform: str) -> Json:
    """The check of an image; one that still has to be pulled passes. Pure."""
    if details is None:
        if is_local(image):
            missing = local_only(image)
            return check("image", missing.message, missing.remedy)
        return check("image", f"{image} is not here yet; it will be pulled")
    made_for = image_labels(details).get(PLATFORM_LABEL)
    if made_for is not None and made_for != platform:
        message = f"{image} was built for {made_for}, and the run is for {platform}"
        return check("image", message, f"`fab build --platform {platform}`, and name that one")
    return check("image", f"{image} is here ({gigabytes(details['Size'])})")


def needed_bytes(size_bytes: int | None, platform: str) -> int:
    """Room for an image while it is pulled. Pure. size_bytes: of the image unpacked, where that is known."""
    return NEEDED_BYTES[platform] if size_bytes is None else int(size_bytes * LAYERS_AS_THEY_COME)


def check_docker_disk(free: int, needed: int, removable: int) -> Json:
    """Pure. removable: what the pull may remove to make room."""
    have, want = gigabytes(free), gigabytes(needed)
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
        check(
            "mounts",
            f"{path} is a mount of the container and does not exist on this host",
            "mount or make it",
        )
        for path in missing
    ]
