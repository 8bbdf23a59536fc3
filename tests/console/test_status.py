"""What the commands print of runs that have been, with this machine's own agent asked and nothing started."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.local.backend import on_this_machine
from backends.local.transport import ProcessLink
from backends.pods.backend import PodsBackend
from backends.pods.cluster_runs import ClusterRuns
from backends.pods.pods import Seen
from console import status as status_command
from contracts import run_directory
from contracts.errors import RequestError
from jobs.runtime.host_samples import HostSamples
from launch.hosts import Agent, Completed
from launch.runs import Run
from launch.targets import Target

WriteRun = Callable[..., Run]
MakeAgent = Callable[..., Agent]
Beat = Callable[..., dict[str, Any]]
RUN_ID = "flax_mlm-20261120-214500-abcd"


def here() -> Target:
    return on_this_machine(hosts=None, platform="cpu")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch, runs_dir: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_status_shows_what_hosts_say_letter_by_letter(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(
        beats=[
            {**beat("failed", step=7, message="no file [/tmp/a] :x:"), "warnings": ["it begins [anew]"]},
            None,
        ],
        metrics=[{"step": 5, "loss": 2.0}],
    )
    assert status_command.status(here(), None) == 0
    said = capsys.readouterr().out
    assert "warning: it begins [anew]" in said
    assert f"{RUN_ID}  failed  step 7/100  loss 2.000 nats  attempt 0" in said
    assert "no file [/tmp/a] :x:" in said
    assert f"resume with `fab train --resume {RUN_ID}`" in said


def test_status_says_once_why_a_run_failed(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "exit code 1: ValueError: no vocabulary"
    write_run(
        beats=[
            beat("failed", message=f"stopped because host 1 failed: {why}"),
            beat("failed", rank=1, message=why),
        ],
        result={"outcome": "failed", "failed_host": 1, "error": f"host 1: {why}\nreading the data"},
    )
    assert status_command.status(here(), None) == 0
    text = capsys.readouterr().out
    assert text.count(why) == text.count(f"  host 1: {why}\n  reading the data\n") == 1
    assert "stopped because host 1 failed" in text and "see below" in text


def test_runs_are_listed_by_the_names_that_they_were_given_and_a_list_that_is_cut_says_so(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for letters in ("aaaa", "bbbb", "cccc"):
        name = f"[bold] {letters}"
        write_run(f"flax_mlm-20261120-214500-{letters}", name=name, result={"outcome": "done"})
    assert status_command.list_runs(here(), limit=1) == 0
    said = capsys.readouterr().out
    assert "[bold] cccc" in said
    assert said.endswith("2 older ones: `fab runs --all`\n")


def test_an_id_is_whole_in_the_list_however_narrow_the_terminal(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    write_run(name="a name of some length", result={"outcome": "done", "loss": 2.0, "eval_loss": 2.0})
    assert status_command.list_runs(here(), limit=1) == 0
    assert RUN_ID in capsys.readouterr().out.split()


def test_runs_and_their_hosts_are_there_as_json_without_what_json_does_not_know(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_command.status(here(), None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": [], "no_answer": [], "unreadable": {}}
    write_run(
        beats=[beat("failed", step=7, message="no file"), None],
        metrics=[{"step": 5, "loss": 2.0, "eval_loss": math.nan}],
    )
    assert status_command.list_runs(here(), limit=1, as_json=True) == 0
    (listed,) = json.loads(capsys.readouterr().out)["runs"]
    assert (listed["run"], listed["state"], listed["step"], listed["total_steps"]) == (
        RUN_ID,
        "failed",
        7,
        100,
    )
    assert (listed["metrics"], listed["headline"]) == ({"loss": 2.0}, None)
    assert status_command.status(here(), None, as_json=True) == 0
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    first, second = shown.pop("host_states")
    assert (shown.pop("findings"), shown.pop("warnings")) == ([], [])
    assert shown == listed
    assert (first["process"], first["state"], first["step"], first["message"]) == (
        "gone",
        "failed",
        7,
        "no file",
    )
    assert (second["process"], second["state"], second["heartbeat_age_s"]) == ("gone", None, None)


def test_status_shows_what_some_host_has_sampled_lately_and_what_is_wrong_by_it(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s, run = time.time(), write_run(beats=[beat("stepping", step=7), beat("stepping", step=7)])
    started = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"
    attempt = {**run.described["attempts"][0], "started": started}
    run.directory.write_json("run.json", {**run.described, "attempts": [attempt]})
    for host, time_s, values in (
        (0, now_s + 1, {"cpu_pct": 12.0, "memory_mib": 15_900.0, "duty_pct": 97.0, "root_free_mib": 1.0}),
        (1, now_s - 900, {"cpu_pct": 34.0, "tensorcore_pct": 55.0}),
    ):
        sampled = HostSamples(host=host, interval_s=10.0)
        sampled = sampled.added(time_s, values, capacity={"memory_mib": 16_384}, devices=[{"duty_pct": 97.0}])
        run.directory.write_json(f"hosts/host-{host}.json", vars(sampled))
    assert status_command.status(here(), None) == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["host", "CPU", "memory", "/", "free"] in said
    assert ["h/0", "12", "%", "15.5", "of", "16.0", "GiB", "0.0", "GiB"] in said
    assert ["host", "devices", "busy"] in said and ["h/0", "97", "%"] in said
    assert not any("34 %" in " ".join(line) or "55 %" in " ".join(line) for line in said)
    assert any(line[:3] == ["host", "0", "(15.5"] for line in said)
    assert status_command.status(here(), None, as_json=True) == 0
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    first, second = shown["host_states"]
    assert first["samples"]["devices"] == [{"duty_pct": 97.0}] and second["samples"] is None
    assert [(each["kind"], each["hosts"]) for each in shown["findings"]] == [("memory", [0])]


def test_runs_are_compared_by_what_differs_in_their_settings_and_by_which_measured_better(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(
        "flax_mlm-20261120-214500-aaaa", name="low", result={"outcome": "done", "eval_loss": 2.5, "mfu": 1}
    )
    two = write_run("flax_mlm-20261120-214500-bbbb", result={"outcome": "done", "eval_loss": 2.25})
    one.directory.write_json("settings.json", {"seed": 0, "data": "stdlib", "steps": 100})
    two.directory.write_json("settings.json", {"seed": 1, "data": "stdlib", "steps": 100, "new": [1]})
    assert status_command.compare(here(), ["low", "bbbb"], as_json=False) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["low", two.run_id], ["run", one.run_id, two.run_id]]
    differ = lines[lines.index(["settings", "that", "differ"]) + 1 :]
    assert differ[:3] == [["seed", "0", "1"], ["new", "-", "[1]"], []]
    assert differ[3:] == [["measured"], ["eval", "loss", "2.500", "nats", "2.250", "nats", "best"]]
    assert status_command.compare(here(), ["bbbb", "aaaa"], as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["run"] for run in found["runs"]] == [two.run_id, one.run_id]
    assert found["settings"] == {"seed": [1, 0], "new": [[1], None]}
    for wanted in (["low"], ["low", "aaaa"]):
        with pytest.raises(RequestError, match="name two runs or more, each once"):
            status_command.compare(here(), wanted, as_json=False)


def test_what_is_asked_of_a_run_that_does_not_run_is_answered_in_words(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(result={"outcome": "done"})
    assert status_command.stop(here(), "latest", grace_s=1) == 0
    assert capsys.readouterr().out == f"{RUN_ID} is not running: it is done\n"
    write_run(result={"outcome": "preempted"})
    assert status_command.stop(here(), "latest", grace_s=1, by_keeper=lambda run_id: run_id == RUN_ID) == 0
    assert capsys.readouterr().out.endswith("; the keeper does not resume it any more\n")
    with pytest.raises(RequestError, match="no run is active; `fab runs` lists them all"):
        status_command.stop(here(), None, grace_s=1)
    with pytest.raises(RequestError, match=f"--host 2: {RUN_ID} has the hosts 0 to 1"):
        status_command.logs(here(), "latest", host=2, keep_on=False, lines=40)
    assert status_command.logs(here(), "latest", host=0, keep_on=False, lines=40) == 1
    assert capsys.readouterr().err.startswith("h/0: "), "the agent knows no such log"


def test_a_run_of_another_user_cannot_be_stopped_and_that_is_said(
    write_run: WriteRun, beat: Beat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent keeps its records by user: it knows nothing of what the keeper has started, and that beats."""
    monkeypatch.setattr(run_directory, "FINISHING_LIMIT_S", 0.0)
    monkeypatch.setattr(ProcessLink, "knows_all", False)  # as on a host of a stack
    write_run(beats=[beat("stepping", time=time.time()), beat("stepping", time=time.time())])
    assert status_command.stop(here(), "latest", grace_s=1) == 1
    assert status_command.NOT_OURS in capsys.readouterr().out
    assert status_command.stop(here(), "latest", grace_s=1, by_keeper=lambda _: True) == 0
    assert status_command.KEEPERS in capsys.readouterr().out


class Restarting(ClusterRuns):
    """Of each run a Job that the cluster goes on with."""

    def __init__(self) -> None:
        pass

    def of(self, run_id: str) -> Seen:
        return Seen(run_id=run_id, work={"metadata": {}}, pods={})


@pytest.mark.parametrize(
    ("begun", "result", "state"),
    [({}, None, "stopped"), ({"pod": "r-0-abcde"}, {"outcome": "failed", "attempt": 0}, "failed")],
)
def test_a_run_of_which_no_pod_is_there_is_stopped_where_its_job_goes_on(
    write_run: WriteRun,
    capsys: pytest.CaptureFixture[str],
    begun: dict[str, Any],
    result: dict[str, Any] | None,
    state: str,
) -> None:
    run = write_run(result=result)
    described = run.described
    described["attempts"][0] |= begun
    run.directory.write_json(run_directory.RUN, {**described, "pods": {"restarts": 10, "queue": None}})
    target = dataclasses.replace(here(), backend=PodsBackend(Restarting()))
    assert status_command.stop(target, "latest", grace_s=1) == 0
    out = capsys.readouterr().out
    assert f"stopping {RUN_ID}" in out and f"{RUN_ID} {'was ' if begun == {} else ''}{state}" in out
    assert (run.directory.read_json(run_directory.RESULT) or {})["outcome"] == state


class Over(ClusterRuns):
    """Of each run a Job that has failed, and that nobody has followed."""

    def __init__(self) -> None:
        pass

    def of(self, run_id: str) -> Seen:
        why = {"type": "Failed", "status": "True", "reason": "MaxFailedIndexesExceeded", "message": "gave up"}
        return Seen(run_id=run_id, work={"metadata": {}, "status": {"conditions": [why]}}, pods={})


def test_status_puts_on_record_why_a_cluster_gave_up_a_run(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run()
    assert status_command.status(dataclasses.replace(here(), backend=PodsBackend(Over())), run.run_id) == 0
    assert f"{RUN_ID}  failed" in capsys.readouterr().out
    result = run.directory.read_json(run_directory.RESULT) or {}
    assert (result["outcome"], result["error"]) == ("failed", "gave up")


LINES = [f"line {number} " + "x" * (number % 90) for number in range(20_000)]
TEXT = "".join(line + "\n" for line in LINES)
assert len(TEXT) > 3 * status_command.CHUNK_BYTES


def logs_of(text: str, request: dict[str, Any], *, ended: bool = True) -> dict[str, Any]:
    """As the agent answers: from the beginning of a line, whole lines, at most so many bytes."""
    begin = request["offset"] if request["offset"] >= 0 else max(0, len(text) + request["offset"])
    if request["offset"] < 0:
        begin = text.rfind("\n", 0, begin) + 1
    piece = text[begin : begin + request["limit_bytes"]]
    piece = piece[: piece.rfind("\n") + 1]
    return {
        "text": piece,
        "offset": begin,
        "next_offset": begin + len(piece),
        "size": len(text),
        "ended": ended,
    }


def silent() -> Completed:
    return Completed(exit_code=None, stdout="", stderr="")


class Shown:
    """What was shown of each host, and what was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.told: list[str] = []

    def show(self, host: int, line: str) -> None:
        self.lines.append((host, line))

    def of(self, host: int) -> list[str]:
        return [line for index, line in self.lines if index == host]

    def all(self, agents: Sequence[Agent], run: Run, *, lines: int, keep_on: bool = False) -> bool:
        """Shows all these agents' logs; whether every one answered."""
        hosts = range(len(agents))
        tell = self.told.append
        return status_command.show_all(
            agents, run, hosts, lines=lines, keep_on=keep_on, show=self.show, tell=tell
        )


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def agent(make_agent: MakeAgent) -> Agent:
    return make_agent(lambda verb, request: logs_of(TEXT, request))


@pytest.fixture
def run(write_run: WriteRun) -> Run:
    return write_run(result={"outcome": "done"})


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_command, "POLL_S", 0.001)
    monkeypatch.setattr(status_command, "ASK_AGAIN_S", 0.001)


@pytest.mark.parametrize("count", [1, 40, 15_000, 30_000])
def test_the_last_lines_are_the_logs_last_however_long_it_is(agent: Agent, run: Run, count: int) -> None:
    assert status_command.tail(agent, run, 0, lines=count) == (LINES[-count:], len(TEXT))


@pytest.mark.parametrize("keep_on", [False, True])
@pytest.mark.parametrize("lines", [0, 40])
def test_hosts_are_asked_at_once_and_each_is_shown_its_own_lines_in_order(
    make_agent: MakeAgent, run: Run, shown: Shown, lines: int, keep_on: bool
) -> None:
    together = threading.Barrier(2, timeout=20)
    first = itertools.count()

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if next(first) < 2:
            together.wait()
        return logs_of(TEXT, request)

    assert shown.all([make_agent(give), make_agent(give)], run, lines=lines, keep_on=keep_on)
    assert (shown.of(0), shown.of(1), shown.told) == (LINES[-lines:], LINES[-lines:], [])


@pytest.mark.parametrize("lines", [0, 40])
def test_a_log_that_grows_faster_than_it_is_read_ends_all_the_same(
    make_agent: MakeAgent, run: Run, shown: Shown, lines: int
) -> None:
    more = "more\n" * (status_command.CHUNK_BYTES // 5 + 1)
    growing = itertools.count(1)

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return logs_of(TEXT + more * next(growing), request, ended=False)

    assert shown.all([make_agent(give)], run, lines=lines)
    assert len(shown.lines) == lines or shown.of(0)[: len(LINES)] == LINES


def test_lines_are_shown_as_they_come_none_twice_made_safe_and_with_pauses_between_the_questions(
    make_agent: MakeAgent, run: Run, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_command, "POLL_S", 0.02)
    texts = ["a\nb\n", "a\nb\n", "a\nb\n1%\r2%\n", "a\nb\n1%\r2%\n\x1b]0;x\x07\n"]
    reads, began_s = itertools.count(), time.monotonic()

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        read = next(reads)
        return logs_of(texts[min(read, 3)], request, ended=read > 3)

    assert status_command.follow_all([make_agent(give)], run, {0: 0}, shown.show, shown.told.append)
    assert shown.of(0) == ["a", "b", "2%", "␛]0;x\\x07"]
    assert time.monotonic() - began_s > 0.02 * 3, "waiting for lines costs no questions without pause"


def test_a_host_that_is_slow_to_answer_holds_up_no_other(
    make_agent: MakeAgent, agent: Agent, run: Run, shown: Shown, hasty: None
) -> None:
    other_is_read = threading.Event()

    def slow(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        assert other_is_read.wait(20)
        return logs_of("slow\n", request)

    def show(host: int, line: str) -> None:
        shown.show(host, line)
        if line == LINES[-1]:
            other_is_read.set()

    assert status_command.follow_all([make_agent(slow), agent], run, {0: 0, 1: 0}, show, shown.told.append)
    assert shown.lines[-1] == (0, "slow")


def test_a_host_that_does_not_answer_is_told_of_once_and_asked_again(
    make_agent: MakeAgent, run: Run, shown: Shown, hasty: None
) -> None:
    asked = itertools.count()

    def give(verb: str, request: dict[str, Any]) -> Any:
        return silent() if 0 < next(asked) < 5 else logs_of("a\nb\n", request, ended=next(asked) > 5)

    assert status_command.follow_all([make_agent(give, "h/0")], run, {0: 0}, shown.show, shown.told.append)
    assert shown.of(0) == ["a", "b"]
    assert shown.told == ["h/0: no answer to logs within 10 s; it is asked again", "h/0 answers again"]


@pytest.mark.parametrize("lines", [0, 40])
def test_a_host_that_does_not_answer_is_named_and_waited_for_only_as_long_as_its_run_may_last(
    make_agent: MakeAgent,
    agent: Agent,
    run: Run,
    shown: Shown,
    hasty: None,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = [make_agent(lambda verb, request: silent(), "h/0"), agent]
    assert not shown.all(agents, run, lines=lines)
    assert (shown.of(0), shown.of(1), shown.told) == (
        [],
        LINES[-lines:],
        ["h/0: no answer to logs within 10 s"],
    )
    monkeypatch.setattr(status_command, "SILENCE_LIMIT_S", 0.3)
    began_s = time.monotonic()
    shown.told.clear()
    assert not shown.all(agents, run, lines=lines, keep_on=True)
    assert time.monotonic() - began_s > 0.3
    assert shown.told == [
        "h/0: no answer to logs within 10 s; it is asked again",
        "h/0: has not answered for 0 s; its log ends here",
    ]
