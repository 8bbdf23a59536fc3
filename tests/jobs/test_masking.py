"""Masking hides a fixed number of ordinary tokens by BERT's rule, and depends on the key and the row alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.flax_mlm.masking import Masked, MaskRule, mask, slots_for

pytestmark = pytest.mark.usefixtures("two_devices")

SPECIAL = (0, 1, 2, 3, 49)
RULE = MaskRule(slots=4, mask_id=49, special_ids=SPECIAL, vocab_size=50)
ROWS, LENGTH = 8, 24

masked_by_rule = jax.jit(lambda seed, tokens_BS, rows_B: mask(RULE, jax.random.key(seed), tokens_BS, rows_B))


def masked(seed: int, tokens_BS: np.ndarray, rows_B: np.ndarray | None = None) -> Masked:
    rows_B = np.arange(len(tokens_BS)) if rows_B is None else rows_B
    return Masked(*(np.asarray(part) for part in masked_by_rule(seed, tokens_BS, rows_B)))  # type: ignore[arg-type]


@st.composite
def batches(draw: st.DrawFn) -> np.ndarray:
    """Eight rows with many special tokens, some rows with hardly anything else."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens_BS = random.integers(4, 49, (ROWS, LENGTH))
    special_BS = random.random((ROWS, LENGTH)) < random.choice([0.0, 0.1, 0.9, 1.0], (ROWS, 1))
    return np.where(special_BS, random.choice(SPECIAL, (ROWS, LENGTH)), tokens_BS).astype(np.int32)


@settings(max_examples=40)
@given(batches(), st.integers(0, 2**31))
def test_every_row_has_exactly_its_slots_and_no_token_is_chosen_twice(
    tokens_BS: np.ndarray, seed: int
) -> None:
    result = masked(seed, tokens_BS)
    assert result.positions_BM.shape == (ROWS, 4)
    assert all(len(set(positions_M.tolist())) == 4 for positions_M in np.asarray(result.positions_BM))
    ordinary_B = (~np.isin(tokens_BS, SPECIAL)).sum(axis=1)
    np.testing.assert_array_equal(np.asarray(result.weights_BM).sum(axis=1), np.minimum(ordinary_B, 4))


@settings(max_examples=40)
@given(batches(), st.integers(0, 2**31))
def test_special_tokens_are_never_hidden_and_what_is_not_chosen_stays(
    tokens_BS: np.ndarray, seed: int
) -> None:
    result = masked(seed, tokens_BS)
    rows_BM = np.arange(ROWS)[:, None]
    np.testing.assert_array_equal(tokens_BS[rows_BM, result.positions_BM], result.targets_BM)
    assert not np.isin(np.asarray(result.targets_BM)[np.asarray(result.weights_BM) == 1], SPECIAL).any()
    chosen_BS = np.zeros(tokens_BS.shape, bool)
    chosen_BS[rows_BM, result.positions_BM] = np.asarray(result.weights_BM) == 1
    np.testing.assert_array_equal(np.asarray(result.inputs_BS)[~chosen_BS], tokens_BS[~chosen_BS])


@settings(max_examples=40)
@given(batches(), st.integers(0, 2**31), st.integers(1, ROWS - 1))
def test_a_row_is_masked_the_same_in_whatever_batch_it_stands(
    tokens_BS: np.ndarray, seed: int, cut: int
) -> None:
    whole = masked(seed, tokens_BS)
    parts = [masked(seed, tokens_BS[rows], np.arange(ROWS)[rows]) for rows in (slice(cut), slice(cut, None))]
    for together, first, second in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(together, np.concatenate([first, second]))


def test_another_row_and_another_key_hide_other_tokens() -> None:
    tokens_BS = np.tile(np.arange(4, 28, dtype=np.int32), (ROWS, 1))
    positions_BM = np.asarray(masked(0, tokens_BS).positions_BM)
    assert len({tuple(positions_M) for positions_M in positions_BM}) == ROWS
    assert not (positions_BM == masked(1, tokens_BS).positions_BM).all()


def test_of_the_hidden_tokens_80_percent_are_the_mask_10_random_and_10_themselves() -> None:
    # Token 10 throughout: what is neither 10 nor the mask is random; a random token is 10 once in 45 times.
    tokens_BS = np.full((4000, LENGTH), 10, np.int32)
    result = masked(0, tokens_BS)
    hidden = np.asarray(result.inputs_BS)[np.arange(4000)[:, None], result.positions_BM].ravel()
    share_mask, share_same = (hidden == 49).mean(), (hidden == 10).mean()
    assert share_mask == pytest.approx(0.8, abs=0.015)
    assert share_same == pytest.approx(0.1 + 0.1 / 45, abs=0.012)
    random = hidden[(hidden != 49) & (hidden != 10)]
    assert set(random.tolist()) == set(range(4, 49)) - {10}, (
        "every ordinary token, and none of the special ones"
    )


def test_every_ordinary_position_is_chosen_equally_often() -> None:
    tokens_BS = np.full((4000, LENGTH), 10, np.int32)
    tokens_BS[:, 0], tokens_BS[:, -1] = 0, 2
    positions = np.asarray(masked(5, tokens_BS).positions_BM).ravel()
    counts = np.bincount(positions, minlength=LENGTH)
    assert counts[[0, -1]].tolist() == [0, 0]
    expected = 4000 * 4 / (LENGTH - 2)
    assert (np.abs(counts[1:-1] - expected) < 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize(
    ("share", "length", "slots"), [(0.15, 64, 10), (0.15, 512, 77), (0.01, 8, 1), (0.9, 8, 7)]
)
def test_the_number_of_slots_is_the_share_rounded_and_at_least_one(
    share: float, length: int, slots: int
) -> None:
    assert slots_for(share, length) == slots


def test_what_becomes_of_a_token_does_not_depend_on_where_it_stands() -> None:
    """As it would if the choice of places and the fate of a place were drawn from one key."""
    tokens_BS = np.full((4000, LENGTH), 10, np.int32)
    result = masked(3, tokens_BS)
    positions, inputs = np.asarray(result.positions_BM), np.asarray(result.inputs_BS)
    is_mask = inputs[np.arange(4000)[:, None], positions] == 49
    shares = [is_mask[positions == place].mean() for place in range(LENGTH)]
    assert shares == pytest.approx([0.8] * LENGTH, abs=0.08)
    random = inputs[(inputs != 49) & (inputs != 10)]
    counts = np.bincount(random, minlength=49)[[token for token in range(4, 49) if token != 10]]
    assert (np.abs(counts - counts.mean()) < 5 * np.sqrt(counts.mean())).all()
