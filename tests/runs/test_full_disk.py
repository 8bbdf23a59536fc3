"""A disk that fills up in the middle of a run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.runs.lab import Lab, Losses, losses, result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Where the lab keeps its runs: a filesystem of 3 MiB."""
    runs = tmp_path / "runs"
    runs.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(runs)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no `mount` on this machine")
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
