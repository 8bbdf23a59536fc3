"""The verb pull: an image by its digest comes to this host, once, if it can be had and there is room for it."""

from __future__ import annotations

import re
import time

from . import engine, images
from .facts import user_name
from .protocol import Failed
from .prune import cleared
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

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
    """Fetch an image; one that is here is not asked for again.

    Attempts are repeated for what can get better (the network, a busy registry, a Docker that is not up yet), with
    the pauses that the answer tells of.

    Raises:
        Failed: it cannot be had, or the disk has too little room after the images that nobody needs are gone.
    """
    image, began = request["image"], time.monotonic()
    deadline = began + (PULL_LIMIT_S if request["limit_s"] is None else request["limit_s"])
    retries: list[str] = []
    removed: list[Json] = []
    answer = {"pulled": False, "attempts": 0, "retries": retries, "pruned": removed}
    for attempt in range(1, request["attempts"] + 1):
        try:
            known = images.look_up(image)
            if known is None:
                if images.is_local(image):
                    raise images.local_only(image)
                removed += make_room(image, request["min_free_bytes"], request["keep"] or [])
                answer.update(pulled=True, attempts=attempt)
                fetched = engine.ask(["pull", "--quiet", image], max(1.0, deadline - time.monotonic()))
                known = images.look_up(image) if fetched.is_good else None
                problem = fetched.complaint or "Docker says that it was pulled, and does not have it"
            if known is not None:
                return {**answer, "seconds": time.monotonic() - began, "size_bytes": known["Size"]}
        except Failed as failure:
            if not engine.is_no_answer(failure.message):
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
        f"{image} could not be pulled, {tried}: {problem}", engine.remedy_of(problem, user_name(), otherwise)
    )


def final_remedy(problem: str) -> str | None:
    """What to do about a problem that no further attempt would end; None: another one may. Pure."""
    if re.search(PERMISSION, problem, re.IGNORECASE):
        return engine.remedy_of(problem, user_name())
    for pattern, remedy in FINAL:
        if re.search(pattern, problem, re.IGNORECASE):
            return remedy
    return None


def make_room(image: str, needed_bytes: int, keep: list[str]) -> list[Json]:
    """Where the disk is short, remove our own images that nobody needs; which those were.

    Raises:
        Failed: it is short all the same.
    """
    place = images.data_root()
    free = images.free_bytes(place)
    if free >= needed_bytes:
        return []
    done = cleared([image, *keep])
    free = done["docker_root_free_bytes"]
    if free < needed_bytes:
        freed = f"{len(done['removed'])} old images were removed, which freed {images.gigabytes(done['freed_bytes'])}"
        have, want = images.gigabytes(free), images.gigabytes(needed_bytes)
        raise Failed(f"{place} has {have} free and the pull needs {want}; {freed}", ROOM)
    return list(done["removed"])
