"""A run that has gone wrong is told by its own numbers, and one that has not is left alone."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.flax_mlm.tokenizer import load_tokenizer, open_tokenizer, train_tokenizer
from jobs.flax_mlm.watch import WINDOW, Watch, save_batch
from jobs.runtime.run_directory import RunDirectory


def after(losses: list[float], grad_norm: float = 1.0) -> Watch:
    watch = Watch()
    for loss in losses:
        assert watch.look({"loss": loss, "grad_norm": grad_norm}) is None
    return watch


def said(watch: Watch, loss: float, grad_norm: float = 1.0) -> str:
    found = watch.look({"loss": loss, "grad_norm": grad_norm})
    assert found is not None
    return found


def usual(seed: int = 0, spread: float = 0.1, steps: int = WINDOW) -> list[float]:
    return [random.Random(seed).gauss(3.0, spread) for _ in range(steps)]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_trouble_from_the_first_step_on(loss: float) -> None:
    assert f"the loss is {loss}" in said(Watch(), loss, math.nan)
    assert "lower --learning-rate" in said(after(usual()), loss, math.nan)


def test_a_gradient_that_is_not_finite_is_trouble_though_the_loss_is_well() -> None:
    assert "its gradient inf" in said(Watch(), 3.0, math.inf)


def test_a_batch_of_special_tokens_alone_is_told_from_a_model_that_came_apart() -> None:
    assert "special tokens alone" in said(Watch(), math.nan, 0.0)


def test_a_gradient_of_nothing_is_trouble() -> None:
    assert "exactly 0" in said(Watch(), 2.0, 0.0)


def test_a_leap_of_more_than_two_nats_is_trouble_once_it_is_known_what_is_usual() -> None:
    assert "leapt to 5.5" in said(after([3.0] * WINDOW), 5.5)
    assert after([3.0] * (WINDOW - 1)).look({"loss": 5.5, "grad_norm": 1.0}) is None
    assert after([3.0] * WINDOW).look({"loss": 4.9, "grad_norm": 1.0}) is None


def test_where_losses_wander_widely_a_leap_has_to_be_wider_than_they_do() -> None:
    wide = [3.0, 4.0] * (WINDOW // 2)
    assert after(wide).look({"loss": 9.0, "grad_norm": 1.0}) is None
    assert "leapt" in said(after(wide), 12.0)


def test_a_loss_of_almost_nothing_is_trouble_only_when_it_stays() -> None:
    quiet = Watch()
    for _ in range(WINDOW):
        assert quiet.look({"loss": 1e-4, "grad_norm": 1e-3}) is None
    assert "nothing is left to learn" in said(quiet, 1e-4)
    assert after([*[1e-4] * (WINDOW - 1), 0.5]).look({"loss": 1e-4, "grad_norm": 1.0}) is None


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
    name = save_batch(directory, 7, "it leapt", tokens, np.array([ids, ids], np.int32))
    kept = directory.read_json(name)
    assert kept is not None
    assert (kept["step"], kept["reason"], kept["tokens"]) == (7, "it leapt", [ids, ids])
    assert [text.strip() for text in kept["texts"]] == ["the cat sat"] * 2
