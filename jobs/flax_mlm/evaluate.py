"""How well the model guesses held-out tokens: every evaluation hides the same ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """loss: mean cross-entropy in nats over the hidden tokens; accuracy: share of them guessed."""

    loss: float
    accuracy: float


def evaluate(
    eval_step: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array],
    params: Any,
    rows_of: Callable[[np.ndarray], jax.Array],
    place: Callable[[np.ndarray], jax.Array],
    *,
    sequences: int,
    batch_size: int,
    tick: Callable[[], None],
) -> Evaluation:
    """Evaluate the first `sequences` held-out sequences, a batch at a time; the last batch is filled up.

    Args:
        eval_step: see step.make_eval_step.
        rows_of: (B,) indices of held-out sequences to (B, S) tokens over all devices.
        place: (B,) values to an array over all devices.
        tick: called at every sign of progress.
    """
    sums, totals = [], []
    for first in range(0, sequences, batch_size):
        places_B = np.arange(first, first + batch_size)
        rows_B = np.minimum(places_B, sequences - 1).astype(np.int32)
        counts_B = (places_B < sequences).astype(np.float32)
        sums.append(eval_step(params, rows_of(rows_B), place(rows_B), place(counts_B)))
        tick()
    for batch in sums:
        totals.append(np.asarray(batch, dtype=np.float64))
        tick()
    nats, hits, hidden = np.sum(totals, axis=0)
    return Evaluation(loss=float(nats / hidden), accuracy=float(hits / hidden))
