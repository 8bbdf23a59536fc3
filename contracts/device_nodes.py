"""The device nodes by which a host has TPUs or GPUs, for everybody who looks for them."""

from __future__ import annotations

import glob

from contracts.errors import RequestError

DEVICE_GLOBS: dict[str, tuple[str, ...]] = {
    "tpu": ("/dev/accel*", "/dev/vfio/[0-9]*"),
    "gpu": ("/dev/nvidia[0-9]*",),
    "cpu": (),
}
VFIO_CONTAINER = "/dev/vfio/vfio"
"""What a process that opens a node of /dev/vfio has to open too."""


def required(platform: str) -> None:
    """Make sure that this host has devices of a platform.

    Raises:
        RequestError: it has none, and a job would fall back to the CPU.
    """
    patterns = DEVICE_GLOBS[platform]
    if patterns and not any(glob.glob(pattern) for pattern in patterns):
        raise RequestError(
            f"RUN_PLATFORM is {platform}, but this host has none: no file like {' or '.join(patterns)}; "
            f"run on a host with a {platform.upper()} or ask for `--platform cpu`"
        )
