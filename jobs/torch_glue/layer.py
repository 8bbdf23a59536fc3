"""A layer of the encoder, forwards and backwards in few operations: for CPUs.

Beside the layer of `encoder`, which autocast and autograd compute: here activations have one dtype throughout, nothing
is converted to float32 but statistics of norms and gradients of parameters (docs/benchmarks.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from jobs.torch_glue import attention

type Tensors = Sequence[torch.Tensor]


class Inputs(NamedTuple):
    """What a layer reads beside activations and parameters. is_last: it is computed at the rows' first tokens only.

    kept: what the shares of attention and the results of the layer's two parts are multiplied by; None: as they are.
    """

    begins_N: torch.Tensor
    plan: attention.Plan
    unseen_P: torch.Tensor
    kept: tuple[torch.Tensor | None, ...]
    head_width: int
    epsilon: float
    is_last: bool


def parameters(layer: Any) -> list[torch.Tensor]:
    """A layer's parameters in the order in which `Layer` takes them."""
    heads, out = layer.attention.self, layer.attention.output
    maps = heads.query, heads.key, heads.value, out.dense, layer.intermediate.dense, layer.output.dense
    parts = *maps, out.LayerNorm, layer.output.LayerNorm
    return [part.weight for part in parts] + [part.bias for part in parts]


class Layer(torch.autograd.Function):  # type: ignore[misc]
    """`Layer.apply(x_TD, inputs, *parameters)`: of x (tokens, width), (tokens or rows, width) in its dtype."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, inputs: Inputs, *parameters: torch.Tensor) -> torch.Tensor:
        begins_N, plan, unseen_P, kept, head_width, epsilon, is_last = inputs
        kept_P, *kept_parts = kept
        weights, biases = parameters[:8], parameters[8:]
        norms = [(weights[index], biases[index]) for index in (6, 7)]
        qkv, out, inner, outer = _narrow(weights, x_TD.dtype)
        qkv_bias, out_bias, inner_bias, outer_bias = _narrow(biases, x_TD.dtype)
        width = x_TD.shape[1]
        if is_last:
            pairs_TE = torch.addmm(qkv_bias[width:], x_TD, qkv[width:].T)
            from_MD = x_TD.index_select(0, begins_N)
            queries_MD = torch.addmm(qkv_bias[:width], from_MD, qkv[:width].T)
            source_XK = torch.cat([part.view(-1, head_width) for part in (queries_MD, pairs_TE)])
        else:
            from_MD = x_TD
            source_XK = torch.addmm(qkv_bias, x_TD, qkv.T).view(-1, head_width)
        seen_XK, *attended = attention.forward(source_XK, unseen_P, kept_P, plan.indices, plan.sizes)
        seen_MD = seen_XK.view(-1, width)
        part_MD = torch.addmm(out_bias, seen_MD, out.T)
        middle_MD, *middle = _add_and_norm(from_MD, part_MD, kept_parts[0], norms[0], epsilon)
        before_MF = torch.addmm(inner_bias, middle_MD, inner.T)
        after_MF = functional.gelu(before_MF)
        part_MD = torch.addmm(outer_bias, after_MF, outer.T)
        outputs_MD, *end = _add_and_norm(middle_MD, part_MD, kept_parts[1], norms[1], epsilon)
        ctx.inputs = inputs
        ctx.save_for_backward(
            *(x_TD, from_MD, *attended, seen_MD, middle_MD, before_MF, after_MF, *middle, *end),
            *(qkv, out, inner, outer, *norms[0], *norms[1]),
        )
        return outputs_MD

    @staticmethod
    def backward(ctx: Any, d_outputs_MD: torch.Tensor) -> tuple[Any, ...]:
        """The gradients of what `forward` takes. Here d_x is the gradient of x."""
        begins_N, plan, _, kept, head_width, _, is_last = ctx.inputs
        kept_P, *kept_parts = kept
        x_TD, from_MD, laid_out_LK, shares_P, seen_MD, middle_MD, before_MF, after_MF = ctx.saved_tensors[:8]
        middle, end, (qkv, out, inner, outer), *norms = (
            ctx.saved_tensors[first:last] for first, last in itertools.pairwise((8, 11, 14, 18, 20, 22))
        )
        width = x_TD.shape[1]
        d_end_MD, *d_norm_2 = _norm_backward(d_outputs_MD, end, norms[1])
        d_part_MD = _times(d_end_MD, kept_parts[1])
        d_outer = _of_map(d_part_MD, after_MF)
        d_before_MF = torch.ops.aten.gelu_backward(d_part_MD @ outer, before_MF)
        d_inner = _of_map(d_before_MF, middle_MD)
        d_middle_MD = torch.addmm(d_end_MD, d_before_MF, inner)
        d_sum_MD, *d_norm_1 = _norm_backward(d_middle_MD, middle, norms[0])
        d_part_MD = _times(d_sum_MD, kept_parts[0])
        d_out = _of_map(d_part_MD, seen_MD)
        d_seen_XK = (d_part_MD @ out).view(-1, head_width)
        d_source_XK = attention.backward(d_seen_XK, laid_out_LK, shares_P, kept_P, plan.indices, plan.sizes)
        if is_last:
            d_queries_XK, d_pairs_XK = d_source_XK.tensor_split([d_seen_XK.shape[0]])
            d_queries_MD, d_pairs_TE = d_queries_XK.view(-1, width), d_pairs_XK.view(-1, 2 * width)
            d_x_TD = d_pairs_TE @ qkv[width:]
            d_x_TD.index_add_(0, begins_N, torch.addmm(d_sum_MD, d_queries_MD, qkv[:width]))
            of_parts = _of_map(d_queries_MD, from_MD), _of_map(d_pairs_TE, x_TD)
            d_qkv = [torch.cat(part) for part in zip(*of_parts, strict=True)]
        else:
            d_qkv_TE = d_source_XK.view(-1, 3 * width)
            d_x_TD, d_qkv = torch.addmm(d_sum_MD, d_qkv_TE, qkv), [*_of_map(d_qkv_TE, x_TD)]
        of_weights, of_biases = (
            (*joint.chunk(3), *gradients)
            for joint, *gradients in zip(d_qkv, d_out, d_inner, d_outer, d_norm_1, d_norm_2, strict=True)
        )
        return d_x_TD, None, *of_weights, *of_biases


def _narrow(parameters: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    """The weights or biases of the four maps in a dtype, those of queries, keys and values as one."""
    return [torch.cat([*parameters[:3]]).to(dtype), *(value.to(dtype) for value in parameters[3:6])]


def _add_and_norm(
    x: torch.Tensor, part: torch.Tensor, kept: torch.Tensor | None, norm: Tensors, epsilon: float
) -> Tensors:
    """The norm of x and the part, of which some is dropped; their sum, its mean and its inverse deviation."""
    total = x + part if kept is None else torch.addcmul(x, part, kept)
    normal, mean, inverse = torch.native_layer_norm(total, norm[0].shape, *norm, epsilon)
    return normal, total, mean, inverse


def _times(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return x if kept is None else x * kept


def _norm_backward(d_normal: torch.Tensor, residuals: Tensors, norm: Tensors) -> Tensors:
    total, mean, inverse = residuals
    gradients: Tensors = torch.ops.aten.native_layer_norm_backward(
        d_normal.contiguous(), total, norm[0].shape, mean, inverse, *norm, [True, True, True]
    )
    return gradients


def _of_map(d_y: torch.Tensor, x: torch.Tensor) -> Tensors:
    """The gradients of the weight and the bias of a linear map of x, in float32."""
    return (d_y.T @ x).float(), d_y.sum(0).float()
