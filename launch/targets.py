"""What a launch is about: a target, which is hosts on a backend, and the plan of an attempt on them.

`backends/` has three backends: this machine, hosts over SSH, pods of a cluster. Who calls a verb or reads a capability
does not ask which of them it has.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from contracts import run_directory
from contracts.aliases import Say
from contracts.errors import RequestError
from contracts.files import Files, is_url
from contracts.host_interface import HANG_FLOOR_S, HEARTBEAT_LIMIT_S
from contracts.inventory import Host, Inventory, Slice
from contracts.ranks import Ranks
from contracts.run_directory import State
from launch import runs
from launch.code.bundles import Bundle
from launch.hosts import Agent, Answer, Transport, address_and_port
from launch.pricing import Budget
from launch.runs import Conclusion, Look, Run, RunsFolder

if TYPE_CHECKING:
    from infra.catalogue import Accelerator

Require = Callable[[], object]
"""Raises once what it stands for is no longer so."""
Sleep = Callable[[float], None]
"""Takes seconds."""

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
        entry = in_catalogue(self.slice.accelerator_type) if self.platform == "tpu" else None
        return entry.peak_bf16_flops_per_s / entry.devices if entry else None

    @property
    def part_of_tpu(self) -> str | None:
        """Why these hosts cannot compute together, where they are not all that the TPU slice has.

        A TPU's runtime waits for every host of its slice, and tells nobody: "Expected 4 worker addresses, got 1".
        """
        if self.platform != "tpu" or self.capabilities.shares_host:
            return None
        count, type_name = len(self.slice.hosts), self.slice.accelerator_type
        entry = in_catalogue(type_name)
        slice_hosts = entry.hosts * self.slice.count if entry else count
        if len(self.hosts) < count:
            return (
                f"--hosts: {len(self.hosts)} of the {count} hosts of {self.slice.name}, and the TPU's runtime waits "
                "for all of them; leave --hosts out, or take a smaller slice (tpu-stack:slices). `fab run`, `put`, "
                "`get` and `ssh` take a part"
            )
        if count < slice_hosts:
            return (
                f"the slice {self.slice.name} ({type_name}) has {slice_hosts} hosts, and the TPU's runtime waits for "
                f"all of them; the inventory has {count}: `pulumi up --refresh` finds the others"
            )
        return None

    @property
    def addresses(self) -> tuple[tuple[str, str, int], ...]:
        """Of each host its name, and where the others find its SSH server."""
        return tuple((host.name, *address_and_port(host.internal_address)) for host in self.hosts)

    def run_state(self, run: Run) -> State:
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


def in_catalogue(type_name: str) -> Accelerator | None:
    """Return the type of a TPU; None: it is none, or not known."""
    from infra.catalogue import CatalogueError, accelerator  # few launches are on TPUs

    try:
        return accelerator(type_name, "any")
    except CatalogueError:
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PresetInventory:
    """An inventory that is at hand already, and what it cannot say of its hosts: that of a rehearsal, in `folder`."""

    inventory: Inventory
    folder: Path
    platform: str
    python: str
    stand_in_devices: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetRequest:
    """A target as a user asks for it; None: the default.

    hosts: on this machine how many, else which ("0-3,5"). runs: a folder on the hosts or a URL, for runs.
    """

    stack: str = LOCAL
    slice: str | None = None
    hosts: str | None = None
    platform: str | None = None
    python: str | None = None
    runs: str | None = None
    preset: PresetInventory | None = None


ACCESSES = ("devices", "privileged")
"""Of a container to its host: the platform's device nodes and nothing more, or all that the host's root may."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Container:
    """image: by digest, or the id of one that was built on the host. mounts, read_only_mounts: paths of the host, in
    the container under the same name. access: one of ACCESSES."""

    image: str
    mounts: tuple[str, ...] = ()
    read_only_mounts: tuple[str, ...] = ()
    access: str = ACCESSES[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnCommand:
    """What a plan has to say of a user's own command, whose words are the plan's arguments.

    folder_sha256: the bundle that it runs in. python, progress: as `contracts.ranks.Spec` has them. has_layer: whether
    it gets an environment over that interpreter's. packages_sha256: the bundle of what is installed in that; None:
    nothing is. is_ranked: whether it is told its rank where it is the only one. folder_is_large: whether the folder is
    stored beside the runs.
    """

    folder_sha256: str
    python: str
    progress: str | None
    has_layer: bool = True
    packages_sha256: str | None = None
    is_ranked: bool = True
    folder_is_large: bool = False

    @property
    def bundles(self) -> tuple[str, ...]:
        """The hashes of what the hosts need besides our code."""
        return tuple(filter(None, [self.folder_sha256, self.packages_sha256]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Secret:
    """A secret of a run. source: "shell", "file:PATH", or sm://PROJECT/SECRET, which the hosts read themselves;
    run.json has it. value: None where the hosts read it."""

    source: str
    value: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One attempt of a run on the hosts of a target, one process on each, which may start several ranks.

    Paths are those on the hosts; "~/" is the home directory there, known of each host after the preflight (`homes`).
    coordinator_port, liveness_port, rank_ports (of each host one for each rank): chosen by the preflight (`settled`).
    container: what the processes run in; None: bare, by the target's interpreter. command: where no job runs, but an
    own command. env: the user's own variables. secrets: those of them that nothing but the ranks may show, by name.
    """

    target: Target
    run_id: str
    job: str
    framework: str
    run_dir: str
    cwd: str
    bundle_sha256: str
    attempt: int = 0
    arguments: tuple[str, ...] = ()
    hang_floor_s: float = HANG_FLOOR_S
    heartbeat_limit_s: float = HEARTBEAT_LIMIT_S
    container: Container | None = None
    command: OwnCommand | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: Mapping[str, Secret] = dataclasses.field(default_factory=dict)
    ranks_per_host: int = 1
    rank_ports: tuple[tuple[int, ...], ...] = ()
    coordinator_port: int = 0
    liveness_port: int = 0
    liveness_token: str = ""
    budget: Budget | None = None
    homes: tuple[str, ...] = ()

    @property
    def processes(self) -> int:
        return len(self.target.hosts)

    @property
    def finds_peers_by_rank(self) -> bool:
        """Whether the ranks find each other by what their framework's own launcher would set."""
        return self.command is not None or self.framework != "jax"

    @property
    def ranks(self) -> Ranks:
        return Ranks(
            hosts=tuple(host for _, host, _ in self.target.addresses),
            ports=self.rank_ports,
            per_host=self.ranks_per_host,
            topology=self.target.slice.topology if self.target.platform == "tpu" else None,
            is_single=self.command is not None
            and not self.command.is_ranked
            and self.processes * self.ranks_per_host == 1,
        )

    @property
    def coordinator(self) -> str:
        return f"{self.target.coordinator_host}:{self.coordinator_port}"

    @property
    def code_dir(self) -> str:
        """Where the hosts unpack the code bundle."""
        return f"{self.target.agent_root}/bundles/{self.bundle_sha256}"

    def stored_at(self, sha256: str) -> str | None:
        """Return where beside the runs a bundle is stored by its hash; None: it is in the run directory."""
        if self.command is not None and sha256 == self.command.packages_sha256:
            return run_directory.packages(self.run_dir, sha256)
        if self.command is not None and sha256 == self.command.folder_sha256 and self.command.folder_is_large:
            return run_directory.large_folder(self.run_dir, sha256)
        return None

    def at_home(self, process_id: int, path: str) -> str:
        """Return a path on one host with its home directory written out."""
        return f"{self.homes[process_id]}/{path[2:]}" if path.startswith("~/") else path

    def process(self, process_id: int) -> dict[str, Any]:
        """Return the keys that name one process of this attempt to its agent."""
        return {"run_id": self.run_id, "attempt": self.attempt, "process_id": process_id}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodOptions:
    """Options of runs on pods; None: as the run began, or the default.

    restarts: how often each pod may be started again after a failure. queue: the Kueue queue that admits the run.
    wait_s: for its nodes.
    """

    restarts: int | None = None
    queue: str | None = None
    wait_s: float | None = None


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

    def ensure(
        self, target: Target, reopen: Callable[[], Target], say: Say, sleep: Sleep = time.sleep
    ) -> Target:
        """Return the target with all its hosts: unchanged if they all answer, else once its slice was made again.

        reopen: returns it as it is then. sleep: between two looks; what it raises ends the waiting, and what was asked
        for stays.

        Raises:
            RequestError, HostError: hosts do not answer and nothing can make them again, or they cannot be prepared.
        """
        ...

    def prepare(
        self,
        reopen: Callable[[], Target],
        say: Say,
        require: Require = lambda: None,
        sleep: Sleep = time.sleep,
    ) -> Target:
        """Return a target whose slice is new, once all its hosts answer and can run something.

        require: raises, now and then, when the slice is lost while its hosts are waited for. sleep: as of `ensure`.

        Raises:
            RequestError: some do not answer, or cannot be prepared.
        """
        ...

    def launcher(self, target: Target, options: PodOptions, before: Run | None) -> Launcher:
        """Return what starts a run. before: the run, where it is resumed.

        Raises:
            RequestError: the options are for another backend.
        """
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

    def status(self, selected: Sequence[Run] | None = None) -> Look:
        """Ask about the processes of the latest attempt of one run, or of several; None: about all that there are."""
        ...

    def logs(self, run: Run, index: int, *, offset: int, limit_bytes: int) -> dict[str, Any]:
        """Return a piece of the log of a process. Raises HostError: its host does not answer, or has no such log."""
        ...

    def ask(self, run: Run, verb: str, request: Mapping[str, Any], *, timeout_s: float) -> list[Answer]:
        """Ask the agent of each process of the latest attempt of a run, all at once; return the answers in order."""
        ...

    def clear(self, run: Run) -> list[str]:
        """Remove what the own command of a run has on its hosts; return what could not be removed, and why."""
        ...

    def conclude(self, run_id: str) -> Conclusion | None:
        """Return why a run that has ended without a word of its own has ended; None: nobody knows."""
        ...

    def forward(self, run_id: str, index: int, port: int) -> AbstractContextManager[int]:
        """Open a port of this machine that leads to one of a run's process."""
        ...

    def open_shell(self, target: Target, index: int | None, run: Run | None) -> int:
        """Join this terminal to a shell on a host, or in the place of a run's process; return its exit code.

        index: of the host in the slice, or in the run; None: the first.

        Raises:
            RequestError, HostError: there is none.
        """
        ...
