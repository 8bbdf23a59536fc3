"""A slice's hosts as a target: reached over SSH, with their runs on the share or in the bucket."""

from __future__ import annotations

import functools

from contracts.errors import RequestError
from contracts.files import Files, is_url
from contracts.inventory import Inventory, Slice
from launch import inventories
from launch.commands import trust
from launch.hosts import Agent
from launch.remote_files import Buckets, HostFiles
from launch.ssh.access import address_and_port
from launch.ssh.agent_session import AGENT_ROOT, SessionLink
from launch.ssh.connection import Ssh
from launch.target import Target, choose_hosts, choose_slice, known_or_gone
from launch.targets import PYTHON, Wanted

CACHE_DIR = "~/.cache/tpu-stack"


def of_inventory(inventory: Inventory, wanted: Wanted) -> Target:
    """The hosts of a slice, reached over SSH; nothing is connected to yet."""
    inventory = trust.applied(inventory, trust.read(trust.place(wanted)))
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
