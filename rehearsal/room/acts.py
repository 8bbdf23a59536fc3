"""What befalls a rehearsal that is up when a person wants it. Each act tells in one line what was done, and what to
look at now; `repertoire.py` lists them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Protocol

from infra import catalogue
from rehearsal.machines import Faults, Machines
from rehearsal.room.hosts import Hosts
from rehearsal.room.wanted import SLICE, chips_of
from rehearsal.state import RehearsalError
from rehearsal.tpu_api import TpuApi

# Google starts a host that crashed again by itself; this long is short enough to watch.
AGAIN_S = 30.0
SHARE = "share"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """host: an index, an instance name, or "share" where that makes sense; empty: none was named."""

    host: str = ""
    amount: float | None = None
    for_good: bool = False


class Scene(Protocol):
    """Of a room, what acts are on."""

    @property
    def hosts(self) -> Hosts | None: ...
    @property
    def machines(self) -> Machines: ...
    @property
    def api(self) -> TpuApi: ...
    @property
    def accelerator(self) -> catalogue.Accelerator: ...
    @property
    def pool(self) -> str: ...
    def node(self) -> str: ...


class Acts:
    """On one room. close: acts that were to come later do not."""

    def __init__(self, room: Scene) -> None:
        self._room = room
        self._timers: list[threading.Timer] = []
        self._wedged: dict[str, list[int]] = {}

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    # --- whom -------------------------------------------------------------------------------------------------

    @property
    def faults(self) -> Faults:
        return self._room.machines.faults

    @property
    def _hosts(self) -> Hosts:
        if self._room.hosts is None:
            raise RehearsalError("the rehearsal has no hosts yet; `fab rehearsal status` says how far it is")
        return self._room.hosts

    def _names(self) -> list[str]:
        return self._hosts.names()

    def name(self, asked: Asked) -> str:
        """The machine that is meant. Raises RehearsalError."""
        names = self._names()
        if asked.host.isdecimal() and int(asked.host) < len(names):
            return names[int(asked.host)]
        if asked.host in names:
            return asked.host
        raise RehearsalError(
            f"--host {asked.host}: there is none; choose one of 0 … {len(names) - 1}"
            if names
            else "the rehearsal has no hosts now; `pulumi up --refresh` makes them"
        )

    # --- the cloud --------------------------------------------------------------------------------------------

    def preempt(self) -> str:
        self._room.api.control.preempt(self._room.node())
        return f"Google took the slice {SLICE} back, without notice. Look: fab status; mend: fab recover"

    def stockout(self) -> str:
        self._room.api.control.set_capacity(self._room.pool, 0)
        return f"{self._room.pool} has no chips any more; who has some keeps them. Look: fab recover after a preempt"

    def restock(self) -> str:
        chips = chips_of(self._room.accelerator)
        self._room.api.control.set_capacity(self._room.pool, chips)
        return f"{self._room.pool} has {chips} chips again; a request that waits is served"

    def vanish(self) -> str:
        self._room.api.control.vanish(self._room.node())
        return f"the slice {SLICE} is gone, as if somebody had deleted it. Mend: fab recover"

    # --- machines ---------------------------------------------------------------------------------------------

    def kill(self, asked: Asked) -> str:
        name = self.name(asked)
        self._hosts.move(name, "down")
        if asked.for_good:
            return f"{name} is dead, as after a power cut, and stays so. Look: fab status"
        timer = threading.Timer(AGAIN_S, self._hosts.move, (name, "up"))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        return f"{name} is dead, as after a power cut; Google starts it again in {AGAIN_S:.0f} s. Look: fab status"

    def restart(self, asked: Asked) -> str:
        name = self.name(asked)
        self._hosts.move(name, "up")
        return f"{name} is starting again"

    def wedge(self, asked: Asked) -> str:
        name = self.name(asked)
        process = self.faults.wedge(name)
        self._wedged.setdefault(name, []).append(process)
        return f"process {process} of {name} is stopped in mid-work (SIGSTOP). Look: the hang watchdog, in fab status"

    def unwedge(self, asked: Asked) -> str:
        name = self.name(asked)
        found = self._wedged.pop(name, [])
        for process in found:
            self.faults.unwedge(name, process)
        return f"{len(found)} processes of {name} go on"

    def hold_device(self, asked: Asked) -> str:
        name = self.name(asked)
        process = self.faults.hold_device(name)
        return (
            f"process {process} of {name} holds its device. Look: fab train is refused, fab doctor names it"
        )

    def fill_disk(self, asked: Asked) -> str:
        if asked.host == SHARE:
            self.faults.fill_share(self._any())
            return "the share has no byte left. Look: what happens at the next checkpoint"
        name = self.name(asked)
        self.faults.fill_disk(name)
        return f"the disk of {name} has no byte left. Look: fab train is refused, fab doctor says why"

    def empty_disk(self, asked: Asked) -> str:
        if asked.host == SHARE:
            self.faults.empty_share(self._any())
            return "the share has room again"
        self.faults.empty_disk(self.name(asked))
        return f"the disk of {self.name(asked)} has room again"

    def clock(self, asked: Asked) -> str:
        name = self.name(asked)
        assert asked.amount is not None
        self.faults.set_clock(name, asked.amount)
        return f"the clock of {name} is off by {asked.amount:g} s for new connections. Look: fab doctor, fab train"

    def _any(self) -> str:
        up = [name for name in self._names() if self._hosts.stands(name) == "up"]
        if not up:
            raise RehearsalError("no host is up, and the share is reached through one")
        return up[0]
