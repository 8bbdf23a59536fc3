"""Runs in a cluster, against a real API server and etcd: what it takes and refuses, what is made, seen and removed.

There is no kubelet: where pods have to exist, a test makes them as the Job controller and the kubelet would.
"""

import collections
import dataclasses
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.pods import manifests
from backends.pods.api_server import ApiError, Connection
from backends.pods.cluster_runs import TOO_LATE, ClusterRuns
from backends.pods.manifests import Options
from backends.pods.pod_backend import PodBackend
from backends.pods.pod_launcher import PodLauncher
from backends.pods.pods import BEGIN_BY, CONTAINER, INDEX, OURS, Object, job_name
from backends.resolve import inventory_target
from console.status import status
from contracts.errors import RequestError
from contracts.inventory import Capacity, Cluster, Inventory, NodePool, Slice, Storage
from launch import launching
from launch.code.bundles import Bundle
from launch.hosts import HostError, HostsError
from launch.launching import run_record
from launch.request.run_request import Planned, Request, command_from_options, work_out
from launch.runs import AtWorkError, Run
from launch.targets import Plan, Target, TargetRequest
from rehearsal.kubernetes.control_plane import find_or_build
from tests.control_plane import LocalControlPlane
from tests.launch.code.package_index import add_wheel

NAMESPACE = "train"
RUN_ID = "flax_mlm-20261123-115959-abcd"
IMAGE = f"registry.example/team/jax@sha256:{'a' * 64}"
BASIC = Request(job="flax_mlm", arguments=("--steps", "20"), name=None, resume=None)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalControlPlane]:
    folder = tmp_path_factory.mktemp("kubernetes") / "control-plane"
    with LocalControlPlane(folder=folder, programs=find_or_build(os.environ, print)) as found:
        yield found
        cut_off(found)


def cut_off(plane: LocalControlPlane) -> None:
    """End the API server at once: asked to, it would wait 10 s for those who watch."""
    plane.running["kube-apiserver"].kill()
    plane.end("kube-apiserver")


@pytest.fixture
def make(plane: LocalControlPlane, tmp_path: Path) -> Callable[..., Target]:
    def target(
        *,
        nodes: int = 2,
        count: int = 1,
        capacity: Capacity = "on-demand",
        reservation: str | None = None,
        images: Sequence[str] = ("jax", "pytorch"),
        kubeconfig: Path = plane.kubeconfig,
        platform: str | None = None,
        hosts: str | None = None,
    ) -> Target:
        pool = NodePool(
            machine_type="ct5lp-hightpu-4t", accelerator="tpu-v5-lite-podslice", nodes=nodes, reservation=reservation
        )  # fmt: skip
        one = Slice(
            name="main", accelerator_type=f"v5litepod-{4 * nodes}", generation="v5e",
            topology={1: "2x2", 2: "2x4", 4: "4x4"}[nodes], zone="us-west4-a", capacity=capacity,
            origin="node-pool main", count=count, devices_per_host=4, hosts=(), pool=pool,
        )  # fmt: skip
        cluster = Cluster(
            name="here", context="rehearsal", kubeconfig=str(kubeconfig), namespace=NAMESPACE, service_account="trainer"
        )  # fmt: skip
        inventory = Inventory(
            stack="dev", project="p", images=dict.fromkeys(images, IMAGE), gateway=None, slices=(one,), cluster=cluster,
            storage=Storage(bucket_url=f"file://{tmp_path}", bucket_region=None, nfs_source=None, nfs_mount=None),
        )  # fmt: skip
        return inventory_target(inventory, TargetRequest(stack="dev.json", platform=platform, hosts=hosts))

    return target


def of(target: Target) -> ClusterRuns:
    assert isinstance(target.backend, PodBackend)
    return target.backend.runs


def launcher(planned: Planned, **changed: Any) -> PodLauncher:
    assert isinstance(planned.launcher, PodLauncher)
    return dataclasses.replace(planned.launcher, **changed)


def as_run(planned: Planned) -> Run:
    now = datetime.datetime.now(datetime.UTC)
    described = run_record(planned.plan, planned.config, name=None, now=now, before=None)
    return Run(directory=planned.directory, described=described, result=None, heartbeats=())


def check(planned: Planned) -> None:
    launcher(planned).prepare(planned.plan, planned.bundles, lambda _: None)


def own(tmp_path: Path, needed: str = "") -> Request:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "requirements.txt").write_text(needed)
    none: dict[str, Any] = {"python": "", "processes_per_host": "", "progress": ""}
    command = command_from_options(["python", "train.py"], workdir=str(folder), framework="pytorch", **none)
    return dataclasses.replace(BASIC, job="", command=command, arguments=())


def test_a_launch_leaves_the_code_and_what_it_needs_where_pods_fetch_it(
    make: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Plan] = []
    monkeypatch.setattr(launching, "_start_and_join", lambda plan, *_: started.append(plan))
    (tmp_path / "runs" / RUN_ID).mkdir(parents=True)  # which a bucket does without
    add_wheel(tmp_path / "index", "greet", "1.0")
    needed = f"--no-index\n--find-links {tmp_path}/index/greet\ngreet\n"
    request = dataclasses.replace(own(tmp_path, needed), run_id=RUN_ID)
    run = launching.launch(request, make(), lambda _: None)
    (plan,) = started
    (job, *_) = manifests.manifests(plan, Options())
    fetched = job["spec"]["template"]["spec"]["initContainers"][0]["command"][4:]
    assert len(fetched) == 6
    for url, sha256 in zip(fetched[::2], fetched[1::2], strict=True):
        (content,) = run.directory.files.read([url])
        assert content is not None and Bundle.from_text(content.decode(), sha256) is not None


def test_what_is_unknown_to_the_api_server_is_refused_before_anything_is_made(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make()
    planned = work_out(BASIC, target)
    written = manifests.manifests

    def misspelt(*told: Any) -> list[Object]:
        first, *others = written(*told)
        return [{**first, "spec": {**first["spec"], "backoffLimits": 3}}, *others]

    monkeypatch.setattr(manifests, "manifests", misspelt)
    with pytest.raises(RequestError, match="does not take the Job .*backoffLimits"):
        check(planned)


@pytest.mark.parametrize(
    ("how", "queue", "said"),
    [
        ({"count": 2}, None, "has no JobSet, which runs on several slices need"),
        ({}, "research", "has no Kueue, which --queue research needs"),
    ],
)
def test_a_controller_that_a_run_needs_and_the_cluster_lacks_is_named(
    make: Callable[..., Target], how: dict[str, Any], queue: str | None, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        check(work_out(dataclasses.replace(BASIC, queue=queue), make(**how)))


def test_a_queue_that_kueue_chooses_by_itself_has_to_be_named(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make()
    planned = work_out(BASIC, target)
    ask = of(target).connection.ask

    def chosen(method: str, path: str, body: Any = None, **more: Any) -> Object:
        found = ask(method, path, body, **more)
        if method == "POST" and path.endswith(
            "jobs"
        ):  # as its webhook does where there is a queue of that name
            found["metadata"]["labels"][manifests.QUEUE_LABEL] = "default"
        return found

    monkeypatch.setattr(of(target).connection, "ask", chosen)
    with pytest.raises(RequestError, match="into its queue default; say --queue default"):
        check(planned)


def test_a_user_without_rights_is_told_all_that_are_missing(
    plane: LocalControlPlane, make: Callable[..., Target], tmp_path: Path
) -> None:
    path = tmp_path / "you"
    plane.authority.kubeconfig(path, plane.layout.server, "you", context="rehearsal")
    target = make(kubeconfig=path)
    planned = work_out(BASIC, target)
    with pytest.raises(
        RequestError,
        match="may not create jobs, delete jobs, patch jobs, .*create pods/exec.*networkpolicies",
    ):
        check(planned)


class Pods:
    """The Job controller and the kubelet of one run, as far as a test needs them."""

    def __init__(self, target: Target, planned: Planned) -> None:
        self.target, self.planned, self.cluster = target, planned, of(target)
        self.run_id = planned.plan.run_id
        self.api, self.name = self.cluster.connection, job_name(self.run_id)

    def states(self) -> list[str]:
        return [entry["state"] for entry in self.cluster.run_in_cluster(self.run_id).entries()]

    def job(self) -> Object:
        return self.api.get(self.api.path("jobs", self.name))

    def is_deleted(self) -> bool:
        return "deletionTimestamp" in self.job()["metadata"]

    def create_suspended(self, plan: Plan | None = None, annotations: dict[str, str] | None = None) -> None:
        """Its Job, as of a launcher that ended there."""
        launcher(self.planned)._require_namespace()
        job = manifests.manifests(plan or self.planned.plan, Options(suspended=True))[0]
        launcher(self.planned)._create(
            {**job, "metadata": {**job["metadata"], "annotations": annotations or {}}}
        )

    def begin(self, wait_s: float, say: Callable[[str], None] = lambda _: None) -> None:
        launcher(self.planned, wait_s=wait_s).begin(self.planned.plan, say)

    def make(self, index: int, suffix: str = "a", node: str | None = None) -> str:
        job = self.job()
        template, name = job["spec"]["template"], f"{self.name}-{index}-{suffix}"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": job["metadata"]["uid"]}
        labels = {**template["metadata"]["labels"], INDEX: str(index)}
        metadata = {"name": name, "labels": labels, "ownerReferences": [owner]}
        spec = {**template["spec"], **({"nodeName": node} if node else {})}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.api.ask("POST", self.api.path("pods"), pod)
        return name

    def say(self, pod: str, phase: str, state: Object | None = None, **more: Any) -> None:
        container = {"name": CONTAINER, "state": state or {}, "ready": True, "restartCount": 0}
        container |= {"image": IMAGE, "imageID": ""}
        status = {"phase": phase, "containerStatuses": [container] if state else [], **more}
        path = f"{self.api.path('pods', pod)}/status"
        self.api.ask("PATCH", path, {"status": status}, content="application/merge-patch+json")

    def remove(self, pod: str) -> None:
        self.api.ask("DELETE", self.api.path("pods", pod), gracePeriodSeconds="0")

    def end_what_is_deleted(self) -> None:
        """What the garbage collector does, of a Job that somebody deletes in the foreground."""
        while not self.is_deleted():
            time.sleep(0.05)
        for pod in self.api.get(self.api.path("pods"), labelSelector=OURS)["items"]:
            self.remove(pod["metadata"]["name"])
        free = {"metadata": {"finalizers": None}}
        self.api.ask("PATCH", self.api.path("jobs", self.name), free, content="application/merge-patch+json")

    def take_away(self) -> None:
        ended = in_background(self.end_what_is_deleted)
        self.cluster.remove(self.run_id, wait_s=0)
        ended.join(10)


RUNNING = {"running": {"startedAt": "2026-11-23T12:00:00Z"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-23T12:00:09Z"}}


@pytest.fixture
def pods(make: Callable[..., Target]) -> Pods:
    """Of a run of one pod."""
    target = make(nodes=1)
    return Pods(target, work_out(BASIC, target))


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def eventually(found: Callable[[], Any], wanted: Any) -> None:
    until_s = time.monotonic() + 10
    while (now := found()) != wanted:
        assert time.monotonic() < until_s, f"{now} and not {wanted}"
        time.sleep(0.05)


def test_a_run_is_made_placed_joined_seen_and_stopped(make: Callable[..., Target], tmp_path: Path) -> None:
    target = make()
    planned = work_out(BASIC, target)
    pods, plan, lines = Pods(target, planned), planned.plan, list[str]()
    cluster, api = pods.cluster, pods.api
    check(planned)
    assert api.get(api.path("jobs"))["items"] == [], "nothing was made"
    begun = in_background(lambda: pods.begin(20.0, lines.append))
    eventually(pods.states, ["starting", "starting"])
    eventually(lambda: pods.job()["spec"].get("suspend"), False)
    begin_by_s = cluster.run_in_cluster(plan.run_id).begin_by_s
    assert begin_by_s == pytest.approx(time.time() + 20 + 2 * 3600, abs=20), "the launcher may die"
    assert "activeDeadlineSeconds" not in pods.job()["spec"], "it may train for long"
    names = [pods.make(0, node="n0"), pods.make(1)]
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    pods.say(names[1], "Pending", conditions=[unplaced])
    eventually(lambda: lines, ["waiting for 1 of 2 pods to be placed: 0/1 nodes"])
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": names[1]}}
    target_node = {"target": {"apiVersion": "v1", "kind": "Node", "name": "n1"}}
    api.ask("POST", f"{api.path('pods', names[1])}/binding", {**binding, **target_node})
    begun.join(20)
    assert not begun.is_alive()
    owners = [
        api.get(api.path(kind, pods.name))["metadata"]["ownerReferences"][0]["name"]
        for kind in ("services", "networkpolicies")
    ]
    assert owners == [pods.name] * 2, "who removes the Job removes all"
    pods.say(names[0], "Running", RUNNING)
    pods.say(names[1], "Running", RUNNING)
    eventually(pods.states, ["running", "running"])
    # No program can be started in these pods: the heartbeats in the bucket say that a process has joined.
    beats = tmp_path / "runs" / plan.run_id / "heartbeats"
    beats.mkdir(parents=True)
    (beats / "host-0.json").write_text(json.dumps({"attempt": 0, "state": "stepping"}))
    assert cluster.join(plan.process(0), 10.0)["state"] == "stepping"
    pods.say(names[1], "Failed", KILLED)
    eventually(pods.states, ["running", "starting"])
    assert cluster.run_in_cluster(plan.run_id).entries()[1]["reason"] == "OOMKilled"
    time.sleep(1)  # by its second of creation, the newest of two pods is told
    pods.make(1, "b", node="n0")
    eventually(lambda: cluster.run_in_cluster(plan.run_id).entries()[1]["reason"], None)

    gone = in_background(pods.end_what_is_deleted)
    answers = target.backend.stop(as_run(planned), grace_s=1)
    gone.join(10)
    assert [answer["stopped"][0]["how"] for answer in answers if not isinstance(answer, HostError)] == [
        "terminated",
        "terminated",
    ]
    assert pods.states() == []


def test_a_run_that_cannot_be_placed_is_taken_away_again_with_the_reason(pods: Pods) -> None:
    check(pods.planned)

    def fail_to_place() -> None:
        eventually(lambda: pods.cluster.run_in_cluster(pods.run_id).work is not None, True)
        event = {
            "metadata": {"name": f"{pods.name}-event"},
            "involvedObject": {"kind": "Job", "name": pods.name, "namespace": NAMESPACE},
            "type": "Warning",
            "reason": "FailedCreate",
            "message": 'Error creating: pods "run-0-x7f2q" is forbidden: exceeded quota: "chips"',
        }
        pods.api.ask("POST", pods.api.path("events"), event)
        pods.end_what_is_deleted()

    ended = in_background(fail_to_place)
    with pytest.raises(
        HostsError, match=r'(?s)1 of 1 pods could not be placed within 2 s.*: exceeded quota: "chips"$'
    ):
        pods.begin(2.0)
    ended.join(10)
    eventually(lambda: pods.cluster.run_in_cluster(pods.run_id).work, None)


def test_a_run_that_another_launcher_has_made_is_left_alone(pods: Pods) -> None:
    check(pods.planned)
    errors: list[HostsError] = []

    def wait_for_nodes() -> None:
        try:
            pods.begin(60.0)
        except HostsError as error:
            errors.append(error)

    begun = in_background(wait_for_nodes)
    eventually(lambda: pods.cluster.run_in_cluster(pods.run_id).begins_pods, True)
    with pytest.raises(AtWorkError, match="is being launched by another process"):
        pods.begin(60.0)
    pods.cluster.remove(pods.run_id, wait_s=0, uid="another")
    assert not pods.is_deleted()
    # Who waits for its nodes waits no longer when somebody else removes it.
    pods.take_away()
    begun.join(10)
    (error,) = errors
    assert "1 of 1 pods could not be placed; all" in str(error) and "removed by somebody else" in str(error)


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_create_whose_answer_is_lost_takes_its_own_job_and_leaves_another_s_alone(
    pods: Pods, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(pods.planned)
    api = pods.api
    jobs, ask = api.path("jobs"), api.ask
    ended: list[threading.Thread] = []

    def losing(method: str, path: str, body: Any = None, **more: Any) -> Object:
        if (method, path) != ("POST", jobs) or ended:
            return ask(method, path, body, **more)
        if whose == "another's":
            body = manifests.manifests(pods.planned.plan, Options(suspended=True))[0]
        ask(method, path, body, **more)
        ended.append(in_background(pods.end_what_is_deleted))
        raise ApiError(host=api.name, reason="no answer")

    monkeypatch.setattr(api, "ask", losing)
    error = HostsError if whose == "its own" else AtWorkError
    with pytest.raises(error, match="1 of 1 pods could not be placed within 1 s|by another process"):
        pods.begin(1.0)
    if whose == "another's":
        assert not pods.is_deleted()
        pods.cluster.remove(pods.run_id, wait_s=0)
    ended[0].join(10)
    eventually(lambda: pods.cluster.run_in_cluster(pods.run_id).work, None)


@pytest.mark.parametrize(
    ("late_s", "attempt", "is_removed"),
    [
        pytest.param(-60.0, {}, False, id="its pods may still begin"),
        pytest.param(60.0, {}, False, id="the clock of whoever looks may be an hour ahead"),
        pytest.param(3660.0, {"pod": "r-0-abcde"}, False, id="it has begun, and waits for a node again"),
        pytest.param(3660.0, {}, True, id="its pods can begin no more"),
    ],
)
def test_a_run_whose_launcher_died_is_removed_by_a_look_when_its_pods_can_begin_no_more(
    pods: Pods, late_s: float, attempt: dict[str, Any], is_removed: bool, tmp_path: Path, capsys: Any
) -> None:
    launched = datetime.datetime.fromtimestamp(time.time() - 3 * 3600, datetime.UTC)
    described = run_record(pods.planned.plan, pods.planned.config, name=None, now=launched, before=None)
    described["attempts"][0] |= attempt
    (tmp_path / "runs" / pods.run_id).mkdir(parents=True)
    pods.planned.directory.write_json("run.json", described)
    pods.create_suspended(annotations={BEGIN_BY: str(time.time() - late_s)})
    eventually(lambda: pods.cluster.run_in_cluster(pods.run_id).begins_pods, True)
    assert status(pods.target, None) == 0
    shown = capsys.readouterr().out
    facts = (pods.is_deleted(), f"{pods.run_id}  failed" in shown, TOO_LATE in shown)
    assert facts == (is_removed,) * 3, shown
    pods.take_away()


def test_the_directory_of_a_run_that_another_launcher_has_made_is_left_alone(
    pods: Pods, tmp_path: Path
) -> None:
    pods.create_suspended()
    there = tmp_path / "runs" / pods.run_id
    there.mkdir(parents=True)
    (there / "run.json").write_text("{}")
    planned = pods.planned
    with pytest.raises(AtWorkError):
        launching._start_and_join(planned.plan, planned.launcher, as_run(planned), lambda _: None)
    assert [path.name for path in there.iterdir()] == ["run.json"]
    pods.take_away()


def test_a_queue_is_named_when_all_that_belongs_to_the_run_is_made(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(nodes=1)
    pods = Pods(target, work_out(dataclasses.replace(BASIC, queue="research"), target))
    launcher(pods.planned)._require_namespace()
    made: list[tuple[str, str]] = []
    ask = pods.api.ask

    def recorded(method: str, path: str, body: Any = None, **more: Any) -> Object:
        if method in ("POST", "PATCH"):
            made.append((path.split("/")[-1], json.dumps(body)))
        return ask(method, path, body, **more)

    with (
        monkeypatch.context() as patch,
        pytest.raises(HostsError, match="queue research has not admitted it"),
    ):
        patch.setattr(pods.api, "ask", recorded)
        pods.begin(1.0)
    pods.end_what_is_deleted()
    assert [kind for kind, _ in made] == ["jobs", "services", "networkpolicies"]
    assert manifests.QUEUE_LABEL in made[0][1]
    assert '"suspend": true' in made[0][1], "it is Kueue that lets it begin"


def test_a_run_that_goes_on_is_not_cleared_away(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.pods.pod_launcher.REMOVE_LIMIT_S", 0.0)
    pods.create_suspended()
    eventually(lambda: pods.cluster.run_in_cluster(pods.run_id).begins_pods, True)
    again = dataclasses.replace(pods.planned.plan, attempt=1)
    with pytest.raises(HostError, match=f"goes on with {pods.run_id}.*fab stop"):
        launcher(pods.planned).prepare(again, [], lambda _: None)
    pods.take_away()


def test_an_api_server_that_is_away_is_told_of_and_asked_again(
    plane: LocalControlPlane, make: Callable[..., Target], tmp_path: Path
) -> None:
    target = make()
    assert target.backend.status().errors == ()
    cut_off(plane)
    try:
        eventually(lambda: len(target.backend.status().errors), 1)
        (error,) = target.backend.status().errors
        assert "cannot be reached" in str(error)
    finally:
        plane.start("kube-apiserver")
        plane.wait_until_ready()
    eventually(lambda: target.backend.status().errors, ())


def test_fifty_runs_are_watched_by_one_watch_of_each_kind(
    plane: LocalControlPlane, make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make()
    pods = Pods(target, work_out(BASIC, target))
    watches: collections.Counter[str] = collections.Counter()
    events = Connection.events

    def noted(connection: Connection, path: str, **query: str) -> Any:
        if connection is of(target).connection:
            watches[path.rpartition("/")[2]] += 1
        return events(connection, path, **query)

    monkeypatch.setattr(Connection, "events", noted)
    for index in range(50):
        plan = dataclasses.replace(pods.planned.plan, run_id=f"flax_mlm-20261123-1200{index:02}-abcd")
        pods.create_suspended(plan)
    eventually(lambda: len(target.backend.status().processes), 100)
    for _ in range(20):
        target.backend.status()
    assert watches == {"jobs": 1, "pods": 1}
