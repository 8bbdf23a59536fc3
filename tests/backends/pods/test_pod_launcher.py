"""Runs in a cluster, against a real API server and etcd: what it takes and refuses, what is made, seen and removed.

There is no kubelet: where pods have to exist, a test makes them as the Job controller and the kubelet would.
"""

from __future__ import annotations

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
from backends.pods.pods import BEGIN_BY, CONTAINER, INDEX, OURS, Object, name_of
from backends.resolve import of_inventory
from console.status import status
from contracts.errors import RequestError
from contracts.inventory import Capacity, Cluster, Inventory, NodePool, Slice, Storage
from launch import launching
from launch.bundles import Bundle
from launch.hosts import HostError, HostsError
from launch.launching import run_record
from launch.run_request import Planned, Request, asked_for, work_out
from launch.runs import AtWorkError, Run
from launch.targets import Plan, Target, Wanted
from rehearsal.kubernetes.control_plane import LocalControlPlane, find_or_build

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
        return of_inventory(inventory, Wanted(stack="dev.json", platform=platform, hosts=hosts))

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


def own(tmp_path: Path) -> Request:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    none = {"python": "", "processes_per_host": "", "progress": ""}
    command = asked_for(["python", "train.py"], workdir=str(folder), framework="pytorch", **none)
    return dataclasses.replace(BASIC, job="", command=command, arguments=())


def test_a_launch_leaves_the_code_in_the_run_directory_where_pods_fetch_it(
    make: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Plan] = []
    monkeypatch.setattr(launching, "_start_and_join", lambda plan, *_: started.append(plan))
    (tmp_path / "runs" / RUN_ID).mkdir(parents=True)  # which a bucket does without
    request = dataclasses.replace(own(tmp_path), run_id=RUN_ID)
    run = launching.launch(request, make(), lambda _: None)
    (plan,) = started
    (job, *_) = manifests.manifests(plan, Options())
    folder, *fetched = job["spec"]["template"]["spec"]["initContainers"][0]["command"][4:]
    assert folder == run.directory.url and len(fetched) == 4
    for name, sha256 in zip(fetched[::2], fetched[1::2], strict=True):
        assert Bundle.of_text(run.directory.read_text(name), sha256) is not None


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
        self.api, self.name = of(target).connection, name_of(planned.plan.run_id)

    def make(self, index: int, suffix: str = "a", node: str | None = None) -> str:
        job = self.api.get(self.api.path("jobs", self.name))
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
        while not self.api.get(self.api.path("jobs", self.name))["metadata"].get("deletionTimestamp"):
            time.sleep(0.05)
        for pod in self.api.get(self.api.path("pods"), labelSelector=OURS)["items"]:
            self.remove(pod["metadata"]["name"])
        free = {"metadata": {"finalizers": None}}
        self.api.ask("PATCH", self.api.path("jobs", self.name), free, content="application/merge-patch+json")


RUNNING = {"running": {"startedAt": "2026-11-23T12:00:00Z"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-23T12:00:09Z"}}


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
    plan, cluster = planned.plan, of(target)
    pods, api, said = Pods(target, planned), cluster.connection, list[str]()
    check(planned)
    assert api.get(api.path("jobs"))["items"] == [], "nothing was made"
    begun = in_background(lambda: launcher(planned, wait_s=20.0).begin(plan, said.append))
    eventually(lambda: [e["state"] for e in cluster.of(plan.run_id).entries()], ["starting", "starting"])
    eventually(lambda: api.get(api.path("jobs", pods.name))["spec"].get("suspend"), False)
    begin_by_s = cluster.of(plan.run_id).begin_by_s
    assert begin_by_s == pytest.approx(time.time() + 20 + 2 * 3600, abs=20), "the launcher may die"
    assert "activeDeadlineSeconds" not in api.get(api.path("jobs", pods.name))["spec"], (
        "it may train for long"
    )
    names = [pods.make(0, node="n0"), pods.make(1)]
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    pods.say(names[1], "Pending", conditions=[unplaced])
    eventually(lambda: said, ["waiting for 1 of 2 pods to be placed: 0/1 nodes"])
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
    eventually(lambda: [e["state"] for e in cluster.of(plan.run_id).entries()], ["running", "running"])
    # No program can be started in these pods: the heartbeats in the bucket say that a process has joined.
    beats = tmp_path / "runs" / plan.run_id / "heartbeats"
    beats.mkdir(parents=True)
    (beats / "host-0.json").write_text(json.dumps({"attempt": 0, "state": "stepping"}))
    assert cluster.join(plan.process(0), 10.0)["state"] == "stepping"
    pods.say(names[1], "Failed", KILLED)
    eventually(lambda: [e["state"] for e in cluster.of(plan.run_id).entries()], ["running", "starting"])
    assert cluster.of(plan.run_id).entries()[1]["reason"] == "OOMKilled"
    time.sleep(1)  # by its second of creation, the newest of two pods is told
    pods.make(1, "b", node="n0")
    eventually(lambda: cluster.of(plan.run_id).entries()[1]["reason"], None)

    gone = in_background(pods.end_what_is_deleted)
    answers = target.backend.stop(as_run(planned), grace_s=1)
    gone.join(10)
    assert [answer["stopped"][0]["how"] for answer in answers if not isinstance(answer, HostError)] == [
        "terminated",
        "terminated",
    ]
    assert cluster.of(plan.run_id).entries() == []


def test_a_run_that_cannot_be_placed_is_taken_away_again_with_the_reason(make: Callable[..., Target]) -> None:
    target = make(nodes=1)
    planned = work_out(BASIC, target)
    pods, cluster = Pods(target, planned), of(target)
    check(planned)

    def fail_to_place() -> None:
        eventually(lambda: cluster.of(planned.plan.run_id).work is not None, True)
        name = f"{pods.name}-event"
        about = {"kind": "Job", "name": pods.name, "namespace": NAMESPACE}
        said = 'Error creating: pods "run-0-x7f2q" is forbidden: exceeded quota: "chips"'
        event = {
            "metadata": {"name": name},
            "involvedObject": about,
            "type": "Warning",
            "reason": "FailedCreate",
        }
        pods.api.ask("POST", pods.api.path("events"), {**event, "message": said})
        pods.end_what_is_deleted()

    ended = in_background(fail_to_place)
    with pytest.raises(
        HostsError, match=r'(?s)1 of 1 pods could not be placed within 2 s.*: exceeded quota: "chips"$'
    ):
        launcher(planned, wait_s=2.0).begin(planned.plan, lambda _: None)
    ended.join(10)
    eventually(lambda: cluster.of(planned.plan.run_id).work, None)


def test_a_run_that_another_launcher_has_made_is_left_alone(make: Callable[..., Target]) -> None:
    target = make(nodes=1)
    planned = work_out(BASIC, target)
    pods, cluster, api = Pods(target, planned), of(target), of(target).connection
    check(planned)
    errors: list[HostsError] = []

    def wait_for_nodes() -> None:
        try:
            launcher(planned, wait_s=60.0).begin(planned.plan, lambda _: None)
        except HostsError as error:
            errors.append(error)

    begun = in_background(wait_for_nodes)
    eventually(lambda: cluster.of(planned.plan.run_id).begins_pods, True)
    with pytest.raises(AtWorkError, match="is being launched by another process"):
        launcher(planned, wait_s=60.0).begin(planned.plan, lambda _: None)
    cluster.remove(planned.plan.run_id, wait_s=0, uid="another")
    assert "deletionTimestamp" not in api.get(api.path("jobs", pods.name))["metadata"]
    # Who waits for its nodes waits no longer when somebody else removes it.
    ended = in_background(pods.end_what_is_deleted)
    cluster.remove(planned.plan.run_id, wait_s=0)
    begun.join(10)
    ended.join(10)
    (error,) = errors
    assert "1 of 1 pods could not be placed; all" in str(error) and "removed by somebody else" in str(error)


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_create_whose_answer_is_lost_takes_its_own_job_and_leaves_another_s_alone(
    make: Callable[..., Target], whose: str
) -> None:
    target = make(nodes=1)
    planned = work_out(BASIC, target)
    pods, cluster, api = Pods(target, planned), of(target), of(target).connection
    check(planned)
    jobs, ask = api.path("jobs"), api.ask
    ended: list[threading.Thread] = []

    def losing(method: str, path: str, body: Any = None, **more: Any) -> Object:
        if (method, path) != ("POST", jobs) or ended:
            return ask(method, path, body, **more)
        if whose == "another's":
            body = manifests.manifests(planned.plan, Options(suspended=True))[0]
        ask(method, path, body, **more)
        ended.append(in_background(pods.end_what_is_deleted))
        raise ApiError(host=api.name, reason="no answer")

    api.ask = losing  # type: ignore[method-assign]
    error = HostsError if whose == "its own" else AtWorkError
    with pytest.raises(error, match="1 of 1 pods could not be placed within 1 s|by another process"):
        launcher(planned, wait_s=1.0).begin(planned.plan, lambda _: None)
    api.ask = ask  # type: ignore[method-assign]
    if whose == "another's":
        assert "deletionTimestamp" not in api.get(api.path("jobs", pods.name))["metadata"]
        cluster.remove(planned.plan.run_id, wait_s=0)
    ended[0].join(10)
    eventually(lambda: cluster.of(planned.plan.run_id).work, None)


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
    late_s: float,
    attempt: dict[str, Any],
    is_removed: bool,
    make: Callable[..., Target],
    tmp_path: Path,
    capsys: Any,
) -> None:
    target = make(nodes=1)
    planned = work_out(dataclasses.replace(BASIC, run_id=RUN_ID), target)
    pods, cluster, api = Pods(target, planned), of(target), of(target).connection
    launcher(planned)._require_namespace()
    launched = datetime.datetime.fromtimestamp(time.time() - 3 * 3600, datetime.UTC)
    described = run_record(planned.plan, planned.config, name=None, now=launched, before=None)
    described["attempts"][0] |= attempt
    (tmp_path / "runs" / RUN_ID).mkdir(parents=True)
    planned.directory.write_json("run.json", described)
    job = manifests.manifests(planned.plan, Options(suspended=True))[0]
    job["metadata"]["annotations"] = {BEGIN_BY: str(time.time() - late_s)}
    launcher(planned)._create(job)
    eventually(lambda: cluster.of(RUN_ID).begins_pods, True)
    assert status(target, None) == 0
    shown = capsys.readouterr().out
    is_going = "deletionTimestamp" in api.get(api.path("jobs", pods.name))["metadata"]
    assert (is_going, f"{RUN_ID}  failed" in shown, TOO_LATE in shown) == (is_removed,) * 3, shown
    ended = in_background(pods.end_what_is_deleted)
    cluster.remove(RUN_ID, wait_s=0)
    ended.join(10)


def test_the_directory_of_a_run_that_another_launcher_has_made_is_left_alone(
    make: Callable[..., Target], tmp_path: Path
) -> None:
    target = make(nodes=1)
    planned = work_out(dataclasses.replace(BASIC, run_id=RUN_ID), target)
    launcher(planned)._require_namespace()
    launcher(planned)._create(manifests.manifests(planned.plan, Options(suspended=True))[0])
    there = tmp_path / "runs" / RUN_ID
    there.mkdir(parents=True)
    (there / "run.json").write_text("{}")
    with pytest.raises(AtWorkError):
        launching._start_and_join(planned.plan, planned.launcher, as_run(planned), lambda _: None)
    assert [path.name for path in there.iterdir()] == ["run.json"]
    of(target).remove(RUN_ID, wait_s=0)
    Pods(target, planned).end_what_is_deleted()


def test_a_queue_is_named_when_all_that_belongs_to_the_run_is_made(make: Callable[..., Target]) -> None:
    target = make(nodes=1)
    planned = work_out(dataclasses.replace(BASIC, queue="research"), target)
    pods, api = Pods(target, planned), of(target).connection
    launcher(planned)._require_namespace()
    asked: list[tuple[str, str, Any]] = []
    ask = api.ask

    def noted(method: str, path: str, body: Any = None, **more: Any) -> Object:
        if method in ("POST", "PATCH"):
            asked.append((method, path.split("/")[-1], json.dumps(body)))
        return ask(method, path, body, **more)

    api.ask = noted  # type: ignore[method-assign]
    with pytest.raises(HostsError, match="the queue research has not admitted it"):
        launcher(planned, wait_s=1.0).begin(planned.plan, lambda _: None)
    api.ask = ask  # type: ignore[method-assign]
    pods.end_what_is_deleted()
    assert [path for _, path, _ in asked] == ["jobs", "services", "networkpolicies"]
    assert manifests.QUEUE_LABEL in asked[0][2]
    assert '"suspend": true' in asked[0][2], "it is Kueue that lets it begin"


def test_a_run_that_goes_on_is_not_cleared_away(
    make: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.pods.pod_launcher.REMOVE_LIMIT_S", 0.0)
    target = make(nodes=1)
    planned = work_out(BASIC, target)
    pods, cluster = Pods(target, planned), of(target)
    launcher(planned)._require_namespace()
    launcher(planned)._create(manifests.manifests(planned.plan, Options(suspended=True))[0])
    eventually(lambda: cluster.of(planned.plan.run_id).begins_pods, True)
    with pytest.raises(HostError, match=f"goes on with {planned.plan.run_id}.*fab stop"):
        launcher(planned).prepare(dataclasses.replace(planned.plan, attempt=1), [], lambda _: None)
    ended = in_background(pods.end_what_is_deleted)
    cluster.remove(planned.plan.run_id, wait_s=0)
    ended.join(10)


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
    planned = work_out(BASIC, target)
    launcher(planned)._require_namespace()
    watches: collections.Counter[str] = collections.Counter()
    events = Connection.events

    def noted(connection: Connection, path: str, **query: str) -> Any:
        if connection is of(target).connection:
            watches[path.rpartition("/")[2]] += 1
        return events(connection, path, **query)

    monkeypatch.setattr(Connection, "events", noted)
    for index in range(50):
        plan = dataclasses.replace(planned.plan, run_id=f"flax_mlm-20261123-1200{index:02}-abcd")
        launcher(planned)._create(manifests.manifests(plan, Options(suspended=True))[0])
    eventually(lambda: len(target.backend.status().processes), 100)
    for _ in range(20):
        target.backend.status()
    assert watches == {"jobs": 1, "pods": 1}
