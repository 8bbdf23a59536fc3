"""The end of a run looked at more closely: pseudo-perplexity, and held-out sentences with fillings to read.

Pseudo-perplexity (Salazar et al. 2020, arXiv:1910.14659, section 2.2) is exp of the mean surprise, in nats, at each
token of a text when that token alone is hidden. It is taken over whole held-out sequences, spread evenly over the
held-out text, special tokens left out.

What it costs: a forward pass of one row for each token, so it is bounded: MOST_ROWS rows, and no more than SHARE of the
rows that the run has trained on (a forward pass is a third of a training step, so under 2 % of the run's time), but one
sequence at least. A mean over 2,048 tokens whose surprise varies by 2 or 3 nats is good to about 0.06 nats, the
perplexity to 6 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jobs.flax_mlm.fillings import Place, filling, readable
from jobs.flax_mlm.guess import Guess
from jobs.flax_mlm.tokenizer import TokenizerFacts, open_tokenizer

MOST_ROWS = 2048
SHARE = 1 / 20


def sample(*, sequences: int, length: int, trained_rows: int) -> np.ndarray:
    """The held-out sequences that are looked at, (N,) indices, spread evenly."""
    rows = min(MOST_ROWS, int(trained_rows * SHARE))
    count = max(1, min(sequences, rows // length))
    return np.linspace(0, sequences - 1, count).round().astype(np.int64)


def look(
    guess: Guess,
    params: Any,
    rows_NS: np.ndarray,
    tokenizer: TokenizerFacts,
    place: Callable[[np.ndarray], jax.Array],
    *,
    batch_size: int,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """`pseudo_perplexity` and `fillings` for result.json. Every process makes the same call.

    Args:
        guess: see guess.make_sharded_guess, compiled so that what it returns is whole on every device.
        rows_NS: whole held-out sequences, the same on all processes.
        place: (B, …) values to an array over all devices.
        tick: called at every sign of progress.
    """
    places = hidden_places(rows_NS, tokenizer.special_ids)
    nats, best = [], []
    for first in range(0, len(places), batch_size):
        several = places[first : first + batch_size]
        filled = [*several, *[several[-1]] * (batch_size - len(several))]
        rows_B = np.array([each.row for each in filled])
        positions_B1 = np.array([[each.position] for each in filled], np.int32)
        inputs_BS = rows_NS[rows_B]
        truth_B1 = np.take_along_axis(inputs_BS, positions_B1, axis=1)
        np.put_along_axis(inputs_BS, positions_B1, tokenizer.mask_id, axis=1)
        guessed = guess(params, place(inputs_BS), place(positions_B1), place(truth_B1))
        nats += np.asarray(guessed.nats_BM)[: len(several), 0].tolist()
        pairs_B = zip(np.asarray(guessed.tokens_BMG), np.asarray(guessed.probabilities_BMG), strict=True)
        best += [
            list(zip(tokens[0].tolist(), shares[0].tolist(), strict=True)) for tokens, shares in pairs_B
        ][: len(several)]
        tick()
    reader = open_tokenizer(tokenizer.path)

    def decode(ids: Sequence[int]) -> str:
        return str(reader.decode(list(ids), skip_special_tokens=False))

    return {
        "pseudo_perplexity": math.exp(sum(nats) / len(nats)) if nats else None,
        "fillings": [
            filling(rows_NS[each.row], each.position, best[each.number], decode, tokenizer.special_ids)
            for each in readable(places, rows_NS, decode)
        ],
    }


def hidden_places(rows_NS: np.ndarray, special_ids: Sequence[int]) -> list[Place]:
    """Every ordinary token of every row, in order."""
    where = np.argwhere(~np.isin(rows_NS, list(special_ids)))
    return [Place(int(row), int(position), number) for number, (row, position) in enumerate(where)]
