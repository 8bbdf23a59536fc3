"""What the program is asked for in a rehearsal of so many hosts: accelerator, zone, configuration. Pure.

Apart from the stack itself, whose program takes seconds to load: `fab rehearsal` needs only this."""

from __future__ import annotations

from typing import Any

from infra import catalogue
from rehearsal.state import RehearsalError

PROJECT = "my-rehearsal"
SLICE = "main"
BUCKET = f"{PROJECT}-runs"
MOUNT = "/mnt/share"
ACCOUNT = "you@rehearsal.example"
# The wait for a slice that has no capacity; long enough for a person to bring it back, short enough to see it end.
WAIT = "10m"
SPARE = 2  # times as many chips as the slice takes, so that a second `up` beside the first has room


def accelerator_of(hosts: int) -> catalogue.Accelerator:
    """A type with so many hosts: v5e where it has one, else the first generation that has.

    Raises:
        RehearsalError: there is none.
    """
    ones = [each for each in catalogue.ACCELERATORS.values() if each.hosts == hosts]
    if not ones:
        sizes = sorted({each.hosts for each in catalogue.ACCELERATORS.values() if each.hosts <= 64})
        raise RehearsalError(
            f"--hosts {hosts}: no TPU slice has so many hosts; choose one of {', '.join(map(str, sizes))}"
        )
    return next((each for each in ones if each.generation.name == "v5e"), ones[0])


def zone_of(accelerator: catalogue.Accelerator) -> str:
    return accelerator.generation.zones[0]


def pool_of(accelerator: catalogue.Accelerator) -> str:
    """The simulator's pool of its chips."""
    return f"{zone_of(accelerator)}:{accelerator.generation.type_prefix}:spot"


def configuration(accelerator: catalogue.Accelerator) -> dict[str, Any]:
    """What a user would write into Pulumi.rehearsal.yaml: one spot slice, a bucket, NFS from a gateway."""
    return {
        "gcp:project": PROJECT,
        "tpu-stack:zone": zone_of(accelerator),
        "tpu-stack:slices": [
            {"name": SLICE, "accelerator": accelerator.type_name, "capacity": "spot", "wait": WAIT}
        ],
        "tpu-stack:storage": {"bucket": {"name": BUCKET}, "nfs": {"kind": "gateway", "mount": MOUNT}},
        "tpu-stack:access": {"members": [f"user:{ACCOUNT}"]},
        "tpu-stack:protect": False,
    }


def chips_of(accelerator: catalogue.Accelerator) -> int:
    """That the pool has."""
    return SPARE * accelerator.chips
