"""The tables of the comparisons: what is divided by what, and what is said of what could not be measured."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest

from bench import mlm, mlm_loss
from bench.peers import FLAX, PYTORCH_BFLOAT16, Program


@pytest.fixture
def programs() -> list[Program]:
    """One at 0.1 s and one at 0.3 s a step, each with a turn in which the machine was busy."""
    found = []
    for name, scale in (("flax_mlm, float32", 1.0), (FLAX, 3.0)):
        process = subprocess.Popen([sys.executable, "-c", ""], text=True)
        process.wait()
        program = Program(name=name, process=process, first_loss=9.0)
        program.wall_s = [0.1 * scale, 5.0, 0.1 * scale]
        program.cpu_s = [0.25 * scale, 0.2 * scale, 0.9]
        program.last = {
            "loss": 2.5,
            "imported_bytes": 1 << 30,
            "compiling_peak_bytes": 4 << 30,
            "stepping_peak_bytes": 3 << 30,
        }
        program.machine_flops_per_s = 1e9
        found.append(program)
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_busy_turn_moves_no_figure_and_the_ratios_are_to_the_flax_peer(programs: list[Program]) -> None:
    table = mlm.table(programs, {"tokens": 1000, "flops": 5e7}).splitlines()
    assert cells(table[2])[:7] == ["flax_mlm, float32", "10,000", "3.00", "–", "0.200", "3.00", "50%"]
    assert cells(table[3])[:6] == [f"(a) {FLAX}", "3,333", "1.00", "–", "0.600", "1.00"]


def test_what_is_faster_than_pytorch_at_its_best_is_more_than_one_time_it(programs: list[Program]) -> None:
    ours, best = programs
    other = dataclasses.replace(ours, name=FLAX, wall_s=[0.9])
    best.name, best.last = PYTORCH_BFLOAT16, {**best.last, "dtype": "bfloat16"}
    table = mlm.table([ours, other, best], {"tokens": 1000, "flops": 5e7}).splitlines()
    assert [cells(line)[3] for line in table[2:]] == ["3.00", "0.33", "1.00"]
    assert cells(table[4])[0] == f"(b) {PYTORCH_BFLOAT16}"
    assert set(mlm.machine_rates([ours, best])) == {"float32", "bfloat16"}


def test_the_step_adds_its_peak_less_the_frameworks_and_what_the_system_does_not_say_is_a_dash(
    programs: list[Program],
) -> None:
    assert mlm.memory(programs[0].last) == "1.00 | 4.00 | 3.00 | 2.00"
    unsaid = dict.fromkeys(("imported_bytes", "compiling_peak_bytes", "stepping_peak_bytes"))
    assert mlm.memory(unsaid) == "– | – | – | –"


def test_every_line_of_a_table_has_as_many_cells_as_its_head(programs: list[Program]) -> None:
    losses = {"flax_mlm, float32": [1.0, 2.0], FLAX: [1.0, 2.0]}
    for table in (
        mlm.table(programs, {"tokens": 1, "flops": 1.0}),
        mlm_loss.table(losses, FLAX),
    ):
        assert len({len(cells(line)) for line in table.splitlines()}) == 1


def test_losses_are_compared_seed_by_seed() -> None:
    """Seeds differ by more than the programs do: the spread of the differences is what says whether they differ."""
    table = mlm_loss.table({"ours": [5.1, 6.1, 7.1], FLAX: [5.0, 6.0, 7.0]}, FLAX).splitlines()
    assert cells(table[2]) == ["ours", "6.1000", "1.0000", "+0.1000", "0.0000"]
    assert math.isnan(mlm_loss.spread([4.0]))


def test_a_program_is_measured_against_the_machines_product_of_its_own_kind(programs: list[Program]) -> None:
    programs[0].last["dtype"] = "bfloat16"
    programs[0].machine_flops_per_s = 2e9
    table = mlm.table(programs, {"tokens": 1000, "flops": 5e7}).splitlines()
    assert [cells(line)[6] for line in table[2:4]] == ["25%", "17%"]
    programs[1].machine_flops_per_s = 0.0
    table = mlm.table(programs, {"tokens": 1000, "flops": 5e7}).splitlines()
    assert [cells(line)[6] for line in table[2:4]] == ["25%", "–"]
