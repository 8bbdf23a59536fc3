"""The directories that a run needs: each can be written, and its file system has room."""

from __future__ import annotations

import os

from .checks import check
from .files import remove
from .protocol import remedy_for
from .waiting import in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

ANSWER_LIMIT_S = 10.0


def lies_in(path: str, mount: str | None) -> bool:
    """Whether the path is below that mount point, by the names alone: a mount that hangs is not asked."""
    return mount is not None and f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(mount)}/")


def look_at(name: str, path: str, timeout_s: float = ANSWER_LIMIT_S) -> Json:
    """The finding of one directory with its `path`, and the `device` and `free_bytes` where they could be found."""
    found = in_time(lambda: seen(name, path), timeout_s)
    if found is None:
        message = f"{path} does not answer within {timeout_s:g} s"
        remedy = "see that the server of its file system is up, or choose another directory"
        found = {"check": check(name, message, remedy)}
    return {"path": path, **found}


def seen(name: str, path: str) -> Json:
    finding = check_writable(name, path)
    existing = path
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    room = os.statvfs(existing)
    return {
        "check": finding,
        "device": os.stat(existing).st_dev,
        "free_bytes": room.f_bavail * room.f_frsize,
    }


def check_writable(name: str, path: str) -> Json:
    """Makes the directory and writes a byte: a full or read-only disk shows in nothing less."""
    trial = os.path.join(path, f".agent-trial.{os.getpid()}")
    try:
        os.makedirs(path, exist_ok=True)
        try:
            with open(trial, "wb") as file:
                file.write(b"x")
        finally:
            remove(trial)
    except OSError as error:
        return check(name, f"{path} cannot be written: {error.strerror}", remedy_for(error))
    return check(name, f"{path} can be written")


def free_bytes(places: list[Json]) -> dict[str, int]:
    """The free space of each file system, under the first of the places that are on it."""
    first: dict[int, str] = {}
    found: dict[str, int] = {}
    for place in places:
        if "device" in place and first.setdefault(place["device"], place["path"]) == place["path"]:
            found[place["path"]] = place["free_bytes"]
    return found


def check_room(places: list[Json], min_free_bytes: int) -> list[Json]:
    """A finding for each file system."""
    checks = []
    for path, free in free_bytes(places).items():
        have, want = (f"{size / 2**30:.1f} GiB" for size in (free, min_free_bytes))
        if free < min_free_bytes:
            remedy = "free some space there (old runs, caches, docker images), or ask for less"
            checks.append(check("disk", f"{path} has {have} free and needs {want}", remedy))
        else:
            checks.append(check("disk", f"{path} has {have} free"))
    return checks
