"""Runs of the jobs in other frameworks and in Keras: killed, preempted and resumed as those of flax_mlm are."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.local import environments
from jobs.runtime.storage.cache import user_cache_dir
from tests.jobs.glue_folder import write_folder, write_rows
from tests.runs.lab import Lab, Losses, losses, result, saved_steps


class JobLab(Lab):
    """A lab of one job, with the options of its runs."""

    def __init__(self, folder: Path, job: str, options: str) -> None:
        super().__init__(folder / "runs", folder / "cache", folder)
        self.job, self._options = job, options.split()

    def options(self) -> list[str]:
        return self._options


MakeLab = Callable[[str, str, str], JobLab]


@pytest.fixture
def lab_of(tmp_path: Path) -> Iterator[MakeLab]:
    """Of a framework, a job and its options: a lab with this machine's environments, which take minutes to make."""
    made: list[JobLab] = []

    def make(framework: str, job: str, options: str) -> JobLab:
        if framework != "jax":
            environments.ensure(framework, print)
            cache = tmp_path / "cache" / "tpu-stack"
            cache.mkdir(parents=True)
            (cache / "environments").symlink_to(user_cache_dir(os.environ) / "environments")
        made.append(JobLab(tmp_path, job, options))
        return made[-1]

    try:
        yield make
    finally:
        for lab in made:
            lab.end_all()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kill_at", [None, pytest.param(12, marks=pytest.mark.nightly)])
def test_torch_glue_goes_on_with_the_very_same_losses_after_a_kill_and_after_a_preemption(
    lab_of: MakeLab, tmp_path: Path, kill_at: int | None
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    options = "--steps 60 --batch-size 8 --max-length 32 --dropout 0.1"
    periods = "--log-every 1 --eval-every 20 --checkpoint-every 5"
    lab = lab_of("pytorch", "torch_glue", f"--data {rows} {options} {periods}")
    goes_on_exactly(lab, lines=60, kill_at=kill_at)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_tf_squad_goes_on_with_the_very_same_losses_after_a_kill_and_after_a_preemption(
    lab_of: MakeLab,
) -> None:
    options = "--steps 60 --batch-size 8 --max-length 64 --stride 20 --steps-per-call 5"
    periods = "--log-every 1 --eval-every 30 --checkpoint-every 5"
    goes_on_exactly(lab_of("tensorflow", "tf_squad", f"{options} {periods}"), lines=60, kill_at=12)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_tf_images_goes_on_with_the_very_same_losses_after_a_kill_and_after_a_preemption(
    lab_of: MakeLab,
) -> None:
    options = "--steps 80 --batch-per-core 64 --flip --steps-per-execution 2"
    periods = "--log-every 2 --eval-every 20 --checkpoint-every 10"
    lab = lab_of("tensorflow", "tf_images", f"{options} {periods}")
    goes_on_exactly(lab, lines=40, kill_at=14, export="model.keras")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_process_of_tensorflow_that_stands_still_for_a_while_is_waited_for(lab_of: MakeLab) -> None:
    """As on a machine that is busy with something else; TensorFlow itself gives it up after 10 s."""
    lab = lab_of("tensorflow", "tf_images", "--steps 80 --batch-per-core 64 --log-every 2 --eval-every 80")
    run = lab.launch()
    lab.reach(run, 6)
    group = lab.records(run)[1]["pid"]
    os.killpg(group, signal.SIGSTOP)
    time.sleep(20)
    os.killpg(group, signal.SIGCONT)
    ended = lab.finish(run)
    assert lab.state(ended) == "done", lab.log(ended)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_keras_glue_goes_on_with_the_very_same_losses_and_two_processes_compute_what_one_does(
    lab_of: MakeLab, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    folder = write_folder(tmp_path / "roberta", "roberta", rows)
    options = "--steps 60 --batch-size 8 --max-length 32 --lengths 2 --dropout 0 --dtype float32"
    periods = "--log-every 1 --eval-every 20 --checkpoint-every 5"
    lab = lab_of("jax", "keras_glue", f"--data {rows} --init-from {folder} {options} {periods}")
    right = goes_on_exactly(lab, lines=60, kill_at=12)

    alone = losses(lab.finish(lab.launch(hosts=1)))
    assert alone == pytest.approx(right, abs=1e-3)
    assert alone[1] == pytest.approx(right[1], abs=1e-5)


def goes_on_exactly(
    lab: Lab, *, lines: int, kill_at: int | None, export: str = "model.safetensors"
) -> Losses:
    """Hold a run that is killed once it has taken `kill_at` steps (None: not killed), then preempted, then resumed
    against one that nobody disturbs; returns the losses of both.

    lines: how many losses there are. export: a file of the export.
    """
    whole = lab.finish(lab.launch())
    assert lab.state(whole) == "done", lab.log(whole)
    right = losses(whole)
    assert len(right) == lines

    run, newest, last = lab.launch(), 0, 9
    if kill_at is not None:
        lab.reach(run, kill_at)
        lab.signal(run, signal.SIGKILL, 1)
        killed = lab.finish(run)
        assert (lab.state(killed), result(killed)["failed_host"]) == ("failed", 1)
        newest, last = saved_steps(killed)[-1], killed.directory.read_metrics()[-1]["step"]
        run = lab.launch(resume=run)
    # Beyond `last`, as the lines of before the kill are there until the resumed run has restored its checkpoint.
    lab.reach(run, last + 3)
    lab.signal(run, signal.SIGTERM, 1)
    preempted = lab.finish(run)
    assert (f"resumed after step {newest}\n" in lab.log(preempted)) == (kill_at is not None)
    assert [ended["code"] for ended in lab.exits(preempted)] == [75, 75]
    assert saved_steps(preempted)[-1] == result(preempted)["steps"] > last

    resumed = lab.resume(run)
    assert lab.state(resumed) == "done"
    assert losses(resumed) == right
    assert result(resumed)["eval_loss"] == result(whole)["eval_loss"]
    assert (Path(resumed.directory.path("export")) / export).exists()
    return right
