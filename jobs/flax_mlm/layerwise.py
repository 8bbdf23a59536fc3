"""How a device applies a model of whose layers it holds only parts, or for which it has little memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jobs.flax_mlm import sharding
from jobs.flax_mlm.model import Apply, Layer, Mlm, plainly

type ModelOf = Callable[[Any], Callable[..., jax.Array]]
"""Parameters to what they make of the inputs of `Mlm.__call__`, but for `apply`."""


def model_of(graph: nnx.GraphDef[Mlm], params_specs: Any, *, remat: bool = False) -> ModelOf:
    """On each device: parameters, of which it may hold only a part, to the model.

    remat: of what a layer computes only its input is kept for the backward pass, and computed again from it.
    Matrices that had to be collected are not kept either: they are collected a second time.
    """
    apply = _layer_by_layer(params_specs, remat)

    def model(params: Any) -> Callable[..., jax.Array]:
        return functools.partial(nnx.merge(graph, _all_but_layers(params, params_specs)), apply=apply)

    return model


def _all_but_layers(params: Any, params_specs: Any) -> Any:
    """The parameters with all that is no layer's collected: the layers' are when their turn comes."""
    collected = {
        name: sharding.collect(params[name], params_specs[name]) for name in params if name != "layers"
    }
    return {**collected, "layers": params["layers"]}


def _layer_by_layer(params_specs: Any, remat: bool) -> Apply:
    """How a layer is applied on a device that may hold only a part of it."""
    layer_specs = params_specs["layers"][0]
    is_cut = any(spec == sharding.CUT for spec in jax.tree.leaves(layer_specs))
    if not is_cut and not remat:
        return plainly

    def apply(layer: Layer, *inputs: jax.Array | None) -> jax.Array:
        graph, state = nnx.split(layer)

        def applied(params: Any, *inputs: jax.Array | None) -> jax.Array:
            whole: Layer = nnx.merge(graph, sharding.collect(params, layer_specs))
            return plainly(whole, *inputs)

        checkpointed = jax.checkpoint(applied, policy=None if remat else _is_kept)
        result: jax.Array = checkpointed(nnx.to_pure_dict(state), *inputs)
        return result

    return apply


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is kept for the backward pass: not a collected matrix, nor a view of it."""
    return primitive.name not in (
        "all_gather",
        "transpose",
        "reshape",
        "slice",
        "squeeze",
    )
