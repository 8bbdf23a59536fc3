"""What the commands print of runs that have been, with this machine's own agent asked and nothing started."""

import dataclasses
import datetime
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.local.processes import ProcessLink
from backends.pods.cluster_runs import ClusterRuns
from backends.pods.pod_backend import PodBackend
from backends.pods.pods import ObservedRun
from console import logs
from console import status as status_command
from contracts import run_directory
from contracts.errors import RequestError
from jobs.runtime.monitoring.host_samples import HostSamples
from tests.launch.slices import Beat, WriteRun, here

RUN_ID = "flax_mlm-20261120-214500-abcd"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch, runs_dir: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_of_a_command_without_steps_status_says_what_would_make_its_goodput_known(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = {"parts": {"start": 1.0, "command": 99.0}, "open": "command"}
    write_run(
        "command-20261120-214500-aaaa", job="command", args=["python"], beats=[beat("done", timing=timing)]
    )
    assert status_command.status(here(), None) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "goodput" in line]
    assert lines == [
        "goodput not known: the command writes no steps to $RUN_DIR/metrics.jsonl (docs/scripts.md)"
    ]


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
    of_list = [listed[name] for name in ("run", "state", "step", "total_steps")]
    assert of_list == [RUN_ID, "failed", 7, 100]
    assert (listed["metrics"], listed["headline"]) == ({"loss": 2.0}, None)
    assert status_command.status(here(), None, as_json=True) == 0
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    first, second = shown.pop("host_states")
    assert (shown.pop("findings"), shown.pop("warnings")) == ([], [])
    assert shown == listed
    of_first = [first[name] for name in ("process", "state", "step", "message")]
    assert of_first == ["gone", "failed", 7, "no file"]
    assert (second["process"], second["state"], second["heartbeat_age_s"]) == ("gone", None, None)


@pytest.mark.parametrize(
    ("error", "message", "shown"),
    [
        (
            "host 1: lost: it was silent for 15 s",
            "stopped because host 1 was lost: it was silent for 15 s",
            "stopped because host 1 was lost",
        ),
        (
            "host 1: killed by signal 9",
            "stopped because host 1 failed: killed by signal 9",
            "stopped because host 1 failed",
        ),
        ("host 0: ValueError: bad", "ValueError: bad", "see below"),
        ("host 1: killed by signal 9", "it was cut off: no route", "it was cut off: no route"),
    ],
)
def test_what_a_host_says_of_the_end_of_its_run_is_a_sentence_without_the_reason_that_stands_below(
    write_run: WriteRun, beat: Beat, capsys: pytest.CaptureFixture[str], error: str, message: str, shown: str
) -> None:
    write_run(beats=[beat("failed", message=message), None], result={"outcome": "failed", "error": error})
    assert status_command.status(here(), None) == 0
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if line.startswith("h/0")]
    assert row.rstrip().endswith(f" ago  {shown}") and f"  {error}\n" in said


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
        logs.logs(here(), "latest", host=2, follow=False, lines=40)
    assert logs.logs(here(), "latest", host=0, follow=False, lines=40) == 1
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
    monkeypatch.setattr("launch.runs.read", lambda _: None)  # its bucket is away
    assert status_command.stop(here(), "latest", grace_s=1) == 1
    assert status_command.NOT_OURS in capsys.readouterr().out


def test_a_run_that_is_started_again_while_it_is_asked_to_stop_is_stopped_as_one_that_runs(
    write_run: WriteRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(result={"outcome": "failed", "attempt": 0})
    first = run.described["attempts"][0]
    attempts = [
        first,
        {**first, "attempt": 1, "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"},
    ]

    def begun_meanwhile(_: object) -> None:
        run.directory.remove(run_directory.RESULT)
        run.directory.write_json(run_directory.RUN, {**run.described, "attempts": attempts})

    monkeypatch.setattr("launch.launching.ask_to_stop", begun_meanwhile)
    monkeypatch.setattr(run_directory, "FINISHING_LIMIT_S", 3.0)  # nobody is there to write its end
    status_command.stop(here(), run.run_id, grace_s=1)
    assert f"stopping {run.run_id}" in capsys.readouterr().out


CONNECTION: Any = SimpleNamespace(name="cluster dev", load=lambda: None)
JOB: dict[str, Any] = {"kind": "Job", "metadata": {}, "spec": {"completions": 2}}


class Restarting(ClusterRuns):
    """Of each run a Job that the cluster goes on with, until it is stopped."""

    def __init__(self) -> None:
        self.connection = CONNECTION
        self.work: dict[str, Any] | None = JOB

    def run_in_cluster(self, run_id: str) -> ObservedRun:
        return ObservedRun(run_id=run_id, work=self.work, pods={})

    def stop(self, run_id: str, attempt: int, index: int, grace_s: float) -> dict[str, Any]:
        self.work = None
        return {"stopped": []}


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
    target = dataclasses.replace(here(), backend=PodBackend(Restarting()))
    assert status_command.stop(target, "latest", grace_s=1) == 0
    out = capsys.readouterr().out
    assert f"stopping {RUN_ID}" in out and f"{RUN_ID} {'was ' if begun == {} else ''}{state}" in out
    assert (run.directory.read_json(run_directory.RESULT) or {})["outcome"] == state


class Over(ClusterRuns):
    """Of each run a Job that has failed, and that nobody has followed."""

    def __init__(self) -> None:
        self.connection = CONNECTION

    def run_in_cluster(self, run_id: str) -> ObservedRun:
        why = {"type": "Failed", "status": "True", "reason": "MaxFailedIndexesExceeded", "message": "gave up"}
        return ObservedRun(run_id=run_id, work={**JOB, "status": {"conditions": [why]}}, pods={})


def test_status_puts_on_record_why_a_cluster_gave_up_a_run(
    write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run()
    assert status_command.status(dataclasses.replace(here(), backend=PodBackend(Over())), run.run_id) == 0
    assert f"{RUN_ID}  failed" in capsys.readouterr().out
    result = run.directory.read_json(run_directory.RESULT) or {}
    assert (result["outcome"], result["error"]) == ("failed", "gave up")
