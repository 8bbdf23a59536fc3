"""Where a run goes: what --stack, --slice and --hosts mean, how each host is reached, where things lie on them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import RequestError
from contracts.files import Files, is_url, unwritable
from contracts.inventory import Host, Inventory, Slice
from launch.backend import Backend, Capabilities
from launch.hosts import Agent, GoneLink, Transport, address_and_port
from launch.runs import Run, RunsFolder

if TYPE_CHECKING:
    from infra.catalogue import Accelerator

LOCAL = "local"
OWN_FRAMEWORK = "jax"
"""The one that this checkout's own environment has, and that `fab deploy` installs."""
PYTHON = "~/.local/share/tpu-stack/venv/bin/python"
"""Where `fab deploy` puts the interpreter that has what the jobs need."""
CACHE_DIR = "~/.cache/tpu-stack"
"""On hosts that are reached over SSH."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hosts in worker order; `transports`, `agents` and `cpus` are in the same order.

    name: as a user says it with --stack. pulumi_stack: what Pulumi calls it, None where Pulumi did not make it.
    runs_url: the folder of its runs, a path that every host sees or a URL; files: how the launching side gets there.
    find_agents: the agents of the hosts that a run.json names, in worker order.
    agent_root, cache_dir, python: paths on the hosts, "~/" being the home directory there.
    python_is_given: whether `python` is what somebody asked for with --python.
    cpus: for each host the processor numbers that its process may use; None: all of them.
    cpu_devices: how many devices a process has where the platform is "cpu".
    stand_in_devices: files that stand in for a TPU's device nodes in a rehearsal.
    alone: inside it nobody else changes the slice or starts a run on it; raises RequestError where somebody does. What
    it gives raises once that is over, as when this machine was suspended and somebody else went on meanwhile.
    backend: what starts runs on the hosts. Where these end with a run, `transports` is empty, and `agents` are of all.
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
    backend: Backend
    python_is_given: bool = False
    cpu_devices: int = 1
    stand_in_devices: tuple[str, ...] | None = None
    alone: Callable[[], AbstractContextManager[Callable[[], object]]] = lambda: contextlib.nullcontext(
        lambda: None
    )

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    def require(self, command: str) -> Target:
        """Return the target. Raises RequestError: a command has no meaning on its backend."""
        if (instead := self.capabilities.instead.get(command)) is not None:
            raise RequestError(instead.format(slice=self.slice.name))
        return self

    @property
    def stack_option(self) -> str:
        """How a command that is to be typed names the stack, with a blank before it; "" for the default."""
        return "" if self.name == LOCAL else f" --stack {self.name}"

    def interpreter(self, framework: str, *, in_container: bool) -> str:
        """Return the interpreter on the hosts that has a framework's packages.

        Raises:
            RequestError: the hosts have nothing of the framework.
        """
        if in_container or framework == OWN_FRAMEWORK:
            return self.python
        made = self.backend.environment(self.platform, framework)
        if made is None:
            raise RequestError(
                f"--framework {framework}: the stack {self.name} has no image of it; `fab build --framework "
                f"{framework}`, `fab push --stack {self.name} --framework {framework}`, then `pulumi up`; "
                "or name an interpreter of the hosts with --python"
            )
        return made

    @property
    def devices(self) -> int:
        """Of all processes together, as the framework counts them."""
        a_host = self.cpu_devices if self.platform == "cpu" else self.slice.devices_per_host
        return a_host * len(self.hosts)

    @property
    def peak_flops_per_s(self) -> float | None:
        """Of one device in bfloat16, as the catalogue has it; None where that is no TPU, or not known."""
        known = _in_catalogue(self.slice.accelerator_type) if self.platform == "tpu" else None
        return known.peak_bf16_flops_per_s / known.devices if known else None

    @property
    def part_of_tpu(self) -> str | None:
        """Why these hosts cannot compute together, where they are not all that the TPU slice has.

        A TPU's runtime waits for every host of its slice, and tells nobody: "Expected 4 worker addresses, got 1".
        """
        if self.platform != "tpu" or self.capabilities.shares_host:
            return None
        there, type_name = len(self.slice.hosts), self.slice.accelerator_type
        known = _in_catalogue(type_name)
        whole = known.hosts * self.slice.count if known else there
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

    def agents_of_all(self, several: Sequence[Run]) -> tuple[Agent, ...]:
        """Return all agents that may know of these runs; where hosts follow a run, those of each run's hosts."""
        if not self.capabilities.hosts_follow_run:
            return self.agents
        return tuple(agent for run in several for agent in self.find_agents(run.described))

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


def _in_catalogue(type_name: str) -> Accelerator | None:
    from infra.catalogue import CatalogueError, accelerator  # few launches are on TPUs

    try:
        return accelerator(type_name, "any")
    except CatalogueError:
        return None


def known_or_gone(
    agents: Sequence[Agent], slice_name: str, described: Mapping[str, Any]
) -> tuple[Agent, ...]:
    """Return the agents of the hosts that run.json names; on a host that the slice no longer has, nothing runs."""
    known = {agent.host: agent for agent in agents}

    def gone(host: str) -> Agent:
        reason = f"is no longer a host of {slice_name}"
        return Agent(host=host, link=GoneLink(reason, "`fab recover` goes on with the new ones"), root="/")

    return tuple(known.get(host["name"]) or gone(host["name"]) for host in described["hosts"])


def choose_slice(inventory: Inventory, wanted: str | None) -> Slice:
    """Return the slice called `wanted`, or the only one.

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
    if not found[0].is_usable:
        raise RequestError(
            f"the slice {found[0].name} has no hosts yet: its {found[0].origin} was still waiting for capacity when "
            f"the stack was last updated; `pulumi up --stack {inventory.stack}` waits on"
        )
    return found[0]


def choose_hosts(hosts: Sequence[Host], wanted: str | None) -> tuple[Host, ...]:
    """Return the hosts that "0-3,5" means; all of them without a choice.

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


def with_expected_hosts(inventory: Inventory) -> Inventory:
    """Return the inventory with the hosts that slices without any will have, so that a request can be checked. Pure.

    They have no addresses. A slice that is not in the catalogue stays as it is.
    """

    def expected(one_slice: Slice) -> Slice:
        known = None if one_slice.is_usable else _in_catalogue(one_slice.accelerator_type)
        return with_hosts(one_slice, known.hosts * one_slice.count) if known else one_slice

    return dataclasses.replace(inventory, slices=tuple(map(expected, inventory.slices)))


def with_hosts(one_slice: Slice, count: int) -> Slice:
    """Return a slice with hosts that have no addresses yet."""
    hosts = tuple(
        Host(
            index=index, name=f"{one_slice.name}-{index}", internal_address="", external_address=None,
            user=None, host_keys=(), reach="direct",
        )
        for index in range(count)
    )  # fmt: skip
    return dataclasses.replace(one_slice, hosts=hosts)


def place_of_runs(inventory: Inventory, one_slice: Slice, asked: str | None) -> str:
    """Return the folder of the runs of a slice, a path on its hosts or a URL. asked: as --runs says it.

    Raises:
        RequestError: it is no such place, or the stack has none.
    """
    if asked is not None:
        if problem := unwritable(asked):
            raise RequestError(f"--runs {asked}: {problem}")
        if not is_url(asked) and not asked.startswith("/"):
            raise RequestError(
                f"--runs {asked}: must be an absolute path on the hosts, or a URL such as gs://…"
            )
        return asked.rstrip("/")
    # A slice that may be in several zones finds its runs in the bucket, whichever it is in.
    mount = None if one_slice.zones or one_slice.pool else inventory.storage.nfs_mount
    place = mount or inventory.storage.bucket_url
    if place is None and one_slice.pool is not None:
        raise RequestError(
            f"the stack {inventory.stack} has no bucket, and the runs of {one_slice.name}, whose hosts are pods, have "
            "to be in one; set tpu-stack:storage.bucket, or say where with --runs"
        )
    if place is None and one_slice.zones:
        raise RequestError(
            f"the stack {inventory.stack} has no bucket, and {one_slice.name} may be in {', '.join(one_slice.zones)}: "
            "its runs have to be in one; set tpu-stack:storage.bucket, or say where with --runs"
        )
    if place is None:
        raise RequestError(
            f"the stack {inventory.stack} has neither NFS nor a bucket, and the hosts of {one_slice.name} need one "
            "place for their runs; set tpu-stack:storage, or say where with --runs"
        )
    return f"{place}/runs"
