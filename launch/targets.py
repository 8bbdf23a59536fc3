"""What --stack, --slice and --hosts mean: this machine as hosts, a Pulumi stack, or a file with an inventory."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from contracts.files import DiskFiles, Files, is_url
from contracts.inventory import Host, Inventory, Slice, Storage
from jobs.runtime.cache import user_cache_dir
from launch import inventories
from launch.hosts import Agent, LocalTransport, ProcessLink
from launch.jobs import CHECKOUT
from launch.remote_files import Buckets, HostFiles
from launch.runs import Run
from launch.ssh.access import address_and_port
from launch.target import LOCAL, Target, choose_hosts, choose_slice, known_or_gone

PLATFORMS = ("cpu", "gpu", "tpu")
PYTHON = "~/.local/share/tpu-stack/venv/bin/python"
"""Where `fab deploy` puts the interpreter that has what the jobs need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """An inventory that is at hand already, and what it cannot say of its hosts: that of a rehearsal, in `folder`."""

    inventory: Inventory
    folder: Path
    platform: str
    python: str
    stand_in_devices: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A target as a user asks for it; None: the default.

    hosts: on this machine how many, else which ("0-3,5"). runs: a folder on the hosts or a URL, for runs.
    """

    stack: str = LOCAL
    slice: str | None = None
    hosts: str | None = None
    platform: str | None = None
    python: str | None = None
    runs: str | None = None
    given: Given | None = None


def resolve(wanted: Wanted, like: Run | None = None) -> Target:
    """The target that is asked for. like: a run that is to go on; on this machine with its hosts and its platform.

    Raises:
        RequestError: there is no such stack, slice, host or platform, or it has no place for runs.
    """
    if wanted.platform is not None and wanted.platform not in PLATFORMS:
        raise RequestError(
            f'--platform: "{wanted.platform}" is not a platform; choose one of {", ".join(PLATFORMS)}'
        )
    if wanted.stack == LOCAL:
        if wanted.slice not in (None, LOCAL):
            raise RequestError(f"--slice {wanted.slice}: this machine has no slices; say --stack as well")
        before = like.described["platform"] if like else None
        same = like is not None and wanted.platform in (None, before)
        return on_this_machine(
            hosts=wanted.hosts or (str(like.processes) if like and same else None),
            platform=wanted.platform or before or "cpu",
            python=wanted.python,
            runs=wanted.runs,
        )

    inventory = wanted.given.inventory if wanted.given else inventories.read(wanted.stack)
    return of_inventory(inventory, wanted)


RUNS = "TPU_STACK_RUNS"
"""Names the folder of this machine's runs, or a URL, where it is not this checkout's runs/."""
DEFAULT_HOSTS = {"cpu": 2, "gpu": 1, "tpu": 1}
MOST_HOSTS = 64
AGENT = CHECKOUT / "host" / "agent" / "__main__.py"


def on_this_machine(
    *, hosts: str | None, platform: str, python: str | None = None, runs: str | None = None
) -> Target:
    """This machine as that many hosts. runs: a folder or a URL (default: $TPU_STACK_RUNS, else this checkout's runs/).

    Raises:
        RequestError: it cannot be so many.
    """
    count = DEFAULT_HOSTS[platform] if hosts is None else _count(hosts)
    if platform != "cpu" and count > 1:
        raise RequestError(
            f"--hosts {count}: on this machine one process drives all its {platform.upper()}s; leave --hosts out"
        )
    target = local(count, platform, sorted(os.sched_getaffinity(0)), python)
    return target if runs is None else dataclasses.replace(target, **_place(runs, "--runs"))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MOST_HOSTS):
        raise RequestError(f"--hosts {text}: must be a whole number from 1 to {MOST_HOSTS} on this machine")
    return int(text)


def local(count: int, platform: str, processors: Sequence[int], python: str | None = None) -> Target:
    """This machine as `count` hosts, which share out `processors`."""
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
        pulumi_stack=None,
        inventory=Inventory(
            stack=LOCAL, project=None, storage=storage, images={}, gateway=None, slices=(one_slice,)
        ),
        slice=one_slice,
        hosts=hosts,
        platform=platform,
        transports=(LocalTransport(),) * count,
        agents=agents_here([host.name for host in hosts], cache_dir),
        find_agents=agents_of,
        python=python or sys.executable,
        **_place(os.environ.get(RUNS) or str(CHECKOUT / "runs"), f"${RUNS}"),
        agent_root=str(cache_dir / "agent"),
        cache_dir=str(cache_dir),
        cpus=shares(processors, count) if platform == "cpu" else (None,) * count,
        coordinator_host="127.0.0.1",
    )


def agents_of(described: Mapping[str, Any]) -> tuple[Agent, ...]:
    """This machine has the hosts of every run that was started on it, however many and whatever they were called."""
    return agents_here([host["name"] for host in described["hosts"]], Path(described["cache_dir"]))


def _place(runs: str, said: str) -> dict[str, Any]:
    """Where runs are kept, and how this machine gets there.

    Raises:
        RequestError: it is a path that is all but a URL.
    """
    if is_url(runs):
        return {"runs_url": runs.rstrip("/"), "files": Buckets()}
    if near := re.match(r"(gs|gcs|s3):/*", runs):
        raise RequestError(f"{said} {runs}: is no URL; write {near[1]}://{runs[near.end() :]}")
    return {"runs_url": os.path.abspath(os.path.expanduser(runs)), "files": DiskFiles()}


def agents_here(hosts: Sequence[str], cache_dir: Path) -> tuple[Agent, ...]:
    """The agents of hosts that are this machine: they share its one agent directory."""
    link = ProcessLink(LocalTransport(), (sys.executable, "-S", "-E", str(AGENT)))
    return tuple(Agent(host=host, link=link, root=str(cache_dir / "agent")) for host in hosts)


def shares(processors: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Share out processors to `count` hosts: all are used, and none twice while there are enough."""
    if count >= len(processors):
        return tuple((processors[index % len(processors)],) for index in range(count))
    bounds = [len(processors) * index // count for index in range(count + 1)]
    return tuple(tuple(processors[bounds[index] : bounds[index + 1]]) for index in range(count))


CACHE_DIR = "~/.cache/tpu-stack"


def keys_file(wanted: Wanted) -> Path:
    """The file with the confirmed keys of an inventory: beside it, and for a stack beside its configuration."""
    if wanted.given is not None:
        return wanted.given.folder / "host-keys.json"
    if inventories.is_file(wanted.stack):
        return Path(wanted.stack).with_suffix(".host-keys.json")
    return CHECKOUT / f"Pulumi.{wanted.stack}.host-keys.json"


def of_inventory(inventory: Inventory, wanted: Wanted) -> Target:
    """The hosts of a slice, reached over SSH; nothing is connected to yet."""
    # With these comes all of SSH, which this machine by itself does not need.
    from launch.ssh.agent_session import AGENT_ROOT
    from launch.ssh.transport import SessionLink, transports_of

    inventory = inventories.with_keys(inventory, inventories.read_keys(keys_file(wanted)))
    one_slice = choose_slice(inventory, wanted.slice)
    hosts = choose_hosts(one_slice.hosts, wanted.hosts)
    given = wanted.given
    transports = transports_of(inventory, one_slice, [host.index for host in hosts])
    agents = tuple(
        Agent(host=host.name, link=SessionLink(transport), root=AGENT_ROOT)
        for host, transport in zip(hosts, transports, strict=True)
    )
    runs_url = _runs_url(inventory, one_slice, wanted.runs)
    return Target(
        name=wanted.stack,
        pulumi_stack=None if inventories.is_file(wanted.stack) else inventory.stack,
        inventory=inventory,
        slice=one_slice,
        hosts=hosts,
        platform=wanted.platform or (given.platform if given else "tpu"),
        transports=transports,
        agents=agents,
        find_agents=functools.partial(known_or_gone, agents, one_slice.name),
        python=wanted.python or (given.python if given else PYTHON),
        runs_url=runs_url,
        files=_files(runs_url, agents),
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * len(hosts),
        coordinator_host=address_and_port(hosts[0].internal_address)[0],
        stand_in_devices=given.stand_in_devices if given else None,
    )


def _runs_url(inventory: Inventory, one_slice: Slice, asked: str | None) -> str:
    if asked is not None:
        if not is_url(asked) and not asked.startswith("/"):
            raise RequestError(
                f"--runs {asked}: must be an absolute path on the hosts, or a URL such as gs://…"
            )
        return asked.rstrip("/")
    place = inventory.storage.nfs_mount or inventory.storage.bucket_url
    if place is None:
        raise RequestError(
            f"the stack {inventory.stack} has neither NFS nor a bucket, and the hosts of {one_slice.name} need one "
            "place for their runs; set tpu-stack:storage, or say where with --runs"
        )
    return f"{place}/runs"


def _files(runs_url: str, agents: tuple[Agent, ...]) -> Files:
    return Buckets() if is_url(runs_url) else HostFiles(agents)
