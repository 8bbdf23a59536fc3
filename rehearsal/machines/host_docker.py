"""Docker in a machine: a real daemon of its own, in the container that the machine is. What that takes.

The daemon makes no networks: its containers have the host's or none, as training has. It may mount, which a container
otherwise may not, and is confined by no seccomp or AppArmor profile: whoever is root on such a machine can get at this
computer. Hence only where it is asked for."""

from __future__ import annotations

from typing import Any

import docker.types

from rehearsal.machines.docker_engine import labels
from rehearsal.machines.registry import INNER_PORT, Registry

DATA = "/var/lib/docker"
START = "/opt/tpu-stack/start-docker"
RIGHTS: dict[str, Any] = {
    # Not --privileged, which some computers cannot give and this needs no more than a part of.
    "cap_add": ["SYS_ADMIN", "NET_ADMIN"],
    "security_opt": ["apparmor=unconfined", "seccomp=unconfined"],
    "pids_limit": 4096,  # two daemons, and a shim for each container, are added to what the machine runs
}


def environment(registry: Registry) -> dict[str, str]:
    """For the machine's first process. Pure."""
    return {"REGISTRY": f"{registry.port} {registry.address}:{INNER_PORT}"}


def data(rehearsal: str) -> docker.types.Mount:
    """Its images, in a volume that goes with the machine: no file system can be stacked upon a container's own."""
    return docker.types.Mount(DATA, None, type="volume", labels=labels(rehearsal))
