"""Following a run shows where it is and ends when the run has; one that stopped is resumed where that helps."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from backends import host_backend
from backends.local.local_backend import on_this_machine
from console import follow
from console.display import Progress
from contracts import run_directory
from contracts.errors import RequestError
from contracts.host_interface import HANG_FLOOR_S, HEARTBEAT_LIMIT_S
from contracts.run_directory import RunDirectory, State
from launch import launching, runs
from launch.hosts import Agent, HostError
from launch.request.run_request import Request, resuming
from launch.runs import Run
from launch.targets import Target
from tests.console.recorded_display import Recorded
from tests.launch.slices import Beat, MakeAgent, WriteRun, make_target, ssh_backend

STARTED_S = 1605908700.0


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0)


def status(run: Run, *states: str, ended_s: float | None = None) -> dict[str, Any]:
    common = {"run_id": run.run_id, "attempt": run.attempt, "ended": ended_s}
    return {"processes": [{**common, "process_id": i, "state": state} for i, state in enumerate(states)]}


def followed(
    run: Run, make_agent: MakeAgent, give: Callable[[str, dict[str, Any]], Any]
) -> tuple[Recorded, str]:
    shown = Recorded()
    return shown, follow.follow(run, make_target([make_agent(give)]), shown)


def test_a_run_that_is_done_is_shown_once_and_left(
    write_run: WriteRun, beat: Beat, make_agent: MakeAgent
) -> None:
    metrics = [
        {"step": 90, "loss": 2.5, "tokens_per_s": 100.0, "step_s": 0.5, "time": STARTED_S},
        {"step": 94, "eval_loss": None, "time": STARTED_S},
        {"step": 95, "eval_loss": 2.25, "eval_accuracy": 0.125, "time": STARTED_S + 1},
    ]
    warned = beat("done", step=94, warnings=["12 bytes are not UTF-8", "\x1b[2Jstep 3 is an outlier"])
    run = write_run(beats=[warned, warned], metrics=metrics, result={"outcome": "done"})
    shown, state = followed(run, make_agent, lambda verb, _: status(run, "exited", "exited", ended_s=1.0))
    assert state == "done"
    assert shown.notes == [
        "step 94: eval loss is not a finite number",
        "step 95: eval loss 2.250 nats, accuracy 12.5% of the masked tokens",
        "warning: 12 bytes are not UTF-8",
        "warning: ␛[2Jstep 3 is an outlier",
    ]
    assert shown.steps == [
        Progress(step=95, total=100, figures=("loss 2.500 nats", "100.0 tokens/s"), left_s=2.5)
    ]


def test_an_agent_that_hosts_share_is_asked_once_and_one_that_is_silent_is_named_beside_the_others(
    write_run: WriteRun, beat: Beat, make_agent: MakeAgent
) -> None:
    running, other = (
        write_run(f"flax_mlm-20261120-214500-{letters}", beats=[beat("stepping")] * 2)
        for letters in ("aaaa", "bbbb")
    )
    asked: list[str] = []

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(verb)
        return status(running, "running", "running")

    one = make_agent(give)
    silent = make_agent(lambda verb, _: {"ok": False, "error": {"message": "no route"}}, host="w-1")
    known = ssh_backend([one, one, silent]).status()
    assert asked == ["status"]
    assert [str(error) for error in known.errors] == ["w-1: no route"]
    assert runs.state_by(running, known) == "running"
    assert runs.state_by(other, known) != "running", "each state is of the run's own processes"


def test_what_the_hosts_do_not_end_themselves_after_a_failure_is_stopped(
    write_run: WriteRun, beat: Beat, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "ENDING_LIMIT_S", 0.2)
    run, asked = write_run(beats=[beat("failed"), beat("stepping")]), []

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        asked.append(verb)
        if verb == "stop":
            run.directory.write_json("result.json", {"attempt": 0, "outcome": "failed", "failed_host": 0})
            return {"stopped": []}
        return status(run, "exited", "exited" if "stop" in asked else "running", ended_s=time.time())

    assert followed(run, make_agent, give)[1] == "failed"
    assert "stop" in asked


def test_the_reason_of_a_failure_is_waited_for_but_not_for_ever(
    write_run: WriteRun, beat: Beat, make_agent: MakeAgent
) -> None:
    run, polls = write_run(beats=[beat("failed"), beat("failed")]), itertools.count()

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        ended_s = time.time() if next(polls) < 3 else time.time() - run_directory.FINISHING_LIMIT_S - 1
        return status(run, "exited", "exited", ended_s=ended_s)

    assert followed(run, make_agent, give)[1] == "failed"
    assert next(polls) > 3


def test_a_host_that_falls_silent_is_told_once_and_again_when_it_answers(
    write_run: WriteRun, beat: Beat, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "AGENTS_PERIOD_S", -1.0)
    run, polls = write_run(beats=[beat("stepping", time=time.time())] * 2), itertools.count()

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        number = next(polls)
        if 1 <= number <= 3:
            return {"ok": False, "error": {"message": "no route"}}
        if number >= 5:
            run.directory.write_json("result.json", {"attempt": 0, "outcome": "done"})
            return status(run, "exited", "exited", ended_s=time.time())
        return status(run, "running", "running")

    shown, state = followed(run, make_agent, give)
    assert state == "done"
    assert shown.notes == ["h: no route; it is asked again", "h answers again"]


def test_a_hosts_own_heartbeat_counts_where_the_run_directory_has_an_older_one(
    write_run: WriteRun, beat: Beat, make_agent: MakeAgent
) -> None:
    run = write_run(beats=[beat("joined", time=5.0), beat("stepping", step=9, time=50.0)])
    fresh, stale = beat("stepping", step=3, time=6.0), beat("joined", rank=1, time=4.0)
    answer = status(run, "running", "running")
    for entry, own in zip(answer["processes"], (fresh, stale), strict=True):
        entry["beat"] = own
    known = ssh_backend([make_agent(lambda verb, _: answer)]).status([run])
    assert [each["step"] for each in follow.with_agents_beats(run, known).heartbeats if each] == [3, 9]


def test_a_bucket_that_cannot_be_read_for_a_while_is_told_once_and_the_run_is_followed_on(
    write_run: WriteRun, beat: Beat, make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "BUCKET_POLL_S", 0)
    done = write_run(beats=[beat("done")] * 2, result={"outcome": "done"})
    before = dataclasses.replace(
        write_run(beats=[beat("stepping")] * 2),
        directory=RunDirectory("gs://b/runs/r", done.directory.files),
    )
    gone = HostError(host="gs://b", reason="there is no network")
    read = mock.Mock(side_effect=[gone, gone, dataclasses.replace(done, directory=before.directory)])
    monkeypatch.setattr(runs, "read", read)
    monkeypatch.setattr(RunDirectory, "read_new_metrics", lambda *_: ([], 0))
    agent = make_agent(lambda verb, _: status(before, *["running"] * 2))
    states = iter(["running", "running", "done"])
    monkeypatch.setattr(runs, "state_by", lambda *_: next(states))
    shown = Recorded()
    assert follow.follow(before, make_target([agent]), shown) == "done"
    assert shown.notes == ["gs://b: there is no network; it is asked again", "gs://b/runs/r answers again"]


# --- what is done about a run that stopped --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "result", "do", "reason"),
    [
        ("running", None, "wait", "it is running, there is nothing to recover"),
        ("starting", None, "wait", "it is starting, there is nothing to recover"),
        ("done", {"outcome": "done"}, "end", "it is done, there is nothing left to do"),
        (
            "failed",
            {"outcome": "failed", "request": True, "error": "no text"},
            "end",
            "it would fail again: no",
        ),
        (
            "stopped",
            {"outcome": "stopped", "out_of_budget": True, "reason": "5 USD"},
            "end",
            "it was stopped: 5",
        ),
        ("failed", {"outcome": "failed"}, "start", "it failed, and starts again"),
        ("lost", None, "start", "it was lost, and starts again"),
        ("hung", {"outcome": "hung"}, "start", "it hung, and starts again"),
        ("preempted", {"outcome": "preempted"}, "start", "it was preempted, and starts again"),
        ("stopped", {"outcome": "stopped"}, "start", "it was stopped, and starts again"),
    ],
)
def test_only_what_may_go_better_is_recovered(
    write_run: WriteRun, state: State, result: dict[str, Any] | None, do: str, reason: str
) -> None:
    run = write_run(result=result)
    decision = launching.decide(state, run)
    assert decision.do == do
    assert decision.reason.startswith(reason)
    for step in (5, 20, 10):
        run.directory.write_text(f"checkpoints/{step}/state/_METADATA", "")
    ends = {"request", "out_of_budget"} & {*(result or {})}
    assert launching.decide("lost", run).reason.endswith("goes on from the checkpoint of step 20") == (
        not ends
    )


def target(agent: Agent, deployed: list[Target] | None = None) -> Target:
    """A slice of one host, which is made again without Google."""
    here = on_this_machine(hosts="1", platform="cpu")

    def deploy(target: Target) -> bool:
        if deployed is not None:
            deployed.append(target)
        return True

    backend = ssh_backend([agent], restore=lambda say, _sleep: say("local is made again"), deploy=deploy)
    return dataclasses.replace(here, name="dev", backend=backend, pulumi_stack="dev", agents=(agent,))


def well(verb: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"processes": []}


def gone(verb: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"ok": False, "error": {"message": "no route"}}


def must_not_be_asked() -> Target:
    raise AssertionError("the target is whole: it is not asked for again")


def test_a_slice_that_lost_a_host_is_made_again_and_waited_for(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_backend, "BOOT_POLL_S", 0)
    said: list[str] = []
    answers = iter([gone, gone, well])
    deployed: list[Target] = []
    broken = target(make_agent(gone, host="w-0"), deployed)
    fresh = target(make_agent(lambda verb, request: next(answers)(verb, request), host="w-new"))
    assert broken.backend.ensure(broken, lambda: fresh, said.append) is fresh
    assert deployed == [fresh]
    assert next(answers, None) is None
    assert said == [
        "no answer from w-0: no route",
        "local is made again",
        "waiting for 1 host (w-new) to answer, for at most 5 min",  # once, of two times that it did not
        "local: all hosts answer (1)",
    ]


def test_while_a_run_waits_for_its_tpu_slice_or_for_nodes_its_step_is_compiled(
    make_agent: MakeAgent, write_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    class WaitsError(Exception):
        pass

    def waits(*_: Any, **__: Any) -> None:
        raise WaitsError

    begun: list[Request] = []
    monkeypatch.setattr("console.compiler.compile_ahead.begin", lambda request, *_: begun.append(request))
    run = write_run()
    monkeypatch.setattr(runs, "find", lambda *_: run)
    agents = [make_agent(gone, host=f"w-{index}") for index in range(4)]
    backend = ssh_backend(agents, restore=waits)
    lost = make_target(agents, runs_url="gs://b/runs", backend=backend)
    with pytest.raises(WaitsError):
        follow.go_on(lambda _: lost, run.run_id, detach=False)
    assert [request.resume for request in begun] == [run]

    # Nodes of a cluster are made for a run.
    monkeypatch.setattr(launching, "launch", waits)
    of_pods = dataclasses.replace(backend.capabilities, hosts_outlive_runs=False)
    pods = dataclasses.replace(lost, backend=dataclasses.replace(backend, capabilities=of_pods))
    hello = Request(job="jax_hello", arguments=(), name=None, resume=None)

    def begin(target_now: Target) -> None:
        with pytest.raises(WaitsError):
            follow.train(lambda _: target_now, hello, resume=None, detach=False, restarts=None)

    for target_now in (pods, lost, dataclasses.replace(pods, platform="cpu")):
        begin(target_now)
    assert [request.job for request in begun[1:]] == ["jax_hello"]


def test_hosts_of_a_slice_that_is_lost_meanwhile_are_waited_for_no_longer(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper asks for the slice again instead; 300 s would pass otherwise."""

    class LostError(Exception):
        pass

    def lost() -> None:
        raise LostError

    monkeypatch.setattr(host_backend, "BOOT_POLL_S", 0)
    monkeypatch.setattr(host_backend, "REQUIRE_PERIOD_S", 0.0)
    with pytest.raises(LostError):
        broken = target(make_agent(gone))
        broken.backend.prepare(lambda: broken, lambda text: None, lost)


def test_what_cannot_be_made_whole_is_told_with_what_to_do(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(broken: Target, reopen: Callable[[], Target] = must_not_be_asked) -> str:
        with pytest.raises(RequestError) as error:
            broken.backend.ensure(broken, reopen, lambda text: None)
        return str(error.value)

    whole, dead = target(make_agent(well)), target(make_agent(gone, host="w-0"))
    assert whole.backend.ensure(whole, must_not_be_asked, lambda text: None) is whole
    here = on_this_machine(hosts="1", platform="cpu")
    assert isinstance(here.backend, host_backend.HostBackend)
    silent = dataclasses.replace(here.backend, agents=dead.agents)
    assert (
        refused(dataclasses.replace(here, backend=silent))
        == "this machine's agent does not answer; the reason is above"
    )
    monkeypatch.setattr(host_backend, "BOOT_LIMIT_S", 0.0)
    said = refused(dead, lambda: dead)
    assert "w-0: no route" in said and "pulumi up --stack dev --replace" in said


def test_a_run_that_goes_on_keeps_the_limits_that_it_was_started_with(write_run: WriteRun) -> None:
    assert resuming(write_run(hang_limit_s=900.0)).hang_floor_s == 900
    assert resuming(write_run(heartbeat_limit_s=20.0)).heartbeat_limit_s == 20
    fresh = resuming(write_run())
    assert (fresh.hang_floor_s, fresh.heartbeat_limit_s) == (HANG_FLOOR_S, HEARTBEAT_LIMIT_S)
