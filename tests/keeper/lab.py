"""A stack with a keeper: the real `keeper.world`, `backends.vm.ensure`, lease and documents against the simulator of
the Cloud TPU API over HTTP. Hosts and what runs on them are modelled. Sleeping moves the simulator's clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.host_backend import HostBackend
from contracts.errors import RequestError
from contracts.inventory import RECORDED, SPECIFICATION, Slice, slices_from_json, to_json
from infra.documents import Documents
from keeper.__main__ import reconcile
from keeper.stack_store import store_at
from keeper.world import World
from launch.control import control_documents
from launch.control.control_documents import Attempt, Limits, Run
from launch.control.store import Content, Store
from launch.hosts import HostError
from launch.policy import Cause, RunObserved
from rehearsal.simulated_cloud import Clock, Node, SimulatedCloud
from tests.infra.cloud_tpu.lab import OWNER, POOL, ZONE, Cloud, wanted_props
from tests.launch.slices import NFS, make_inventory, make_slice

RUN_ID = "flax_mlm-20261123-100000-abcd"
NOW_S = 1_800_000_000.0
ZONES = (ZONE, "us-west4-a")
POOLS = (POOL, POOL.replace(ZONE, ZONES[1]))
NAME = f"projects/grant/locations/{ZONE}/queuedResources/main"
INVENTORY = make_inventory(
    make_slice((), name="main", zone=ZONE, origin="queued-resource main"),
    project="grant",
    has_keeper=True,
    storage=NFS,
)


class HostWorld(World):
    """The keeper's world whose hosts are those of `Lab`."""

    lab: Lab

    def examine(self, run: Run, content: Content, *, has_hosts: bool) -> RunObserved | None:
        lab = self.lab
        if lab.attempt < 0:
            return None
        # A host of its attempt that its slice no longer has counts as one without processes, not as one that is silent.
        silent = 0
        if has_hosts:
            hosts = {host.name for host in self._slice(content, run.slice or "").hosts}
            silent = len(({*lab.on} & hosts) - (lab.instances() - lab.dead))
        state: Any = "running" if lab.is_running else lab.cause or "lost"
        return RunObserved(
            living="unknown" if silent else "present" if lab.is_running else "absent",
            state=state, cause=lab.cause or "lost", attempt=lab.attempt, silent=silent, checkpoint=lab.checkpoint,
        )  # fmt: skip

    def silent(self, name: str, content: Content) -> int:
        return self.lab.count_silent(self._slice(content, name))

    def _slice(self, content: Content, name: str) -> Slice:
        stack = self._specified(content)
        return next(each for each in stack.inventory.slices if each.name == name)

    def signs(self, several: Any) -> dict[str, Any]:
        return {}

    def start(self, run: Run, require: Callable[[], object]) -> int:
        require()
        target = self.target(run)
        assert not self.lab.is_running, "a run that lives was started a second time"
        self.lab.attempt, self.lab.on, self.lab.cause = (
            self.lab.attempt + 1,
            tuple(host.name for host in target.hosts),
            None,
        )
        return self.lab.attempt

    def stop(self, run: Run) -> None:
        self.lab.cause = "stopped"


@dataclasses.dataclass
class Lab:
    """A stack with the slice "main", and at most one run on it.

    on: names of the hosts that the run was started on. dead: hosts that do not answer, whatever the API says.
    broken: why hosts cannot be prepared. cause: why the latest attempt has ended; None while it runs.
    """

    cloud: Cloud
    documents: Documents
    lines: list[str] = dataclasses.field(default_factory=list)
    attempt: int = -1
    checkpoint: int = -1
    on: tuple[str, ...] = ()
    dead: set[str] = dataclasses.field(default_factory=set)
    broken: str = ""
    cause: Cause | None = None
    prepared: int = 0

    # --- what is there ----------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        return Store(self.documents)

    @property
    def run(self) -> Run:
        found = self.store.run(RUN_ID)
        assert found is not None
        return found

    @property
    def slice(self) -> control_documents.Slice:
        return self.store.edit_slice("main", lambda now: now)

    def states(self) -> dict[str, str]:
        """Zone → state of each request of the slice that nobody has asked to delete."""
        found = self.cloud.control.alive()["queuedResources"]
        states = {each["name"].split("/")[3]: each["state"]["state"] for each in found}
        return {zone: state for zone, state in states.items() if state != "DELETING"}

    def instances(self) -> set[str]:
        nodes = self.cloud.api.cloud.all(Node)
        return {name for node in nodes if node.state == "READY" for name in node.instances}

    def hosts(self) -> tuple[str, ...]:
        recorded = self.documents.read(RECORDED).value
        slices = slices_from_json(json.dumps(recorded or {"slices": []}))
        return tuple(host.name for each in slices for host in each.hosts)

    @property
    def is_running(self) -> bool:
        return self.cause is None and bool(self.on) and {*self.on} <= self.instances() - self.dead

    def count_silent(self, known: Slice) -> int:
        return len({host.name for host in known.hosts} - (self.instances() - self.dead))

    # --- what people and Pulumi do ----------------------------------------------------------------------------------

    def specify(self, **more: Any) -> None:
        value = {
            "project": "grant",
            "owner": OWNER,
            "slices": {"main": wanted_props(**more)},
            "inventory": to_json(INVENTORY),
        }
        self.documents.change(SPECIFICATION, lambda now: {**(now or {}), **value})

    def up(self, **more: Any) -> None:
        self.specify(**more)
        self.cloud.create(**more)

    def train(self, **changes: Any) -> None:
        """A run that is kept, and trains on the slice."""
        with self.world().hold("main") as lease:
            self.world().request("main", self.store.read(), lease, wait_s=0.0)
        self.on, self.attempt, self.cause = self.hosts(), 0, None
        created = self.world().slices(self.store.read())["main"].created
        run = Run(
            run_id=RUN_ID, stack="dev", runs_url="/nowhere/runs", slices=("main",), slice="main", project="grant",
            limits=Limits(attempts=20), seen="running", added_s=self.documents.now_s(),
            attempt=Attempt(number=0, created=created, checkpoint=-2, has_joined=True),
        )  # fmt: skip
        self.store.edit_run(RUN_ID, lambda _: dataclasses.replace(run, **changes))
        assert self.is_running

    # --- the keeper -------------------------------------------------------------------------------------------------

    def world(self) -> World:
        made = HostWorld(
            self.documents,
            self.lines.append,
            program="the keeper",
            backoff=dataclasses.replace(self.cloud.session.backoff, say=self.lines.append),
            clients=self.cloud.session.clients,
        )
        made.lab = self
        return made

    def one_pass(self) -> None:
        reconcile(store_at(self.documents), self.world(), self.lines.append)

    def later(self, seconds: float = 60.0) -> None:
        self.cloud.control.advance(seconds)
        self.one_pass()

    def preempt(self) -> None:
        self.cloud.control.preempt(NAME)
        self.cloud.control.advance(60)

    def set_capacity(self, *chips: int) -> None:
        for pool, count in zip(POOLS, chips, strict=False):
            self.cloud.control.set_capacity(pool, count)


def prepare_patches(lab: Lab, clock: Clock, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Hosts are those of the lab, and time is the simulator's."""
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(Documents, "now_s", lambda _: clock.now())

    def prepare(_: Any, reopen: Callable[[], Any], say: Any, require: Callable[[], None]) -> Any:
        lab.prepared += 1
        found = reopen()
        require()
        if lab.broken:
            raise RequestError(lab.broken)
        if silent := lab.count_silent(found.slice):
            raise HostError(host="", reason=f"{silent} hosts do not answer")
        return found

    patch.setattr(HostBackend, "prepare", prepare)
    # As on a gateway, whose timer starts one pass a minute; the two looks of a pass wait for real.
    patch.setattr("keeper.__main__.LOOK_EVERY_S", 0.0)


@contextlib.contextmanager
def opened(
    tmp_path: Path, patch: pytest.MonkeyPatch, capacity: Mapping[str, int] | None = None
) -> Iterator[Lab]:
    clock = Clock(frozen_at=NOW_S)
    with SimulatedCloud(clock=clock, capacity=dict(capacity or dict.fromkeys(POOLS, 64))) as api:
        patch.setenv("GOOGLE_TPU_V2_CUSTOM_ENDPOINT", f"{api.url}/v2/")
        lab = Lab(Cloud(api, clock), Documents(str(tmp_path / "control")))

        prepare_patches(lab, clock, tmp_path, patch)
        yield lab
        lab.cloud.client.close()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with opened(tmp_path, monkeypatch) as made:
        yield made
