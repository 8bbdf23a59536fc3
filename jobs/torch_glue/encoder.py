"""transformers' RoBERTa or BERT with a head, computed over packed rows: the same parameters, the same logits.

Beside transformers' own way through the model: products are of all rows' tokens at once, attention is of each block of
rows of one length, and the last layer is computed at the rows' first tokens only, which are all that the head reads. On
a CPU, layers with GELU (`layer`) and dropout are written by hand: torch's dropout draws each number apart, which took
more time than the products of a layer (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from jobs.glue.batches import Blocks, Packed, row_lengths
from jobs.torch_glue import attention
from jobs.torch_glue.layer import Inputs, Layer, parameters

WORD = 4
"""Numbers of 16 bits in one that is drawn."""


class Noise:
    """Whole numbers of 16 bits, all equally likely, each given out once. Without any, torch draws its own."""

    def __init__(self, numbers_N: torch.Tensor | None) -> None:
        self._left_N = numbers_N

    def drop(self, x: torch.Tensor, rate: float, training: bool) -> torch.Tensor:
        """Dropout; `rate` is rounded to a 65,536th."""
        if not training or rate == 0.0:
            return x
        if self._left_N is None:
            return functional.dropout(x, rate)
        return x * self.keep(x.numel(), rate, x.dtype).view(x.shape)

    def keep(self, values: int, rate: float, dtype: torch.dtype) -> torch.Tensor:
        """What to multiply so many values by: 0 for those that are dropped."""
        assert self._left_N is not None
        numbers_N, self._left_N = self._left_N[:values], self._left_N[values:]
        threshold = round(rate * 2**16) - 2**15
        if torch.compiler.is_compiling():
            kept_N = numbers_N >= threshold
        else:
            kept_N = torch.ge(numbers_N, threshold, out=torch.empty_like(numbers_N, dtype=dtype))
        return kept_N.to(dtype) * (1 / (1 - rate))


def draw(numbers: int) -> torch.Tensor:
    """So many numbers for `Noise`, by the seed that torch has been given: NumPy draws them in half the time."""
    raw = np.random.SFC64(torch.initial_seed()).random_raw(-(-numbers // WORD))
    return torch.from_numpy(raw.view(np.int16))


class Encoder(torch.nn.Module):  # type: ignore[misc]
    """A model of transformers whose rows are packed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        layers = model.base_model.encoder.layer
        for layer in layers:  # which stay what is called, as FSDP gathers the weights of a layer at its call
            layer.forward = functools.partial(_layer, layer, layer is layers[-1])

    def numbers(self, blocks: Blocks) -> int:
        """How many numbers of noise a step needs."""
        config = self.model.config
        rows, tokens = sum(rows for rows, _ in blocks), sum(rows * length for rows, length in blocks)
        layers, width = int(config.num_hidden_layers), int(config.hidden_size)
        pairs, first_pairs = (len(plan.keys) for plan in self.plans(blocks))
        all_tokens = tokens * width + (layers - 1) * (2 * tokens * width + pairs)
        first_tokens = first_pairs + 4 * rows * width  # of the last layer, and of the head
        return all_tokens + first_tokens

    def plans(self, blocks: Blocks) -> tuple[attention.Plan, attention.Plan]:
        """How a CPU's attention lays out the rows: in all layers, and in the last."""
        heads = int(self.model.config.num_attention_heads)
        return attention.make_plan(blocks, heads, is_last=False), attention.make_plan(
            blocks, heads, is_last=True
        )

    def arguments(self, batch: Packed, place: Any) -> dict[str, Any]:
        """What `forward` reads of a batch of one share, on the device."""
        arguments = {
            name: place(getattr(batch, f"{name}_GT")[0]) for name in ("ids", "mask", "types", "places")
        }
        begins_N = np.cumsum([0, *row_lengths(batch.blocks)])[:-1]
        arguments["begins"] = place(begins_N)
        if arguments["begins"].device.type == "cpu":
            arguments["plans"] = self.plans(batch.blocks)
        return arguments

    def forward(self, batch: dict[str, Any], blocks: Blocks, numbers_N: torch.Tensor | None) -> torch.Tensor:
        """(rows, classes). batch: `arguments`."""
        model, config, noise = self.model, self.model.config, Noise(numbers_N)
        base, dropout = model.base_model, config.hidden_dropout_prob
        places_T, mask_T, embeddings = batch["places"], batch["mask"], base.embeddings
        if (
            config.model_type == "roberta"
        ):  # it counts from the padding token's id + 1 on, and padding has that id
            places_T = (places_T + 1) * mask_T + config.pad_token_id
        x_TD = (
            embeddings.word_embeddings(batch["ids"])
            + embeddings.token_type_embeddings(batch["types"])
            + embeddings.position_embeddings(places_T)
        )
        x_TD = noise.drop(embeddings.LayerNorm(x_TD), dropout, self.training)
        unseen_T = torch.zeros_like(mask_T, dtype=torch.float32).masked_fill(mask_T == 0, -math.inf)
        rows = Rows(batch["begins"], blocks, unseen_T, batch.get("plans"))
        for layer in base.encoder.layer:
            x_TD = layer(x_TD, rows, noise)
        head_dropout = dropout if config.classifier_dropout is None else config.classifier_dropout
        if config.model_type == "roberta":
            head = model.classifier
            first_BD = torch.tanh(head.dense(noise.drop(x_TD, head_dropout, self.training)))
            logits_BC: torch.Tensor = head.out_proj(noise.drop(first_BD, head_dropout, self.training))
        else:
            first_BD = base.pooler.activation(base.pooler.dense(x_TD))
            logits_BC = model.classifier(noise.drop(first_BD, head_dropout, self.training))
        return logits_BC


class Rows:
    """Where the rows are among the tokens. unseen_T: 0, or -∞ for padding."""

    def __init__(
        self,
        begins_N: torch.Tensor,
        blocks: Blocks,
        unseen_T: torch.Tensor,
        plans: tuple[attention.Plan, attention.Plan] | None,
    ) -> None:
        self.begins_N, self.blocks, self.unseen_T, self.plans = begins_N, blocks, unseen_T, plans
        if plans is not None:
            unseen_U = functional.pad(unseen_T, (0, 1), value=-math.inf)
            self.unseen = [unseen_U.index_select(0, plan.keys) for plan in plans]


def _layer(layer: Any, is_last: bool, x_TD: torch.Tensor, rows: Rows, noise: Noise) -> torch.Tensor:
    """A layer over all tokens, or the last one at the first token of each row."""
    heads, out, rate = layer.attention.self, layer.attention.output, layer.output.dropout.p
    is_gelu = getattr(layer.intermediate.intermediate_act_fn, "act", None) is functional.gelu
    if rows.plans is not None and is_gelu and not torch.compiler.is_compiling():
        return _layer_by_hand(layer, is_last, x_TD, rows, noise, rows.plans[is_last])
    maps = heads.query, heads.key, heads.value
    if is_last:
        k_TD, v_TD = functional.linear(x_TD, *_joined(maps[1:])).chunk(2, 1)
        x_TD = x_TD.index_select(0, rows.begins_N)
        q_MD = heads.query(x_TD)
    else:
        q_MD, k_TD, v_TD = functional.linear(x_TD, *_joined(maps)).chunk(3, 1)
    dropout = heads.dropout.p if layer.training else 0.0
    seen_MD = attend(q_MD, k_TD, v_TD, rows, heads.attention_head_size, dropout)
    x_MD = out.LayerNorm(noise.drop(out.dense(seen_MD), rate, layer.training) + x_TD)
    inner_MF = layer.intermediate(x_MD)
    output_MD: torch.Tensor = layer.output.LayerNorm(
        noise.drop(layer.output.dense(inner_MF), rate, layer.training) + x_MD
    )
    return output_MD


def _layer_by_hand(
    layer: Any, is_last: bool, x_TD: torch.Tensor, rows: Rows, noise: Noise, plan: attention.Plan
) -> torch.Tensor:
    """As `_layer`, on a CPU."""
    heads, output = layer.attention.self, layer.output
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_TD.dtype
    shape = len(rows.begins_N) if is_last else len(x_TD), x_TD.shape[1]
    kept = tuple(
        noise.keep(math.prod(shape), rate, dtype).view(shape) if layer.training and rate else None
        for shape, rate in (
            ((len(plan.keys),), heads.dropout.p),
            (shape, layer.attention.output.dropout.p),
            (shape, output.dropout.p),
        )
    )
    inputs = Inputs(
        begins_N=rows.begins_N,
        plan=plan,
        unseen_P=rows.unseen[is_last],
        kept=kept,
        head_width=heads.attention_head_size,
        epsilon=output.LayerNorm.eps,
        is_last=is_last,
    )
    with torch.autocast("cpu", enabled=False):
        outputs_MD: torch.Tensor = Layer.apply(x_TD.to(dtype), inputs, *parameters(layer))
    return outputs_MD


def _joined(maps: Sequence[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of one map to the outputs of all of them."""
    return torch.cat([linear.weight for linear in maps]), torch.cat([linear.bias for linear in maps])


def split(x_TD: torch.Tensor, blocks: Blocks) -> list[torch.Tensor]:
    """The tokens by block, (rows, length, …) each."""
    parts = x_TD.split([rows * length for rows, length in blocks])
    return [part.unflatten(0, block) for part, block in zip(parts, blocks, strict=True)]


def attend(
    q_MD: torch.Tensor, k_TD: torch.Tensor, v_TD: torch.Tensor, rows: Rows, head_width: int, dropout: float
) -> torch.Tensor:
    """Attention within each row, for all of its tokens or for the first one of each."""
    blocks, by_head = rows.blocks, (-1, head_width)
    asking = blocks if len(q_MD) == len(k_TD) else tuple((rows, 1) for rows, _ in blocks)
    mixed = []
    for q_BMD, k_BSD, v_BSD, unseen_BS in zip(
        split(q_MD, asking),
        split(k_TD, blocks),
        split(v_TD, blocks),
        split(rows.unseen_T, blocks),
        strict=True,
    ):
        q_BHMK, k_BHSK, v_BHSK = (x.unflatten(2, by_head).transpose(1, 2) for x in (q_BMD, k_BSD, v_BSD))
        seen_BHMK = functional.scaled_dot_product_attention(
            q_BHMK, k_BHSK, v_BHSK, attn_mask=unseen_BS[:, None, None].to(q_BHMK.dtype), dropout_p=dropout
        )
        mixed.append(seen_BHMK.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(mixed)
