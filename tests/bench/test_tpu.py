"""The estimates of training steps: what counts as grown, and that none has since they were written down."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bench import tpu


def cell(cycles: int, **spent: int) -> dict[str, Any]:
    return {"compiler": "libtpu 0", "cycles": cycles, "memory": 1, "spent": spent}


def test_an_estimate_that_rises_by_more_than_three_percent_is_told_with_the_operations_that_grew() -> None:
    before = cell(1000, dot=600, add=300, sort=100)
    assert tpu.growth(before, cell(1030, dot=630, add=300, sort=100)) is None
    assert tpu.growth(before, cell(900, dot=900)) is None
    said = tpu.growth(before, cell(1100, dot=650, add=250, gather=200))
    assert said == "1,000 cycles are now 1,100, +10.0 %: gather +200, dot +50"


def test_every_cell_has_a_name_of_its_own_and_is_of_a_slice_that_exists() -> None:
    assert len({each.name for each in tpu.CELLS}) == len(tpu.CELLS)
    assert {each.place.accelerator.generation.name for each in tpu.CELLS} == {
        *("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
    }
    assert json.loads(tpu.KEPT.read_text()).keys() <= {each.name for each in tpu.CELLS}


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_no_estimate_has_risen_since_it_was_written_down() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.tpu", "--kept", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
