"""What runs are started on, as the rest sees it: verbs that every backend has, and as data what differs.

`backends/` has three of them: this machine, hosts over SSH, pods of a cluster. Who calls a verb or reads a capability
does not ask which of them it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from launch.bundles import Bundle
    from launch.launch import Request
    from launch.plan import Plan
    from launch.targets import Target

Say = Callable[[str], None]


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


class Backend(Protocol):
    """The verbs of a backend. What its hosts' agents answer (status, stop, logs) is asked of the target's agents."""

    @property
    def capabilities(self) -> Capabilities: ...

    def built_image(self, framework: str, platform: str) -> str | None:
        """Return the id of the image of a framework that was built here; None: the hosts pull the inventory's.

        Raises:
            RequestError: it has not been built, or there is no image for the platform.
        """
        ...

    def environment(self, platform: str, framework: str) -> str | None:
        """Return the interpreter of the environment that `make_environment` makes; None: it makes none.

        Raises:
            RequestError: there is none for the platform.
        """
        ...

    def make_environment(self, framework: str, say: Say) -> None:
        """Make the environment of a framework where it is missing. Raises RequestError: it could not be made."""
        ...

    def ensure(self, target: Target, say: Say) -> None:
        """Make the slice of a target again that has lost hosts, and no other. Raises RequestError: it cannot be."""
        ...

    def prepare(self, target: Target) -> bool:
        """Make hosts that are new able to run something; False: some could not be prepared, which has been said."""
        ...

    def launcher(self, target: Target, request: Request) -> Launcher:
        """Return what starts a run of the request. Raises RequestError: it asks for what is not to be had here."""
        ...

    def conclude(self, run_id: str) -> str | None:
        """Return why a run that has ended without a word of its own has ended; None: nobody knows."""
        ...

    def begins_again(self, run_id: str) -> bool:
        """Whether a run none of whose processes is alive will be started again."""
        ...

    def forward(self, target: Target, run_id: str, index: int, port: int) -> AbstractContextManager[int]:
        """Open a port of this machine that leads to one of a run's process."""
        ...

    def open_shell(self, target: Target, index: int | None, run_id: str | None) -> int:
        """Join this terminal to a shell on a host, or in the process of a run; return its exit code.

        Raises:
            RequestError, HostError: there is none.
        """
        ...
