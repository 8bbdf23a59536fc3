"""What a cluster says of a run's pods, as agents would say it; and the run's state that follows."""

import dataclasses
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest

from backends.pods import api_server, cluster_runs
from backends.pods.api_server import ApiError
from backends.pods.cluster_runs import ClusterRuns
from backends.pods.pod_backend import PodBackend
from backends.pods.pods import (
    CODE_CONTAINER,
    CONTAINER,
    INDEX,
    RUN_LABEL,
    SLICE_INDEX,
    ObservedRun,
    observed_runs,
    trouble,
)
from console import follow, overview
from console.display import Plain
from console.summary import exit_code
from contracts.errors import UNAVAILABLE, WRONG_REQUEST
from contracts.inventory import Host
from contracts.run_directory import RESULT, RunDirectory
from launch import launching, policy, runs
from launch.hosts import HostError, in_thread
from launch.output import terminal
from launch.runs import Run
from tests.backends.pods.pod_plans import CLUSTER, TABLE
from tests.launch.conftest import RUN_ID, STARTED
from tests.launch.slices import make_target

AT = "2020-11-20T21:46:00Z"
BEGAN_S = 1605908760.0


def pod(
    index: int, phase: str, state: dict[str, Any] | None = None, *, made: str = AT, **more: Any
) -> dict[str, Any]:
    labels = {RUN_LABEL: RUN_ID, INDEX: str(index), **more.pop("labels", {})}
    containers = [] if state is None else [{"name": CONTAINER, "state": state, "image": "i"}]
    metadata = {"name": f"r-{index}", "uid": f"{index}-{made}", "labels": labels, "creationTimestamp": made}
    status = {"phase": phase, "containerStatuses": containers, **more}
    return {"metadata": metadata, "spec": {}, "status": status}


def job(*, pods: int = 2, over: str | None = None) -> dict[str, Any]:
    conditions = [{"type": over, "status": "True", "reason": "PodFailurePolicy"}] if over else []
    metadata = {"name": "r", "uid": "j", "labels": {RUN_LABEL: RUN_ID}}
    job = {"kind": "Job", "metadata": metadata, "spec": {"completions": pods}}
    return {**job, "status": {"conditions": conditions}}


RUNNING = {"running": {"startedAt": AT}}
FAILED = {"terminated": {"exitCode": 76, "reason": "Error", "finishedAt": AT}}
OK = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": AT}}


@pytest.mark.parametrize(
    ("work", "pods", "states"),
    [
        (job(), [], ["starting", "starting"]),
        (job(), [pod(0, "Running", RUNNING), pod(1, "Pending")], ["running", "starting"]),
        (job(), [pod(0, "Running", RUNNING), pod(1, "Failed", FAILED)], ["running", "starting"]),
        (
            job(over="FailureTarget"),
            [pod(0, "Running", RUNNING), pod(1, "Failed", FAILED)],
            ["running", "exited"],
        ),
        (job(over="Failed"), [pod(1, "Failed", FAILED)], ["exited"]),
        (job(), [pod(0, "Succeeded", OK), pod(1, "Running", RUNNING)], ["exited", "running"]),
        (None, [pod(0, "Running", RUNNING)], ["running"]),
        (None, [pod(0, "Failed", FAILED)], ["exited"]),
    ],
)
def test_a_process_is_starting_for_as_long_as_the_cluster_starts_its_pod_again(
    work: dict[str, Any] | None, pods: list[dict[str, Any]], states: list[str]
) -> None:
    found = observed_runs([work] if work else [], pods)[RUN_ID]
    assert [entry["state"] for entry in found.entries()] == states


def test_of_the_pods_of_a_process_the_newest_counts() -> None:
    old, new = pod(0, "Failed", FAILED), pod(0, "Running", RUNNING, made="2020-11-20T21:47:00Z")
    assert observed_runs([job(pods=1)], [new, old])[RUN_ID].pods == {0: new}


def test_the_pods_of_a_jobset_are_counted_through_its_slices() -> None:
    template = {"template": {"spec": {"completions": 2}}, "replicas": 2}
    jobset = {**job(), "kind": "JobSet", "spec": {"replicatedJobs": [template]}}
    child = job()
    child["metadata"] = {**child["metadata"], "ownerReferences": [{"kind": "JobSet"}]}
    last = pod(1, "Running", RUNNING, labels={SLICE_INDEX: "1"})
    found = observed_runs([child, jobset], [last])[RUN_ID]
    assert [entry["state"] for entry in found.entries()] == ["starting"] * 3 + ["running"]


@pytest.mark.parametrize(
    ("beats", "pods", "result", "state"),
    [
        # What a pod before this one has said is not this one's.
        ([("failed", -5.0), ("failed", -5.0)], [RUNNING, RUNNING], "failed", "starting"),
        ([("failed", -5.0), ("failed", -5.0)], [None, None], "failed", "starting"),
        ([("stepping", 5.0), ("stepping", 5.0)], [RUNNING, RUNNING], None, "running"),
        # Whether that is the run's end is told by the exit code of its pod: the cluster may start it again.
        ([("failed", 5.0), ("stepping", 5.0)], [RUNNING, RUNNING], None, "starting"),
    ],
)
def test_what_earlier_pods_said_is_not_of_those_that_were_started_again(
    beats: list[tuple[str, float]], pods: list[dict[str, Any] | None], result: str | None, state: str
) -> None:
    found = [pod(index, "Running" if each else "Pending", each) for index, each in enumerate(pods)]
    run = Run(
        directory=RunDirectory("/nowhere"),
        described={"run_id": RUN_ID, "attempts": [{"attempt": 0, "started": STARTED, "processes": 2}]},
        result={"outcome": result, "attempt": 0} if result else None,
        heartbeats=tuple({"state": said, "attempt": 0, "time": BEGAN_S + s} for said, s in beats),
    )
    entries = observed_runs([job()], found)[RUN_ID].entries()
    assert runs.state(run, entries, knowing=1, now_s=BEGAN_S + 60) == state


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (pod(0, "Failed", {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}), "OOMKilled"),
        (pod(0, "Failed", FAILED), "exit code 76"),
        (
            pod(0, "Failed", {"terminated": {"exitCode": 1, "reason": "Error", "message": "x\nno cwd\n"}}),
            "no cwd",
        ),
        (pod(0, "Failed", None, reason="Evicted", message="low on memory"), "Evicted: low on memory"),
        (
            pod(0, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}),
            "ImagePullBackOff: no",
        ),
        (
            pod(
                0,
                "Pending",
                None,
                conditions=[{"type": "PodScheduled", "status": "False", "message": "no room"}],
            ),
            "no room",
        ),
        (
            pod(
                0,
                "Running",
                None,
                conditions=[
                    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
                ],
            ),
            "PreemptionByScheduler",
        ),
        (pod(0, "Pending", {"waiting": {"reason": "ContainerCreating"}}), None),
        (pod(0, "Succeeded", OK), None),
    ],
)
def test_why_a_pod_does_not_run_is_said_in_the_words_of_whoever_knows(
    found: dict[str, Any], why: str | None
) -> None:
    assert trouble(found) == why


class Away(ClusterRuns):
    """Runs of a cluster whose API server gives no answer now and then. answers: None: none; else the pod 0."""

    def __init__(self, answers: list[dict[str, Any] | None]) -> None:
        self.answers = answers

    def run_in_cluster(self, run_id: str) -> ObservedRun:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if found is None:
            raise ApiError(host="cluster", reason="no answer")
        return ObservedRun(run_id=run_id, work=job(pods=1), pods={0: found})


def test_whoever_waits_for_a_process_to_join_survives_an_api_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_server, "ASK_AGAIN_S", 0.01)
    cluster = Away([None, None, pod(0, "Succeeded", OK)])
    assert cluster.join({"run_id": RUN_ID, "attempt": 0, "process_id": 0}, 10.0)["state"] == "done"


class Expired(Away):
    """Runs of a cluster that has stopped to know this user."""

    def run_in_cluster(self, run_id: str) -> ObservedRun:
        raise ApiError(host="cluster", reason="Unauthorized", remedy="log in again", status=401)


def test_whoever_may_not_ask_any_more_is_told_at_once() -> None:
    with pytest.raises(ApiError, match="Unauthorized → log in again"):
        Expired([None]).join({"run_id": RUN_ID, "attempt": 0, "process_id": 0}, 3600.0)


class Working(Away):
    """A run of two pods, of which the second has ended. heard: what the agent of the first is asked."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.connection: Any = Named()

    def run_in_cluster(self, run_id: str) -> ObservedRun:
        pods = {0: pod(0, "Running", {"running": {}}), 1: pod(1, "Succeeded", OK)}
        return ObservedRun(run_id=run_id, work=job(pods=2), pods=pods)

    def session(self, pod: dict[str, Any]) -> Any:
        return self

    def ask(self, verb: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.heard.append((verb, request))
        return {"text": "where it is"}


class Named:
    name = "cluster"

    def load(self) -> None: ...


def test_the_agents_of_all_pods_are_asked_and_one_that_is_gone_is_an_error_beside_the_answers(
    write_run: Any,
) -> None:
    cluster, run = Working(), write_run()
    answer, error = PodBackend(cluster).ask(run, "stacks", {"timeout_s": 1}, timeout_s=5)
    assert answer == {"text": "where it is"}
    process = {"run_id": run.run_id, "attempt": run.attempt, "process_id": 0}
    assert cluster.heard == [("stacks", {**process, "timeout_s": 1})]
    assert isinstance(error, HostError) and error.host == run.described["hosts"][1]["name"]


class Refusing:
    """A connection that refuses what is asked about JobSets, and takes all else. taken: the paths."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def path(self, kind: str, name: str = "") -> str:
        return f"{kind}/{name}"

    def ask(self, method: str, path: str, body: dict[str, Any]) -> None:
        if path.startswith("jobsets"):
            raise ApiError(host="cluster", reason="forbidden", status=403)
        self.taken.append(path)


def test_who_has_no_right_to_jobsets_can_remove_a_run_of_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Away([None])
    refusing = Refusing()
    monkeypatch.setattr(cluster, "connection", refusing, raising=False)
    cluster.remove("r-1", wait_s=0)
    assert refusing.taken == ["jobs/r-1"]


def codeless(code: int, *, made: str = AT) -> dict[str, Any]:
    """A pod whose code could not be fetched."""
    over = {"exitCode": code, "reason": "Error", "message": "gs://b: a\ngs://b: no code\n"}
    containers = [{"name": CODE_CONTAINER, "state": {"terminated": over}, "image": "i"}]
    waiting = {"waiting": {"reason": "PodInitializing"}}
    return pod(0, "Failed", waiting, made=made, initContainerStatuses=containers)


NO_CODE = "its code could not be had: gs://b: no code"


@pytest.mark.parametrize("code", [WRONG_REQUEST, UNAVAILABLE, 1])
def test_a_pod_without_its_code_fails_the_join_of_all_at_once_with_the_kind_of_its_failure(code: int) -> None:
    cluster = Away([codeless(code)])
    process = {"run_id": RUN_ID, "attempt": 0}
    failed = cluster.join({**process, "process_id": 0}, 3600.0)
    other = cluster.join({**process, "process_id": 1}, 3600.0)
    assert failed["beat"] == {"exit_code": code, "message": NO_CODE}
    launcher = type("Launcher", (), {"join": lambda *_, **__: [failed, other]})()
    plan = TABLE["four hosts"][0]
    hosts = [Host(**{**vars(plan.target.hosts[0]), "name": name}) for name in ("p-0", "p-1")]
    plan = dataclasses.replace(plan, target=dataclasses.replace(plan.target, hosts=tuple(hosts)))
    with pytest.raises(launching.NotJoined, match=f"p-0: {NO_CODE}$") as raised:
        launching.join(plan, launcher)
    assert raised.value.exit_code == (code if code != 1 else None)


class Stuck(Away):
    """A run whose pod cannot be started again. removed: what was."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        super().__init__([*pods])
        self.removed: list[str] = []
        self._in_vain_since_s = {}

    def remove(self, run_id: str, **_: Any) -> None:
        self.removed.append(run_id)


def test_a_run_ends_with_the_reason_where_its_pod_waits_in_vain_for_long(
    write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_image = pod(0, "Pending", {"waiting": {"reason": "ErrImagePull", "message": "gone"}})
    cluster, run = Stuck(no_image), write_run()

    def state() -> str:
        (entry,) = cluster.entries(cluster.run_in_cluster(run.run_id))
        return runs.state(run, [entry], knowing=1, now_s=BEGAN_S + 10 * 3600)

    assert state() == "starting"
    target = type("Target", (), {"backend": PodBackend(cluster)})()
    # Whoever saw no pod of it yet is not to end what a launcher has begun meanwhile.
    _, now = follow.concluded(run, "lost", target)
    assert (now, run.directory.read_json(RESULT), cluster.removed) == ("lost", None, [])
    monkeypatch.setattr(cluster_runs, "NO_RESTART_LIMIT_S", -1.0)
    assert state() == "lost"
    ended, now = follow.concluded(run, "lost", target)
    assert (now, (ended.result or {})["error"]) == ("failed", "process 0: ErrImagePull: gone")
    assert cluster.removed == [run.run_id]


def test_a_run_whose_pods_cannot_fetch_its_code_again_and_again_ends_as_an_outage(
    write_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("backends.pods.cluster_runs.time.monotonic", lambda: now_s)
    fetching = pod(0, "Pending", {"waiting": {"reason": "PodInitializing"}}, made="2020-11-20T21:47:00Z")
    later = codeless(UNAVAILABLE, made="2020-11-20T21:48:00Z")
    pods = [codeless(UNAVAILABLE), fetching, later, later]
    cluster, run, states = Stuck(*pods), write_run(), []
    for now_s in (0.0, 300.0, 1000.0):  # noqa: B007 - it is the clock
        (entry,) = cluster.entries(cluster.run_in_cluster(run.run_id))
        states.append(entry["state"])
    assert states == ["starting", "starting", "exited"]
    assert entry["reason"] == NO_CODE
    # The attempt before has told its end, which the cluster would have started again.
    lost = {"outcome": "failed", "attempt": 0, "exit_code": None, "error": "host 0 was lost"}
    run.directory.write_json(RESULT, lost)
    ended, state = follow.concluded(run, "failed", type("Target", (), {"backend": PodBackend(cluster)})())
    assert cluster.removed == [run.run_id]
    assert (ended.result or {})["error"] == f"process 0: {NO_CODE}\nbefore that: host 0 was lost"
    assert policy.failure_cause(state, ended.result) == "outside"
    assert exit_code(ended, state) == UNAVAILABLE


@pytest.mark.parametrize(
    ("codes", "kind"),
    [((UNAVAILABLE, WRONG_REQUEST), WRONG_REQUEST), ((1, UNAVAILABLE), UNAVAILABLE), ((137, 1), 1)],
)
def test_of_pods_that_fail_in_different_ways_a_wrong_request_tells_the_kind_and_then_an_outage(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], kind: int
) -> None:
    cluster = Stuck()
    pods = {index: codeless(code) for index, code in enumerate(codes)}
    now = ObservedRun(run_id=RUN_ID, work=None, pods=pods)
    monkeypatch.setattr(cluster, "run_in_cluster", lambda _: now)
    conclusion = cluster.conclude(RUN_ID)
    assert conclusion is not None and conclusion.exit_code == kind


def test_a_run_that_has_been_at_work_since_has_its_whole_time_again() -> None:
    cluster = Stuck(codeless(UNAVAILABLE))
    assert cluster.in_vain_s(RUN_ID, 0, codeless(UNAVAILABLE)) >= 0.0
    cluster._in_vain_since_s[RUN_ID, 0] -= 3600.0
    assert cluster.in_vain_s(RUN_ID, 0, pod(0, "Running", RUNNING)) == 0.0
    assert cluster.in_vain_s(RUN_ID, 0, codeless(UNAVAILABLE)) < 60.0


def test_why_a_process_does_not_start_is_told_once_until_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"run_id": RUN_ID, "process_id": 0, "state": "starting", "reason": "no code"}
    shown = Plain(terminal())
    before: Mapping[int, str] = {}
    again = {**entry, "reason": None}
    for looked in (entry, again, entry, {**again, "state": "running"}, entry):
        before = follow._tell_delays(shown, runs.Look(processes=(looked,), errors=()), before)
    assert capsys.readouterr().out.count("process 0 waits to start: no code") == 2


def test_clusters_of_one_name_have_a_certificate_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = [kubernetes.client.Configuration(), kubernetes.client.Configuration()]
    for made, endpoint, certificate in zip(found, ("https://one", "https://two"), "AB", strict=True):
        cluster = dataclasses.replace(CLUSTER, context=None, endpoint=endpoint, ca_certificate=certificate)
        api_server._use_google(cluster, made)
    assert [Path(each.ssl_ca_cert).read_text() for each in found] == ["A", "B"]


@pytest.mark.parametrize(
    ("result", "is_heard", "goes_on"),
    [
        ({"outcome": "preempted"}, False, True),
        ({"outcome": "hung"}, False, True),
        ({"outcome": "failed", "exit_code": None}, False, True),
        ({"outcome": "failed", "exit_code": 76}, False, True),
        ({"outcome": "failed", "exit_code": 2}, False, False),
        ({"outcome": "failed", "exit_code": 1}, False, True),
        ({"outcome": "stopped"}, False, False),
        ({"outcome": "done"}, False, False),
        ({"outcome": "preempted"}, True, False),
    ],
)
def test_a_run_whose_cluster_is_not_heard_may_be_started_again_unless_its_end_was_for_good(
    result: dict[str, Any], is_heard: bool, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {"run_id": RUN_ID, "attempts": [{"attempt": 0, "started": STARTED, "processes": 2}]}
    run = Run(
        directory=RunDirectory("/nowhere"),
        described={**described, "pods": {"restarts": 10, "queue": None}},
        result={"attempt": 0, **result},
        heartbeats=(None, None),
    )
    errors = () if is_heard else (ApiError(host="cluster dev", reason="it is away"),)
    known = runs.Look(processes=(), errors=errors)
    assert runs.may_be_restarted(run, known, runs.state_by(run, known)) is goes_on
    on_hosts = dataclasses.replace(run, described=described)
    assert not runs.may_be_restarted(on_hosts, known, runs.state_by(on_hosts, known))
    # Who follows it waits, and for no longer than that.
    monkeypatch.setattr(follow, "UNHEARD_LIMIT_S", 0.4)
    monkeypatch.setattr(follow, "POLL_S", 0.1)
    monkeypatch.setattr(runs, "read", lambda _: run)
    backend: Any = type("Backend", (), {"status": lambda *_: known})()
    began_s = time.monotonic()
    assert follow.follow(run, make_target([], backend=backend), Plain(terminal())) == result["outcome"]
    assert (time.monotonic() - began_s > 0.4) is goes_on


def test_a_cluster_of_the_stack_is_asked_with_a_token_that_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(("old", "new"))
    found = type("Credentials", (), {"valid": False, "token": None})()
    found.refresh = lambda _: setattr(found, "token", next(tokens))
    monkeypatch.setattr("google.auth.default", lambda **_: (found, "p"))
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                near, _ = listener.accept()
                with near:
                    heard.extend(near.recv(1 << 16).decode().split("\r\n"))
                    near.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

        answering = in_thread(answer)
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        connection = api_server.Connection(dataclasses.replace(CLUSTER, context=None, endpoint=endpoint))
        assert [connection.get("/api"), connection.get("/api")] == [{}, {}]
        answering.result()
    sent = [line for line in heard if line.lower().startswith("authorization:")]
    assert [line.partition(": ")[2] for line in sent] == ["Bearer old", "Bearer new"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"Content-Length: 11\r\n\r\n<p>log in</", "what answers is no API server: <p>log in"),
        (b'Content-Length: 100\r\n\r\n{"items": [', "cannot be reached"),
    ],
)
def test_no_api_server_or_half_an_answer_is_one_that_is_away(answer: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def give() -> None:
            near, _ = listener.accept()
            with near:
                near.recv(1 << 16)
                near.sendall(b"HTTP/1.1 200 OK\r\n" + answer)

        giving = in_thread(give)
        connection = api_server.Connection(dataclasses.replace(CLUSTER, context=None))
        made = kubernetes.client.Configuration(host=f"http://127.0.0.1:{listener.getsockname()[1]}")
        made.proxy, made.retries = None, False
        connection._client = kubernetes.client.ApiClient(made)
        with pytest.raises(ApiError, match=said):
            connection.get("/api/v1/pods")
        giving.result()


def test_a_pod_that_ended_with_its_run_is_not_called_gone(write_run: Any) -> None:
    hosts = [{"index": 0, "name": "r-0"}, {"index": 1, "name": "r-1"}]
    run = write_run(hosts=hosts, pods={"restarts": 10, "queue": None})
    stuck = pod(0, "Pending", {"waiting": {"reason": "ErrImagePull", "message": "no such image"}})
    (starting, *_) = observed_runs([job()], [stuck])[RUN_ID].entries()
    away = ApiError(host="cluster dev", reason="it is away")

    def told(*entries: dict[str, Any], errors: tuple[ApiError, ...] = ()) -> list[tuple[str, str | None]]:
        known = runs.Look(processes=entries, errors=errors)
        return [(each["process"], each["message"]) for each in overview.hosts(run, known)]

    assert told(starting) == [("starting", "ErrImagePull: no such image"), ("ended", None)]
    assert told(errors=(away,)) == [("no answer", None)] * 2
