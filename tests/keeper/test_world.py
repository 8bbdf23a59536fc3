"""What a pass does at Google: against the simulator of the Cloud TPU API, with hosts that are modelled."""

import datetime
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra import naming
from infra.cloud_tpu.queued_resources import QueuedResources
from infra.cloud_tpu.tpu_request import SliceSpec
from infra.documents import Documents
from infra.slice_apis.google_api import Listing
from infra.slice_apis.lifecycle import Lifecycle
from infra.slice_apis.retry import Backoff
from keeper import keep_commands, queue_commands
from keeper.world import World, observed_slice
from launch import policy
from launch.code import precompiled
from launch.control.control_documents import Run, Submission
from launch.control.store import Content
from launch.hosts import Agent, HostError
from launch.policy import Standing
from launch.remote_files import HostFiles
from launch.request.run_request import Request, work_out
from launch.targets import TargetRequest
from tests.infra.cloud_tpu.lab import ZONE, wanted_props
from tests.keeper import lab as labs
from tests.keeper.lab import RUN_ID, ZONES, Lab
from tests.launch.slices import make_slice, make_target

lab = labs.lab
TWO_ZONES = {"zones": [*ZONES], "strategy": "first", "zone_wait_s": 600.0}
ACTIVE, WAITS = "ACTIVE", "WAITING_FOR_RESOURCES"
QUEUED = Submission(
    number=1, what="train.py", request={}, submitted={}, bundles=(), where={}, by="me", added=""
)


def acts(lab: Lab) -> list[str]:
    return [str(line["act"]) for line in lab.run.history]


def test_a_lost_slice_is_requested_waited_for_and_prepared_and_its_run_goes_on(lab: Lab) -> None:
    lab.up()
    lab.train()
    lab.one_pass()
    assert lab.run.history == () and lab.slice.history == ()
    before = lab.hosts()
    lab.preempt()
    lab.set_capacity(0)
    lab.one_pass()
    assert lab.states() == {ZONE: WAITS} and lab.run.reason == "no capacity for main yet"
    count = len(lab.cloud.control.journal())
    for _ in range(3):
        lab.later(600.0)
    assert len(lab.cloud.control.journal()) == count, "what waits is waited for, and nothing else"
    lab.set_capacity(64)
    lab.cloud.control.advance(600.0)
    lab.one_pass()
    assert lab.is_running and lab.attempt == 1 and lab.prepared == 1
    assert {*lab.on} == {*lab.hosts()} != {*before}
    assert [*dict.fromkeys(acts(lab))] == ["asks", "waits", "has a new slice", "resumes", "runs"], (
        lab.run.history
    )
    assert lab.run.limits.attempts == 19 and lab.slice.requested is False


def test_one_that_waits_in_vain_gets_the_next_zone_and_one_that_two_zones_serve_loses_the_other(
    lab: Lab,
) -> None:
    lab.up(**TWO_ZONES)
    lab.train()
    lab.preempt()
    lab.set_capacity(0, 0)
    lab.one_pass()
    assert lab.states() == {ZONES[0]: WAITS}
    lab.set_capacity(0, 64)
    lab.later(700.0)
    lab.later(600.0)
    assert lab.states() == {ZONES[1]: ACTIVE} and lab.is_running
    properties = SliceSpec.from_props(wanted_props(**TWO_ZONES))
    lab.set_capacity(64, 64)
    Lifecycle(QueuedResources(lab.cloud.client, lab.cloud.session.backoff)).ask(properties, is_recorded=False)
    lab.cloud.control.advance(600.0)
    assert lab.states() == dict.fromkeys(ZONES, ACTIVE)
    lab.later()
    assert lab.states() == {ZONES[1]: ACTIVE} and lab.is_running and lab.attempt == 1


def test_a_multislice_of_which_a_node_is_gone_is_made_again(lab: Lab) -> None:
    """The listing shows it as ACTIVE: its silent hosts tell."""
    lab.up(node_count=2)
    lab.train()
    lab.cloud.control.vanish("main-1")
    for _ in range(3):
        lab.later(120.0)
    assert lab.is_running and lab.attempt == 1 and len(lab.on) == 8
    assert "main: is lost (node main-1 is gone)" in lab.lines
    assert lab.states() == {ZONE: ACTIVE}


@pytest.mark.parametrize("how", ["stop", "unkeep", "cancel"])
def test_what_was_asked_for_is_given_back_once_no_run_wants_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lab.up()
    lab.train(submission=QUEUED if how == "cancel" else None)
    lab.preempt()
    lab.set_capacity(0)
    lab.one_pass()
    assert lab.states() == {ZONE: WAITS}
    target: Any = type("Target", (), {})()
    monkeypatch.setattr(keep_commands, "stack_documents", lambda _: lab.documents)
    if how == "stop":
        assert keep_commands.stop(target, RUN_ID)
    elif how == "unkeep":
        keep_commands.unkeep(lab.documents, RUN_ID)
    else:
        monkeypatch.setattr(queue_commands, "World", lambda *_, **__: lab.world())
        assert queue_commands.cancel(lab.documents, TargetRequest(), ["1"], grace_s=1.0) == 0
    lab.cloud.control.cut_off(ZONE)
    lab.later()
    assert lab.states() == {ZONE: WAITS} or how == "cancel"
    lab.cloud.control.clear_faults()
    lab.later()
    lab.later()
    assert lab.states() == {} and lab.run.end is not None
    assert lab.run.end.outcome == {"stop": "stopped", "unkeep": "unmanaged", "cancel": "stopped"}[how]
    assert [*lab.store.read().slices] == []


def test_hosts_that_cannot_be_prepared_are_tried_twelve_times_and_the_slice_is_given_back(lab: Lab) -> None:
    lab.up()
    lab.train()
    lab.preempt()
    lab.broken = "w-0: no room on its disk"
    for _ in range(policy.MOST_PREPARES + 3):
        lab.later(policy.LONGEST_PAUSE_S)
    assert lab.prepared == policy.MOST_PREPARES
    assert lab.run.end is not None and lab.run.end.outcome == "failed"
    assert lab.run.end.reason == "its hosts could not be prepared 12 times: w-0: no room on its disk"
    assert lab.states() == {}


class NoAnswer:
    """The way to an agent that does not answer."""

    knows_all = False

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Any]:
        failed: Future[Any] = Future()
        failed.set_exception(HostError(host="w-0", reason="no answer"))
        return failed


def test_of_a_run_that_its_silent_hosts_alone_can_read_nothing_is_known_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its hosts are prepared again, and are given up one day."""
    agents = tuple(Agent(host=host, link=NoAnswer(), root="/agent") for host in ("w-0", "w-1"))
    target = make_target(agents, runs_url="/mnt/share/runs", files=HostFiles(agents))
    world = World(Documents(str(tmp_path)), print, program="a test")
    monkeypatch.setattr(world, "target", lambda _: target)
    run = Run(run_id=RUN_ID, stack="s", runs_url="/mnt/share/runs", slices=("main",), slice="main")
    content = Content(runs={}, slices={}, stack_values={}, unreadable={})
    observed = world.examine(run, content, has_hosts=True)
    assert observed is not None and (observed.living, observed.silent) == ("unknown", 2)
    with pytest.raises(HostError, match="no answer"):
        world.remove(run)


def test_a_submitted_run_starts_with_the_note_of_a_step_that_was_compiled_where_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "keeper"))
    target = make_target([Agent(host=f"w-{index}", link=NoAnswer(), root="/agent") for index in range(4)])
    asked = Request(job="jax_hello", arguments=(), name=None, resume=None)
    documents = Documents(str(tmp_path / "control"))
    world, started = World(documents, print, program="a test"), list[Request]()
    submission = Submission(
        number=1, what="", request={}, submitted={}, bundles=(), where={}, by="", added=""
    )
    run = Run(run_id=RUN_ID, stack="s", runs_url="/share/runs", slices=("s",), submission=submission)

    def launch(wanted: Request, *_: Any, **__: Any) -> Any:
        started.append(wanted)
        return SimpleNamespace(attempt=0)

    monkeypatch.setattr(world, "target", lambda _: target)
    monkeypatch.setattr("keeper.submissions.request", lambda *_: asked)
    monkeypatch.setattr("launch.runs.read", lambda _: None)
    monkeypatch.setattr("launch.launching.launch", launch)
    monkeypatch.setattr("console.track.start", lambda *_: None)
    step = work_out(asked, target).step
    assert step is not None
    note = {"key": "k", "sha256": "s", "facts": {}, "url": "gs://bucket/k"}
    place = tmp_path / "control" / "executables" / f"{step.name}.json"
    place.parent.mkdir(parents=True)
    place.write_text("no document")  # it costs the compiling, and not the start
    assert world.start(run, lambda: None) == 0
    place.unlink()
    precompiled.publish(note, step, documents.url)
    assert world.start(run, lambda: None) == 0
    assert [wanted.precompiled for wanted in started] == [None, note]


def test_one_document_that_is_none_is_named_and_the_run_of_another_is_brought_back(lab: Lab) -> None:
    lab.up()
    lab.train()
    (bad := Path(lab.documents.url) / "runs" / "bad.json").write_text("1\n[]")
    lab.preempt()
    lab.one_pass()
    assert lab.is_running
    assert any(f"{bad} cannot be read" in line and "the others go on" in line for line in lab.lines)


# --- how a slice stands ---------------------------------------------------------------------------------------------

NOW = datetime.datetime(2026, 11, 23, 12, tzinfo=datetime.UTC)
PLACES = {**wanted_props(), "zones": ["a", "b"], "strategy": "first", "zone_wait_s": 600}
ONE_ZONE = wanted_props()


def asked(
    state: str, zone: str = "a", *, owner: str = "ours", own_id: str = "dev-main", age_s: int = 0
) -> Any:
    """A queued resource as a listing has it."""
    return {
        "name": f"projects/p/locations/{zone}/queuedResources/{own_id}",
        "state": {"state": state},
        "createTime": (NOW - datetime.timedelta(seconds=age_s)).isoformat(),
        "tpu": {"nodeSpec": [{"node": {"labels": {naming.OWNER_LABEL: owner}}}]},
    }


@pytest.mark.parametrize(
    ("places", "requests", "standing"),
    [
        (PLACES, [], "absent"),
        (PLACES, [asked(ACTIVE, own_id="dev-other")], "absent"),
        (PLACES, [asked("SUSPENDED")], "lost"),
        (PLACES, [asked("SUSPENDED"), asked(ACTIVE, "b", owner="theirs")], "lost"),
        (PLACES, [asked(WAITS, owner="theirs")], "absent"),
        (PLACES, [asked(WAITS, age_s=599)], "waiting"),
        (PLACES, [asked(WAITS, age_s=600)], "overdue"),
        (PLACES, [asked("PROVISIONING", age_s=6000)], "waiting"),
        (PLACES | {"strategy": "race"}, [asked(WAITS, age_s=600), asked(WAITS, "b", age_s=600)], "waiting"),
        (ONE_ZONE, [asked(WAITS, age_s=6000)], "waiting"),
        (PLACES, [asked(ACTIVE), asked("PROVISIONING", "b")], "doubled"),
        (PLACES, [asked(ACTIVE), asked(ACTIVE, "b")], "doubled"),
        (PLACES, [asked(ACTIVE), asked("DELETING", "b")], "active"),
        (PLACES, [asked(ACTIVE), asked(ACTIVE, "b", owner="theirs")], "active"),
    ],
)
def test_a_slice_stands_as_the_requests_of_its_own_stack_do_in_all_its_zones(
    places: dict[str, Any], requests: list[Any], standing: Standing
) -> None:
    client: Any = SimpleNamespace(now=lambda: NOW, under=lambda _: client)  # nothing is asked
    api = QueuedResources(client, Backoff())
    known = make_slice((), name="main", origin="queued-resource dev-main")
    properties = {**places, "queued_resource_id": "dev-main", "owner": "ours"}

    def found(unreachable: tuple[str, ...]) -> Standing:
        listing = Listing(items=requests, unreachable=unreachable)
        return observed_slice(api, properties, known, listing).standing

    assert found(()) == standing
    assert found(("b",)) == (standing if standing in ("active", "doubled") else "unknown")
    assert observed_slice(api, properties, known, None).standing == "unknown"
