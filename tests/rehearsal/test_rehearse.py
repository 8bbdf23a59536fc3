"""The story ends well only if everything in it came true, and is taken down whatever happens."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rehearsal import rehearse
from rehearsal.rehearse import STEPS, compare_losses, read_losses, run_id_in, step_in

# A `fab` that writes down what is typed and does what `tell` needs; $FAILS and $LOSS make it misbehave.
FAB = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in $FAILS) exit 1 ;; esac
case "$1" in
  status) echo "some-id  running  step $STEPS/$STEPS  loss 1.0" ;;
  runs) echo "run name job"; echo "a-1 undisturbed flax_mlm"; echo "b-2 disturbed flax_mlm" ;;
  get) for target; do :; done
       loss=1.0; case "$*" in *b-2*) loss=$LOSS ;; esac
       echo "{\\"step\\": $STEPS, \\"loss\\": $loss}" > "$target" ;;
esac
"""

Rehearse = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def try_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Tells the story with that fab: exit code, what was typed, what was said."""
    stand_in = tmp_path / "bin" / "fab"
    stand_in.parent.mkdir()
    stand_in.write_text(FAB)
    stand_in.chmod(0o755)
    monkeypatch.setattr(rehearse, "what_is_left", lambda name, folder: [])
    monkeypatch.setattr(rehearse, "environment", lambda environ, folder: dict(environ))

    def told(*, fails: str = "nothing", loss: str = "1.0") -> tuple[int, list[str], list[str]]:
        log = tmp_path / "typed"
        environ = {
            "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
            "LOG": str(log), "FAILS": fails, "LOSS": loss, "STEPS": str(STEPS),
        }  # fmt: skip
        said: list[str] = []
        code = rehearse.rehearse(2, environ, said.append)
        return code, log.read_text().splitlines(), said

    return told


def test_the_story_is_told_to_its_end_and_taken_down(try_it: Rehearse) -> None:
    code, typed, said = try_it()
    assert code == 0, said
    acts = [words for words in typed if words.split()[0] not in ("status", "runs", "get")]
    assert [" ".join(line.split()[:2]) for line in acts] == [
        "rehearsal up", "deploy --stack", "train --stack", "train --stack", "rehearsal kill", "recover --stack",
        "rehearsal preempt", "recover --stack", "rehearsal down",
    ]  # fmt: skip


def test_every_command_is_shown_before_it_is_run(try_it: Rehearse) -> None:
    _, typed, said = try_it()
    shown = [" ".join(shlex.split(line)[2:]) for line in said if line.startswith("$ fab ")]
    behind_the_scenes = ("status", "runs")
    assert [line for line in typed if line.split()[0] not in behind_the_scenes] == [
        line for line in shown if line.split()[0] not in behind_the_scenes
    ]


def test_a_rehearsal_that_cannot_be_had_is_no_story_that_went_wrong(try_it: Rehearse) -> None:
    code, typed, said = try_it(fails="rehearsal?up*")
    assert (code, typed[-1]) == (2, "rehearsal down")
    assert any("what is missing is said above" in line for line in said)


@pytest.mark.parametrize("fails", ["deploy*", "train*--detach", "recover*", "get*", "rehearsal?pre*"])
def test_a_step_that_fails_ends_the_story_and_it_is_taken_down(try_it: Rehearse, fails: str) -> None:
    code, typed, said = try_it(fails=fails)
    assert code == 1
    assert typed[-1] == "rehearsal down"
    assert any("not as it should be" in line for line in said)


def test_losses_that_differ_are_no_happy_end(try_it: Rehearse) -> None:
    code, typed, said = try_it(loss="1.1")
    assert code == 1 and typed[-1] == "rehearsal down"
    assert not any("came true" in line for line in said)


def test_a_rehearsal_that_cannot_be_taken_down_is_no_happy_end(try_it: Rehearse) -> None:
    code, _, said = try_it(fails="rehearsal?down")
    assert code == 1 and not any("came true" in line for line in said)


def test_something_that_is_left_is_no_happy_end(try_it: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "what_is_left", lambda name, folder: ["tpu-stack-x-w-0"])
    code, _, said = try_it()
    assert code == 1 and any("tpu-stack-x-w-0" in line for line in said)


def test_ctrl_c_takes_it_down_and_is_told_by_the_exit_code(
    try_it: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearse, "tell", interrupted)
    code, typed, _ = try_it()
    assert code == 130 and typed == ["rehearsal down"]


def test_its_commands_have_a_rehearsal_of_their_own_that_ends_with_it(tmp_path: Path) -> None:
    given: Mapping[str, str] = {"PATH": "/bin", "TPU_STACK_REHEARSAL": "/elsewhere"}
    made = rehearse.environment(given, tmp_path)
    assert made["TPU_STACK_REHEARSAL"] == str(tmp_path)
    assert made["TPU_STACK_REHEARSAL_OWNER"] == str(os.getpid())
    assert int(made["COLUMNS"]) > 120  # or the list of runs shortens their ids


@pytest.mark.parametrize(
    ("status", "step"),
    [
        ("x-1  running  step 120/300  loss 3.2  attempt 1", 120),
        ("x-1  starting  step 0/?", 0),
        ("error: none", None),
    ],
)
def test_the_step_of_a_run_is_read_from_what_fab_status_says(status: str, step: int | None) -> None:
    assert step_in(status) == step


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        ("x-1  failed  step 57/100  loss 6.384", True),
        ("x-1  done  step 9/9", True),
        ("x-1  running  step 1/9", False),
    ],
)
def test_a_run_that_is_over_is_not_waited_for(status: str, ended: bool) -> None:
    assert rehearse.has_ended(status) is ended


def test_a_run_that_is_not_listed_is_an_error_and_no_other_run_is_taken() -> None:
    with pytest.raises(rehearse.StoryError, match="disturbed"):
        run_id_in("run name\na-1 undisturbed flax_mlm", "disturbed")


WANTED = {10: 5.0, 20: 4.0, 30: 3.0}


def test_equal_curves_are_equal_to_the_last_digit() -> None:
    compared = compare_losses(WANTED, dict(WANTED), steps=30)
    assert compared.equal and compared.lines[-1] == "all 3 losses are equal to the last digit"


@pytest.mark.parametrize(
    ("found", "steps"),
    [
        ({10: 5.0, 20: 4.0}, 30),  # ended early
        ({10: 5.0, 30: 3.0}, 30),  # a step is missing
        ({**WANTED, 40: 2.0}, 30),  # went on too long
        ({10: 5.0, 20: 4.001, 30: 3.0}, 30),
        (dict(WANTED), 40),  # neither got to the end
        ({}, 30),
        ({10: 5.0, 20: float("nan"), 30: 3.0}, 30),
    ],
)
def test_a_curve_that_differs_anywhere_is_not_equal(found: dict[int, float], steps: int) -> None:
    assert not compare_losses(WANTED, found, steps=steps).equal


def test_no_losses_at_all_are_not_equal() -> None:
    assert not compare_losses({}, {}, steps=30).equal


def test_rounding_is_allowed_and_told() -> None:
    compared = compare_losses(WANTED, {**WANTED, 20: 4.00001}, steps=30)
    assert compared.equal and "apart by at most 2.5e-06" in compared.lines[-1]


def test_a_step_computed_twice_counts_as_it_was_last_and_evaluations_do_not_count(tmp_path: Path) -> None:
    lines = [{"step": 10, "loss": 9.0}, {"step": 10, "eval_loss": 1.0}, {"step": 10, "loss": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_losses(tmp_path / "metrics.jsonl") == {10: 5.0}
