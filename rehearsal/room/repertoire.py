"""The acts that a person can ask for, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rehearsal.machines import MachinesError
from rehearsal.room.acts import Acts, Asked
from rehearsal.state import RehearsalError
from rehearsal.tpu_api import ApiError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Act:
    """help: for a listing. carry_out: → the line that is told. needs: "host", "amount" or both."""

    help: str
    carry_out: Callable[[Acts, Asked], str]
    needs: tuple[str, ...] = ()


def carry_out(acts: Acts, name: str, asked: Asked) -> str:
    """The line of an act. Raises RehearsalError."""
    act = ACTS.get(name)
    if act is None:
        raise RehearsalError(f'"{name}" is no act of the rehearsal; choose one of {", ".join(ACTS)}')
    if "host" in act.needs and not asked.host:
        raise RehearsalError(f"{name}: which host? Say --host and its index, such as --host 0")
    if "amount" in act.needs and asked.amount is None:
        raise RehearsalError(f"{name}: how much? {act.help}; such as --amount 60")
    try:
        return act.carry_out(acts, asked)
    except (MachinesError, ApiError, ValueError) as error:
        raise RehearsalError(f"{name}: {error}") from None


def _of_cloud(act: Callable[[Acts], str]) -> Callable[[Acts, Asked], str]:
    """One that befalls no host in particular."""
    return lambda acts, _asked: act(acts)


def _fault(name: str, said: str) -> Callable[[Acts, Asked], str]:
    """The act that is a fault of one machine that takes nothing but its name. said: what is told, with {name} in it."""

    def carry_out(acts: Acts, asked: Asked) -> str:
        machine = acts.name(asked)
        getattr(acts.faults, name)(machine)
        return said.format(name=machine)

    return carry_out


HOST = ("host",)
BOTH = ("host", "amount")
ACTS: Mapping[str, Act] = {
    "kill": Act(
        help="a host loses power; Google starts it again (--for-good: not)", carry_out=Acts.kill, needs=HOST
    ),
    "restart": Act(help="a host that was killed starts again", carry_out=Acts.restart, needs=HOST),
    "cut": Act(
        help="a host is cut off the network",
        carry_out=_fault(
            "cut", "{name} hears and says nothing any more. Look: fab status; mend: fab rehearsal heal"
        ),
        needs=HOST,
    ),
    "heal": Act(
        help="it is back on the network",
        carry_out=_fault("heal", "{name} is on the network again"),
        needs=HOST,
    ),
    "preempt": Act(help="Google takes the slice back, without notice", carry_out=_of_cloud(Acts.preempt)),
    "vanish": Act(help="somebody deletes the slice", carry_out=_of_cloud(Acts.vanish)),
    "stockout": Act(help="there are no chips to be had any more", carry_out=_of_cloud(Acts.stockout)),
    "restock": Act(help="there are chips again", carry_out=_of_cloud(Acts.restock)),
    "wedge": Act(help="a host's training process is stopped in mid-work", carry_out=Acts.wedge, needs=HOST),
    "unwedge": Act(help="it goes on", carry_out=Acts.unwedge, needs=HOST),
    "fill-disk": Act(
        help="a host's disk, or --host share, has no byte left", carry_out=Acts.fill_disk, needs=HOST
    ),
    "empty-disk": Act(help="it has room again", carry_out=Acts.empty_disk, needs=HOST),
    "clock": Act(
        help="a host's clock is off by --amount seconds (0: right)", carry_out=Acts.clock, needs=BOTH
    ),
    "hold-device": Act(help="another process holds a host's device", carry_out=Acts.hold_device, needs=HOST),
    "release-device": Act(
        help="it lets go", carry_out=_fault("release_device", "the device of {name} is free"), needs=HOST
    ),
    "unmount-share": Act(
        help="a host has lost the share",
        carry_out=_fault(
            "unmount_share", "the share of {name} is an empty folder now. Look: fab train is refused"
        ),
        needs=HOST,
    ),
    "mount-share": Act(
        help="it has it again", carry_out=_fault("mount_share", "{name} has the share again"), needs=HOST
    ),
    "break-python": Act(
        help="a host's interpreter is gone",
        carry_out=_fault(
            "break_python", "{name} has no interpreter for jobs any more. Look: fab train is refused"
        ),
        needs=HOST,
    ),
    "mend-python": Act(
        help="it is back", carry_out=_fault("mend_python", "{name} has its interpreter again"), needs=HOST
    ),
    "kill-docker": Act(
        help="a host's Docker daemon is gone",
        carry_out=_fault(
            "kill_docker",
            "{name} has no Docker daemon any more. Look: fab doctor, fab train --runtime docker",
        ),
        needs=HOST,
    ),
    "start-docker": Act(
        help="it is back", carry_out=_fault("start_docker", "{name} has its Docker daemon again"), needs=HOST
    ),
    "refuse-keys": Act(
        help="a host knows no key of yours",
        carry_out=_fault("refuse_keys", "{name} lets nobody in any more. Look: what fab doctor says of it"),
        needs=HOST,
    ),
    "accept-keys": Act(
        help="it knows yours again", carry_out=_fault("accept_keys", "{name} lets you in again"), needs=HOST
    ),
    "change-host-key": Act(
        help="a host shows another key than the inventory has",
        carry_out=_fault(
            "change_host_key", "{name} shows a key that is not in the inventory. Look: nothing connects to it"
        ),
        needs=HOST,
    ),
    "restore-host-key": Act(
        help="it shows its own again",
        carry_out=_fault("restore_host_key", "{name} shows its own key again"),
        needs=HOST,
    ),
}
