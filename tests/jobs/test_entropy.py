"""The loss of guessing tokens by how frequent they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.flax_mlm import tokens as tokens_module
from jobs.flax_mlm.tokens import unigram_entropy


@given(st.lists(st.integers(5, 40), min_size=1, max_size=200), st.sampled_from([np.uint16, np.uint32]))
def test_unigram_entropy_is_the_loss_of_guessing_by_frequency(ids: list[int], dtype: type) -> None:
    loss = -sum(math.log(ids.count(token) / len(ids)) for token in ids) / len(ids)
    framed: np.ndarray = np.array([0, *ids, 2, 1, 60_000], dtype)
    assert unigram_entropy(framed, (0, 1, 2, 3, 60_000, 60_001)) == pytest.approx(loss)


def test_tokens_equally_frequent_have_the_logarithm_of_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_COUNT_AT_ONCE", 64)
    assert unigram_entropy(np.arange(1_000, dtype=np.uint16), ()) == pytest.approx(math.log(1_000))


@pytest.mark.parametrize("ids", [[], [0, 2]])
def test_without_a_plain_token_there_is_no_entropy(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="all special"):
        unigram_entropy(np.array(ids, np.uint16), (0, 1, 2))
