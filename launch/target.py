"""Where a run goes: the hosts of a slice, how each is reached, and where things lie on them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contracts.errors import RequestError
from contracts.files import Files, is_url
from contracts.inventory import Host, Inventory, Slice
from infra.catalogue import CatalogueError, accelerator
from launch.hosts import Agent, GoneLink, Transport
from launch.runs import RunsFolder
from launch.ssh.access import address_and_port

LOCAL = "local"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hosts in worker order; `transports`, `agents` and `cpus` are in the same order.

    name: as a user says it with --stack. pulumi_stack: what Pulumi calls it, None where Pulumi did not make it.
    runs_url: the folder of its runs, a path that every host sees or a URL; files: how the launching side gets there.
    find_agents: the agents of the hosts that a run.json names, in worker order.
    agent_root, cache_dir, python: paths on the hosts, "~/" being the home directory there.
    cpus: for each host the processor numbers that its process may use; None: all of them.
    cpu_devices: how many devices a process has where the platform is "cpu".
    stand_in_devices: files that stand in for a TPU's device nodes in a rehearsal.
    """

    name: str
    pulumi_stack: str | None
    inventory: Inventory
    slice: Slice
    hosts: tuple[Host, ...]
    platform: str
    transports: tuple[Transport, ...]
    agents: tuple[Agent, ...]
    find_agents: Callable[[Mapping[str, Any]], tuple[Agent, ...]]
    python: str
    runs_url: str
    files: Files
    agent_root: str
    cache_dir: str
    cpus: tuple[tuple[int, ...] | None, ...]
    coordinator_host: str
    cpu_devices: int = 1
    stand_in_devices: tuple[str, ...] | None = None

    @property
    def is_local(self) -> bool:
        """Whether the hosts are processes of this machine: it sees their files, and several runs share it."""
        return self.name == LOCAL

    @property
    def devices(self) -> int:
        """Of all processes together, as the framework counts them."""
        a_host = self.cpu_devices if self.platform == "cpu" else self.slice.devices_per_host
        return a_host * len(self.hosts)

    @property
    def peak_flops_per_s(self) -> float | None:
        """Of one device in bfloat16, as the catalogue has it; None where that is no TPU, or not known."""
        if self.platform != "tpu":
            return None
        try:
            found = accelerator(self.slice.accelerator_type)
        except CatalogueError:
            return None
        return found.peak_bf16_flops_per_s / found.devices

    @property
    def part_of_tpu(self) -> str | None:
        """Why these hosts cannot compute together, where they are not all that the TPU slice has.

        A TPU's runtime waits for every host of its slice, and tells nobody: "Expected 4 worker addresses, got 1".
        """
        if self.platform != "tpu" or self.is_local:
            return None
        there, type_name = len(self.slice.hosts), self.slice.accelerator_type
        try:
            whole = accelerator(type_name).hosts * self.slice.count
        except CatalogueError:
            whole = there
        if len(self.hosts) < there:
            return (
                f"--hosts: {len(self.hosts)} of the {there} hosts of {self.slice.name}, and the TPU's runtime waits "
                "for all of them; leave --hosts out, or take a smaller slice (tpu-stack:slices). `fab run`, `put`, "
                "`get` and `ssh` take a part"
            )
        if there < whole:
            return (
                f"the slice {self.slice.name} ({type_name}) has {whole} hosts, and the TPU's runtime waits for all of "
                f"them; the inventory has {there}: `pulumi up --refresh` finds the others"
            )
        return None

    @property
    def addresses(self) -> tuple[tuple[str, str, int], ...]:
        """Of each host its name, and where the others find its SSH server."""
        return tuple((host.name, *address_and_port(host.internal_address)) for host in self.hosts)

    @property
    def runs_on_share(self) -> bool:
        """Whether the runs lie on the hosts' own file system or share, and not in a bucket."""
        return not is_url(self.runs_url)

    @property
    def mount(self) -> str | None:
        """Where the share has to be mounted on every host for its runs to be found; None where they are elsewhere."""
        mount = self.inventory.storage.nfs_mount
        return mount if mount is not None and f"{self.runs_url}/".startswith(f"{mount}/") else None

    @property
    def runs(self) -> RunsFolder:
        """Where its runs lie."""
        return RunsFolder(url=self.runs_url, files=self.files)


def known_or_gone(
    agents: Sequence[Agent], slice_name: str, described: Mapping[str, Any]
) -> tuple[Agent, ...]:
    """The agents of the hosts that run.json names; that of a host which the slice no longer has never answers."""
    known = {agent.host: agent for agent in agents}

    def gone(host: str) -> Agent:
        reason = f"is no longer a host of {slice_name}"
        return Agent(host=host, link=GoneLink(reason, "`fab recover` goes on with the new ones"), root="/")

    return tuple(known.get(host["name"]) or gone(host["name"]) for host in described["hosts"])


def choose_slice(inventory: Inventory, wanted: str | None) -> Slice:
    """The slice called `wanted`, or the only one.

    Raises:
        RequestError: there is none of that name, several to choose from, or it has no hosts yet.
    """
    names = ", ".join(each.name for each in inventory.slices)
    if not inventory.slices:
        raise RequestError(
            f"the stack {inventory.stack} has no slice; add one to tpu-stack:slices, then `pulumi up`"
        )
    if wanted is None and len(inventory.slices) > 1:
        raise RequestError(f"--slice: the stack {inventory.stack} has several, say which: {names}")
    found = [each for each in inventory.slices if wanted in (None, each.name)]
    if not found:
        raise RequestError(f'--slice: "{wanted}" is not a slice of {inventory.stack}; choose one of {names}')
    if not found[0].hosts:
        raise RequestError(
            f"the slice {found[0].name} has no hosts yet: its {found[0].origin} was still waiting for capacity when "
            f"the stack was last updated; `pulumi up --stack {inventory.stack}` waits on"
        )
    return found[0]


def choose_hosts(hosts: Sequence[Host], wanted: str | None) -> tuple[Host, ...]:
    """The hosts that "0-3,5" means; all of them without a choice.

    Raises:
        RequestError: the text is no such list, or there is no such host.
    """
    if wanted is None:
        return tuple(hosts)
    chosen: set[int] = set()
    for part in wanted.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        if match is None:
            raise RequestError(f'--hosts: "{wanted}" is not a list of hosts; write it as 0-3,5')
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= len(hosts):
            raise RequestError(f"--hosts {wanted}: the slice has the hosts 0 to {len(hosts) - 1}")
        chosen.update(range(first, last + 1))
    return tuple(hosts[index] for index in sorted(chosen))
