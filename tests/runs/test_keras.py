"""Runs of keras_glue: killed, preempted and resumed as those of flax_mlm are; two processes compute what one does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.glue_folder import write_folder, write_rows
from tests.runs.lab import Lab, losses, result, saved_steps

STEPS = 60


class KerasLab(Lab):
    job = "keras_glue"

    def options(self) -> list[str]:
        periods = (
            "--log-every 1 --eval-every 20 --checkpoint-every 5 --dropout 0.1 --lengths 2 --dtype float32"
        )
        model = ["--init-from", str(self.data.parent / "roberta")]
        return [
            "--data",
            str(self.data),
            *model,
            *f"--steps {STEPS} --batch-size 8 --max-length 32 {periods}".split(),
        ]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[KerasLab]:
    rows = write_rows(tmp_path / "rows.jsonl")
    write_folder(tmp_path / "roberta", "roberta", rows)
    made = KerasLab(tmp_path / "runs", tmp_path / "cache", rows)
    try:
        yield made
    finally:
        made.end_all()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_keras_glue_goes_on_with_the_very_same_losses_after_a_kill_and_after_a_preemption(
    lab: KerasLab,
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

    alone = lab.finish(lab.launch(hosts=1))
    assert losses(alone) == pytest.approx(right, abs=1e-3)  # dropout is that of the batch, not of a process
    assert losses(alone)[1] == pytest.approx(right[1], abs=1e-5)
