"""A run that nobody disturbs: what it leaves behind, and what it leaves alone."""

import json
from pathlib import Path

import pytest

from jobs.flax_mlm import METRICS
from jobs.runtime.monitoring.metric_definitions import of_run
from launch.runs import Run
from tests.runs.lab import CHECKPOINT_EVERY, STEPS, Lab, Losses, result, saved_steps

IGNORED = (".venv/", ".cache/", "runs/", "__pycache__/", ".pytest_cache/", ".hypothesis/")


def test_an_undisturbed_run_is_done_its_directory_is_whole_and_the_checkout_as_it_was(
    shared_lab: Lab, reference: Run, checkout: tuple[str, str]
) -> None:
    home = Path(reference.directory.url)
    # The sampler of a host owes nothing to a run that is over before its first sample.
    assert {path.name for path in home.iterdir()} - {"hosts"} == {
        *("run.json", "metrics.jsonl", "tensorboard", "checkpoints", "logs", "heartbeats"),
        *("export", "report.html", "result.json", "settings.json", "code.tar.gz.base64"),
        *("attempts", ".unfinished"),
    }
    described, settings = reference.described, reference.directory.read_json("settings.json") or {}
    assert (described["version"], described["job"], described["stack"]) == (1, "flax_mlm", "jax")
    assert (described["target"], described["platform"], described["runtime"]) == ("local", "cpu", "bare")
    assert [host["index"] for host in described["hosts"]] == [0, 1]
    (attempt,) = described["attempts"]
    assert (attempt["attempt"], attempt["processes"]) == (0, 2)
    assert attempt["bundle"] == described["code"]["bundle"]
    assert of_run(json.loads(json.dumps(described))) == METRICS
    assert settings.keys() == described["config"].keys()
    assert (settings["layers"], settings["learning_rate"], settings["dtype"]) == (1, 0.01, "float32")
    assert settings["vocab_size"] is not None and settings["max_positions"] == 32
    assert shared_lab.state(reference) == "done"
    assert [(beat["state"], beat["step"]) for beat in reference.heartbeats if beat] == [("done", STEPS)] * 2
    assert sorted(path.name for path in home.glob("logs/0/*")) == ["host-0.log", "host-1.log"]
    assert list((home / "tensorboard").glob("events.out.tfevents.*"))
    exported = {path.name for path in (home / "export").iterdir()}
    assert exported >= {"config.json", "model.safetensors", "tokenizer.json", "params.msgpack", "README.md"}
    assert reference.run_id in (home / "report.html").read_text()
    assert list(home.rglob("*.part")) == []
    before, after = ([line for line in said.splitlines() if not line.endswith(IGNORED)] for said in checkout)
    assert after == before


def test_every_step_is_measured_once_with_a_falling_loss_and_the_result_is_that_of_the_last_evaluation(
    reference: Run, right_losses: Losses
) -> None:
    assert list(right_losses) == list(range(1, STEPS + 1))
    first, last = list(right_losses.values())[:10], list(right_losses.values())[-10:]
    assert sum(last) < 0.8 * sum(first)
    lines = reference.directory.read_metrics()
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    trained = [line for line in lines if "loss" in line][-1]
    assert {"grad_norm", "learning_rate", "tokens_per_s", "step_s"} <= trained.keys()
    evaluated = {line["step"]: line for line in lines if "eval_loss" in line}
    assert list(evaluated) == list(range(CHECKPOINT_EVERY, STEPS + 1, CHECKPOINT_EVERY))
    # Kept are the last two and the best; the last one is saved before it is evaluated, so of those before it.
    best = min(
        (step for step in evaluated if step < STEPS), key=lambda step: float(evaluated[step]["eval_loss"])
    )
    assert saved_steps(reference) == sorted({best, 55, 60})
    found = result(reference)
    assert (found["outcome"], found["steps"], found["attempt"]) == ("done", STEPS, 0)
    for name in ("eval_loss", "eval_accuracy"):
        assert found[name] == evaluated[STEPS][name]
    assert (found["error"], found["failed_host"]) == (None, None)
    assert found["unigram_entropy"] > 0 and found["tokens_per_s"] > 0
    assert found["wall_s"] == pytest.approx(sum(found["time_s"].values()), abs=0.01)
    parts = {
        "start",
        "restore",
        "compile",
        "compute",
        "input_wait",
        "evaluation",
        "checkpoint",
        "logging",
        "finish",
    }
    assert found["time_s"].keys() == parts
    assert all(found["time_s"][part] > 0 for part in parts - {"input_wait", "restore"})
