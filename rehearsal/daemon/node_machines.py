"""Machines behind the simulated nodes: one for each worker of a running node, removed as abruptly as the node.

The cloud reports a node's state and does not wait; threads here bring each machine into the state that it should have.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import asyncssh

from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.machines import Machine, Machines
from rehearsal.simulated_cloud import NoHardware

MachineState = Literal["up", "down", "gone"]

# Where machines belong when their node or instance is in a state; in those that are not here they stay as they are.
PLACES: Mapping[str, MachineState] = {
    "READY": "up",
    "RUNNING": "up",
    "PREEMPTED": "gone",
    "TERMINATED": "gone",
    "STOPPING": "gone",
    "DELETING": "gone",
    "gone": "gone",
}
AT_ONCE = 8
TRIES = 2


@dataclasses.dataclass(kw_only=True)
class Worker:
    """One machine: its desired and its current state. has_booted: it can be started again; else it is made anew.
    busy: held by the thread that is changing it."""

    machine: Machine
    belongs: MachineState
    stands: MachineState = "gone"
    has_booted: bool = False
    busy: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class NodeMachines:
    """`rehearsal.simulated_cloud.Hardware` with machines. addresses: of the machines' network, to give out in turn.

    authorized_key: the public key that may log in. moved: called when a machine has reached its desired state.
    """

    def __init__(
        self,
        *,
        machines: Machines,
        addresses: Sequence[str],
        authorized_key: str,
        say: Callable[[str], None],
        moved: Callable[[], None],
    ) -> None:
        self._machines = machines
        self._turn = itertools.cycle(addresses)
        self._all = len(addresses)
        self._authorized_key = authorized_key
        self._say = say
        self._tell = moved
        self._numbers = NoHardware()
        self._keys: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._workers: dict[str, Worker] = {}
        self._again: set[str] = set()
        self._guard = threading.Lock()
        self._open = True
        self._threads = concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hosts")
        self._moved = threading.Condition()
        self.failed: dict[str, str] = {}

    # --- asked and told by the cloud -----------------------------------------------------------------------------

    def addresses(self, instance: str) -> tuple[str, str]:
        """Inside: of a machine; outside: a number that nothing answers at."""
        free = self._free_address()
        with self._guard:
            self._addresses[instance] = free
        return free, self._numbers.addresses(instance)[1]

    def host_key(self, instance: str) -> str:
        """The public host key of a new pair; the machine gets the private key."""
        pair = asyncssh.generate_private_key("ssh-ed25519")
        self._keys[instance] = pair.export_private_key().decode()
        return pair.export_public_key().decode().split()[1]

    def changed(self, instances: Sequence[str], state: str) -> None:
        """Bring a node's machines into the state that the node's requires; does not wait for that."""
        if place := PLACES.get(state):
            for name in instances:
                self.move(name, place)

    # --- one machine ---------------------------------------------------------------------------------------------

    def move(self, name: str, place: MachineState) -> None:
        """A machine belongs there from now on; one that was removed stays so."""
        with self._guard:
            worker = self._workers.get(name)
            if worker is None:
                if place == "gone" or name not in self._addresses or not self._open:
                    return
                machine = Machine(
                    name=name,
                    address=self._addresses[name],
                    host_key=self._keys[name],
                    authorized_key=self._authorized_key,
                )
                worker = self._workers[name] = Worker(machine=machine, belongs=place)
            elif (
                worker.belongs == "gone"
            ):  # it is on its way out, and another one may be called so afterwards
                (self._again.add if place == "up" else self._again.discard)(name)
                return
            worker.belongs = place
            if self._open:
                self._threads.submit(functools.partial(self._bring, worker))

    def names(self) -> list[str]:
        """The names of the machines that are not being removed, in worker order."""
        with self._guard:
            present = [name for name, worker in self._workers.items() if worker.belongs != "gone"]
        return sorted(present, key=_worker_order)

    def instances(self) -> dict[str, str]:
        """Their addresses, by name."""
        return {name: self._addresses[name] for name in self.names()}

    def stands(self, name: str) -> MachineState:
        """The current state of a machine."""
        with self._guard:
            worker = self._workers.get(name)
        return worker.stands if worker else "gone"

    # --- waiting -------------------------------------------------------------------------------------------------

    def settle(self, limit_s: float) -> bool:
        """Whether every machine is where it belongs, or cannot be brought there, within that time."""
        with self._moved:
            return self._moved.wait_for(self._is_settled, limit_s)

    def close(self) -> None:
        """Moves nothing any more; those that are being moved are waited for."""
        with self._guard:
            self._open = False
        self._threads.shutdown(cancel_futures=True)

    def _is_settled(self) -> bool:
        with self._guard:
            workers = list(self._workers.items())
            if self._again:
                return False
        return all(worker.stands == worker.belongs or name in self.failed for name, worker in workers)

    def _free_address(self) -> str:
        """The next free address in turn, so that a returned one is unused for as long as possible."""
        with self._guard:
            taken = set(self._addresses.values())
        address = next(
            (candidate for candidate in itertools.islice(self._turn, self._all) if candidate not in taken),
            None,
        )
        if address is None:
            raise RuntimeError(f"all {self._all} addresses of the machines' network are taken")
        return address

    # --- bringing ------------------------------------------------------------------------------------------------

    def _bring(self, worker: Worker) -> None:
        """Change a machine step by step until it has its desired state, which may change meanwhile."""
        name = worker.machine.name
        with worker.busy:
            try:
                self._bring_there(worker, name)
                self.failed.pop(name, None)
            except Exception as error:  # whatever it is, it is told, and the other machines go on
                self.failed[name] = str(error)
                self._say(f"machine {name}: {error}")
        if worker.stands == "gone":
            with self._guard:
                self._workers.pop(name, None)
                has_successor = name in self._again
                self._again.discard(name)
                if not has_successor:
                    self._addresses.pop(name, None)
                    self._keys.pop(name, None)
            if has_successor:
                self.move(name, "up")
        with self._moved:
            self._moved.notify_all()
        self._tell()

    def _bring_there(self, worker: Worker, name: str) -> None:
        """Raises MachinesError: a step has failed twice. On a busy computer the first try may have been too slow."""
        tries = TRIES
        while worker.stands != worker.belongs:
            try:
                self._step(worker, name)
            except MachinesError as error:
                tries -= 1
                if not (tries and self._open):
                    raise
                self._say(f"machine {name}: {error}; once more")

    def _step(self, worker: Worker, name: str) -> None:
        place = worker.belongs
        if place == "gone":
            self._machines.remove(name)
        elif not worker.has_booted:
            worker.stands = "down"  # should this fail: there may be something to remove
            self._machines.remove(name)
            self._machines.boot(worker.machine)
            worker.has_booted = True
            place = "up"
        elif place == "up":
            self._machines.restart(name)
        else:
            self._machines.kill(name)
        worker.stands = place
        self._say(f"machine {name} is {place}")


def _worker_order(name: str) -> tuple[str, int]:
    prefix, _, number = name.rpartition("-")
    return (prefix, int(number)) if number.isdecimal() else (name, 0)


def new_identity(folder: Path) -> str:
    """A pair in a new folder, id_ed25519 and id_ed25519.pub as ssh-keygen leaves them. → the public line."""
    folder.mkdir(mode=0o700)
    pair = asyncssh.generate_private_key("ssh-ed25519", comment="rehearsal")
    path = folder / "id_ed25519"
    path.touch(mode=0o600)
    path.write_bytes(pair.export_private_key())
    line = pair.export_public_key().decode().strip()
    path.with_suffix(".pub").write_text(f"{line}\n", encoding="utf-8")
    return line
