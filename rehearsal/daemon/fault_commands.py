"""The faults that a person can cause in a rehearsal that is up, by name: `fab rehearsal cut --host 1`.

Each returns one line: what was done, and what to look at now.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.faults import Faults
from rehearsal.simulator.api_error import ApiError
from rehearsal.state import SLICE, RehearsalError

if TYPE_CHECKING:  # they take a second, and whoever only asks the daemon needs none
    from rehearsal.daemon.gateway import KeeperGateway
    from rehearsal.daemon.node_machines import NodeMachines
    from rehearsal.machines.machines import Machines
    from rehearsal.simulated_cloud import Control

# Google starts a host that crashed again by itself; this long is short enough to watch.
AGAIN_S = 30.0
SHARE = "share"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultRequest:
    """host: an index, an instance name, or "share" where that makes sense; empty: none was named. zone: of the chips;
    empty: the stack's own."""

    host: str = ""
    zone: str = ""
    amount: float | None = None
    for_good: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command[Commands]:
    """help: for the list of faults. run: → the line that is told. needs: "host", "amount" or both."""

    help: str
    run: Callable[[Commands, FaultRequest], str]
    needs: tuple[str, ...] = ("host",)


def require[Commands](
    commands: Mapping[str, Command[Commands]], name: str, request: FaultRequest
) -> Command[Commands]:
    """The command of that name. Raises RehearsalError: there is none, or the request lacks what it needs."""
    command = commands.get(name)
    if command is None:
        raise RehearsalError(f'"{name}" is no act of this rehearsal; choose one of {", ".join(commands)}')
    if "host" in command.needs and not request.host:
        raise RehearsalError(f"{name}: which one? Say --host and its index, such as --host 0")
    if "amount" in command.needs and request.amount is None:
        raise RehearsalError(f"{name}: how much? {command.help}; such as --amount 4")
    return command


def chosen_name(names: Sequence[str], request: FaultRequest) -> str:
    """The machine or node that a request selects. Raises RehearsalError."""
    if request.host.isdecimal() and int(request.host) < len(names):
        return names[int(request.host)]
    if request.host in names:
        return request.host
    raise RehearsalError(
        f"--host {request.host}: there is none; choose one of 0 … {len(names) - 1}"
        if names
        else "the rehearsal has no hosts now; `pulumi up --refresh` makes them"
    )


class CommonFaults:
    """The faults that hosts and nodes of a cluster share."""

    def __init__(self, machines: Machines) -> None:
        self.faults, self._machines = machines.faults, machines
        self._timers: list[threading.Timer] = []
        self._wedged: dict[str, list[int]] = {}

    def wedge(self, name: str) -> str:
        process = self.faults.wedge(name)
        self._wedged.setdefault(name, []).append(process)
        return f"process {process} of {name} is stopped in mid-work (SIGSTOP). Look: the hang watchdog, in fab status"

    def unwedge(self, name: str) -> str:
        wedged = self._wedged.pop(name, [])
        for process in wedged:
            self.faults.unwedge(name, process)
        return f"{len(wedged)} processes of {name} go on"

    def bucket_away(self) -> str:
        self._machines.freeze_bucket(frozen=True)
        return "the bucket does not answer. Look: fab status, fab keeper status"

    def bucket_back(self) -> str:
        self._machines.freeze_bucket(frozen=False)
        return "the bucket answers again"

    def later(self, act: Callable[[], object]) -> None:
        """Carry out `act` after AGAIN_S, unless the rehearsal is closed before."""
        timer = threading.Timer(AGAIN_S, act)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()


class WithMachines(Protocol):
    """A rehearsal, whether its machines are hosts or nodes."""

    @property
    def common_faults(self) -> CommonFaults: ...

    def machine(self, request: FaultRequest) -> str:
        """Return the name of the one that a request means. Raises RehearsalError."""
        ...


EVERYWHERE_COMMANDS: Mapping[str, Command[WithMachines]] = {
    "wedge": Command(
        help="a training process is stopped in mid-work",
        run=lambda all, request: all.common_faults.wedge(all.machine(request)),
    ),
    "unwedge": Command(
        help="it goes on", run=lambda all, request: all.common_faults.unwedge(all.machine(request))
    ),
    "bucket-away": Command(
        help="the bucket does not answer",
        run=lambda all, _: all.common_faults.bucket_away(),
        needs=(),
    ),
    "bucket-back": Command(
        help="it answers again", run=lambda all, _: all.common_faults.bucket_back(), needs=()
    ),
}


class FaultCommands:
    """The faults of one rehearsal. pool, chips: of its slices in the simulated cloud. close: what was to come later
    does not."""

    def __init__(
        self,
        *,
        hosts: NodeMachines,
        machines: Machines,
        control: Control,
        pool: str,
        chips: int,
        gateway: KeeperGateway | None = None,
    ) -> None:
        """gateway: None where the stack has no keeper."""
        self.common_faults, self.faults, self._gateway = CommonFaults(machines), machines.faults, gateway
        self._hosts = hosts
        self._control = control
        self._pool = pool
        self._chips = chips

    def carry_out(self, name: str, request: FaultRequest) -> str:
        """The line that is told. Raises RehearsalError."""
        command = require(COMMANDS, name, request)
        try:
            return command.run(self, request)
        except (MachinesError, ApiError, ValueError) as error:
            raise RehearsalError(f"{name}: {error}") from None

    def close(self) -> None:
        self.common_faults.close()

    def machine(self, request: FaultRequest) -> str:
        return chosen_name(self._hosts.names(), request)

    # --- the cloud --------------------------------------------------------------------------------------------

    def preempt(self, _request: FaultRequest) -> str:
        for name in self._parts():
            self._control.preempt(name)
        return f"Google took the slice {SLICE} back, without notice. Look: fab status; mend: fab recover"

    def vanish(self, _request: FaultRequest) -> str:
        for name in self._parts():
            self._control.vanish(name)
        return f"the slice {SLICE} is gone, as if somebody had deleted it. Mend: fab recover"

    def stockout(self, request: FaultRequest) -> str:
        self._control.set_capacity(pool := self._pool_in(request.zone), 0)
        return f"{pool} has no chips any more; who has some keeps them. Look: fab recover after a preempt"

    def restock(self, request: FaultRequest) -> str:
        self._control.set_capacity(pool := self._pool_in(request.zone), self._chips)
        return f"{pool} has {self._chips} chips again; a request that waits is served"

    def _pool_in(self, zone: str) -> str:
        own, _, kind = self._pool.partition(":")
        return f"{zone or own}:{kind}"

    def gateway_off(self, _request: FaultRequest) -> str:
        self._require_gateway().power_off()
        return "the gateway has lost its power, and nobody keeps any run. Look: fab keeper status"

    def gateway_on(self, _request: FaultRequest) -> str:
        self._require_gateway().power_on()
        return "the gateway is on, and its timer starts the keeper"

    def _require_gateway(self) -> KeeperGateway:
        if self._gateway is None:
            raise RehearsalError(
                "this rehearsal has no keeper; `fab rehearsal up --keeper` makes one that has"
            )
        return self._gateway

    def _parts(self) -> list[str]:
        """The names of the slice: one, or on Compute Engine those of all its parts.

        The stack's own node, where there is a choice: somebody else may have one in the project.
        """
        names = list(self._control.slices())
        if not names:
            raise RehearsalError("there is no slice now; `pulumi up --refresh` makes it again")
        on_compute = [name for name in names if "/zones/" in name]
        return on_compute or [min(names, key=lambda name: not name.endswith(f"-{SLICE}"))]

    # --- machines ---------------------------------------------------------------------------------------------

    def kill(self, request: FaultRequest) -> str:
        name = self.machine(request)
        self._hosts.move(name, "down")
        if request.for_good:
            return f"{name} is dead, as after a power cut, and stays so. Look: fab status"
        self.common_faults.later(functools.partial(self._hosts.move, name, "up"))
        return f"{name} is dead, as after a power cut; Google starts it again in {AGAIN_S:.0f} s. Look: fab status"

    def restart(self, request: FaultRequest) -> str:
        name = self.machine(request)
        self._hosts.move(name, "up")
        return f"{name} is starting again"

    def fill_disk(self, request: FaultRequest) -> str:
        if request.host == SHARE:
            self.faults.fill_share(self._one_that_is_up())
            return "the share has no byte left. Look: what happens at the next checkpoint"
        name = self.machine(request)
        self.faults.fill_disk(name)
        return f"the disk of {name} has no byte left. Look: fab train is refused, fab doctor says why"

    def empty_disk(self, request: FaultRequest) -> str:
        if request.host == SHARE:
            self.faults.empty_share(self._one_that_is_up())
            return "the share has room again"
        name = self.machine(request)
        self.faults.empty_disk(name)
        return f"the disk of {name} has room again"

    def clock(self, request: FaultRequest) -> str:
        name = self.machine(request)
        assert request.amount is not None
        self.faults.set_clock(name, request.amount)
        return f"the clock of {name} is off by {request.amount:g} s for new connections. Look: fab doctor, fab train"

    def _one_that_is_up(self) -> str:
        up = [name for name in self._hosts.names() if self._hosts.stands(name) == "up"]
        if not up:
            raise RehearsalError("no host is up, and the share is reached through one")
        return up[0]


def _cloud_command(help: str, run: Callable[[FaultCommands, FaultRequest], str]) -> Command[FaultCommands]:
    """A fault of the cloud, not of one host."""
    return Command(help=help, run=run, needs=())


def _machine_command(
    help: str, cause: Callable[[Faults, str], object], message: str
) -> Command[FaultCommands]:
    """A fault that takes only the machine's name. message: with {name} and {result}, the fault's return value."""

    def run(commands: FaultCommands, request: FaultRequest) -> str:
        name = commands.machine(request)
        return message.format(name=name, result=cause(commands.faults, name))

    return Command(help=help, run=run)


COMMANDS: Mapping[str, Command[FaultCommands]] = {
    "kill": Command(
        help="a host loses power; Google starts it again (--for-good: not)", run=FaultCommands.kill
    ),
    "restart": Command(help="a host that was killed starts again", run=FaultCommands.restart),
    "cut": _machine_command(
        "a host is cut off the network", Faults.cut,
        "{name} is cut off the network. Look: fab status; mend: fab rehearsal heal",
    ),
    "heal": _machine_command("it is back on the network", Faults.heal, "{name} is on the network again"),
    "preempt": _cloud_command("Google takes the slice back, without notice", FaultCommands.preempt),
    "vanish": _cloud_command("somebody deletes the slice", FaultCommands.vanish),
    "stockout": _cloud_command("Google has no chips left (--zone: in another zone)", FaultCommands.stockout),
    "restock": _cloud_command("there are chips again (--zone: there)", FaultCommands.restock),
    "gateway-off": _cloud_command(
        "the gateway, where the keeper is, loses its power", FaultCommands.gateway_off
    ),
    "gateway-on": _cloud_command("it is on again", FaultCommands.gateway_on),
    **EVERYWHERE_COMMANDS,
    "fill-disk": Command(
        help="a host's disk, or --host share, has no byte left", run=FaultCommands.fill_disk
    ),
    "empty-disk": Command(help="it has room again", run=FaultCommands.empty_disk),
    "clock": Command(
        help="a host's clock is off by --amount seconds (0: right)", run=FaultCommands.clock, needs=("host", "amount")
    ),
    "hold-device": _machine_command(
        "another process holds a host's device", Faults.hold_device,
        "process {result} of {name} holds its device. Look: fab train is refused, fab doctor names it",
    ),
    "release-device": _machine_command("it lets go", Faults.release_device, "the device of {name} is free"),
    "unmount-share": _machine_command(
        "a host has lost the share", Faults.unmount_share,
        "the share of {name} is an empty folder now. Look: fab train is refused",
    ),
    "mount-share": _machine_command("it has it again", Faults.mount_share, "{name} has the share again"),
    "break-python": _machine_command(
        "a host's interpreter is gone", Faults.break_python,
        "{name} has no interpreter for jobs any more. Look: fab train is refused",
    ),
    "mend-python": _machine_command("it is back", Faults.mend_python, "{name} has its interpreter again"),
    "kill-docker": _machine_command(
        "a host's Docker daemon is gone", Faults.kill_docker,
        "{name} has no Docker daemon any more. Look: fab doctor, fab train --runtime docker",
    ),
    "start-docker": _machine_command("it is back", Faults.start_docker, "{name} has its Docker daemon again"),
    "refuse-keys": _machine_command(
        "a host knows no key of yours", Faults.refuse_keys,
        "{name} accepts no log-in. Look: what fab doctor says of it",
    ),
    "accept-keys": _machine_command("it knows yours again", Faults.accept_keys, "{name} lets you in again"),
    "change-host-key": _machine_command(
        "a host shows another key than the inventory has", Faults.change_host_key,
        "{name} shows a key that is not in the inventory. Look: nothing connects to it",
    ),
    "restore-host-key": _machine_command(
        "it shows its own again", Faults.restore_host_key, "{name} shows its own key again"
    ),
}  # fmt: skip
