"""A launch: what is refused before a host is asked, and its phases, all or nothing."""

import base64
import contextlib
import dataclasses
import datetime
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends import host_backend
from backends.local import environments
from backends.local.local_backend import on_this_machine
from backends.resolve import resolve
from console import follow, status
from contracts import fencing
from contracts.errors import INTERRUPTED, RequestError
from contracts.run_directory import FOLDER, RunDirectory
from jobs import jax_hello
from jobs.flax_mlm.config import Config
from launch import jobs, launching, policy, runs, targets
from launch.code.bundles import Bundle
from launch.hosts import Agent, GoneLink, HostsError
from launch.launching import NotJoined, run_record
from launch.request import run_request
from launch.request.run_request import Planned, Request, work_out
from launch.runs import AtWorkError, Run
from launch.targets import Container, Plan, Sleep, Target
from tests.launch.slices import MakeAgent, WriteRun, here, make_plan, make_slice, make_target

DEVICES = {"gpu": Path("/dev/nvidia0"), "tpu": Path("/dev/accel0")}
LONG_S = 60.0
"""Nobody waits so long here."""
TINY = "--vocab-size 300 --sequence-length 16 --batch-size 4 --eval-fraction 0.3"


def train(*, hosts: str | None = None, platform: str | None = None, **changed: Any) -> int:
    def open_target(like: Run | None) -> Target:
        return resolve(targets.TargetRequest(hosts=hosts, platform=platform), like)

    asked = Request(
        job=changed.pop("job", "flax_mlm") or "",
        arguments=tuple(follow.job_arguments(changed.pop("arguments", ""), ())),
        name=changed.pop("name", None),
        resume=None,
    )
    return follow.train(open_target, asked, **{"resume": None, "detach": True, "restarts": 0, **changed})


def refused(runs_dir: Path, **changed: Any) -> str:
    before = sorted(path.name for path in runs_dir.rglob("*")) if runs_dir.exists() else []
    with pytest.raises(RequestError) as error:
        train(**changed)
    assert (sorted(path.name for path in runs_dir.rglob("*")) if runs_dir.exists() else []) == before
    return str(error.value)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random, path = Random(0), tmp_path / "text.jsonl"
    texts = (
        " ".join(random.choices(["the", "cat", "sat", "on", "a", "mat"], k=30)) + f" {n}" for n in range(20)
    )
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"arguments": '--data "my text'}, ["--args: '--data \"my text' has a quote that is not closed"]),
        ({"arguments": "--sequence-length 600"}, ["--sequence-length 600: the model takes at most", "512"]),
        ({"arguments": "--batch-size 5"}, ["--batch-size 5: is shared out over 2 devices", "choose 4 or 6"]),
        ({"arguments": "--batch-size 5", "hosts": "3"}, ["over 3 devices", "choose 3 or 6"]),
        ({"arguments": "--steps 0 --dropout 2 --seed -1"}, ["--steps 0: ", "--dropout 2.0: ", "--seed -1: "]),
        ({"arguments": "--data /no/such/text"}, ["--data /no/such/text"]),
        ({"arguments": "--tokenizer /no/such.json"}, ["--tokenizer /no/such.json: No such file"]),
        ({"arguments": f"--data CORPUS {TINY} --batch-size 400"}, ["too few for one batch of 400"]),
        ({"arguments": "--data EMPTY"}, ["empty.txt"]),
        ({"resume": "latest"}, ['"latest": there is no run in', "start one with `fab train --job flax_mlm`"]),
    ],
)
def test_a_wrong_request_is_told_and_leaves_no_run(
    runs_dir: Path, corpus: Path, changed: dict[str, Any], parts: list[str]
) -> None:
    (empty := corpus.with_name("empty.txt")).write_text("\n \n")
    if arguments := changed.get("arguments"):
        changed = {
            **changed,
            "arguments": arguments.replace("CORPUS", str(corpus)).replace("EMPTY", str(empty)),
        }
    text = refused(runs_dir, **changed)
    assert [part for part in parts if part not in text] == []


def test_every_bucket_that_is_out_of_reach_is_named_before_a_run_begins(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    text = refused(runs_dir, arguments="--data gs://a/t --init-from gs://b/x --remote-cache gs://c")
    why = "127.0.0.1:9 cannot be reached from this machine (Connection refused)"
    assert sorted(line.partition(" →")[0] for line in text.splitlines()) == [
        f"--data gs://a/t: {why}",
        f"--init-from gs://b/x: {why}",
        f"--remote-cache gs://c: {why}",
    ]
    monkeypatch.setenv("TPU_STACK_RUNS", "gs://mine/runs")
    assert refused(runs_dir).startswith(f"gs://mine/runs: {why}")


def test_a_run_keeps_the_framework_and_the_processes_that_it_began_with(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_hello, "FRAMEWORKS", ("jax", "pytorch"), raising=False)

    def worked_out(resume: Run | None = None, python: str | None = None, **asked: str) -> Planned:
        request = Request(job="jax_hello", arguments=(), name=None, resume=resume, **asked)  # type: ignore[arg-type]
        return work_out(request, on_this_machine(hosts="2", platform="cpu", python=python))

    first = worked_out(framework="pytorch", processes_per_host="2")
    assert (first.plan.framework, first.plan.ranks_per_host, first.needs_environment) == ("pytorch", 2, True)
    assert first.plan.target.python == str(environments.environment_python("pytorch"))
    now = datetime.datetime.now(datetime.UTC)
    asked = first.processes_per_host
    described = run_record(
        first.plan, first.config, name=None, processes_per_host=asked, now=now, before=None
    )
    first.directory.write_json("run.json", described)
    again = worked_out(resume=runs.find(here("2").runs, "latest"))
    assert (again.plan.framework, again.plan.ranks_per_host, again.processes_per_host) == ("pytorch", 2, "2")
    given = worked_out(framework="pytorch", python="/my/python")
    assert (given.plan.target.python, given.needs_environment) == ("/my/python", False)
    assert worked_out().plan.framework == "jax"


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_device_that_this_machine_does_not_have_fails_the_preflight_and_leaves_no_run(
    runs_dir: Path, corpus: Path, platform: str
) -> None:
    if DEVICES[platform].exists():
        pytest.skip(f"this machine has {DEVICES[platform]}")
    with pytest.raises(HostsError, match=r"^preflight failed, nothing was started:\n  \S+: .* → ") as error:
        train(platform=platform, arguments=f"--data {corpus} {TINY}")
    assert platform.upper() in str(error.value)
    assert list(runs_dir.rglob("*")) == []


@pytest.fixture
def earlier(write_run: WriteRun, corpus: Path) -> Callable[..., Run]:
    """A run that was lost, with the corpus as its data."""

    def make(**changed: Any) -> Run:
        config = Config(
            data=str(corpus), vocab_size=300, sequence_length=16, batch_size=4, eval_fraction=0.3, steps=7
        )
        arguments = ["--data", str(corpus), *TINY.split(), "--steps", "7"]
        options: dict[str, Any] = {"config": dataclasses.asdict(config), "args": arguments}
        return write_run(**{**options, **changed})

    return make


OTHER_OPTIONS = """\
--resume flax_mlm-20261120-214500-abcd: a resumed run goes on as it began, but these options differ:
  --steps: the run has 7, asked for is 8
  --seed: the run has 0, asked for is 1
  leave them out, or start a new run"""


@pytest.mark.parametrize(
    ("run", "changed", "said"),
    [
        ({}, {"resume": "zzzz"}, '"zzzz" is not a run in RUNS; the newest are flax_mlm-20261120-214500-abcd'),
        ({}, {"hosts": "3"}, "--batch-size 4: is shared out over 3 devices"),
        ({"result": {"outcome": "done"}}, {}, "the run is done, there is nothing left to resume"),
        ({"job": "torch_mlm"}, {"job": "flax_mlm"}, "abcd is a run of torch_mlm; leave --job out"),
        ({"cwd": "/no/such/folder"}, {}, "/no/such/folder: the directory that the run was started in"),
        ({}, {"arguments": f"--data CORPUS {TINY} --steps 8 --seed 1 --log-every 3"}, OTHER_OPTIONS),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_resumed_is_refused_with_the_reason(
    runs_dir: Path,
    corpus: Path,
    earlier: Callable[..., Run],
    run: dict[str, Any],
    changed: dict[str, Any],
    said: str,
) -> None:
    earlier(**run)
    changed = {**changed, "arguments": changed.get("arguments", "").replace("CORPUS", str(corpus))}
    assert said.replace("RUNS", str(runs_dir)) in refused(
        runs_dir, **{"job": None, "resume": "abcd", **changed}
    )


def test_two_that_resume_one_run_at_once_do_not_both_start_it(
    runs_dir: Path, earlier: Callable[..., Run]
) -> None:
    run = earlier()
    with launching.exclusive_launch(run.run_id):
        text = refused(runs_dir, job=None, resume="abcd")
    assert "is being launched by another process; `fab status` shows it" in text


def again(run: Run) -> Request:
    arguments = tuple(run.described["args"])
    overruled = launching.stop_asked(run)
    return Request(job="flax_mlm", arguments=arguments, name=None, resume=run, overruled=overruled)


def resume(run: Run, **how: Any) -> None:
    launching.launch(again(run), here("2"), print, **how)


@pytest.fixture
def prepared(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are taken to have what a plan needs."""
    monkeypatch.setattr(host_backend.HostLauncher, "prepare", lambda _, plan, *__: plan)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize("taken_after", [0, 1])
def test_a_launch_whose_slice_somebody_else_has_meanwhile_starts_nothing(
    earlier: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, taken_after: int
) -> None:
    """As after a laptop slept while it staged the code, or while it wrote the record."""
    looks = [None] * taken_after
    started: list[Plan] = []

    def require() -> None:
        if not looks:
            raise RequestError("somebody else has taken over the lease")
        looks.pop()

    run = earlier()
    monkeypatch.setattr(launching, "_start_and_join", lambda plan, *_: started.append(plan))
    with pytest.raises(RequestError, match="taken over"):
        resume(run, hold=lambda: contextlib.nullcontext(require))
    assert started == []
    attempts = (run.directory.read_json("run.json") or {})["attempts"]
    assert attempts[-1]["attempt"] == taken_after  # a record that may be somebody else's is not overwritten


@pytest.mark.usefixtures("prepared")
def test_a_folder_that_a_killed_launcher_left_is_not_what_a_resumed_run_goes_on_with(
    earlier: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before run.json said so: that names the folder of the attempt before."""
    run = earlier()
    planned = work_out(again(run), here("2"))
    (folder,) = planned.bundles  # the code will do for one
    run.described["code"] = {"folder": folder.sha256}
    run.directory.write_json("run.json", run.described)
    run.directory.write_text(FOLDER, "another")
    monkeypatch.setattr(
        launching, "work_out", lambda *_: dataclasses.replace(planned, bundles=(folder, folder))
    )
    monkeypatch.setattr(launching, "_start_and_join", lambda *_: None)
    resume(run)
    assert run.directory.read_text(FOLDER) == folder.text


@pytest.mark.parametrize("earlier_stop", [False, True])
def test_a_stop_that_comes_while_a_resumed_run_s_code_is_staged_is_not_lost(
    earlier: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, earlier_stop: bool
) -> None:
    run = earlier()
    if earlier_stop:  # which the resume overrules
        launching.ask_to_stop(run)

    def stopped_meanwhile(_: Any, plan: Plan, *__: Any) -> Plan:
        assert status.stop(here("2"), run.run_id, grace_s=1) == 0
        return plan

    monkeypatch.setattr(host_backend.HostLauncher, "prepare", stopped_meanwhile)
    monkeypatch.setattr(launching, "_start_and_join", lambda *_: pytest.fail("it was started"))
    with pytest.raises(launching.LaunchFailed) as failure:
        resume(run)
    assert failure.value.run.result is not None
    assert (failure.value.run.result["outcome"], failure.value.run.attempt) == ("stopped", 1)
    started: list[Plan] = []
    monkeypatch.setattr(host_backend.HostLauncher, "prepare", lambda _, plan, *__: plan)
    monkeypatch.setattr(launching, "_start_and_join", lambda plan, *_: started.append(plan))
    resume(run)
    assert [plan.attempt for plan in started] == [2]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    "moment",
    ["after its attempt ended", "in the pause", "while its slice is waited for", "while its code is staged"],
)
def test_a_run_that_is_told_to_stop_before_it_is_started_again_by_itself_ends_as_stopped(
    earlier: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    run = earlier()
    launching.ask_to_stop(run)  # which the resume overrules
    started: list[int] = []

    def fails(plan: Plan, _launcher: Any, run: Run, _say: Any) -> None:
        started.append(plan.attempt)
        run.directory.write_text(f"checkpoints/{plan.attempt}/state/_METADATA", "")
        run.directory.write_json("result.json", {"outcome": "failed", "attempt": plan.attempt})

    def stop() -> None:
        assert status.stop(here("2"), run.run_id, grace_s=1) == 0

    def notify(_: Run, event: str, __: Any) -> None:
        if event == "failed" and moment == "after its attempt ended":
            stop()
        elif event == "failed" and len(started) == 2:
            threading.Timer(0.3, stop).start()

    def ensure(_: Any, target: Target, __: Any, ___: Any, sleep: Sleep) -> Target:
        if moment == "after its attempt ended":
            pytest.fail("a slice is made for it")
        if moment == "while its slice is waited for":
            stop()
            sleep(LONG_S)
        return target

    def stage(_: Any, plan: Plan, *__: Any) -> Plan:
        if started and moment == "while its code is staged":
            stop()
        return plan

    monkeypatch.setattr(launching, "_start_and_join", fails)
    monkeypatch.setattr(follow, "_notify", notify)
    monkeypatch.setattr(host_backend.HostBackend, "ensure", ensure)
    monkeypatch.setattr(host_backend.HostLauncher, "prepare", stage)
    monkeypatch.setattr(launching, "STOP_LOOK_S", 0.1)
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", LONG_S)
    began_s = time.monotonic()
    assert train(job=None, resume=run.run_id, detach=False, restarts=3) == INTERRUPTED
    assert time.monotonic() - began_s < LONG_S
    ended = runs.find(here("2").runs, run.run_id)
    assert started == ([1, 2] if moment == "in the pause" else [1])
    assert ended.result is not None and ended.result["outcome"] == "stopped"
    assert here("2").run_state(ended) == "stopped"


@pytest.mark.usefixtures("prepared")
def test_a_stop_while_fab_recover_waits_for_the_slice_ends_it_and_an_earlier_one_does_not(
    earlier: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = earlier()
    launching.ask_to_stop(run)
    waits: list[bool] = [True, False]

    def ensure(_: Any, target: Target, __: Any, ___: Any, sleep: Sleep) -> Target:
        sleep(0.0)
        if waits.pop(0):
            assert status.stop(here("2"), run.run_id, grace_s=1) == 0
            sleep(LONG_S)
        return target

    started: list[int] = []
    monkeypatch.setattr(host_backend.HostBackend, "ensure", ensure)
    monkeypatch.setattr(launching, "STOP_LOOK_S", 0.1)
    monkeypatch.setattr(launching, "_start_and_join", lambda plan, *_: started.append(plan.attempt))

    def recover() -> int:
        return follow.go_on(lambda _: here("2"), run.run_id, detach=True)

    assert recover() == INTERRUPTED
    ended = runs.find(here("2").runs, run.run_id)
    assert ended.result is not None and (ended.result["outcome"], started) == ("stopped", [])
    assert recover() == 0 and started == [1]


def test_a_launcher_that_is_overtaken_by_another_one_says_so_and_leaves_the_run_to_it(
    runs_dir: Path, earlier: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = earlier()
    started: list[tuple[int, str]] = []

    def launched_by_another(plan: Plan, _launcher: Any, run: Run, _say: Any) -> None:
        started.append((plan.attempt, run.directory.read_text("run.json") or ""))

    def overtaken(_: Any, plan: Plan, *__: Any) -> Plan:
        if not started:
            monkeypatch.setattr(launching, "_start_and_join", launched_by_another)
            monkeypatch.setattr(launching, "exclusive_launch", lambda _: contextlib.nullcontext())
            started.append((-1, ""))
            resume(run)
        return plan

    monkeypatch.setattr(host_backend.HostLauncher, "prepare", overtaken)
    with pytest.raises(
        AtWorkError, match="attempt 1 of this run has been begun by somebody else; `fab status`"
    ):
        resume(run)
    (_, (attempt, written)) = started
    assert (attempt, run.directory.read_text("run.json")) == (1, written)


@pytest.mark.usefixtures("prepared")
def test_a_launcher_that_is_frozen_after_it_took_an_attempt_neither_records_nor_starts_it(
    earlier: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, take = earlier(), fencing.take

    def frozen(directory: RunDirectory, attempt: int, *, launch: int) -> RunDirectory:
        taken = take(directory, attempt, launch=launch)
        take(directory, attempt + 1, launch=launch).write_text("run.json", "the next one's")
        return taken

    monkeypatch.setattr(fencing, "take", frozen)
    monkeypatch.setattr(launching, "_start_and_join", lambda *_: pytest.fail("it was started"))
    with pytest.raises(AtWorkError, match="attempt 2 of this run has begun since; attempt 1 ends"):
        resume(run)
    assert run.directory.read_text("run.json") == "the next one's"


def test_a_resumed_run_finds_its_data_where_it_began_wherever_one_stands_now(
    runs_dir: Path, earlier: Callable[..., Run], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        data="text.jsonl", vocab_size=300, sequence_length=16, batch_size=4, eval_fraction=0.3, steps=7
    )
    run = earlier(
        cwd=str(corpus.parent),
        config=dataclasses.asdict(config),
        args=["--data", "text.jsonl", *TINY.split(), "--steps", "7"],
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    request, job = again(run), jobs.find("flax_mlm")
    run_request._check(request, job, job.parse(request.arguments), here("2"), 1)
    assert Path.cwd() == tmp_path / "elsewhere"


PLAN = make_plan(
    make_target([Agent(host="w", link=GoneLink("", ""), root="/")] * 3, platform="cpu"),
    coordinator_port=4000,
    homes=("/home/me",) * 3,
)
BUNDLE = Bundle(sha256=PLAN.bundle_sha256, archive=b"archive")


def check(ok: bool, message: str = "", remedy: str | None = None) -> dict[str, Any]:
    return {"name": "n", "ok": ok, "message": message, "remedy": remedy}


class Hosts:
    """Three hosts that answer by verb and number; what was asked of them, in the order it came."""

    def __init__(self, make_agent: MakeAgent, answers: Mapping[str, Callable[[int], Any]]) -> None:
        self.asked: list[tuple[str, int]] = []
        lock = threading.Lock()

        def agent(number: int) -> Agent:
            def give(verb: str, request: dict[str, Any]) -> Any:
                with lock:
                    self.asked.append((verb, number))
                return answers[verb](number)

            return make_agent(give, host=f"w-{number}")

        self.agents = [agent(number) for number in range(3)]

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.asked]


def test_a_preflight_lists_every_failed_check_of_every_host(make_agent: MakeAgent) -> None:
    def answer(number: int) -> dict[str, Any]:
        if number == 2:
            return {"ok": False, "error": {"message": "Python 3.7 is too old", "remedy": "bring 3.8"}}
        checks = [
            check(True, "fine"),
            check(False, "disk is full", "make room"),
            check(False, "port is taken"),
        ]
        return {"checks": checks if number == 0 else [check(True)], "facts": {}}

    with pytest.raises(HostsError) as error:
        host_backend.preflight(PLAN, Hosts(make_agent, {"preflight": answer}).agents)
    assert str(error.value).splitlines() == [
        "preflight failed, nothing was started:",
        "  w-0: disk is full → make room",
        "  w-0: port is taken",
        "  w-2: Python 3.7 is too old → bring 3.8",
    ]


def test_code_is_sent_only_where_it_is_missing_and_once_where_hosts_share_a_directory(
    make_agent: MakeAgent,
) -> None:
    hosts = Hosts(make_agent, {"stage": lambda number: {}})
    facts = [{"bundle_present": number == 1} for number in range(3)]
    assert host_backend.stage(BUNDLE, hosts.agents, facts) == 2
    assert sorted(hosts.asked) == [("stage", 0), ("stage", 2)]
    assert host_backend.stage(BUNDLE, hosts.agents, [{"bundle_present": True}] * 3) == 0
    received: list[dict[str, Any]] = []

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        received.append(request)
        return {}

    shared = make_agent(give)
    agents = [dataclasses.replace(shared, host=f"h/{number}") for number in range(3)]
    assert host_backend.stage(BUNDLE, agents, [{"bundle_present": False}] * 3) == 1
    (request,) = received
    assert base64.b64decode(request["archive_base64"]) == b"archive"
    assert request["sha256"] == PLAN.bundle_sha256


def test_packages_are_taken_from_the_share_and_sent_in_parts_to_hosts_that_do_not_see_it(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_backend, "PIECE_BYTES", 4)
    monkeypatch.setattr(host_backend, "MOST_BYTES_SENT", 8)
    lines = list[str]()
    answers: dict[int, dict[str, Any]] = {
        number: {"present": number == 1, "sent": number == 1, "problem": None} for number in range(3)
    }
    answers[2]["problem"] = "/share/packages: Permission denied"
    hosts = Hosts(make_agent, {"stage": answers.__getitem__})
    assert host_backend.stage_if_missing(BUNDLE, hosts.agents, "/share/packages", lines.append) == 3
    assert sorted(hosts.asked) == [("stage", 0)] * 3 + [("stage", 1)] + [("stage", 2)] * 3
    assert lines == ["/share/packages: Permission denied; 2 hosts get it from this machine instead"]


def test_a_start_that_fails_on_one_host_stops_all_of_them_again(make_agent: MakeAgent) -> None:
    hosts = Hosts(make_agent, {"start": lambda number: {}})
    host_backend.start(PLAN, hosts.agents)
    assert sorted(hosts.asked) == [("start", 0), ("start", 1), ("start", 2)]

    def start(number: int) -> dict[str, Any]:
        return {"ok": False, "error": {"message": "no fork", "remedy": None}} if number == 1 else {}

    hosts = Hosts(make_agent, {"start": start, "stop": lambda number: {"stopped": []}})
    with pytest.raises(HostsError, match="so it was stopped again:\n  w-1: no fork"):
        host_backend.start(PLAN, hosts.agents)
    assert hosts.verbs() == ["start"] * 3 + ["stop"] * 3


def joined(state: str, process: str = "running", **more: str) -> dict[str, Any]:
    return {"state": state, "beat": None, "process": {"state": process, **more}}


def join(make_agent: MakeAgent, *answers: Any, limit_s: float = 9) -> list[dict[str, Any]]:
    """Join with hosts that give these answers; what they were asked."""
    asked: list[dict[str, Any]] = []
    everyone = threading.Barrier(3)

    def agent(number: int) -> Agent:
        def give(verb: str, request: dict[str, Any]) -> Any:
            everyone.wait(timeout=30)  # would break if one were asked after another
            asked.append({"verb": verb, **request})
            return answers[number]

        return make_agent(give, host=f"w-{number}")

    target = dataclasses.replace(PLAN.target, agents=tuple(agent(number) for number in range(3)))
    plan = dataclasses.replace(PLAN, target=target)
    launching.join(plan, host_backend.HostLauncher(), limit_s=limit_s)
    return sorted(asked, key=lambda request: int(request["process_id"]))


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([joined("starting"), joined("failed")], "^a process failed before all had joined: w-2: failed$"),
        ([joined("starting"), joined("starting", "exited")], "^a process failed before all had joined: w-2: exited$"),
        ([joined("starting"), joined("joined", "lost", reason="no room")], "^a process failed .*: w-2: no room$"),
        ([joined("starting"), joined("starting")], "^w-1, w-2 did not join within 9 s$"),
        ([joined("joined"), {"ok": False, "error": {"message": "cut", "remedy": "mend"}}], "^w-2: cut → mend$"),
    ],
)  # fmt: skip
def test_a_group_that_does_not_form_is_told_with_who_is_missing_and_why(
    make_agent: MakeAgent, answers: list[Any], said: str
) -> None:
    with pytest.raises(NotJoined, match=said):
        join(make_agent, joined("joined"), *answers)


CONTAINED = dataclasses.replace(PLAN, container=Container(image="r/jax@sha256:" + "0" * 64))


def test_an_image_is_pulled_where_it_is_missing_and_a_host_that_cannot_have_it_is_named(
    make_agent: MakeAgent,
) -> None:
    def give(number: int) -> dict[str, Any]:
        return {"ok": number != 1, "error": {"message": "denied", "remedy": "`fab deploy`"}}

    hosts, said = Hosts(make_agent, {"pull": give}), list[str]()
    facts = [{"image_present": number == 1, "image_needs_bytes": 7} for number in range(3)]
    host_backend.pull(CONTAINED, hosts.agents, facts, said.append)
    assert sorted(hosts.asked) == [("pull", 0), ("pull", 2)]
    assert said[0] == f"pulling {'r/jax@sha256:' + '0' * 64} on 2 of 3 hosts …"
    host_backend.pull(PLAN, hosts.agents, [{}] * 3, said.append)  # a bare run
    host_backend.pull(CONTAINED, hosts.agents, [{"image_present": True}] * 3, said.append)
    assert len(hosts.asked) == len(said) == 2
    with pytest.raises(HostsError) as error:
        host_backend.pull(
            CONTAINED, hosts.agents, [{"image_present": False, "image_needs_bytes": 7}] * 3, said.append
        )
    assert str(error.value).splitlines() == [
        "the image could not be had everywhere, nothing was started:",
        "  w-1: denied → `fab deploy`",
    ]


def test_a_run_on_a_slice_that_is_taken_back_is_told_when_and_refused_just_before() -> None:
    flex = make_slice([], capacity="flex-start", ends_at="2026-11-26T16:00:00Z")
    assert launching.ending_line(make_slice([]), 0.0) is None
    now_s = (flex.ends_s or 0.0) - 7200
    assert "(flex-start) is taken back in 2 h: the run saves and leaves before that" in (
        launching.ending_line(flex, now_s) or ""
    )
    with pytest.raises(RequestError, match="is taken back at 2026-11-26T16:00:00Z; `pulumi up --refresh`"):
        launching.ending_line(flex, now_s + 6400)
