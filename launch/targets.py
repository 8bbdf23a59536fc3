"""Where a run goes: what --stack, --slice and --hosts mean, how each host is reached, where things lie on them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.device_nodes import DEVICE_GLOBS
from contracts.errors import RequestError
from contracts.files import DiskFiles, Files, is_url, unwritable
from contracts.inventory import Host, Inventory, NodePool, Slice, Storage
from contracts.process import PLATFORMS
from jobs.runtime.cache import user_cache_dir
from launch.hosts import Agent, GoneLink, LocalTransport, ProcessLink, Transport, address_and_port
from launch.jobs import CHECKOUT
from launch.runs import Run, RunsFolder

if TYPE_CHECKING:
    from backends.pods.cluster_runs import ClusterRuns
    from infra.catalogue import Accelerator

LOCAL = "local"
PYTHON = "~/.local/share/tpu-stack/venv/bin/python"
"""Where `fab deploy` puts the interpreter that has what the jobs need."""
CACHE_DIR = "~/.cache/tpu-stack"
"""On hosts that are reached over SSH."""
RUNS = "TPU_STACK_RUNS"
"""Names the folder of this machine's runs, or a URL, where it is not this checkout's runs/."""
DEFAULT_HOSTS = {"cpu": 2, "gpu": 1, "tpu": 1}
MOST_HOSTS = 64
AGENT = CHECKOUT / "host" / "agent" / "__main__.py"


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
    cluster: where the hosts are pods, what it has of runs; `transports` is empty then, and `agents` of all runs.
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
    python_is_given: bool = False
    cpu_devices: int = 1
    stand_in_devices: tuple[str, ...] | None = None
    alone: Callable[[], AbstractContextManager[Callable[[], object]]] = lambda: contextlib.nullcontext(
        lambda: None
    )
    cluster: ClusterRuns | None = None

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
        known = _in_catalogue(self.slice.accelerator_type) if self.platform == "tpu" else None
        return known.peak_bf16_flops_per_s / known.devices if known else None

    @property
    def part_of_tpu(self) -> str | None:
        """Why these hosts cannot compute together, where they are not all that the TPU slice has.

        A TPU's runtime waits for every host of its slice, and tells nobody: "Expected 4 worker addresses, got 1".
        """
        if self.platform != "tpu" or self.is_local:
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
        """Return all agents that may know of these runs; on this machine also those of runs with other hosts."""
        if not self.is_local:
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
    if not found[0].hosts and found[0].pool is None:
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


def resolve(wanted: Wanted, like: Run | None = None) -> Target:
    """Return the target that is asked for. like: a run that is resumed; on this machine with its hosts and platform.

    Raises:
        RequestError: there is no such stack, slice, host or platform, or it has no place for runs.
    """
    _require_platform(wanted)
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

    from launch import inventories  # this machine needs none

    inventory = wanted.given.inventory if wanted.given else inventories.read(wanted.stack)
    return of_inventory(inventories.renewed(inventory), wanted)


def _require_platform(wanted: Wanted) -> None:
    if wanted.platform is not None and wanted.platform not in PLATFORMS:
        raise RequestError(
            f'--platform: "{wanted.platform}" is not a platform; choose one of {", ".join(PLATFORMS)}'
        )


def inventory_of(wanted: Wanted) -> Inventory:
    """Return the inventory of a stack as it is now, whether it has hosts or not; of this machine its own.

    Raises:
        RequestError: there is no such stack.
    """
    _require_platform(wanted)
    if wanted.stack == LOCAL:
        return resolve(wanted).inventory
    from launch import inventories  # this machine needs none

    return inventories.renewed(wanted.given.inventory if wanted.given else inventories.read(wanted.stack))


def of_each(inventory: Inventory, wanted: Wanted) -> list[Target]:
    """Return the target of every slice that may be meant, those without hosts left out. Raises as `resolve`."""
    if wanted.stack == LOCAL:
        return [resolve(wanted)]
    there = [each for each in inventory.slices if each.hosts or each.pool]
    named = [each.name for each in there if wanted.slice in (None, each.name)]
    return [of_inventory(inventory, dataclasses.replace(wanted, slice=name)) for name in named]


def with_expected_hosts(inventory: Inventory) -> Inventory:
    """Return the inventory with the hosts that slices without any will have, so that a request can be checked. Pure.

    They have no addresses. A slice that is not in the catalogue stays as it is.
    """

    def expected(one_slice: Slice) -> Slice:
        known = None if one_slice.hosts or one_slice.pool else _in_catalogue(one_slice.accelerator_type)
        return _with_hosts(one_slice, known.hosts * one_slice.count) if known else one_slice

    return dataclasses.replace(inventory, slices=tuple(map(expected, inventory.slices)))


def _with_hosts(one_slice: Slice, count: int) -> Slice:
    """Return a slice with hosts that have no addresses yet."""
    hosts = tuple(
        Host(
            index=index, name=f"{one_slice.name}-{index}", internal_address="", external_address=None,
            user=None, host_keys=(), reach="direct",
        )
        for index in range(count)
    )  # fmt: skip
    return dataclasses.replace(one_slice, hosts=hosts)


def on_this_machine(
    *, hosts: str | None, platform: str, python: str | None = None, runs: str | None = None
) -> Target:
    """Return this machine as so many hosts. runs: a folder or URL (default: $TPU_STACK_RUNS, else runs/ here).

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
    """Return this machine as `count` hosts, which share out `processors`."""
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
        devices_per_host=gpus(os.environ, glob.glob(DEVICE_GLOBS["gpu"][0])) if platform == "gpu" else 1,
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
        python_is_given=python is not None,
        **_place(os.environ.get(RUNS) or str(CHECKOUT / "runs"), f"${RUNS}"),
        agent_root=str(cache_dir / "agent"),
        cache_dir=str(cache_dir),
        cpus=shares(processors, count) if platform == "cpu" else (None,) * count,
        coordinator_host="127.0.0.1",
    )


def gpus(environ: Mapping[str, str], nodes: Sequence[str]) -> int:
    """Return how many GPUs this machine lets its processes see; 1 where that is none, which the preflight finds."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    seen = len(nodes) if chosen is None else len([each for each in chosen.split(",") if each.strip()])
    return max(1, min(seen, len(nodes)))


def agents_of(described: Mapping[str, Any]) -> tuple[Agent, ...]:
    """Return the agents of a run on this machine, which has the hosts of every run that was started on it."""
    return agents_here([host["name"] for host in described["hosts"]], Path(described["cache_dir"]))


def _place(runs: str, said: str) -> dict[str, Any]:
    """Return where runs are kept, and how this machine reaches them.

    Raises:
        RequestError: it is a URL of a kind that runs are not kept at, or a path that is all but a URL.
    """
    if problem := unwritable(runs):
        raise RequestError(f"{said} {runs}: {problem}")
    runs = runs.removeprefix("file://")
    if is_url(runs):
        from backends.remote_files import Buckets

        return {"runs_url": runs.rstrip("/"), "files": Buckets()}
    return {"runs_url": os.path.abspath(os.path.expanduser(runs)), "files": DiskFiles()}


def agents_here(hosts: Sequence[str], cache_dir: Path) -> tuple[Agent, ...]:
    """Return the agents of hosts that are this machine: they share its one agent directory."""
    link = ProcessLink(LocalTransport(), (sys.executable, "-S", "-E", str(AGENT)))
    return tuple(Agent(host=host, link=link, root=str(cache_dir / "agent")) for host in hosts)


def shares(processors: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Share out processors to `count` hosts: all are used, and none twice while there are enough."""
    if count >= len(processors):
        return tuple((processors[index % len(processors)],) for index in range(count))
    bounds = [len(processors) * index // count for index in range(count + 1)]
    return tuple(tuple(processors[bounds[index] : bounds[index + 1]]) for index in range(count))


def keys_file(wanted: Wanted) -> Path:
    """Return the file with the confirmed keys of an inventory: beside it, or for a stack beside its configuration."""
    from launch import inventories

    if wanted.given is not None:
        return wanted.given.folder / "host-keys.json"
    if inventories.is_file(wanted.stack):
        return Path(wanted.stack).with_suffix(".host-keys.json")
    return CHECKOUT / f"Pulumi.{wanted.stack}.host-keys.json"


def of_inventory(inventory: Inventory, wanted: Wanted) -> Target:
    """Return the hosts of a slice, reached over SSH; nothing is connected to yet."""
    # With these comes all of SSH, which this machine by itself does not need.
    from backends.remote_files import Buckets, HostFiles
    from backends.vm.agent_session import AGENT_ROOT
    from backends.vm.transport import transports_of
    from launch import inventories

    inventory = inventories.with_keys(inventory, inventories.read_keys(keys_file(wanted)))
    one_slice = choose_slice(inventory, wanted.slice)
    if one_slice.pool is not None:
        return _on_cluster(inventory, one_slice, one_slice.pool, wanted)
    hosts = choose_hosts(one_slice.hosts, wanted.hosts)
    given = wanted.given
    transports = transports_of(inventory, one_slice, [host.index for host in hosts])
    agents = tuple(
        Agent(host=host.name, link=transport, root=AGENT_ROOT)
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
        python_is_given=wanted.python is not None,
        runs_url=runs_url,
        files=Buckets() if is_url(runs_url) else HostFiles(agents),
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * len(hosts),
        coordinator_host=address_and_port(hosts[0].internal_address)[0],
        stand_in_devices=given.stand_in_devices if given else None,
    )


def _on_cluster(inventory: Inventory, one_slice: Slice, pool: NodePool, wanted: Wanted) -> Target:
    """Return the pods that a run on node pools has; nothing is asked of the cluster yet."""
    from backends.pods.cluster_runs import ClusterRuns
    from backends.pods.pods import AGENT_ROOT, CACHE_DIR
    from backends.remote_files import Buckets
    from launch import inventories

    if inventory.cluster is None:
        raise RequestError(
            f"the slice {one_slice.name} is in a cluster, and the inventory of {inventory.stack} has none; "
            f"`pulumi up --stack {inventory.stack}` writes it"
        )
    one_slice = _with_hosts(one_slice, pool.nodes * one_slice.count)
    runs_url = _runs_url(inventory, one_slice, wanted.runs)
    if not is_url(runs_url):
        raise RequestError(
            f"--runs {runs_url}: pods share no disk; name a URL such as gs://…, or leave it out"
        )
    files = Buckets()
    cluster = ClusterRuns(inventory.cluster, files, runs_url)
    hosts = choose_hosts(one_slice.hosts, wanted.hosts)
    return Target(
        name=wanted.stack,
        pulumi_stack=None if inventories.is_file(wanted.stack) else inventory.stack,
        inventory=inventory,
        slice=one_slice,
        hosts=hosts,
        platform=wanted.platform or (wanted.given.platform if wanted.given else "tpu"),
        transports=(),
        agents=cluster.agents_called([inventory.cluster.name]),
        find_agents=cluster.agents,
        python="python",
        runs_url=runs_url,
        files=files,
        agent_root=AGENT_ROOT,
        cache_dir=CACHE_DIR,
        cpus=(None,) * len(hosts),
        coordinator_host="",
        cluster=cluster,
    )


def _runs_url(inventory: Inventory, one_slice: Slice, asked: str | None) -> str:
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
