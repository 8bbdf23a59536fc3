"""Hosts that are reached over SSH: what they are like, and a slice of them as a target."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from backends.host_backend import HostBackend
from backends.vm.agent_session import AGENT_ROOT
from backends.vm.ensure import exclusive, restore
from backends.vm.transport import make_transports
from contracts.files import is_url
from contracts.inventory import Host, Inventory, Slice, is_made_again
from launch import inventories
from launch.hosts import Agent, GoneLink, Transport, address_and_port
from launch.remote_files import Buckets, HostFiles
from launch.targets import CACHE_DIR, PYTHON, Capabilities, Target, TargetRequest

CAPABILITIES = Capabilities(
    shares_files=False,
    shares_host=False,
    is_billed=True,
    hosts_outlive_runs=True,
    hosts_follow_run=False,
    restarts_runs=False,
    stops_with_launcher=False,
    python_remedy="`fab deploy --stack {stack}{runtime}` installs it",
    checks=("ssh", "hosts", "storage"),
    instead={},
)


def make_backend(
    inventory: Inventory,
    pulumi_stack: str | None,
    one_slice: Slice,
    agents: tuple[Agent, ...],
    transports: tuple[Transport, ...],
) -> HostBackend:
    """Return the backend of hosts of a slice that are reached over SSH."""
    by_name = {agent.host: agent for agent in agents}

    def agents_for(described: Mapping[str, Any]) -> tuple[Agent, ...]:
        """On a host that the slice has no longer, nothing runs; one that was made again may have the same name. What
        runs on another slice, only its heartbeats show."""
        created = described["attempts"][-1].get("slice_created", "")
        before = described.get("slice") or {}
        is_same_slice = not before or _names(before) == _names(dataclasses.asdict(one_slice))
        is_here = not (is_same_slice and is_made_again(created, one_slice.created))
        link = GoneLink(f"is no longer a host of {one_slice.name}", "`fab recover` goes on with the new ones")
        if not is_same_slice:
            link = GoneLink(
                f"is a host of the slice {before.get('name')}", "name it with --slice", knows_all=False
            )
        names = [host["name"] for host in described["hosts"]]
        return tuple(
            (by_name.get(name) if is_here else None) or Agent(host=name, link=link, root="/")
            for name in names
        )

    return HostBackend(
        capabilities=CAPABILITIES,
        environments=None,
        agents=agents,
        transports=transports,
        agents_for=agents_for,
        restore=functools.partial(restore, inventory.control, pulumi_stack, one_slice),
        deploy=_deploy,
        hold=functools.partial(exclusive, inventory.control, one_slice.name),
        terminal=_terminal,
    )


def _names(one_slice: Mapping[str, Any]) -> tuple[str, str]:
    """A slice's name in its stack, and at Google, whichever API made it."""
    return one_slice.get("name", ""), one_slice.get("origin", "").rpartition(" ")[2]


def _deploy(target: Target) -> bool:
    from backends.vm.deploy import deploy  # few runs ever need it

    return deploy(target, with_comforts=False) == 0


def _terminal(target: Target, index: int | None, arguments: Sequence[str]) -> int:
    from backends.vm import ssh_config

    argv = ssh_config.command(target, index, arguments)
    sys.stdout.flush()
    # In place of this process, so that the terminal, its signals and its size are ssh's own.
    os.execvp(argv[0], argv)


def make_target(
    inventory: Inventory, one_slice: Slice, hosts: tuple[Host, ...], runs_url: str, request: TargetRequest
) -> Target:
    """Return the hosts of a slice, reached over SSH; nothing is connected to yet."""
    preset = request.preset
    transports = make_transports(inventory, one_slice, [host.index for host in hosts])
    agents = tuple(
        Agent(host=host.name, link=transport, root=AGENT_ROOT)
        for host, transport in zip(hosts, transports, strict=True)
    )
    pulumi_stack = None if inventories.is_file(request.stack) else inventory.stack
    return Target(
        name=request.stack,
        pulumi_stack=pulumi_stack,
        inventory=inventory,
        slice=one_slice,
        hosts=hosts,
        platform=request.platform or (preset.platform if preset else "tpu"),
        transports=transports,
        agents=agents,
        python=request.python or (preset.python if preset else PYTHON),
        python_is_given=request.python is not None,
        runs_url=runs_url,
        files=Buckets() if is_url(runs_url) else HostFiles(agents),
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * len(hosts),
        coordinator_host=address_and_port(hosts[0].internal_address)[0],
        backend=make_backend(inventory, pulumi_stack, one_slice, agents, transports),
        stand_in_devices=preset.stand_in_devices if preset else None,
    )
