"""A program that steps in turn: what it is asked, what it answers, and what is said when it does not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.peers import PEERS, PROGRAMS, Program, running

PLAY = """
import sys
sys.path.insert(0, {programs!r})
from turns import answer
answer(lambda step: 10.0 - step, {{"imported_bytes": 5}}, lambda: (1.5, 0.25))
"""


@pytest.fixture
def played() -> tuple[list[str], dict[str, str]]:
    """A program whose loss is 10 less the number of the step."""
    return [sys.executable, "-c", PLAY.format(programs=str(PROGRAMS))], dict(os.environ)


def test_turns_are_measured_and_compiling_evaluating_and_waking_are_not(
    played: tuple[list[str], dict[str, str]],
) -> None:
    with running({"a": played}) as (program,):
        assert program.evaluate() == 1.5  # before the first step too
        program.compile()
        assert program.evaluate() == 1.5
        program.turn(2)
        program.wake()
        program.turn(3)
        assert (program.first_loss, program.last["loss"], program.last["step"]) == (10.0, 4.0, 7)
        assert len(program.wall_s) == len(program.cpu_s) == 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone says it")
def test_what_compiling_took_for_a_while_is_not_in_the_peak_of_stepping() -> None:
    hungry = PLAY.replace("10.0 - step", "len(bytearray((step == 0) * 300 << 20))")
    command = [sys.executable, "-c", hungry.format(programs=str(PROGRAMS))], dict(os.environ)
    with running({"a": command}) as (program,):
        program.compile()
        program.turn(1)
        assert program.last["compiling_peak_bytes"] > 300 << 20
        assert program.last["stepping_peak_bytes"] < 100 << 20


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


def test_the_others_are_ended_when_one_fails(played: tuple[list[str], dict[str, str]]) -> None:
    left: list[Program] = []
    with pytest.raises(RuntimeError, match="as it must"), running({"a": played, "b": played}) as programs:
        left = programs
        raise RuntimeError("as it must")
    assert [program.process.poll() is None for program in left] == [False, False]


def test_every_peer_has_a_lock_and_a_program() -> None:
    locks = PROGRAMS.parent / "locks"
    assert all(
        (locks / f"{lock}.txt").exists() and (PROGRAMS / script).exists()
        for lock, script, *_ in PEERS.values()
    )
