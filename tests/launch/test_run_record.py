"""How a run ended, in a person's words and as an exit code."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from contracts.run_directory import RunDirectory, State
from jobs.runtime.bucket_files import BucketFiles
from launch import run_record
from launch.run_record import finalize
from launch.runs import Run

WriteRun = Callable[..., Run]
RUN_ID = "flax_mlm-20261120-214500-abcd"


@pytest.mark.parametrize(
    ("state", "result", "code"),
    [
        ("done", {"outcome": "done"}, 0),
        ("failed", {"outcome": "failed"}, 1),
        ("failed", {"outcome": "failed", "request": True}, 2),
        ("failed", None, 1),
        ("stopped", {"outcome": "stopped"}, 130),
        ("preempted", {"outcome": "preempted"}, 130),
        ("hung", {"outcome": "hung"}, 1),
        ("lost", None, 1),
    ],
)
def test_the_exit_code_follows_the_state(
    write_run: WriteRun, state: State, result: dict[str, Any] | None, code: int
) -> None:
    assert run_record.exit_code(write_run(result=result), state) == code


def test_a_run_that_is_done_says_what_it_learned_and_where_it_lies(write_run: WriteRun) -> None:
    run = write_run(
        result={
            "outcome": "done",
            "steps": 100,
            "wall_s": 75.4,
            "tokens_per_s": 51234.5,
            "eval_loss": 2.5,
            "eval_accuracy": 0.4321,
            "unigram_entropy": 5.75,
        }
    )
    for step in (50, 100):
        run.directory.write_text(f"checkpoints/{step}/state", "x")
    run.directory.write_text("export/config.json", "{}")
    place = run.directory.url
    assert run_record.summary(run, "done") == [
        f"{RUN_ID} is done",
        "  eval loss    2.500 nats, 3.250 below the unigram baseline of 5.750",
        "  accuracy     43.2% of the masked tokens",
        "  speed        51,234 tokens/s",
        "  wall time    1:15 for 100 steps",
        f"  checkpoint   {place}/checkpoints/100",
        f"  export       {place}/export",
        f"  report       {place}/report.html",
    ]


@pytest.mark.parametrize(
    ("time_s", "said"),
    [
        (
            {"start": 9.0, "compute": 180.0, "input_wait": 0.5, "finish": 10.5},
            ["compute 90%, finish 5%, start 4%"],
        ),
        ({"start": 0.0}, []),
        ({}, []),
        (None, []),
        ([1], []),
        ({"start": "long"}, []),
    ],
)
def test_where_the_time_went_is_told_of_parts_that_took_more_than_a_hundredth(
    write_run: WriteRun, time_s: Any, said: list[str]
) -> None:
    run = write_run(result={"outcome": "done", "steps": 3, "wall_s": 200.0, "time_s": time_s})
    lines = run_record.summary(run, "done")
    assert [line.removeprefix("  of that      ") for line in lines if "of that" in line] == said


def test_a_run_of_a_job_that_says_nothing_of_its_metrics_is_told_by_their_names(write_run: WriteRun) -> None:
    result = {"outcome": "done", "steps": 3, "wall_s": 1.0, "eval_loss": 2.5, "games": 1200, "outliers": 0}
    run = write_run(result=result, metrics=[{"step": 3, "loss": 0.0}], metric_definitions=None)
    assert run_record.summary(run, "done")[1:5] == [
        "  loss         0.000",
        "  eval loss    2.500",
        "  games        1,200",
        "  wall time    0:01 for 3 steps",
    ]


def test_warnings_are_counted_and_where_they_are_is_said(write_run: WriteRun) -> None:
    run = write_run(result={"outcome": "done", "steps": 3, "wall_s": 1.0, "warnings": ["a", "b"]})
    assert "  warnings     2; the report has them" in run_record.summary(run, "done")


def test_a_loss_worse_than_the_baseline_is_told_as_that(write_run: WriteRun) -> None:
    run = write_run(result={"outcome": "done", "eval_loss": 6.0, "unigram_entropy": 5.75})
    assert "  eval loss    6.000 nats, 0.250 above the unigram baseline of 5.750" in run_record.summary(
        run, "done"
    )


def test_a_done_run_without_finite_figures_is_told_without_them(write_run: WriteRun) -> None:
    run = write_run(
        result={"outcome": "done", "steps": 3, "wall_s": 1.0, "eval_loss": None, "unigram_entropy": 5.0}
    )
    assert [line.split()[0] for line in run_record.summary(run, "done")[1:]] == ["wall", "report"]


def test_a_failure_says_why_where_the_log_is_and_where_to_go_on_from(write_run: WriteRun) -> None:
    run = write_run(result={"outcome": "failed", "error": "host 1 was killed\nlast line", "failed_host": 1})
    assert run_record.summary(run, "failed") == [
        f"{RUN_ID} failed",
        "  host 1 was killed",
        "  last line",
        f"  log: {run.directory.url}/logs/0/host-1.log",
        f"  resume with `fab train --resume {RUN_ID}` (no checkpoint yet: from the start)",
    ]


@pytest.mark.parametrize("state", ["failed", "lost", "hung"])
def test_resuming_goes_on_from_the_latest_complete_checkpoint(write_run: WriteRun, state: State) -> None:
    run = write_run()
    for name in ("9", "10", "11.orbax-checkpoint-tmp", "notes"):
        run.directory.write_text(f"checkpoints/{name}/state", "x")
    assert run.directory.checkpoint_steps() == [9, 10]
    assert run_record.summary(run, state)[-1] == f"  resume with `fab train --resume {RUN_ID}` (from step 10)"


def test_in_a_bucket_a_checkpoint_counts_once_its_last_file_is_there(write_run: WriteRun) -> None:
    known = write_run()
    run = dataclasses.replace(
        known, directory=RunDirectory(f"memory://{uuid.uuid4().hex}/run", BucketFiles())
    )
    run.directory.write_text("checkpoints/50/commit_success.txt", "")
    run.directory.write_text(
        "checkpoints/100/state/d/half", "x"
    )  # a bucket cannot rename: it has its name already
    assert run.directory.checkpoint_steps() == [50]


@pytest.mark.parametrize("state", ["stopped", "preempted"])
def test_a_run_that_was_stopped_says_how_to_go_on(write_run: WriteRun, state: State) -> None:
    text = " ".join(run_record.summary(write_run(result={"outcome": state, "steps": 42}), state))
    assert state in text
    assert f"`fab train --resume {RUN_ID}`" in text


def test_a_wrong_request_found_on_a_host_is_told_without_a_way_to_resume(write_run: WriteRun) -> None:
    run = write_run(result={"outcome": "failed", "request": True, "error": "--data x: too small"})
    assert run_record.summary(run, "failed") == [f"{RUN_ID}: --data x: too small"]


def test_what_a_job_or_an_agent_wrote_is_not_overwritten_by_the_launchers_last_word(
    write_run: WriteRun,
) -> None:
    run = finalize(write_run(result={"outcome": "preempted", "steps": 7}), "failed", "the launcher's view")
    assert run.current_result() == {"attempt": 0, "outcome": "preempted", "steps": 7}


def test_a_run_that_nobody_concluded_gets_its_result_and_its_report(
    write_run: WriteRun, beat: Callable[..., Any]
) -> None:
    run = finalize(write_run(beats=[beat("stepping", step=8), None]), "failed", "w-1 did not join")
    result = run.current_result()
    assert result is not None
    assert (result["outcome"], result["steps"], result["error"]) == ("failed", 8, "w-1 did not join")
    assert run.directory.read_text("report.html")
