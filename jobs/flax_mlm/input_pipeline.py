"""Reads batches from the token cache onto the devices. What step t reads is a function of (seed, t) only, and a host
reads only the rows of its own devices."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh

from jobs.flax_mlm import sharding
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.corpus import Split
from jobs.flax_mlm.data import Tokens


class InputPipeline:
    """The sequences of a corpus as global arrays, whose rows are shared out over all devices."""

    def __init__(self, tokens: Tokens, config: Config, mesh: Mesh) -> None:
        self._tokens, self._config = tokens, config
        self._by_row = sharding.by_row(mesh)

    def sequences(self, split: Split) -> int:
        return self._tokens.sequences(split, self._config.sequence_length)

    def place(self, values_B: np.ndarray) -> jax.Array:
        """Place values that every host has, (B, …): each device is given its own rows of them."""
        return jax.make_array_from_callback(values_B.shape, self._by_row, lambda rows: values_B[rows])

    def step(self, step: int) -> jax.Array:
        """(B, S) tokens of a training step, from 1."""
        return self._rows("train", self._indices(step))

    def step_on_host(self, step: int) -> np.ndarray:
        """The same on this host, all rows of it."""
        return self._tokens.rows("train", self._indices(step), self._config.sequence_length)

    def held_out(self, indices_B: np.ndarray) -> jax.Array:
        """(B, S) tokens of these held-out sequences."""
        return self._rows("eval", indices_B)

    def _indices(self, step: int) -> np.ndarray:
        config = self._config
        return step_indices(
            step - 1, seed=config.seed, sequences=self.sequences("train"), batch_size=config.batch_size
        )

    def _rows(self, split: Split, indices_B: np.ndarray) -> jax.Array:
        length = self._config.sequence_length

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            return self._tokens.rows(split, indices_B[index[0] if index else slice(None)], length)

        return jax.make_array_from_callback((indices_B.size, length), self._by_row, read)


def step_indices(step: int, *, seed: int, sequences: int, batch_size: int) -> np.ndarray:
    """The training sequences of step `step` (from 0): (batch_size,) indices below `sequences`.

    An epoch is a permutation drawn from (seed, epoch); the sequences that do not fill a last batch wait for
    the next epoch's permutation.
    """
    epoch, place = divmod(step, sequences // batch_size)
    order = _epoch_order(seed, epoch, sequences)[place * batch_size : (place + 1) * batch_size]
    return order.astype("int64")


@functools.lru_cache(maxsize=1)
def _epoch_order(seed: int, epoch: int, sequences: int) -> np.ndarray:
    # A table, of four bytes a sequence (20 million: 80 MB, half a second), shuffled in place. A permutation that needs
    # no table would be another order, and with it every run another one.
    order = np.arange(sequences, dtype=np.uint32)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(order)
    return order
