"""The keeper gives idle slices back, and none that anybody may want: on the simulator, with the real lease, lifecycle
and documents; only what hosts say is made up."""

import contextlib
import dataclasses
import datetime
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.host_backend import HostBackend
from backends.local.local_backend import on_this_machine
from backends.vm import ensure
from console import notify
from contracts.inventory import RECORDED, SPECIFICATION, to_json
from infra.documents import Documents
from infra.documents.lease import Lease, LeaseHeldError
from infra.slice_apis.lifecycles import Clients, lifecycle_for, read_environment_settings
from infra.slice_apis.retry import Backoff, CloudTpuError
from keeper import reclaim
from keeper.stack_store import NOTED_EVERY_S, Stack, stack_at
from keeper.world import World
from launch.control.control_documents import End, Run
from launch.control.store import Store
from launch.hosts import HostError
from launch.inventories import with_kept
from launch.runs import Look, RunsFolder
from rehearsal.simulated_cloud import Clock, SimulatedCloud
from tests.infra.cloud_tpu.lab import OWNER, wanted_props
from tests.launch.test_pricing import MAIN

HOUR_S = 3600.0
NOW_S = 1_800_000_000.0 - 1_800_000_000.0 % NOTED_EVERY_S


@dataclasses.dataclass
class Lab:
    """A stack with one slice that was made at NOW_S, and its keeper. look: what the agents of its hosts answer."""

    documents: Documents
    world: World
    folder: RunsFolder
    api: SimulatedCloud
    said: list[str]
    patch: pytest.MonkeyPatch
    clock_s: float = NOW_S
    look: Look = dataclasses.field(default_factory=lambda: Look(processes=(), errors=()))
    events: list[notify.Event] = dataclasses.field(default_factory=list)

    @property
    def store(self) -> Store:
        return Store(self.documents)

    def send(self, event: notify.Event) -> dict[str, str]:
        self.events.append(event)
        return {}

    def is_there(self) -> bool:
        return bool(self.api.control.alive()["queuedResources"])

    def after(self, hours: float) -> bool:
        """Whether the slice is still there after a look so many hours later, and after the one after that."""
        for self.clock_s in (NOW_S + hours * HOUR_S, NOW_S + hours * HOUR_S + NOTED_EVERY_S):
            reclaim.give_back(self.store, self.world, self.said.append)
        return self.is_there()

    def on(self, stack: Stack, slice_name: str, _: object = None) -> Any:
        (one,) = stack.inventory.slices
        assert (one.name, len(one.hosts)) == (slice_name, 4)
        return dataclasses.replace(
            on_this_machine(hosts="1", platform="cpu"),
            runs_url=self.folder.url,
            files=self.folder.files,
            stand_in_devices=(f"{self.folder.url}/accel*",),
        )


def make_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Whoever tests may not be root, or root of a container, who may not look into others' processes.
    for name, program in [
        ("sudo", 'shift 2; exec "$@"'),
        ("find", f'{shutil.which("find")} "$@" 2>/dev/null'),
    ]:
        make_program(tmp_path / "bin" / name, program)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    clock = Clock(frozen_at=NOW_S)
    said: list[str] = []
    with SimulatedCloud(clock=clock) as api:
        monkeypatch.setenv("GOOGLE_TPU_V2_CUSTOM_ENDPOINT", api.url)
        backoff = Backoff(say=said.append, now=clock.now, sleep=api.control.advance)
        documents = Documents(str(tmp_path / "store"))
        props = wanted_props(wait_s=600)
        main = dataclasses.replace(MAIN, hosts=(), created="", origin="queued-resource main")
        here = on_this_machine(hosts="1", platform="cpu")
        inventory = dataclasses.replace(here.inventory, stack="dev", slices=(main,), idle_hours=6.0)
        stack = {
            "project": "grant",
            "owner": OWNER,
            "slices": {"main": props},
            "inventory": to_json(inventory),
        }
        documents.change(SPECIFICATION, lambda _: stack)
        folder = RunsFolder(url=str(tmp_path / "runs"), files=here.files)
        with contextlib.closing(Clients(read_environment_settings, backoff)) as clients:
            lifecycle_for(props, clients, backoff).create(props)
            world = World(documents, said.append, program="the keeper", backoff=backoff, clients=clients)
            made = Lab(documents=documents, world=world, folder=folder, api=api, said=said, patch=monkeypatch)
            monkeypatch.setattr(Documents, "now_s", lambda _: made.clock_s)
            monkeypatch.setattr(HostBackend, "status", lambda *_: made.look)
            monkeypatch.setattr(reclaim, "on", made.on)
            monkeypatch.setattr(notify, "send", made.send)
            yield made


def test_a_slice_that_no_run_has_used_is_given_back_and_commands_see_that(lab: Lab) -> None:
    assert lab.after(5.5)
    assert lab.after(6.05)  # no time to look
    assert not lab.events and not lab.after(6.5)
    # Since it was there, some seconds after it was asked for.
    told = "main: no run has used it for 6 h 29 min; it is given back in 15 min unless a run begins on it"
    assert [(event.kind, event.text, event.stack) for event in lab.events] == [("idle", told, "dev")]
    assert "main: no run has used it for 6 h 44 min; it is given back" in lab.said
    stack = stack_at(lab.store.read(), "")
    assert stack is not None
    recorded = json.dumps(lab.documents.read(RECORDED).value).encode()
    (one,) = with_kept(dataclasses.replace(stack.inventory, slices=(MAIN,)), recorded).slices
    assert one.hosts == ()
    assert datetime.datetime.fromisoformat(one.created).timestamp() == lab.clock_s
    assert not lab.after(6.75) and len(lab.said) < 10


def running(lab: Lab) -> None:
    lab.look = Look(processes=({"state": "running", "ended": None, "beat": {"state": "joined"}},), errors=())


def silent(lab: Lab) -> None:
    """For some hours only: nobody can use it then either, but that may pass."""
    lab.look = Look(processes=(), errors=(HostError(host="h", reason="no answer"),))


def ended(lab: Lab) -> None:
    lab.look = Look(processes=({"state": "exited", "ended": NOW_S + 2 * HOUR_S},), errors=())


def open_elsewhere(lab: Lab) -> None:
    def refused(target: Any) -> list[str]:
        raise HostError(host="h", reason="whether a program has a TPU open cannot be seen")

    lab.patch.setattr(reclaim, "devices_open_on", refused)


RUN = Run(run_id="r", stack="dev", runs_url="gs://b/runs", slices=("main",), project="grant")


def kept(lab: Lab) -> None:
    lab.store.edit_run("r", lambda _: dataclasses.replace(RUN, slice="main"))


def queued(lab: Lab) -> None:
    ended = dataclasses.replace(RUN, run_id="x", end=End(outcome="cancelled", reason="", at_s=1.0))
    lab.store.edit_run("x", lambda _: ended)
    lab.store.edit_run("r", lambda _: RUN)


def leased(lab: Lab) -> None:
    def hold(name: str) -> contextlib.AbstractContextManager[Lease]:
        raise LeaseHeldError("`pulumi up` is changing main")

    lab.patch.setattr(lab.world, "hold", hold)


def not_configured(lab: Lab) -> None:
    def without(stack: Any) -> Any:
        return {**stack, "inventory": json.dumps({**json.loads(stack["inventory"]), "idle_hours": None})}

    lab.documents.change(SPECIFICATION, without)


def unseen(lab: Lab) -> None:
    def observed(*_: Any) -> None:
        raise CloudTpuError("its hosts have not published their names")

    lab.patch.setattr(ensure, "observed", observed)


@pytest.mark.parametrize(
    "keep", [running, silent, ended, open_elsewhere, kept, queued, leased, not_configured, unseen]
)
def test_a_slice_that_somebody_may_want_stays(lab: Lab, keep: Callable[[Lab], None]) -> None:
    keep(lab)
    assert lab.after(7)


def test_people_are_told_again_where_a_run_has_used_it_since(lab: Lab) -> None:
    lab.clock_s = NOW_S + 7 * HOUR_S
    reclaim.give_back(lab.store, lab.world, lab.said.append)
    lab.look = Look(processes=({"state": "exited", "ended": NOW_S + 7.5 * HOUR_S},), errors=())
    assert lab.is_there() and lab.after(8)
    lab.clock_s = NOW_S + 14 * HOUR_S
    reclaim.give_back(lab.store, lab.world, lab.said.append)
    assert lab.is_there() and len(lab.events) == 2


BEAT = {"state": "stepping", "step": 7}


def ran(state: str, **known: Any) -> list[dict[str, Any]]:
    return [{"state": state, **known}]


@pytest.mark.parametrize(
    ("known", "hours"),
    [
        pytest.param({}, 9, id="nobody has used it since it was made"),
        pytest.param({"used_s": None}, 0, id="not known"),
        pytest.param({"processes": ran("running", started=NOW_S, beat=BEAT)}, 0, id="a run steps"),
        pytest.param({"processes": ran("running", started=NOW_S + HOUR_S)}, 8, id="one joins for ever"),
        pytest.param({"processes": ran("starting", started=None)}, 0, id="one is being started"),
        pytest.param({"processes": ran("exited", ended=NOW_S + HOUR_S)}, 8, id="one hung, and was ended"),
        pytest.param(
            {"processes": [*ran("exited", ended=NOW_S), *ran("exited", ended=NOW_S + 8 * HOUR_S)]}, 1,
            id="one was started again and again; the policy ends that",
        ),
        pytest.param({"silent_since_s": NOW_S + 2 * HOUR_S}, 7, id="a host is dead"),
        pytest.param(
            {"silent_since_s": NOW_S + HOUR_S, "processes": ran("running", started=NOW_S)}, 8,
            id="a host is dead, and the others wait for it",
        ),
        pytest.param({"open_s": NOW_S + 9 * HOUR_S}, 0, id="a program has a TPU open"),
        pytest.param({"open_s": NOW_S + 5 * HOUR_S}, 4, id="a program had one open"),
    ],
)  # fmt: skip
def test_a_slice_is_of_use_only_by_what_gets_on(known: dict[str, Any], hours: float) -> None:
    assert reclaim.unused_s(NOW_S + 9 * HOUR_S, **{"used_s": NOW_S, **known}) == hours * HOUR_S


def test_a_slice_with_a_host_that_does_not_answer_is_given_back_after_as_long(lab: Lab) -> None:
    """Nobody can use it, and it is billed. One look without an answer is none."""
    silent(lab)
    assert lab.after(7)
    lab.look = Look(processes=(), errors=())
    kept(lab)
    assert lab.after(8)
    lab.store.edit_run("r", lambda _: None)
    silent(lab)
    assert lab.after(12)
    assert not lab.after(18.25)


def test_a_program_that_has_a_device_open_holds_the_slice_and_the_time_counts_from_its_end(
    lab: Lab, tmp_path: Path
) -> None:
    lab.folder.directory("x").write_text("y", "")
    with open(tmp_path / "runs" / "accel0", "w"):
        assert lab.after(7)
    assert lab.after(12.75)
    assert not lab.after(13.5)


def test_what_root_may_not_look_into_is_not_taken_for_idle(lab: Lab, tmp_path: Path) -> None:
    for said, stays in [
        ("/proc/9/fd/3': Permission denied", True),
        ("/proc/9/fd': No such file or directory", False),
    ]:
        make_program(tmp_path / "bin" / "find", f"""echo "find: '{said}" >&2; exit 1""")
        assert lab.after(7) is stays
    assert any("cannot be seen (find: '/proc/9/fd/3': Permission denied)" in line for line in lab.said)
