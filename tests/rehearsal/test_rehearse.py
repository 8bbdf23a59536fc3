"""The story ends well only if everything in it came true, and is taken down whatever happens.

`make rehearse` itself, with real parts, is run by tests/test_readme.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rehearsal import rehearse
from rehearsal.rehearse import Story, StoryError, compare_losses, read_losses, run_id_in, step_in


@pytest.mark.parametrize(
    ("accident", "left", "code"),
    [
        (None, [], 0),
        (None, ["tpu-stack-x-w-0"], 1),
        (StoryError("the losses differ"), [], 1),
        (rehearse.NotBegunError("no Docker"), [], 2),
        (KeyboardInterrupt(), [], 130),
    ],
)
def test_however_the_story_ends_it_is_taken_down_and_only_a_good_end_is_code_0(
    monkeypatch: pytest.MonkeyPatch, accident: BaseException | None, left: list[str], code: int
) -> None:
    def tell(*_: object, **__: object) -> None:
        if accident:
            raise accident

    typed: list[str] = []
    lines: list[str] = []
    monkeypatch.setattr(rehearse, "tell", tell)
    monkeypatch.setattr(Story, "type", lambda _, line: typed.append(line))
    monkeypatch.setattr(rehearse, "what_is_left", lambda name, folder: left)
    assert rehearse.rehearse(2, {}, lines.append) == code
    assert typed == ["fab rehearsal down"]
    assert any("came true" in line for line in lines) == (code == 0)


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
