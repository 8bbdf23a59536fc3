"""The accelerators of this host: there, and free of other processes and of their locks."""

from __future__ import annotations

import fcntl
import os

from .checks import check
from .proc import described, holders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

DEVICE_GLOBS: dict[str, list[str]] = {
    "tpu": ["/dev/accel*", "/dev/vfio/[0-9]*"],
    "gpu": ["/dev/nvidia[0-9]*"],
    "cpu": [],
}
LOCKFILES: dict[str, list[str]] = {"tpu": ["/tmp/libtpu_lockfile"], "gpu": [], "cpu": []}


def check_device(platform: str, globs: list[str] | None, proc_root: str) -> Json:
    """Whether the devices are there and, but for a GPU, which several may use, nobody has them open.

    A CPU has none unless the request names some, which then stand for a TPU's.
    """
    globs = DEVICE_GLOBS[platform] if globs is None else globs
    if not globs:
        return check("device", f"{len(os.sched_getaffinity(0))} CPU cores")
    import glob

    name = "stand-in" if platform == "cpu" else platform.upper()
    devices = sorted(path for pattern in globs for path in glob.glob(pattern))
    if not devices:
        message = f"no {name} on this host: none of {', '.join(globs)} exists"
        return check("device", message, f"choose a host that has one, or another platform than {platform}")
    if platform != "gpu":
        real = {os.path.realpath(path): path for path in devices}
        for target, held_by in sorted(holders(real, proc_root).items()):
            if held_by:
                message = f"{real[target]} is held by {described(held_by, proc_root)}"
                return check("device", message, "stop the run that holds it, or end that process")
    return check("device", f"{len(devices)} {name} devices: {', '.join(devices)}")


def check_lockfiles(platform: str, paths: list[str] | None, proc_root: str) -> list[Json]:
    """A finding for each lock file that is there; where the request names none, of those that the platform has."""
    paths = LOCKFILES[platform] if paths is None else paths
    return [check_lockfile(path, proc_root) for path in paths if os.path.lexists(path)]


def check_lockfile(path: str, proc_root: str) -> Json:
    """A lock file that outlived its process, as SIGKILL leaves one, is removed; a held one is left alone."""
    real = os.path.realpath(path)
    held_by = holders([real], proc_root)[real]
    remedy = "stop the run that holds it, or end that process"
    try:
        if held_by or is_locked(path):
            return check("lockfile", f"{path} is held by {described(held_by, proc_root)}", remedy)
        os.unlink(path)
    except FileNotFoundError:
        return check("lockfile", f"{path} is not there")
    except OSError as error:
        message = f"{path} cannot be looked at or removed: {error.strerror}"
        return check("lockfile", message, f"if nobody needs it: sudo rm {path}")
    return check("lockfile", f"removed {path}, left over from a process that has ended")


def is_locked(path: str) -> bool:
    """Whether some process has a lock, of either make, on the file."""
    with open(path, "rb+") as file:
        for lock in (fcntl.flock, fcntl.lockf):
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
