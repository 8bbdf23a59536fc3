"""Runs of tf_images in TensorFlow's environment: killed, preempted and resumed as those of flax_mlm are."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.runtime.cache import user_cache_dir
from launch import environments
from tests.runs.lab import Lab, losses, result, saved_steps

STEPS = 80


class ImagesLab(Lab):
    job = "tf_images"

    def options(self) -> list[str]:
        periods = "--log-every 2 --eval-every 20 --checkpoint-every 10 --steps-per-execution 2"
        return f"--steps {STEPS} --batch-per-core 64 --flip {periods}".split()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImagesLab]:
    """Its cache has this machine's environment of TensorFlow, which takes minutes to make."""
    environments.ensure("tensorflow", print)
    cache = tmp_path / "cache" / "tpu-stack"
    cache.mkdir(parents=True)
    (cache / "environments").symlink_to(user_cache_dir(os.environ) / "environments")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    made = ImagesLab(tmp_path / "runs", cache.parent, tmp_path)
    try:
        yield made
    finally:
        made.end_all()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_tf_images_goes_on_with_the_very_same_losses_after_a_kill_and_after_a_preemption(
    lab: ImagesLab,
) -> None:
    whole = lab.finish(lab.launch())
    assert lab.state(whole) == "done", lab.log(whole)
    right = losses(whole)
    assert len(right) == STEPS // 2

    run = lab.launch()
    lab.reach(run, 14)
    lab.signal(run, signal.SIGKILL, 1)
    killed = lab.finish(run)
    assert (lab.state(killed), result(killed)["failed_host"]) == ("failed", 1)
    newest = saved_steps(killed)[-1]

    run = lab.launch(resume=run)
    lab.reach(run, killed.directory.read_metrics()[-1]["step"] + 2)
    lab.signal(run, signal.SIGTERM, 1)
    preempted = lab.finish(run)
    assert f"resumed after step {newest}\n" in lab.log(preempted)
    assert [ended["code"] for ended in lab.exits(preempted)] == [75, 75]
    assert saved_steps(preempted)[-1] == result(preempted)["steps"]

    resumed = lab.resume(run)
    assert lab.state(resumed) == "done"
    assert losses(resumed) == right
    assert result(resumed)["eval_loss"] == result(whole)["eval_loss"]
    assert (Path(resumed.directory.path("export")) / "model.keras").exists()
