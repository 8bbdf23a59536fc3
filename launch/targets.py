"""Where a run's hosts come from: today this machine; an inventory, and how each of its hosts is reached."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.inventory import Host, Inventory, Slice, Storage
from jobs.runtime.cache import user_cache_dir
from jobs.runtime.errors import RequestError
from launch.agents import Agent
from launch.jobs import CHECKOUT
from launch.runs import Run
from launch.transport import LocalTransport

LOCAL = "local"
TARGETS = (LOCAL,)
PLATFORMS = ("cpu", "gpu", "tpu")
DEFAULT_LOCAL_HOSTS = {"cpu": 2, "gpu": 1, "tpu": 1}
MOST_LOCAL_HOSTS = 64
AGENT = CHECKOUT / "host" / "agent.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """An inventory, and where things lie on its hosts.

    cpus: for each host the processor numbers that its process may use; None: all of them.
    sees_files: whether the launching side sees the same files as the hosts (run directories, data).
    """

    name: str
    inventory: Inventory
    platform: str
    agents: tuple[Agent, ...]
    python: str
    runs_dir: Path
    cache_dir: Path
    cpus: tuple[tuple[int, ...] | None, ...]
    coordinator_host: str
    sees_files: bool

    @property
    def slice(self) -> Slice:
        return self.inventory.slices[0]

    @property
    def hosts(self) -> tuple[Host, ...]:
        return self.slice.hosts

    @property
    def devices(self) -> int:
        return self.slice.devices_per_host * len(self.hosts)


def resolve(name: str, *, hosts: int | None, platform: str) -> Target:
    """The target called `name`.

    Raises:
        RequestError: there is no such target or platform, or it cannot have so many hosts.
    """
    if name not in TARGETS:
        raise RequestError(f'--target: "{name}" is not a target; choose one of {", ".join(TARGETS)}')
    if platform not in PLATFORMS:
        raise RequestError(
            f'--platform: "{platform}" is not a platform; choose one of {", ".join(PLATFORMS)}'
        )
    count = DEFAULT_LOCAL_HOSTS[platform] if hosts is None else hosts
    if not 1 <= count <= MOST_LOCAL_HOSTS:
        raise RequestError(f"--hosts {count}: must be between 1 and {MOST_LOCAL_HOSTS} on this machine")
    if platform != "cpu" and count > 1:
        raise RequestError(
            f"--hosts {count}: on this machine one process drives all its {platform.upper()}s; leave --hosts out"
        )
    return local(count, platform, sorted(os.sched_getaffinity(0)))


def local(count: int, platform: str, processors: Sequence[int]) -> Target:
    """This machine as `count` hosts: processes on 127.0.0.1, each with its own share of the processors."""
    cache_dir = user_cache_dir(os.environ)
    machine = socket.gethostname()
    hosts = tuple(
        Host(
            index=index,
            name=f"{machine}/{index}" if count > 1 else machine,
            internal_address="127.0.0.1",
            external_address=None,
            user=None,
            host_keys=(),
            reach="local",
        )
        for index in range(count)
    )
    one_slice = Slice(
        name=LOCAL,
        accelerator_type=platform,
        generation=platform,
        topology=str(count),
        zone=LOCAL,
        capacity="on-demand",
        origin=LOCAL,
        count=1,
        devices_per_host=1,
        hosts=hosts,
    )
    storage = Storage(bucket_url=None, bucket_region=None, nfs_source=None, nfs_mount=None)
    return Target(
        name=LOCAL,
        inventory=Inventory(
            stack=LOCAL, project=None, storage=storage, images={}, gateway=None, slices=(one_slice,)
        ),
        platform=platform,
        agents=local_agents([host.name for host in hosts], cache_dir),
        python=sys.executable,
        runs_dir=runs_dir(),
        cache_dir=cache_dir,
        cpus=shares(processors, count) if platform == "cpu" else (None,) * count,
        coordinator_host="127.0.0.1",
        sees_files=True,
    )


def runs_dir() -> Path:
    """Where runs are kept: $TPU_STACK_RUNS where it is set, else this checkout's runs/."""
    return Path(os.environ.get("TPU_STACK_RUNS") or CHECKOUT / "runs").absolute()


def agents_of(described: Mapping[str, Any]) -> tuple[Agent, ...]:
    """The agents of the hosts that run.json names, in worker order."""
    return local_agents([host["name"] for host in described["hosts"]], Path(described["cache_dir"]))


def agents_of_all(several: Sequence[Run]) -> tuple[Agent, ...]:
    """The agents of all hosts that any of these runs has."""
    return tuple(agent for run in several for agent in agents_of(run.described))


def local_agents(hosts: Sequence[str], cache_dir: Path) -> tuple[Agent, ...]:
    """The agents of hosts that are this machine: they share its one agent directory."""
    command = (sys.executable, "-S", "-E", str(AGENT))
    return tuple(
        Agent(host=host, transport=LocalTransport(), command=command, root=str(cache_dir / "agent"))
        for host in hosts
    )


def shares(processors: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Share out processors to `count` hosts: all are used, and none twice while there are enough."""
    if count >= len(processors):
        return tuple((processors[index % len(processors)],) for index in range(count))
    bounds = [len(processors) * index // count for index in range(count + 1)]
    return tuple(tuple(processors[bounds[index] : bounds[index + 1]]) for index in range(count))
