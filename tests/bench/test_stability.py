"""Training is stable: some cells of docs/benchmarks.md's table, and what the table says of a cell that is not."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from bench import stability
from bench.stability import Cell

FINE = Cell(
    dtype="float32",
    planned_steps=400,
    seed=0,
    steps=400,
    loss=5.7,
    unigrams=6.175,
    outliers=(),
    grad_norm=1.2,
)


@pytest.mark.nightly  # `make train`, which CI runs, trains 3,000 steps in float32
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_short_runs_of_either_kind_of_numbers_end_below_the_unigrams_without_an_outlier(dtype: str) -> None:
    command = [sys.executable, "-m", "bench.stability", "--steps", "200", "--seeds", "1", "--dtype", dtype]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(" 200 |") == 1


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, 0, "5.700 | 5.800"),
        ({"outliers": (97,)}, 1, "| 1 |"),
        ({"steps": 160}, 1, "5.700 (ended at 160)"),
        ({"loss": 6.2}, 1, "6.200"),
    ],
)
def test_a_cell_that_leaps_or_is_ended_or_learns_nothing_fails_the_bench(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, object],
    status: int,
    said: str,
) -> None:
    cells = [dataclasses.replace(FINE, seed=1, loss=5.8), dataclasses.replace(FINE, **changed)]  # type: ignore[arg-type]

    def trained(configs: Sequence[object]) -> Iterator[Cell]:
        assert len(configs) == 2
        yield from cells

    monkeypatch.setattr(stability, "all_trained", trained)
    asked = ["--steps", "400", "--seeds", "2", "--dtype", "float32"]
    assert stability.main(asked) == status
    assert said in capsys.readouterr().out
