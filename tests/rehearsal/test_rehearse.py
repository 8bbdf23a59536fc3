"""The story ends well only if everything in it came true, and is taken down whatever happens.

`make rehearse` itself, with real parts, is run by tests/test_readme.py."""

import pytest

from rehearsal import rehearse
from rehearsal.rehearse import Story, StoryError, compare_losses


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
