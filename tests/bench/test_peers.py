"""Programs that step in turn: what one is asked and answers, what is said when it does not, and the tables of them."""

import dataclasses
import os
import subprocess
import sys

import pytest

from bench import mlm
from bench.peers import FLAX, PROGRAMS, PYTORCH_BFLOAT16, Program, running

PLAY = """
import sys
sys.path.insert(0, {programs!r})
from turns import answer
answer(lambda step: 10.0 - step, {{"imported_bytes": 5}})
"""


@pytest.fixture
def played() -> tuple[list[str], dict[str, str]]:
    """A program whose loss is 10 less the number of the step."""
    return [sys.executable, "-c", PLAY.format(programs=str(PROGRAMS))], dict(os.environ)


def test_turns_are_measured_and_compiling_and_waking_are_not(
    played: tuple[list[str], dict[str, str]],
) -> None:
    with running({"a": played}) as (program,):
        program.compile()
        program.turn(2)
        program.wake()
        program.turn(3)
        assert (program.first_loss, program.last["loss"], program.last["step"]) == (10.0, 4.0, 7)
        assert len(program.wall_s) == len(program.cpu_s) == 2


@pytest.mark.parametrize(
    ("program", "limit_s", "said"),
    [
        ("raise SystemExit(7)", 60, "the odd one ended with 7, asked .*compile"),
        ("import sys\nfor line in sys.stdin: pass", 0.2, r"the odd one did not answer within 0.2 s"),
    ],
    ids=["it ends", "it hangs"],
)
def test_a_program_that_does_not_answer_is_ended_and_named(program: str, limit_s: float, said: str) -> None:
    odd = [sys.executable, "-c", program], dict(os.environ)
    with running({"the odd one": odd}) as (started,):
        asked = Program(name=started.name, process=started.process, limit_s=limit_s)
        with pytest.raises(SystemExit, match=said):
            asked.compile()
        assert started.process.poll() is not None


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


def test_a_busy_turn_moves_no_figure_and_the_ratios_are_to_the_peers(programs: list[Program]) -> None:
    case = {"tokens": 1000, "flops": 5e7}
    table = mlm.table(programs, case).splitlines()
    assert cells(table[2])[:7] == ["flax_mlm, float32", "10,000", "3.00", "–", "0.200", "3.00", "50%"]
    assert cells(table[3])[:6] == [f"(a) {FLAX}", "3,333", "1.00", "–", "0.600", "1.00"]
    ours, best = programs
    other = dataclasses.replace(ours, name=FLAX, wall_s=[0.9])
    best.name, best.last = PYTORCH_BFLOAT16, {**best.last, "dtype": "bfloat16"}
    best.machine_flops_per_s = 2e9  # of a product of its own kind
    table = mlm.table([ours, other, best], case).splitlines()
    assert [cells(line)[3] for line in table[2:]] == ["3.00", "0.33", "1.00"]
    assert [cells(line)[6] for line in table[2:]] == ["50%", "6%", "8%"]
    assert cells(table[4])[0] == f"(b) {PYTORCH_BFLOAT16}"
    assert mlm.machine_rates([ours, best]) == {"float32": 1e9, "bfloat16": 2e9}
    assert len({len(cells(line)) for line in table}) == 1
