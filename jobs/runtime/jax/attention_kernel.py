"""Attention of whole sequences as a Pallas kernel for TPUs: a sequence's scores are made, used and forgotten beside the
core, and queries, keys and values are read as their products write them, the heads side by side.

The operations and roundings are those of `custom_gradients.attention`. Splash attention, which JAX has, takes each
head's values as an array of its own: XLA copies them on the way there and back, in rows of 64 numbers that a TPU's
memory pads to 128 (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LANES = 128
"""Numbers that lie side by side in a register: so wide is a block, of one head or several."""
LEAST_POSITIONS = 256
"""Shorter sequences keep a kernel's units waiting for each other: XLA's own products take fewer cycles there."""
MOST_POSITIONS = 512
"""Of a block. A head's scores of so many positions take 1 MiB of the 16 that a kernel may use."""

type OfHead = Callable[..., tuple[jax.Array, ...]]
"""What a kernel computes of one head of one sequence: (its mask or None, its (S, K) inputs) to its (S, K) outputs."""


def takes(shape_BSHK: tuple[int, ...]) -> bool:
    """Whether attention of such queries, keys and values can be computed here."""
    _, length, heads, head_width = shape_BSHK
    return (
        length % LANES == 0
        and LEAST_POSITIONS <= length <= MOST_POSITIONS
        and LANES % head_width == 0
        and heads * head_width % LANES == 0
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attention(
    q_BSD: jax.Array,
    k_BSD: jax.Array,
    v_BSD: jax.Array,
    segments_BS: jax.Array | None,
    heads: int,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q k / √K) v of each of the heads, which lie side by side, (B, S, D), in q's dtype.

    segments_BS: whole numbers; a position sees those of its own number only. interpret: on a device that is no TPU,
    slowly, for tests.
    """
    return _forward(q_BSD, k_BSD, v_BSD, segments_BS, heads, interpret)[0]


def _forward(
    q_BSD: jax.Array,
    k_BSD: jax.Array,
    v_BSD: jax.Array,
    segments_BS: jax.Array | None,
    heads: int,
    interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    (mixed_BSD,) = _by_heads(_mixed, (q_BSD, k_BSD, v_BSD), segments_BS, heads, 1, interpret)
    return mixed_BSD, (q_BSD, k_BSD, v_BSD, segments_BS)


def _backward(
    heads: int, interpret: bool, residuals: tuple[jax.Array | None, ...], gradient_BSD: jax.Array
) -> tuple[jax.Array | None, ...]:
    *inputs, segments_BS = residuals
    return (*_by_heads(_gradients, (*inputs, gradient_BSD), segments_BS, heads, 3, interpret), None)


attention.defvjp(_forward, _backward)


def _mixed(
    mask_SS: jax.Array | None, q_SK: jax.Array, k_SK: jax.Array, v_SK: jax.Array
) -> tuple[jax.Array, ...]:
    exponentials_SS, sums_S1 = _exponentials(mask_SS, _scaled(q_SK), k_SK)
    return (_product(exponentials_SS, v_SK, (1, 0)) / sums_S1,)


def _gradients(
    mask_SS: jax.Array | None, q_SK: jax.Array, k_SK: jax.Array, v_SK: jax.Array, gradient_SK: jax.Array
) -> tuple[jax.Array, ...]:
    """Those of queries, keys and values. Exponentials are computed again: that takes less time than to keep them."""
    scaled_SK = _scaled(q_SK)
    exponentials_SS, sums_S1 = _exponentials(mask_SS, scaled_SK, k_SK)
    shared_SK = (gradient_SK / sums_S1).astype(q_SK.dtype)
    grad_shares_SS = _product(shared_SK, v_SK, (1, 1))
    along_S1 = (exponentials_SS * grad_shares_SS).sum(axis=-1, keepdims=True) / sums_S1
    grad_scores_SS = (exponentials_SS * (grad_shares_SS - along_S1)).astype(q_SK.dtype)
    return (
        _product(grad_scores_SS, k_SK, (1, 0)) * q_SK.shape[-1] ** -0.5,
        _product(grad_scores_SS, scaled_SK, (0, 0)),
        _product(exponentials_SS, shared_SK, (0, 0)),
    )


def _scaled(q_SK: jax.Array) -> jax.Array:
    scaled_SK: jax.Array = q_SK * q_SK.shape[-1] ** -0.5
    return scaled_SK


def _exponentials(
    mask_SS: jax.Array | None, scaled_SK: jax.Array, k_SK: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Those of the scores, in the dtype of the keys, and their sums."""
    scores_SS = _product(scaled_SK, k_SK, (1, 1))
    if mask_SS is not None:
        scores_SS = jnp.where(mask_SS, scores_SS, -jnp.inf)
    exponentials_SS = jnp.exp(scores_SS - scores_SS.max(axis=-1, keepdims=True)).astype(k_SK.dtype)
    return exponentials_SS, exponentials_SS.astype(jnp.float32).sum(axis=-1, keepdims=True)


def _product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The sum over these axes of x and y, in float32."""
    contracted = ((axes[:1], axes[1:]), ((), ()))
    product: jax.Array = jax.lax.dot_general(x, y, contracted, preferred_element_type=jnp.float32)
    return product


def _by_heads(
    head_kernel: OfHead,
    inputs: tuple[Any, ...],
    segments_BS: jax.Array | None,
    heads: int,
    outputs: int,
    interpret: bool,
) -> list[jax.Array]:
    """`of_head` of each head of each sequence of (B, S, D) inputs, to so many (B, S, D) outputs: a turn of the grid
    takes the heads of LANES columns, of as many sequences as have MOST_POSITIONS together."""
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    sequences, length, width = inputs[0].shape
    head_width = width // heads
    rows = max(count for count in range(1, MOST_POSITIONS // length + 1) if sequences % count == 0)
    block = pallas.BlockSpec((rows, length, LANES), lambda row, column: (row, 0, column))
    segments, segment_blocks = [], []
    if segments_BS is not None:
        segments = [segments_BS[:, :, None], segments_BS[:, None, :]]
        segment_blocks = [
            pallas.BlockSpec((rows, *ids_array.shape[1:]), lambda row, _: (row, 0, 0))
            for ids_array in segments
        ]

    def kernel(*refs: Any) -> None:
        ids, input_refs, output_refs = refs[: len(segments)], refs[len(segments) : -outputs], refs[-outputs:]
        for row in range(rows):
            mask_SS = ids[0][row] == ids[1][row] if ids else None
            for first in range(0, LANES, head_width):
                columns = slice(first, first + head_width)
                results = head_kernel(mask_SS, *(ref[row, :, columns] for ref in input_refs))
                for ref, result in zip(output_refs, results, strict=True):
                    ref[row, :, columns] = result.astype(ref.dtype)

    results: list[jax.Array] = pallas.pallas_call(
        kernel,
        grid=(sequences // rows, width // LANES),
        in_specs=[*segment_blocks, *[block] * len(inputs)],
        out_specs=[block] * outputs,
        out_shape=[jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)] * outputs,
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name=f"attention{head_kernel.__name__}",
    )(*segments, *inputs)
    return results
