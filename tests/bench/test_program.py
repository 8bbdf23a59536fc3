"""A program that steps in turn: what it is asked, what it answers, and what is said when it does not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.program import PEERS, PROGRAMS, Program, running

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


def test_steps_are_counted_on_from_the_one_that_compiled(played: tuple[list[str], dict[str, str]]) -> None:
    with running({"a": played}) as (program,):
        program.compile()
        program.turn(2)
        program.turn(3)
        assert (program.first_loss, program.last["loss"], program.last["step"]) == (10.0, 5.0, 6)
        assert len(program.wall_s) == len(program.cpu_s) == 2  # compiling is no measurement


def test_a_step_that_wakes_a_program_is_no_turn(played: tuple[list[str], dict[str, str]]) -> None:
    with running({"a": played}) as (program,):
        program.compile()
        program.wake()
        program.turn(1)
        assert (program.last["step"], len(program.wall_s), len(program.cpu_s)) == (3, 1, 1)


def test_an_evaluation_takes_no_step_and_is_no_turn(played: tuple[list[str], dict[str, str]]) -> None:
    with running({"a": played}) as (program,):
        assert program.evaluate() == 1.5  # before the first step too
        program.compile()
        assert program.evaluate() == 1.5
        program.turn(1)
        assert program.last["loss"] == 9.0 and len(program.wall_s) == 1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone says it")
def test_what_compiling_took_for_a_while_is_not_in_the_peak_of_stepping() -> None:
    hungry = PLAY.replace("10.0 - step", "len(bytearray((step == 0) * 300 << 20))")
    command = [sys.executable, "-c", hungry.format(programs=str(PROGRAMS))], dict(os.environ)
    with running({"a": command}) as (program,):
        program.compile()
        program.turn(1)
        assert program.last["compiling_peak_bytes"] > 300 << 20
        assert program.last["stepping_peak_bytes"] < 100 << 20


def test_a_program_that_ends_is_named_with_how_it_ended() -> None:
    with (
        running({"the odd one": ([sys.executable, "-c", "raise SystemExit(7)"], dict(os.environ))}) as (
            program,
        ),
        pytest.raises(SystemExit, match="the odd one ended with 7, asked .*compile"),
    ):
        program.compile()


def test_a_program_that_hangs_is_ended_at_the_limit_and_named() -> None:
    silent = "import sys\nfor line in sys.stdin: pass"
    with running({"the silent one": ([sys.executable, "-c", silent], dict(os.environ))}) as (program,):
        hurried = Program(name=program.name, process=program.process, limit_s=0.2)
        with pytest.raises(SystemExit, match=r"the silent one did not answer within 0.2 s"):
            hurried.compile()
        assert program.process.poll() is not None


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
