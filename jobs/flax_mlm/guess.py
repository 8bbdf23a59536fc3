"""What the model would write in place of hidden tokens, and how surprised it is by what stands there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jobs.flax_mlm import sharding
from jobs.flax_mlm.layerwise import ModelOf, model_of
from jobs.flax_mlm.model import Mlm

BEST = 5
"""Guesses that are kept of each hidden token; G in shapes."""


class Guesses(NamedTuple):
    """Of M hidden tokens in each of B rows: the surprise at the true one, in nats, and the best guesses, best first."""

    nats_BM: jax.Array
    probabilities_BMG: jax.Array
    tokens_BMG: jax.Array


Guess = Callable[[Any, jax.Array, jax.Array, jax.Array], Guesses]


def make_guess(model: ModelOf) -> Guess:
    """(params, inputs_BS, positions_BM, truth_BM) to Guesses; to be compiled by the caller, or not."""

    def guess(params: Any, inputs_BS: jax.Array, positions_BM: jax.Array, truth_BM: jax.Array) -> Guesses:
        log_BMV = jax.nn.log_softmax(model(params)(inputs_BS, positions_BM))
        log_BMG, tokens_BMG = jax.lax.top_k(log_BMV, BEST)
        nats_BM = -jax.numpy.take_along_axis(log_BMV, truth_BM[..., None], axis=-1)[..., 0]
        return Guesses(nats_BM, jax.numpy.exp(log_BMG), tokens_BMG)

    return guess


def make_sharded_guess(graph: nnx.GraphDef[Mlm], mesh: Mesh, params: Any) -> Guess:
    """As `make_guess`, on devices that each have their own rows, and of such parameters as these perhaps only parts."""
    specs, rows = sharding.specs(params, mesh), sharding.ROWS
    guess = make_guess(model_of(graph, specs))
    return sharding.on_each_device(guess, mesh, (specs, rows, rows, rows), rows)
