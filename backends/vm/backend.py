"""Hosts that are reached over SSH: what they are like, and a slice of them as a target."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING

from backends.host_launcher import HostLauncher, launcher_of
from backends.vm.agent_session import AGENT_ROOT
from backends.vm.ensure import exclusive, restore
from backends.vm.transport import transports_of
from contracts.files import is_url
from contracts.inventory import Inventory, Slice
from launch import inventories
from launch.backend import Capabilities, Say
from launch.hosts import Agent, address_and_port
from launch.remote_files import Buckets, HostFiles
from launch.targets import CACHE_DIR, PYTHON, Target, Wanted, choose_hosts, known_or_gone, place_of_runs

if TYPE_CHECKING:
    from launch.launch import Request

LOOPBACK = "127.0.0.1"


class SshBackend:
    """Hosts that are reached over SSH, such as TPU VMs."""

    capabilities = Capabilities(
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

    def built_image(self, framework: str, platform: str) -> None:  # noqa: ARG002 - hosts pull what was pushed
        return None

    def environment(self, platform: str, framework: str) -> None:  # noqa: ARG002 - images have the frameworks
        return None

    def make_environment(self, framework: str, say: Say) -> None:
        """There is none to be made."""

    def ensure(self, target: Target, say: Say) -> None:
        restore(target.inventory.control, target.pulumi_stack, target.slice, say)

    def prepare(self, target: Target) -> bool:
        from backends.vm.deploy import deploy  # few runs ever need it

        return deploy(target, with_comforts=False) == 0

    def launcher(self, target: Target, request: Request) -> HostLauncher:
        return launcher_of(target, request)

    def conclude(self, run_id: str) -> None:  # noqa: ARG002 - its agents have said all
        return None

    def begins_again(self, run_id: str) -> bool:  # noqa: ARG002
        return False

    def forward(
        self,
        target: Target,
        run_id: str,  # noqa: ARG002 - a host is led to whatever runs
        index: int,
        port: int,
    ) -> contextlib.AbstractContextManager[int]:
        return target.transports[index].forward(LOOPBACK, port)

    def open_shell(self, target: Target, index: int | None, run_id: str | None) -> int:  # noqa: ARG002
        from backends.vm import ssh_config

        argv = ssh_config.command(target, index)
        sys.stdout.flush()
        # In place of this process, so that the terminal, its signals and its size are ssh's own.
        os.execvp(argv[0], argv)


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
        backend=SshBackend(),
        stand_in_devices=given.stand_in_devices if given else None,
        alone=functools.partial(exclusive, inventory.control, one_slice.name),
    )
