"""Hosts that are reached over SSH, as the hosts of a target."""

from __future__ import annotations

import functools

from backends.vm.agent_session import AGENT_ROOT
from backends.vm.transport import transports_of
from contracts.files import is_url
from contracts.inventory import Inventory, Slice
from launch import inventories
from launch.hosts import Agent, address_and_port
from launch.remote_files import Buckets, HostFiles
from launch.targets import CACHE_DIR, PYTHON, Target, Wanted, choose_hosts, known_or_gone, place_of_runs


def target_of(inventory: Inventory, one_slice: Slice, wanted: Wanted) -> Target:
    """Return the hosts of a slice, reached over SSH; nothing is connected to yet."""
    hosts = choose_hosts(one_slice.hosts, wanted.hosts)
    given = wanted.given
    transports = transports_of(inventory, one_slice, [host.index for host in hosts])
    agents = tuple(
        Agent(host=host.name, link=transport, root=AGENT_ROOT)
        for host, transport in zip(hosts, transports, strict=True)
    )
    runs_url = place_of_runs(inventory, one_slice, wanted.runs)
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
        python_is_given=wanted.python is not None,
        runs_url=runs_url,
        files=Buckets() if is_url(runs_url) else HostFiles(agents),
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * len(hosts),
        coordinator_host=address_and_port(hosts[0].internal_address)[0],
        stand_in_devices=given.stand_in_devices if given else None,
    )
