"""What the container of a machine is made with. Pure."""

from __future__ import annotations

from typing import Any

import docker.types

from rehearsal.machines import host_docker, storage
from rehearsal.machines.docker_engine import labels
from rehearsal.machines.machine import DEVICE, HOME_MIB, SPARE_SHARE, Machine, home
from rehearsal.machines.registry import Registry

# Enough for a small job and what it writes to home and share; what runs away ends itself and not this computer.
MEMORY_MIB = 4096
PROCESSES = 2048


def options(rehearsal: str, machine: Machine, registry: Registry | None) -> dict[str, Any]:
    """Apart from image, name and network. registry: where the machine is to have Docker."""
    environment = {"USER_NAME": machine.user, "DEVICE": DEVICE}
    found: dict[str, Any] = {
        "hostname": machine.name,
        "init": True,
        "labels": labels(
            rehearsal, role="machine", machine=machine.name, address=machine.address, user=machine.user,
            share=machine.share_mount or "",
        ),
        # A home that can be full without this computer's disk being so.
        "tmpfs": {home(machine.user): f"size={HOME_MIB}m,exec,mode=0755"},
        "mem_limit": f"{MEMORY_MIB}m",
        "pids_limit": PROCESSES,
        "shm_size": "256m",
    }  # fmt: skip
    mounts: list[docker.types.Mount] = []
    if (
        machine.share_mount is not None
    ):  # twice: from the spare one it is mounted again where it was unmounted
        mounts += [storage.share_at(rehearsal, path) for path in (machine.share_mount, SPARE_SHARE)]
    if registry is not None:
        found |= host_docker.RIGHTS
        environment |= host_docker.environment(registry)
        mounts.append(host_docker.data(rehearsal))
    return {**found, "environment": environment, "mounts": mounts}
