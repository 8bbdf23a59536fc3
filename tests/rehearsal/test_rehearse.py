"""The story ends well only if everything in it came true, and is taken down whatever happens."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rehearsal import rehearse
from rehearsal.rehearse import STEPS, compare_losses, read_losses, run_id_in, step_in

# A `fab` that writes down what is typed and does what `tell` needs; $FAILS and $LOSS make it misbehave.
FAB = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in $FAILS) exit 1 ;; esac
case "$1" in
  status) state=running; case "$*" in *kept*) [ -e "$LOG.preempted" ] && state=done ;; esac
          echo "some-id  $state  step $STEPS/$STEPS  loss 1.0" ;;
  rehearsal) case "$*" in *preempt*) grep -q "name kept" "$LOG" && touch "$LOG.preempted" ;; esac; true ;;
  runs) echo "run name job"; echo "a-1 undisturbed flax_mlm"; echo "b-2 disturbed flax_mlm"; echo "c-3 kept flax_mlm" ;;
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

    def told(
        *, fails: str = "nothing", loss: str = "1.0", kubernetes: bool = False
    ) -> tuple[int, list[str], list[str]]:
        log = tmp_path / "typed"
        environ = {
            "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
            "LOG": str(log), "FAILS": fails, "LOSS": loss, "STEPS": str(STEPS),
        }  # fmt: skip
        said: list[str] = []
        code = rehearse.rehearse(2, environ, said.append, kubernetes=kubernetes)
        return code, log.read_text().splitlines(), said

    return told


def test_the_story_is_told_to_its_end_every_command_is_shown_and_it_is_taken_down(try_it: Rehearse) -> None:
    code, typed, said = try_it()
    assert code == 0, said
    acts = [words for words in typed if words.split()[0] not in ("status", "runs", "get")]
    assert [" ".join(line.split()[:2]) for line in acts] == [
        "rehearsal up", "deploy --stack", "train --stack", "train --stack", "rehearsal kill", "recover --stack",
        "rehearsal preempt", "recover --stack", "train --stack", "rehearsal preempt", "keeper status",
        "rehearsal down",
    ]  # fmt: skip
    shown = [" ".join(shlex.split(line)[2:]) for line in said if line.startswith("$ fab ")]
    behind_the_scenes = ("status", "runs")
    assert [line for line in typed if line.split()[0] not in behind_the_scenes] == [
        line for line in shown if line.split()[0] not in behind_the_scenes
    ]


def test_on_a_cluster_nobody_mends_anything_by_hand(
    try_it: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse.Story, "until_done", lambda self, run: None)
    monkeypatch.setattr(rehearse, "fetch_from_bucket", lambda story, run_id, to: write_losses(to))
    monkeypatch.setattr(rehearse, "POD_STEPS", STEPS)
    monkeypatch.setattr(rehearse, "FIRST_OF_PODS", STEPS)
    monkeypatch.setattr(rehearse, "SECOND_OF_PODS", STEPS)
    monkeypatch.setattr(rehearse, "PROGRESS_LIMIT_S", 3)
    code, _, said = try_it(kubernetes=True)
    assert code == 1 and any("is not at step" in line for line in said), (
        said
    )  # never started again: no accident has struck it
    monkeypatch.setattr(rehearse, "attempt_in", lambda status: 2)
    code, typed, said = try_it(kubernetes=True)
    assert code == 0, said
    typed = typed[typed.index("rehearsal down") + 1 :]
    assert [" ".join(line.split()[:2]) for line in typed if line.split()[0] not in ("status", "runs")] == [
        "build --framework", "rehearsal up", "train --stack", "train --stack", "rehearsal kill-pod", "rehearsal drain",
        "rehearsal node-back", "rehearsal down",
    ]  # fmt: skip


def write_losses(target: Path) -> None:
    target.write_text(json.dumps({"step": STEPS, "loss": 1.0}) + "\n")


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ({"fails": "rehearsal?up*"}, 2, "what is missing is said above"),
        ({"fails": "train*--detach"}, 1, "ended with exit code 1, expected 0"),
        ({"fails": "recover*"}, 1, "ended with exit code 1, expected 0"),
        ({"fails": "get*"}, 1, "ended with exit code 1, expected 0"),
        ({"fails": "rehearsal?down"}, 1, "ended with exit code 1, expected 0"),
        ({"loss": "1.1"}, 1, "are not those of the undisturbed one"),
    ],
)
def test_what_goes_wrong_ends_the_story_is_told_by_the_exit_code_and_it_is_taken_down(
    try_it: Rehearse, wrong: dict[str, str], code: int, words: str
) -> None:
    found, typed, said = try_it(**wrong)
    assert (found, typed[-1]) == (code, "rehearsal down")
    assert any(words in line for line in said) and not any("came true" in line for line in said)


def test_something_that_is_left_or_an_interrupt_is_no_happy_end(
    try_it: Rehearse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse, "what_is_left", lambda name, folder: ["tpu-stack-x-w-0"])
    code, typed_before, said = try_it()
    assert code == 1 and any("tpu-stack-x-w-0" in line for line in said)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearse, "tell", interrupted)
    code, typed, _ = try_it()
    assert code == 130 and typed[len(typed_before) :] == ["rehearsal down"]


@pytest.mark.parametrize(
    ("status", "step", "ended"),
    [
        ("x-1  running  step 120/300  loss 3.2  attempt 1", 120, False),
        ("x-1  starting  step 0/?", 0, False),
        ("error: none", None, False),
        ("x-1  failed  step 57/100  loss 6.384", 57, True),
        ("x-1  done  step 9/9", 9, True),
    ],
)
def test_how_far_a_run_is_and_whether_it_is_over_is_read_from_what_fab_status_says(
    status: str, step: int | None, ended: bool
) -> None:
    assert (step_in(status), rehearse.has_ended(status)) == (step, ended)
    with pytest.raises(rehearse.StoryError, match="disturbed"):  # and no other run is taken
        run_id_in("run name\na-1 undisturbed flax_mlm", "disturbed")


WANTED = {10: 5.0, 20: 4.0, 30: 3.0}


@pytest.mark.parametrize(
    ("found", "steps", "equal", "words"),
    [
        (dict(WANTED), 30, True, "all 3 losses are equal to the last digit"),
        ({**WANTED, 20: 4.00001}, 30, True, "apart by at most 2.5e-06"),
        ({10: 5.0, 20: 4.0}, 30, False, "not the same steps"),  # ended early
        ({10: 5.0, 30: 3.0}, 30, False, "only in one: 20"),
        ({**WANTED, 40: 2.0}, 30, False, "only in one: 40"),
        ({10: 5.0, 20: 4.001, 30: 3.0}, 30, False, "apart by"),
        (dict(WANTED), 40, False, "40 expected"),  # neither got to the end
        ({}, 30, False, "not the same steps"),
        ({10: 5.0, 20: float("nan"), 30: 3.0}, 30, False, "apart by"),
    ],
)
def test_curves_are_equal_only_if_they_are_so_at_every_step_but_for_rounding(
    found: dict[int, float], steps: int, equal: bool, words: str
) -> None:
    compared, lines = compare_losses(WANTED, found, name="kept", steps=steps)
    assert (compared, words in lines[-1]) == (equal, True)
    assert lines[0].split() == ["step", "undisturbed", "kept"]


def test_a_step_computed_twice_counts_as_it_was_last_and_evaluations_do_not_count(tmp_path: Path) -> None:
    lines = [{"step": 10, "loss": 9.0}, {"step": 10, "eval_loss": 1.0}, {"step": 10, "loss": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_losses(tmp_path / "metrics.jsonl") == {10: 5.0}
