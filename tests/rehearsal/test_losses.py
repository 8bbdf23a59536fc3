"""Two curves are the same only if every step is there and every loss agrees."""

import json
from pathlib import Path

import pytest

from rehearsal.losses import compare, read

WANTED = {10: 5.0, 20: 4.0, 30: 3.0}


def test_equal_curves_are_equal_to_the_last_digit() -> None:
    compared = compare(WANTED, dict(WANTED), steps=30)
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
    assert not compare(WANTED, found, steps=steps).equal


def test_no_losses_at_all_are_not_equal() -> None:
    assert not compare({}, {}, steps=30).equal


def test_rounding_is_allowed_and_told() -> None:
    compared = compare(WANTED, {**WANTED, 20: 4.00001}, steps=30)
    assert compared.equal and "apart by at most 2.5e-06" in compared.lines[-1]


def test_a_step_computed_twice_counts_as_it_was_last_and_evaluations_do_not_count(tmp_path: Path) -> None:
    lines = [{"step": 10, "loss": 9.0}, {"step": 10, "eval_loss": 1.0}, {"step": 10, "loss": 5.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path / "metrics.jsonl") == {10: 5.0}
