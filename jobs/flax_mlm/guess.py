"""What the model would write in place of hidden tokens, and how surprised it is by what stands there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from jobs.flax_mlm import sharding
from jobs.flax_mlm.layerwise import all_but_layers, layer_by_layer
from jobs.flax_mlm.model import Apply, Mlm, plainly

BEST = 5
"""Guesses that are kept of each hidden token; G in shapes."""


class Guesses(NamedTuple):
    """Of M hidden tokens in each of B rows: the surprise at the true one, in nats, and the best guesses, best first."""

    nats_BM: jax.Array
    probabilities_BMG: jax.Array
    tokens_BMG: jax.Array


Guess = Callable[[Any, jax.Array, jax.Array, jax.Array], Guesses]


def make_guess(graph: nnx.GraphDef[Mlm], mesh: Mesh | None = None, params: Any = None) -> Guess:
    """(params, inputs_BS, positions_BM, truth_BM) to Guesses; to be compiled by the caller, or not.

    mesh, params: of devices that each have their own rows, and such parameters as they hold, perhaps each a part. None:
    a single device with all of it.
    """
    if mesh is not None:
        specs = sharding.specs(params, mesh)
        rows = sharding.ROWS
        guess_there = _guess(
            lambda there: nnx.merge(graph, all_but_layers(there, specs)), layer_by_layer(specs)
        )
        return sharding.on_each_device(guess_there, mesh, (specs, rows, rows, rows), rows)
    return _guess(lambda whole: nnx.merge(graph, whole), plainly)


def _guess(model_of: Callable[[Any], Mlm], apply: Apply) -> Guess:

    def guess(params: Any, inputs_BS: jax.Array, positions_BM: jax.Array, truth_BM: jax.Array) -> Guesses:
        log_BMV = jax.nn.log_softmax(model_of(params)(inputs_BS, positions_BM, apply=apply))
        log_BMG, tokens_BMG = jax.lax.top_k(log_BMV, BEST)
        nats_BM = -jax.numpy.take_along_axis(log_BMV, truth_BM[..., None], axis=-1)[..., 0]
        return Guesses(nats_BM, jax.numpy.exp(log_BMG), tokens_BMG)

    return guess
