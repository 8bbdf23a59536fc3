"""Attention within rows that stand one after another, forwards and backwards in few operations: for CPUs.

Beside `scaled_dot_product_attention` of each block: a CPU spends more time on starting a block's small operations than
on computing them. Here one gather lays out the queries, keys and values of all blocks, and what is computed element by
element is computed of all blocks' scores at once (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from jobs.glue.batches import Array, Blocks, make_blocks, row_lengths

MOST_BLOCKS = 5
"""That rows are gathered into. More of them would pad fewer scores, and have more operations."""

type Tensors = list[torch.Tensor]


class Plan(NamedTuple):
    """Where each vector of a head stands: in the source, and in the layout, which has the queries, keys and values of
    each block as (rows, heads, positions).

    indices: five. `gather`: of each place of the layout, its vector in the source; a place that only fills a block
    repeats one. `scatter`: of each vector of the source, its place in the layout. `outputs`: of each query's place in
    the layout, its vector in the output; `places`: the other way round. `fill`: queries that only fill a block.
    keys: of each score, the token of its key; one beyond the last where that only fills the block.
    sizes: rows times heads, queries and keys of each block, one after another.
    """

    indices: list[torch.Tensor]
    keys: torch.Tensor
    sizes: list[int]


@functools.lru_cache(maxsize=8)
def make_plan(blocks: Blocks, heads: int, *, is_last: bool) -> Plan:
    """The plan for packed rows. is_last: queries are of each row's first token only.

    The source is (tokens, 3, heads): a token's queries, keys and values; in the last layer (rows, heads) queries and
    then (tokens, 2, heads) keys and values.
    """
    lengths_N = np.array(row_lengths(blocks))
    rows, tokens, begins_N = len(lengths_N), int(lengths_N.sum()), np.cumsum(lengths_N) - lengths_N
    by_head_H1 = np.arange(heads)[:, None]
    stride, first_key = (2 * heads, rows * heads) if is_last else (3 * heads, heads)
    gather: tuple[list[Array], ...] = ([], [], [])
    are_real: tuple[list[Array], ...] = ([], [], [])
    outputs, keys, sizes = [], [], []
    row = 0
    for count, length in make_blocks(lengths_N, MOST_BLOCKS):
        row_R1, row = np.arange(row, row + count)[:, None], row + count
        is_token_RS = np.arange(length) < lengths_N[row_R1]
        token_RS = begins_N[row_R1] + np.arange(length) * is_token_RS
        query_RM, is_query_RM = (row_R1, is_token_RS[:, :1]) if is_last else (token_RS, is_token_RS)
        key_RHS = token_RS[:, None] * stride + first_key + by_head_H1
        output_RHM = query_RM[:, None] * heads + by_head_H1
        query_RHM = output_RHM if is_last else key_RHS - first_key
        outputs.append(output_RHM.ravel())
        for part, block_indices in zip(gather, (query_RHM, key_RHS, key_RHS + heads), strict=True):
            part.append(block_indices.ravel())
        for part, block_indices in zip(are_real, (is_query_RM, is_token_RS, is_token_RS), strict=True):
            part.append(np.repeat(block_indices[:, None], heads, axis=1).ravel())
        scores = count, heads, query_RM.shape[1], length
        key_RS = np.where(is_token_RS, token_RS, tokens)
        keys.append(np.broadcast_to(key_RS[:, None, None], scores).ravel())
        sizes += [count * heads, *scores[2:]]
    vectors, is_vector = (np.concatenate([*q, *k, *v]) for q, k, v in (gather, are_real))
    output, is_output = np.concatenate(outputs), np.concatenate(are_real[0])
    scatter, places = _places(vectors, is_vector), _places(output, is_output)
    indices = vectors, scatter, output, places, np.nonzero(~is_output)[0]
    return Plan([*map(torch.from_numpy, indices)], torch.from_numpy(np.concatenate(keys)), sizes)


def _places(indices: Array, are_real: Array) -> Array:
    """Of each index its place among those that are real."""
    places = np.nonzero(are_real)[0]
    inverse = np.empty(len(places), np.int64)
    inverse[indices[places]] = places
    return inverse


def forward(
    source_XK: torch.Tensor,
    unseen_P: torch.Tensor,
    kept_P: torch.Tensor | None,
    indices: list[torch.Tensor],
    sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each query's vector, in the source's order, the values by softmax of q k / √K; and for the backward pass the
    layout, with q / √K, and the shares.

    unseen_P: float32, added to each score. kept_P: what each share is multiplied by, 0 where it is dropped.
    """
    gather, _, outputs, places, _ = indices
    laid_out_LK = source_XK.index_select(0, gather)
    laid_out_LK[: len(outputs)] *= laid_out_LK.shape[1] ** -0.5
    queries, keys, values = _parts(laid_out_LK, len(outputs), sizes)
    narrow_P = laid_out_LK.new_empty(len(unseen_P))
    for query, key, scores in zip(queries, keys, _pairs(narrow_P, sizes), strict=True):
        torch.bmm(query, key.mT, out=scores)
    scores_P = narrow_P + unseen_P
    shares_P = torch.empty_like(scores_P)
    for scores, shares in zip(_pairs(scores_P, sizes), _pairs(shares_P, sizes), strict=True):
        torch.softmax(scores, -1, out=shares)
    mixed_QK = laid_out_LK.new_empty(len(outputs), laid_out_LK.shape[1])
    mixing = _pairs(_times(shares_P, kept_P, mixed_QK.dtype), sizes)
    for shares, value, mixed in zip(mixing, values, _vectors(mixed_QK, sizes, 1), strict=True):
        torch.bmm(shares, value, out=mixed)
    return mixed_QK.index_select(0, places), laid_out_LK, shares_P


def backward(
    gradient_XK: torch.Tensor,
    laid_out_LK: torch.Tensor,
    shares_P: torch.Tensor,
    kept_P: torch.Tensor | None,
    indices: list[torch.Tensor],
    sizes: list[int],
) -> torch.Tensor:
    """The gradient of the source, from that of the results. Here d_x is the gradient of x."""
    _, scatter, outputs, _, fill = indices
    d_mixed_QK = gradient_XK.index_select(0, outputs).index_fill_(0, fill, 0)
    d_mixed = _vectors(d_mixed_QK, sizes, 1)
    queries, keys, values = _parts(laid_out_LK, len(outputs), sizes)
    d_laid_out_LK, d_mixing_P = torch.empty_like(laid_out_LK), laid_out_LK.new_empty(len(shares_P))
    d_queries, d_keys, d_values = _parts(d_laid_out_LK, len(outputs), sizes)
    mixing, d_mixing = (
        _pairs(each_P, sizes) for each_P in (_times(shares_P, kept_P, laid_out_LK.dtype), d_mixing_P)
    )
    for block, d_mix in enumerate(d_mixed):
        torch.bmm(mixing[block].mT, d_mix, out=d_values[block])
        torch.bmm(d_mix, values[block].mT, out=d_mixing[block])
    d_shares_P = _times(d_mixing_P, kept_P, shares_P.dtype)
    d_scores_P = torch.empty_like(d_shares_P)
    for d_shares, shares, d_scores in zip(
        *(_pairs(each_P, sizes) for each_P in (d_shares_P, shares_P, d_scores_P)), strict=True
    ):
        torch.ops.aten._softmax_backward_data.out(d_shares, shares, -1, shares.dtype, grad_input=d_scores)
    for block, d_scores in enumerate(_pairs(d_scores_P.to(laid_out_LK.dtype), sizes)):
        torch.bmm(d_scores, keys[block], out=d_queries[block])
        torch.bmm(d_scores.mT, queries[block], out=d_keys[block])
    d_laid_out_LK[: len(outputs)] *= laid_out_LK.shape[1] ** -0.5
    return d_laid_out_LK.index_select(0, scatter)


def _times(values_P: torch.Tensor, kept_P: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if kept_P is None:
        return values_P.to(dtype)
    return torch.mul(values_P, kept_P, out=torch.empty_like(values_P, dtype=dtype))


def _pairs(flat_P: torch.Tensor, sizes: list[int]) -> Tensors:
    """By block, (rows times heads, queries, keys)."""
    shapes = list(zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True))
    return [
        part.view(shape) for part, shape in zip(flat_P.split([*map(math.prod, shapes)]), shapes, strict=True)
    ]


def _parts(flat_LK: torch.Tensor, queries: int, sizes: list[int]) -> tuple[Tensors, Tensors, Tensors]:
    """The queries, keys and values of a layout, by block."""
    parts = flat_LK.split([queries, *2 * [(len(flat_LK) - queries) // 2]])
    return _vectors(parts[0], sizes, 1), _vectors(parts[1], sizes, 2), _vectors(parts[2], sizes, 2)


def _vectors(flat_LK: torch.Tensor, sizes: list[int], size_index: int) -> Tensors:
    """By block, (rows times heads, positions, head width)."""
    counts = list(zip(sizes[::3], sizes[size_index::3], strict=True))
    parts = flat_LK.split([*map(math.prod, counts)])
    return [part.view(*count, -1) for part, count in zip(parts, counts, strict=True)]
