"""Checkpoints are complete or absent; one that cannot be read is put aside, and the one before it is used."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.runtime.jax.checkpoints import TORN, Checkpoints

pytestmark = [
    pytest.mark.usefixtures("two_devices"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax.*"),
]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(str(tmp_path / "run"))


@pytest.fixture
def checkpoints(directory: RunDirectory) -> Iterator[Checkpoints]:
    opened = Checkpoints(directory, keep_last=2)
    yield opened
    opened.close()


def state(step: int) -> dict[str, Any]:
    return {"params": {"layers": {0: jnp.full((4, 3), step / 7)}}, "step": jnp.asarray(step, jnp.int32)}


def saved(checkpoints: Checkpoints, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        checkpoints.save(step, state(step))
        checkpoints.evaluated(step, loss)
    checkpoints.wait()


def reopened(directory: RunDirectory) -> tuple[int, Any] | None:
    again = Checkpoints(directory, keep_last=2)
    try:
        return again.restore_latest(state(0))
    finally:
        again.close()


def test_what_was_saved_is_restored_to_the_bit_with_what_was_noted_beside_it(
    directory: RunDirectory, checkpoints: Checkpoints
) -> None:
    notes = {"losses": [0.1 + 0.2, 1e-300], "row": 3}
    assert checkpoints.restore_latest(state(0)) is None
    checkpoints.save(5, state(5))
    checkpoints.save(10, state(10), notes=notes)
    checkpoints.save(10, state(99))  # a step that is there is not written again
    checkpoints.wait()
    again = Checkpoints(directory, keep_last=2)
    for expected, noted in ((10, notes), (5, None)):  # as older code wrote them, without notes
        restored = again.restore_latest(state(0))
        assert restored is not None
        step, tree = restored
        assert (step, again.notes) == (expected, noted)
        assert str(jax.tree.structure(tree)) == str(jax.tree.structure(state(step)))
        for mine, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(state(step)), strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        shutil.rmtree(directory.path(f"checkpoints/{step}"))
    again.close()


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ({1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: 2.5, 6: None}, [2, 5, 6]),
        ({1: math.nan, 2: 4.0, 3: math.nan, 4: 5.0, 5: 6.0}, [2, 4, 5]),
        ({1: -math.inf, 2: 4.0, 3: 5.0, 4: 6.0}, [2, 3, 4]),
    ],
)
def test_the_latest_are_kept_and_the_best_besides_which_is_a_finite_one(
    checkpoints: Checkpoints, losses: dict[int, float | None], kept: list[int]
) -> None:
    saved(checkpoints, losses)
    assert checkpoints.steps() == kept


# Orbax leaves a closed event loop behind where a read fails.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncated", "deleted", "notes torn"])
def test_a_torn_checkpoint_is_put_aside_and_the_one_before_it_used(
    directory: RunDirectory, checkpoints: Checkpoints, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(checkpoints, {5: None})
    checkpoints.save(10, state(10), notes={"row": 1})
    checkpoints.wait()
    newest = Path(directory.path("checkpoints/10"))
    shutil.copytree(newest, newest.with_name("15.orbax-checkpoint-tmp-0"))  # of a write that was cut off
    if damage == "notes torn":
        (newest / "notes" / "metadata").write_text('{"row"')
    for path in newest.rglob("*"):
        if path.is_file() and damage == "truncated":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif path.is_file() and damage == "deleted" and "d" in path.parts:
            path.unlink()
    restored = reopened(directory)
    assert restored is not None
    assert (restored[0], int(restored[1]["step"])) == (5, 5)
    said = capsys.readouterr().out
    assert "checkpoint 10 cannot be read (" in said
    assert f"it is put aside in {TORN}/ and 5 is used" in said
    assert [name.partition("-")[0] for name in directory.list(TORN)] == ["10"]
    assert directory.list("checkpoints") == ["5"]


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_where_no_checkpoint_can_be_read_the_run_is_refused_and_nothing_is_moved(
    directory: RunDirectory, checkpoints: Checkpoints
) -> None:
    saved(checkpoints, {5: None, 10: None})
    again = Checkpoints(directory, keep_last=2)
    with pytest.raises(RequestError, match="none of the run's 2 checkpoints can be read by this code"):
        again.restore_latest({**state(0), "came_with_new_code": jnp.zeros(2)})
    again.close()
    assert directory.list("checkpoints") == ["10", "5"]
    assert directory.list(TORN) == []
