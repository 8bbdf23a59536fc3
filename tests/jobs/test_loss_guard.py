"""A run that has gone wrong is told by its own numbers, and one that has not is left alone."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.run_directory import RunDirectory
from jobs.flax_mlm.loss_guard import (
    AWAY_LIMIT_STEPS,
    USELESS_LIMIT_STEPS,
    WINDOW,
    LossGuard,
    Outlier,
    batch_file,
    save_batch,
)
from jobs.flax_mlm.tokenizer import load_tokenizer, open_tokenizer, train_tokenizer


def after(losses: list[float], grad_norm: float = 1.0) -> LossGuard:
    guard = LossGuard()
    for loss in losses:
        assert guard.check({"loss": loss, "grad_norm": grad_norm}) is None
    return guard


def found(guard: LossGuard, loss: float, grad_norm: float = 1.0) -> Outlier:
    outlier = guard.check({"loss": loss, "grad_norm": grad_norm})
    assert outlier is not None
    return outlier


def usual(seed: int = 0, spread: float = 0.1, steps: int = WINDOW) -> list[float]:
    return [random.Random(seed).gauss(3.0, spread) for _ in range(steps)]


@pytest.mark.parametrize(
    ("loss", "grad_norm", "symptom", "remedy", "is_skipped"),
    [
        (math.nan, math.nan, "the loss is nan (usually 3", "lower --learning-rate", True),
        (math.inf, math.nan, "the loss is inf (usually 3", "lower --learning-rate", True),
        (3.0, math.inf, "its gradient inf", "--dtype float32", True),
        (math.nan, 0.0, "only special tokens", "look at --data", True),
        (2.0, 0.0, "exactly 0", "look at --data", False),
        (5.5, 54.0, "leapt to 5.5 (usually 3", "lower --learning-rate", False),
    ],
)
def test_a_single_outlier_is_told_and_counted_and_ends_nothing_and_the_same_that_stays_ends_the_run(
    loss: float, grad_norm: float, symptom: str, remedy: str, is_skipped: bool
) -> None:
    guard = after(usual())
    outlier = found(guard, loss, grad_norm)
    assert symptom in str(outlier) and remedy not in str(outlier)
    assert (outlier.row, outlier.ends, guard.outliers, guard.skipped) == (1, False, 1, int(is_skipped))
    assert guard.check({"loss": 3.0, "grad_norm": 1.0}) is None
    limit = USELESS_LIMIT_STEPS if is_skipped or not grad_norm else AWAY_LIMIT_STEPS
    ends = [found(guard, loss, grad_norm) for _ in range(limit)]
    assert [outlier.ends for outlier in ends] == [False] * (limit - 1) + [True]
    assert (
        symptom in str(ends[-1])
        and f"last of {limit} outliers in a row" in str(ends[-1])
        and remedy in str(ends[-1])
    )
    assert (guard.outliers, guard.series) == (limit + 1, 2)


def test_outliers_of_different_kinds_follow_one_another_as_those_of_one_kind_and_change_nothing_usual() -> (
    None
):
    guard = after([3.0] * WINDOW)
    kinds = [(math.nan, math.nan), (9.0, 50.0)] * (AWAY_LIMIT_STEPS // 2)
    for number, kind in enumerate(kinds, 1):
        outlier = found(guard, *kind)
        assert "(usually 3)" in str(outlier)
        assert outlier.ends == (number == AWAY_LIMIT_STEPS)


def test_who_goes_on_all_the_same_has_the_new_level_for_usual_and_is_not_told_of_it_forever() -> None:
    guard = after([3.0] * WINDOW)
    assert [found(guard, 10.0).ends for _ in range(AWAY_LIMIT_STEPS)][-1]
    assert guard.row == 0
    for loss in [10.0] * (3 * WINDOW):
        assert guard.check({"loss": loss, "grad_norm": 1.0}) is None


@pytest.mark.parametrize(
    ("losses", "loss", "leaps"),
    [
        ([3.0] * (WINDOW - 1), 5.5, False),  # before it is known what is usual
        ([3.0] * WINDOW, 4.9, False),
        ([3.0] * WINDOW, 5.1, True),
        ([3.0, 4.0] * (WINDOW // 2), 9.0, False),  # where losses wander widely a leap is wider than they do
        ([3.0, 4.0] * (WINDOW // 2), 12.0, True),
    ],
)
def test_a_leap_is_two_nats_and_ten_spreads_above_what_is_usual(
    losses: list[float], loss: float, leaps: bool
) -> None:
    outlier = after(losses).check({"loss": loss, "grad_norm": 1.0})
    assert (outlier is not None) == leaps
    assert not leaps or "leapt" in str(outlier)


def test_a_loss_of_almost_nothing_ends_a_run_only_when_it_stays() -> None:
    quiet = after([1e-4] * WINDOW, grad_norm=1e-3)
    end = found(quiet, 1e-4)
    assert end.ends and "nothing is left to learn: look at --data" in str(end)
    assert after([*[1e-4] * (WINDOW - 1), 0.5]).check({"loss": 1e-4, "grad_norm": 1.0}) is None


STEP = st.tuples(st.sampled_from([3.0, 3.1, 12.0, math.nan, math.inf]), st.sampled_from([0.0, 1.0, math.inf]))


@given(st.lists(STEP, max_size=150), st.integers(0, 150))
def test_a_resumed_run_sees_the_outliers_and_the_end_that_one_which_nobody_disturbed_sees(
    then: list[tuple[float, float]], saved_after: int
) -> None:
    undisturbed = after(usual())
    resumed = after(usual())
    for step, (loss, grad_norm) in enumerate(then):
        if step == saved_after:
            resumed = LossGuard.from_notes(json.loads(json.dumps(resumed.notes())))
        values = {"loss": loss, "grad_norm": grad_norm}
        assert undisturbed.check(values) == resumed.check(values)
    assert undisturbed == resumed


@given(st.integers(0, 2**32), st.floats(0.01, 0.5), st.floats(1e-4, 0.1))
def test_a_run_that_learns_is_never_in_trouble(seed: int, spread: float, rate: float) -> None:
    """Noise as large as that of the smallest batches, on a curve that falls from ln V as fast or slowly as any."""
    noise = random.Random(seed)
    after([2.0 + 7.0 * math.exp(-rate * step) + noise.gauss(0, spread) for step in range(300)])


def test_the_batch_is_kept_with_its_text_for_a_person_to_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["the cat sat on the mat and the dog ate the hat"] * 20, 300, path)
    ids = open_tokenizer(path).encode("the cat sat", add_special_tokens=False).ids
    tokens: Any = SimpleNamespace(tokenizer=load_tokenizer(path))
    directory = RunDirectory(str(tmp_path / "run"))
    save_batch(directory, 7, "it leapt", tokens, np.array([ids, ids], np.int32))
    kept = directory.read_json(batch_file(7))
    assert kept is not None
    assert (kept["step"], kept["reason"], kept["tokens"]) == (7, "it leapt", [ids, ids])
    assert [text.strip() for text in kept["texts"]] == ["the cat sat"] * 2
