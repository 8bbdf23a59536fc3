"""Parts of a rehearsal without Docker, whose machines only write down what is done with them; and a whole one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from rehearsal.machines import Machine
from rehearsal.room import begin
from rehearsal.room.hosts import Hosts
from rehearsal.tpu_api import Delays, TpuApi
from tests.rehearsal.room.person import Person
from tools import stand_in_base


class Paperwork:
    """Machines on paper. may_boot, may_remove: each waits until its event is set. broken: names that cannot boot."""

    def __init__(self) -> None:
        self.up: dict[str, Machine] = {}
        self.down: dict[str, Machine] = {}
        self.booted: list[Machine] = []
        self.broken: set[str] = set()
        self.may_boot = threading.Event()
        self.may_boot.set()
        self.may_remove = threading.Event()
        self.may_remove.set()
        self._guard = threading.Lock()

    def boot(self, machine: Machine) -> None:
        assert self.may_boot.wait(10)
        with self._guard:
            self.booted.append(machine)
            if machine.name in self.broken:
                raise RuntimeError("no room for it")
            assert machine.name not in self.up | self.down
            self.up[machine.name] = machine

    def kill(self, name: str) -> None:
        with self._guard:
            self.down[name] = self.up.pop(name)

    def restart(self, name: str) -> None:
        with self._guard:
            self.up[name] = self.down.pop(name)

    def remove(self, name: str) -> None:
        assert self.may_remove.wait(10)
        with self._guard:
            self.up.pop(name, None)
            self.down.pop(name, None)


class Lab:
    """A simulated API with machines on paper behind it. `said`: what was told; `moves`: how often something moved."""

    def __init__(self, addresses: list[str]) -> None:
        self.paper = Paperwork()
        self.said: list[str] = []
        self.moves = 0
        self.hosts = Hosts(
            machinery=self.paper,
            addresses=addresses,
            make=self._make,
            say=self.said.append,
            moved=self._moved,
        )
        self.api = TpuApi(hardware=self.hosts, delays=Delays().scaled(0))

    def _make(self, name: str, address: str, private_key: str) -> Machine:
        return Machine(name=name, address=address, host_key_private_pem=private_key, authorized_keys=())

    def _moved(self) -> None:
        self.moves += 1


@pytest.fixture
def new_lab() -> Iterator[Callable[[list[str]], Lab]]:
    labs: list[Lab] = []

    def make(addresses: list[str]) -> Lab:
        labs.append(Lab(addresses))
        labs[-1].api.__enter__()
        return labs[-1]

    yield make
    for lab in labs:
        lab.paper.may_boot.set()
        lab.paper.may_remove.set()
        lab.hosts.close()
        lab.api.__exit__(None, None, None)


@pytest.fixture(scope="module")
def environ() -> Iterator[Mapping[str, str]]:
    """With a base image for the hosts that this computer can get; the daemon inherits it."""
    base = stand_in_base.chosen(os.environ, print)
    with pytest.MonkeyPatch.context() as patch:
        if base:
            patch.setenv(stand_in_base.VARIABLE, base)
        yield dict(os.environ)


@pytest.fixture
def person(tmp_path: Path, environ: Mapping[str, str]) -> Iterator[Person]:
    made = Person(tmp_path / "rehearsal", environ)
    yield made
    begin.down(made.folder, made.said.append)
