"""A run that nobody disturbs: what it leaves behind, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.flax_mlm import METRICS
from jobs.runtime.jax.devices import multiplies_bfloat16
from jobs.runtime.metric_definitions import of_run
from launch.runs import Run
from tests.runs.lab import Lab, Losses, result, saved_steps

IGNORED = (".venv/", ".cache/", "runs/", "__pycache__/", ".pytest_cache/", ".hypothesis/")


def test_an_undisturbed_run_is_done_and_its_directory_is_whole(shared_lab: Lab, reference: Run) -> None:
    home = Path(reference.directory.url)
    assert {path.name for path in home.iterdir()} == {
        *("run.json", "metrics.jsonl", "tensorboard", "checkpoints", "logs", "heartbeats"),
        *("export", "report.html", "result.json", "settings.json"),
    }
    settings = reference.directory.read_json("settings.json") or {}
    assert settings.keys() == reference.described["config"].keys()
    assert (settings["layers"], settings["learning_rate"], settings["dtype"]) == (1, 0.01, "float32")
    assert settings["vocab_size"] is not None and settings["max_positions"] == 32
    assert shared_lab.state(reference) == "done"
    assert [beat["state"] for beat in reference.heartbeats if beat] == ["done", "done"]
    steps = reference.total_steps
    assert {beat["step"] for beat in reference.heartbeats if beat} == {steps}
    assert sorted(path.name for path in home.glob("logs/0/*")) == ["host-0.log", "host-1.log"]
    assert list((home / "tensorboard").glob("events.out.tfevents.*"))
    exported = {path.name for path in (home / "export").iterdir()}
    assert exported >= {"config.json", "model.safetensors", "tokenizer.json", "params.msgpack", "README.md"}
    assert reference.run_id in (home / "report.html").read_text()
    assert list(home.rglob("*.part")) == []


def test_run_json_says_what_was_run_where_and_how_the_attempt_began(reference: Run) -> None:
    described = reference.described
    assert (described["version"], described["job"], described["stack"]) == (1, "flax_mlm", "jax")
    assert (described["target"], described["platform"], described["runtime"]) == ("local", "cpu", "bare")
    assert described["config"]["batch_size"] == 12
    assert [host["index"] for host in described["hosts"]] == [0, 1]
    (attempt,) = described["attempts"]
    assert (attempt["attempt"], attempt["processes"]) == (0, 2)
    assert attempt["bundle"] == described["code"]["bundle"]
    assert of_run(json.loads(json.dumps(described))) == METRICS


def test_the_metrics_have_every_step_once_with_a_falling_loss(reference: Run, right_losses: Losses) -> None:
    assert list(right_losses) == list(range(1, (reference.total_steps or 0) + 1))
    first, last = list(right_losses.values())[:10], list(right_losses.values())[-10:]
    assert sum(last) < 0.8 * sum(first)
    lines = reference.directory.read_metrics()
    trained = [line for line in lines if "loss" in line]
    assert set(trained[-1]) >= {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_s",
        "step_s",
        "time",
    }
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == [20, 40, 60]


def test_the_last_two_checkpoints_and_the_best_one_are_kept(reference: Run) -> None:
    evaluated = {
        line["step"]: line["eval_loss"] for line in reference.directory.read_metrics() if "eval_loss" in line
    }
    # The last one is saved before it is evaluated, so the best of those before it is there still.
    best = min((step for step in evaluated if step < 60), key=lambda step: evaluated[step])
    assert saved_steps(reference) == sorted({best, 55, 60})


def test_the_result_is_that_of_the_last_evaluation(reference: Run) -> None:
    found = result(reference)
    last = [line for line in reference.directory.read_metrics() if "eval_loss" in line][-1]
    assert (found["outcome"], found["steps"], found["attempt"]) == ("done", reference.total_steps, 0)
    assert (found["eval_loss"], found["eval_accuracy"]) == (last["eval_loss"], last["eval_accuracy"])
    assert (found["error"], found["failed_host"]) == (None, None)
    assert found["unigram_entropy"] > 0
    assert found["wall_s"] == pytest.approx(sum(found["time_s"].values()), abs=0.01)
    parts = {"start", "compute", "input_wait", "evaluation", "checkpoint", "logging", "finish"}
    assert found["time_s"].keys() == parts
    assert all(found["time_s"][part] > 0 for part in parts - {"input_wait"})
    assert found["tokens_per_s"] > 0


def test_a_run_changes_nothing_in_the_checkout(checkout: tuple[str, str]) -> None:
    def kept(said: str) -> list[str]:
        return [line for line in said.splitlines() if not line.endswith(IGNORED)]

    before, after = checkout
    assert kept(after) == kept(before)


@pytest.mark.nightly
def test_what_to_compute_in_is_decided_by_all_processes_where_it_is_left_open(lab: Lab) -> None:
    run = lab.finish(lab.launch("--dtype", "auto", "--steps", "2"))
    assert result(run)["outcome"] == "done"
    kind = "bfloat16" if multiplies_bfloat16() else "float32"
    assert [f" of 2 processes, in {kind}; " in lab.log(run, host) for host in (0, 1)] == [True, False]
