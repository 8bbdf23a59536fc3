"""The device nodes by which a host has TPUs or GPUs, for everybody who looks for them."""

from __future__ import annotations

DEVICE_GLOBS: dict[str, tuple[str, ...]] = {
    "tpu": ("/dev/accel*", "/dev/vfio/[0-9]*"),
    "gpu": ("/dev/nvidia[0-9]*",),
    "cpu": (),
}
VFIO_CONTAINER = "/dev/vfio/vfio"
"""What a process that opens a node of /dev/vfio has to open too."""
