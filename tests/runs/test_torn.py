"""Checkpoints that something outside has damaged: the newest that can be read is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.runs import Run
from tests.runs.lab import Lab, Losses, losses, saved_steps

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


def truncate_the_largest_file(checkpoint: Path) -> None:
    largest = max(
        (path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    with largest.open("rb+") as file:
        file.truncate(largest.stat().st_size // 2)


def delete_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "state" / "manifest.ocdbt").unlink()


@pytest.mark.parametrize("damage", [truncate_the_largest_file, delete_the_manifest, shutil.rmtree])
def test_a_damaged_newest_checkpoint_is_passed_over_for_the_one_before(
    lab: Lab,
    lost_run: Run,
    right_losses: Losses,
    damage: Callable[[Path], None],
) -> None:
    run = lab.copy_of(lost_run)
    *_, before, newest = saved_steps(run)
    damage(Path(run.directory.path(f"checkpoints/{newest}")))

    resumed = lab.resume(run)

    log = lab.log(resumed)
    assert f"resumed after step {before}\n" in log
    if damage is not shutil.rmtree:
        assert f"checkpoint {newest} cannot be read" in log
        assert any(name.startswith(f"{newest}-") for name in run.directory.list("checkpoints-torn"))
    assert lab.state(resumed) == "done"
    assert losses(resumed) == right_losses
