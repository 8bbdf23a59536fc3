"""Runs of torch_glue in PyTorch's environment: killed, preempted and resumed as those of flax_mlm are."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.runtime.cache import user_cache_dir
from launch import environments
from tests.runs.lab import Lab, losses, result, saved_steps

STEPS = 60


class GlueLab(Lab):
    job = "torch_glue"

    def options(self) -> list[str]:
        periods = "--log-every 1 --eval-every 20 --checkpoint-every 5 --dropout 0.1"
        return [
            "--data",
            str(self.data),
            *f"--steps {STEPS} --batch-size 8 --max-length 32 {periods}".split(),
        ]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GlueLab]:
    """Its cache has this machine's environment of PyTorch, which takes minutes to make."""
    environments.ensure("pytorch", print)
    cache = tmp_path / "cache" / "tpu-stack"
    cache.mkdir(parents=True)
    (cache / "environments").symlink_to(user_cache_dir(os.environ) / "environments")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    drawn = random.Random(0)
    lines = []
    for _ in range(200):
        label = drawn.choice(["bad", "good"])
        words = [drawn.choice(["the", "film", "plot", "actor", "was"]) for _ in range(drawn.randint(3, 20))]
        words.insert(drawn.randrange(len(words)), {"bad": "awful", "good": "lovely"}[label])
        lines.append(json.dumps({"sentence": " ".join(words), "label": label}) + "\n")
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    made = GlueLab(tmp_path / "runs", cache.parent, tmp_path / "rows.jsonl")
    try:
        yield made
    finally:
        made.end_all()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torch_glue_goes_on_with_the_very_same_losses_after_a_kill_and_after_a_preemption(
    lab: GlueLab,
) -> None:
    whole = lab.finish(lab.launch())
    assert lab.state(whole) == "done", lab.log(whole)
    right = losses(whole)
    assert len(right) == STEPS

    run = lab.launch()
    lab.reach(run, 12)
    lab.signal(run, signal.SIGKILL, 1)
    killed = lab.finish(run)
    assert (lab.state(killed), result(killed)["failed_host"]) == ("failed", 1)
    newest = saved_steps(killed)[-1]

    run = lab.launch(resume=run)
    lab.reach(run, newest + 3)
    lab.signal(run, signal.SIGTERM, 1)
    preempted = lab.finish(run)
    assert f"resumed after step {newest}\n" in lab.log(preempted)
    assert [ended["code"] for ended in lab.exits(preempted)] == [75, 75]
    assert saved_steps(preempted)[-1] == result(preempted)["steps"]

    resumed = lab.resume(run)
    assert lab.state(resumed) == "done"
    assert losses(resumed) == right
    assert result(resumed)["eval_loss"] == result(whole)["eval_loss"]
    assert (Path(resumed.directory.path("export")) / "model.safetensors").exists()
