"""What --stack, --slice and --hosts mean: this machine, a Pulumi stack, or a file with an inventory."""

from __future__ import annotations

import dataclasses
import functools

from infra.inventory import Inventory, Slice
from jobs.runtime.errors import RequestError
from jobs.runtime.files import BucketFiles, Files
from launch import local, stack_output
from launch.agents import Agent
from launch.host_files import HostFiles
from launch.runs import Run
from launch.ssh.access import address_and_port
from launch.ssh.connections import Ssh
from launch.ssh.session import SessionLink
from launch.target import LOCAL, Target, choose_hosts, choose_slice, known_or_gone

PLATFORMS = ("cpu", "gpu", "tpu")
AGENT_ROOT = "~/.cache/tpu-stack/agent"
CACHE_DIR = "~/.cache/tpu-stack"
PYTHON = "~/.local/share/tpu-stack/venv/bin/python"
"""Where `fab deploy` puts the interpreter that has what the jobs need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """An inventory that is at hand already, and what it cannot say of its hosts: a rehearsal's."""

    inventory: Inventory
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
        return local.resolve(
            hosts=wanted.hosts or (str(like.processes) if like and same else None),
            platform=wanted.platform or before or "cpu",
            python=wanted.python,
        )
    inventory = wanted.given.inventory if wanted.given else stack_output.read(wanted.stack)
    return of_inventory(inventory, wanted)


def of_inventory(inventory: Inventory, wanted: Wanted) -> Target:
    """The hosts of a slice, reached over SSH; nothing is connected to yet."""
    one_slice = choose_slice(inventory, wanted.slice)
    hosts = choose_hosts(one_slice.hosts, wanted.hosts)
    given = wanted.given
    transports = Ssh().transports(inventory, one_slice, [host.index for host in hosts])
    agents = tuple(
        Agent(host=host.name, link=SessionLink(transport), root=AGENT_ROOT)
        for host, transport in zip(hosts, transports, strict=True)
    )
    runs_url = _runs_url(inventory, one_slice, wanted.runs)
    return Target(
        name=wanted.stack,
        pulumi_stack=None if stack_output.is_file(wanted.stack) else inventory.stack,
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
        if "://" not in asked and not asked.startswith("/"):
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
    return BucketFiles() if "://" in runs_url else HostFiles(agents)
