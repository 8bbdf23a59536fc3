"""Which Python is taken, and what a person without one reads."""

import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import interpreter
from tools.interpreter import Interpreter, NoInterpreterError, candidates, find_interpreter, probe, suitable


def python(version: tuple[int, int, int], *, able: bool = True) -> Interpreter:
    return Interpreter(path=f"/python{version[1]}", version=version, able=able)


def test_the_first_new_enough_python_that_can_make_an_environment_is_taken() -> None:
    found = [python((3, 11, 2)), python((3, 12, 3), able=False), python((3, 13, 0)), python((3, 12, 1))]
    assert suitable(found).version == (3, 13, 0)


@given(st.permutations([python((3, 8, 1)), python((3, 11, 9)), python((3, 12, 3), able=False)]))
def test_a_python_without_venv_is_answered_with_the_debian_package(found: list[Interpreter]) -> None:
    with pytest.raises(NoInterpreterError, match=r"apt-get install python3\.12-venv"):
        suitable(found)


@pytest.mark.parametrize(
    ("found", "seen"), [([], "none that runs"), ([python((3, 11, 2))], r"Python 3\.11\.2 \(/python11\)")]
)
def test_with_no_python_new_enough_the_ways_to_get_one_are_said(found: list[Interpreter], seen: str) -> None:
    with pytest.raises(
        NoInterpreterError,
        match=rf"this machine has: {seen}; install one .*pyenv install 3\.12.*make PYTHON=",
    ):
        suitable(found)


def write_program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_python_that_runs_answers_with_its_own_path_and_not_the_environments() -> None:
    answer = probe(sys.executable)
    assert answer is not None
    assert answer.version == tuple(sys.version_info[:3])
    assert ".venv" not in answer.path


@pytest.mark.parametrize(
    "body",
    ["echo 'pyenv: python3.12: command not found' >&2; exit 127", "echo hello", "echo '{}'", "echo '[1]'"],
)
def test_a_shim_that_fails_and_a_program_that_is_no_python_are_passed_over(tmp_path: Path, body: str) -> None:
    assert probe(str(write_program(tmp_path / "python3", body))) is None


def test_a_failing_shim_first_on_the_path_hides_no_python_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shims, real = tmp_path / "shims", tmp_path / "real"
    shims.mkdir()
    real.mkdir()
    for name in ("python3.12", "python3"):
        write_program(shims / name, "exit 127")
    write_program(real / "python3", f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{shims}:{real}:/usr/bin:/bin")
    assert find_interpreter("", os.environ) == probe(sys.executable)


def test_uv_is_asked_only_when_nothing_on_the_path_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "uv", f"echo {sys.executable}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(candidates(os.environ))[-1] == sys.executable
    assert find_interpreter("", os.environ) == probe(sys.executable)


def test_a_python_asked_for_that_does_not_run_is_an_error_and_no_other_is_taken() -> None:
    with pytest.raises(NoInterpreterError, match="PYTHON=/nowhere/python3.12: this does not run"):
        find_interpreter("/nowhere/python3.12", os.environ)


def test_the_preferred_python_is_the_oldest_allowed() -> None:
    assert ".".join(map(str, interpreter.OLDEST)) == interpreter.PREFERRED
