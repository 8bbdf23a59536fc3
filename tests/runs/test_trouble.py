"""A run whose numbers stay wrong or whose disk is full ends on every host and says why in plain words."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from console.summary import summary
from jobs.flax_mlm.loss_guard import USELESS_LIMIT_STEPS
from tests.runs.lab import Lab, Losses, losses, result, saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUINOUS = ("--learning-rate", "1e30", "--warmup-share", "0.0", "--log-every", "20")
"""The first step ruins the parameters: no later one has a loss that is finite."""
LAST = 1 + USELESS_LIMIT_STEPS


def test_a_run_that_stays_ruined_ends_with_one_message_the_batch_and_no_ruined_checkpoint(lab: Lab) -> None:
    run = lab.finish(lab.launch(*RUINOUS))
    found = result(run)
    assert (found["outcome"], found["steps"]) == ("failed", LAST)
    error = found["error"]
    assert error.startswith(f"host {found['failed_host']}: step {LAST}: the loss is nan")
    assert f"the last of {USELESS_LIMIT_STEPS} outliers in a row" in error
    assert "lower --learning-rate" in error and "--on-trouble warn" in error
    assert error.count(f"step {LAST}") == 1 and f"/trouble/step-{LAST}.json" in error
    assert "\n" not in error and "Traceback" not in error
    assert "\n".join(summary(run, "failed")).count("lower --learning-rate") == 1
    for host in (0, 1):
        assert "Traceback" not in lab.log(run, host)
        assert lab.log(run, host).count("lower --learning-rate") == 1
    kept = {path.name: json.loads(path.read_text()) for path in Path(run.directory.path("trouble")).iterdir()}
    assert sorted(kept) == [f"step-{step}.json" for step in (2, LAST)]
    assert {(len(batch["tokens"]), len(batch["texts"])) for batch in kept.values()} == {(12, 12)}
    assert saved_steps(run) == []
    written = [line for line in run.directory.read_metrics() if "loss" in line]
    assert [line["step"] for line in written] == list(range(2, LAST + 1))
    assert [line["outliers"] for line in written] == list(range(1, USELESS_LIMIT_STEPS + 1))
    assert {end["code"] for end in lab.exits(run)} == {1}


@pytest.mark.nightly
def test_a_run_that_is_told_to_goes_on_whatever_its_numbers_say_and_counts_them(lab: Lab) -> None:
    run = lab.finish(lab.launch(*RUINOUS, "--on-trouble", "warn", "--steps", str(LAST + 9)))
    found = result(run)
    assert (found["outcome"], found["outliers"], found["skipped_updates"]) == ("done", LAST + 8, LAST + 8)
    assert found["eval_loss"] is None
    log = lab.log(run)
    assert [f"step {step}: the loss is nan" in log for step in (2, 3, LAST + 1)] == [True, False, True]
    assert run.directory.list("trouble") == [f"step-{step}.json" for step in (2, LAST + 1)]
    assert saved_steps(run) == [LAST + 9]  # those on the way were held back


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where the lab keeps its runs: a filesystem of 3 MiB."""
    runs = tmp_path / "runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(runs)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    yield runs
    subprocess.run(["umount", "-l", str(runs)], check=True)


def test_a_full_disk_fails_the_run_in_plain_words_and_what_was_complete_is_resumed_when_there_is_room(
    small_disk: Path, lab: Lab, right_losses: Losses
) -> None:
    with mock.patch("launch.plan.MIN_FREE_BYTES", 0):
        run = lab.launch("--keep-checkpoints", "100")
        failed = lab.finish(run)
        assert lab.state(failed) == "failed"
        error = result(failed)["error"]
        assert "the disk is full" in error
        assert re.search(rf"{run.directory.url} has \d+ MiB free of 3 MiB", error)
        assert f"fab train --resume {run.run_id}" in error

        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        resumed = lab.resume(run)
    assert lab.state(resumed) == "done"
    assert "resumed after step" in lab.log(resumed)
    assert losses(resumed) == right_losses
