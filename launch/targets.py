"""Where a run goes: its hosts, the backend that has them, and where things lie on them.

`backends/` has three backends: this machine, hosts over SSH, pods of a cluster. Who calls a verb or reads a capability
does not ask which of them it has.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from contracts.errors import RequestError
from contracts.files import Files, is_url, unwritable
from contracts.inventory import Host, Inventory, Slice
from contracts.run_directory import State
from launch import runs
from launch.bundles import Bundle
from launch.hosts import Agent, Answer, Transport, address_and_port
from launch.runs import Look, Run, RunsFolder

if TYPE_CHECKING:
    from infra.catalogue import Accelerator
    from launch.launching import Request
    from launch.plan import Plan

Say = Callable[[str], None]
Require = Callable[[], object]
"""Raises once what it stands for is no longer so."""

LOCAL = "local"
OWN_FRAMEWORK = "jax"
"""The one that this checkout's own environment has, and that `fab deploy` installs."""
PYTHON = "~/.local/share/tpu-stack/venv/bin/python"
"""Where `fab deploy` puts the interpreter that has what the jobs need."""
CACHE_DIR = "~/.cache/tpu-stack"
"""On hosts that are reached over SSH."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend's hosts are like.

    shares_files: they see this machine's files under the same paths, and have its rights and its ports.
    shares_host: they are one machine, with one disk and one set of ports.
    is_billed: they cost money while they are there.
    hosts_outlive_runs: they are there before a run and after it; otherwise they are made for it and end with it.
    hosts_follow_run: a run decides how many there are, and one that is resumed has those that it had.
    restarts_runs: lost processes are started again without a launcher, as often as --max-restarts says.
    stops_with_launcher: Ctrl-C in the command that follows a run stops the run, and not only the command.
    python_remedy: what to do where the interpreter lacks something; {stack} and {runtime} are filled in.
    checks: what `fab doctor` looks at, in order.
    instead: of commands that have no meaning on them, why, and what to do instead; {slice} is filled in.
    """

    shares_files: bool
    shares_host: bool
    is_billed: bool
    hosts_outlive_runs: bool
    hosts_follow_run: bool
    restarts_runs: bool
    stops_with_launcher: bool
    python_remedy: str
    checks: tuple[str, ...]
    instead: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Hosts in worker order; `transports`, `agents` and `cpus` are in the same order.

    name: as a user says it with --stack. pulumi_stack: what Pulumi calls it, None where Pulumi did not make it.
    runs_url: the folder of its runs, a path that every host sees or a URL; files: how the launching side gets there.
    agent_root, cache_dir, python: paths on the hosts, "~/" being the home directory there.
    python_is_given: whether `python` is what somebody asked for with --python.
    cpus: for each host the processor numbers that its process may use; None: all of them.
    cpu_devices: how many devices a process has where the platform is "cpu".
    stand_in_devices: files that stand in for a TPU's device nodes in a rehearsal.
    transports, agents: empty where hosts end with a run.
    """

    name: str
    pulumi_stack: str | None
    inventory: Inventory
    slice: Slice
    hosts: tuple[Host, ...]
    platform: str
    transports: tuple[Transport, ...]
    agents: tuple[Agent, ...]
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
        if self.backend.environments is None:
            raise RequestError(
                f"--framework {framework}: the stack {self.name} has no image of it; `fab build --framework "
                f"{framework}`, `fab push --stack {self.name} --framework {framework}`, then `pulumi up`; "
                "or name an interpreter of the hosts with --python"
            )
        return self.backend.environments.interpreter(framework, self.platform)

    def make_environment(self, framework: str, say: Say) -> None:
        """Make the environment of a framework where hosts have one and it is missing. Raises RequestError."""
        if self.backend.environments is not None:
            self.backend.environments.make(framework, say)

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

    def state_of(self, run: Run) -> State:
        """Ask what a run is doing now."""
        return runs.state_by(run, self.backend.status([run]))

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


class Environments(Protocol):
    """What a machine has of the frameworks, where it is this one."""

    def image(self, framework: str, platform: str) -> str:
        """Return the id of the image of a framework that was built here.

        Raises:
            RequestError: it has not been built, or there is no image for the platform.
        """
        ...

    def interpreter(self, framework: str, platform: str) -> str:
        """Return the interpreter of the environment that `make` makes. Raises RequestError: as `image`."""
        ...

    def make(self, framework: str, say: Say) -> None:
        """Make the environment of a framework where it is missing. Raises RequestError: it could not be made."""
        ...


class Launcher(Protocol):
    """What a run is started by: by each of its hosts, or by a cluster that makes its pods.

    record: what run.json has of it.
    """

    @property
    def record(self) -> Mapping[str, Any]: ...

    def documents(self, plan: Plan) -> Sequence[Mapping[str, Any]]:
        """Return what a cluster is given of the plan; nothing where each host is told what to start. Pure."""
        ...

    def placed(self, plan: Plan) -> Plan:
        """Return the plan with the hosts that the run will have. Pure. Raises RequestError: it cannot have any."""
        ...

    def prepare(self, plan: Plan, bundles: Sequence[Bundle], say: Say, now_s: Callable[[], float]) -> Plan:
        """Make sure that the run can start, and put there what it needs; return the plan as it will be.

        Raises:
            RequestError, HostError, HostsError: it cannot; nothing has been started.
        """
        ...

    def begin(self, plan: Plan, say: Say) -> None:
        """Start every process, or none.

        Raises:
            RequestError, HostError, HostsError: some could not be started; those that were have been stopped again.
        """
        ...

    def join(self, plan: Plan, *, limit_s: float, answer_limit_s: float) -> list[Answer]:
        """Return of each process, once it has joined its group, has ended, or has not joined within `limit_s`, what its
        agent says of it. answer_limit_s: for the agent to say so."""
        ...


class Backend(Protocol):
    """The verbs of a backend, on the hosts of one target. environments: None where hosts have images alone."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def environments(self) -> Environments | None: ...

    def ensure(self, target: Target, reopen: Callable[[], Target], say: Say) -> Target:
        """Return the target with all its hosts: unchanged if they all answer, else once its slice was made again.

        reopen: returns it as it is then.

        Raises:
            RequestError, HostError: hosts do not answer and nothing can make them again, or they cannot be prepared.
        """
        ...

    def prepare(self, reopen: Callable[[], Target], say: Say, require: Require = lambda: None) -> Target:
        """Return a target whose slice is new, once all its hosts answer and can run something.

        require: raises, now and then, when the slice is lost while its hosts are waited for.

        Raises:
            RequestError: some do not answer, or cannot be prepared.
        """
        ...

    def launcher(self, target: Target, request: Request) -> Launcher:
        """Return what starts a run of the request. Raises RequestError: it asks for what is not to be had here."""
        ...

    def hold(self) -> AbstractContextManager[Require]:
        """Return what keeps others from changing the slice and from starting a run on it meanwhile. What it gives
        raises once that is over, as when this machine was suspended and somebody else went on.

        Raises:
            RequestError: somebody else does so now.
        """
        ...

    def stop(self, run: Run, *, grace_s: float) -> list[Answer]:
        """Stop the processes of the latest attempt of a run; return of each host what it stopped."""
        ...

    def status(self, several: Sequence[Run] | None = None) -> Look:
        """Ask about the processes of the latest attempt of one run, or of several; None: about all that there are."""
        ...

    def logs(self, run: Run, index: int, *, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Return a piece of the log of a process. Raises HostError: its host does not answer, or has no such log."""
        ...

    def clear(self, run: Run) -> list[str]:
        """Remove what the own command of a run has on its hosts; return what could not be removed, and why."""
        ...

    def conclude(self, run_id: str) -> str | None:
        """Return why a run that has ended without a word of its own has ended; None: nobody knows."""
        ...

    def forward(self, run_id: str, index: int, port: int) -> AbstractContextManager[int]:
        """Open a port of this machine that leads to one of a run's process."""
        ...

    def open_shell(self, target: Target, index: int | None, run_id: str | None) -> int:
        """Join this terminal to a shell on a host, or in the process of a run; return its exit code.

        Raises:
            RequestError, HostError: there is none.
        """
        ...


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
