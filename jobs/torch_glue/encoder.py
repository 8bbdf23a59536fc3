"""transformers' RoBERTa or BERT with a head, computed over packed rows: the same parameters, the same logits.

Beside transformers' own way through the model: products are of all rows' tokens at once, attention is of each block of
rows of one length, and the last layer is computed at the rows' first tokens only, which are all that the head reads. On
a CPU, dropout and attention with dropout are written by hand: torch's draw each number apart, which took more time than
the products of a layer (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn import functional

from jobs.glue.batches import Blocks, Packed

WORD = 4
"""Numbers of 16 bits in one that torch draws."""


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
        numbers_N, self._left_N = self._left_N[: x.numel()], self._left_N[x.numel() :]
        least = round(rate * 2**16) - 2**15
        kept = (
            numbers_N >= least
            if torch.compiler.is_compiling()
            else torch.ge(numbers_N, least, out=torch.empty_like(numbers_N, dtype=x.dtype))
        )
        return x * (kept.view(x.shape).to(x.dtype) * (1 / (1 - rate)))


def draw(numbers: int) -> torch.Tensor:
    """So many numbers for `Noise` from torch's generator."""
    return torch.empty(-(-numbers // WORD), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)


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
        sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
        layers, width, heads = map(int, sizes)
        pairs = heads * sum(rows * length * length for rows, length in blocks)
        of_all_tokens = tokens * width + (layers - 1) * (2 * tokens * width + pairs)
        of_first_tokens = heads * tokens + 4 * rows * width  # of the last layer, and of the head
        return of_all_tokens + of_first_tokens

    def forward(
        self, batch: dict[str, torch.Tensor], blocks: Blocks, numbers_N: torch.Tensor | None
    ) -> torch.Tensor:
        """(rows, classes). batch: ids_T, mask_T, types_T and places_T of one share."""
        model, config, noise = self.model, self.model.config, Noise(numbers_N)
        base, dropout = model.base_model, config.hidden_dropout_prob
        places_T, mask_T, embeddings = batch["places_T"], batch["mask_T"], base.embeddings
        if (
            config.model_type == "roberta"
        ):  # it counts from the padding token's id + 1 on, and padding has that id
            places_T = (places_T + 1) * mask_T + config.pad_token_id
        x_TD = (
            embeddings.word_embeddings(batch["ids_T"])
            + embeddings.token_type_embeddings(batch["types_T"])
            + embeddings.position_embeddings(places_T)
        )
        x_TD = noise.drop(embeddings.LayerNorm(x_TD), dropout, self.training)
        unseen_T = torch.zeros_like(mask_T, dtype=x_TD.dtype).masked_fill(mask_T == 0, -math.inf)
        for layer in base.encoder.layer:
            x_TD = layer(x_TD, unseen_T, blocks, noise)
        of_head = dropout if config.classifier_dropout is None else config.classifier_dropout
        if config.model_type == "roberta":
            head = model.classifier
            first_BD = torch.tanh(head.dense(noise.drop(x_TD, of_head, self.training)))
            logits_BC: torch.Tensor = head.out_proj(noise.drop(first_BD, of_head, self.training))
        else:
            first_BD = base.pooler.activation(base.pooler.dense(x_TD))
            logits_BC = model.classifier(noise.drop(first_BD, of_head, self.training))
        return logits_BC


def _layer(
    layer: Any, is_last: bool, x_TD: torch.Tensor, unseen_T: torch.Tensor, blocks: Blocks, noise: Noise
) -> torch.Tensor:
    """A layer over all tokens, or the last one at the first token of each row."""
    of, out, rate = layer.attention.self, layer.attention.output, layer.output.dropout.p
    asking_TD = first_tokens(x_TD, blocks) if is_last else x_TD
    seen_TD = attend(
        of.query(asking_TD), of.key(x_TD), of.value(x_TD), unseen_T, blocks, of.attention_head_size,
        of.dropout.p, noise, layer.training,
    )  # fmt: skip
    x_TD = out.LayerNorm(noise.drop(out.dense(seen_TD), rate, layer.training) + asking_TD)
    inner_TF = layer.intermediate(x_TD)
    found: torch.Tensor = layer.output.LayerNorm(
        noise.drop(layer.output.dense(inner_TF), rate, layer.training) + x_TD
    )
    return found


def split(x_TD: torch.Tensor, blocks: Blocks) -> list[torch.Tensor]:
    """The tokens by block, (rows, length, …) each."""
    parts = x_TD.split([rows * length for rows, length in blocks])
    return [part.unflatten(0, block) for part, block in zip(parts, blocks, strict=True)]


def first_tokens(x_TD: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return torch.cat([part_BSD[:, 0] for part_BSD in split(x_TD, blocks)])


def attend(
    q_MD: torch.Tensor,
    k_TD: torch.Tensor,
    v_TD: torch.Tensor,
    unseen_T: torch.Tensor,
    blocks: Blocks,
    head_width: int,
    rate: float,
    noise: Noise,
    training: bool,
) -> torch.Tensor:
    """Attention within each row, for all of its tokens or for the first one of each."""
    asking = blocks if len(q_MD) == len(k_TD) else tuple((rows, 1) for rows, _ in blocks)
    by_head = (-1, head_width)
    found = []
    for q_BMD, k_BSD, v_BSD, unseen_BS in zip(
        split(q_MD, asking), split(k_TD, blocks), split(v_TD, blocks), split(unseen_T, blocks), strict=True
    ):
        q_BHMK, k_BHSK, v_BHSK = (x.unflatten(2, by_head).transpose(1, 2) for x in (q_BMD, k_BSD, v_BSD))
        unseen_B11S = unseen_BS[:, None, None].to(q_BHMK.dtype)
        if q_MD.device.type == "cpu":
            scores_BHMS = (q_BHMK * head_width**-0.5) @ k_BHSK.transpose(2, 3) + unseen_B11S
            shares_BHMS = torch.softmax(scores_BHMS, -1, dtype=torch.float32).to(q_BHMK.dtype)
            seen_BHMK = noise.drop(shares_BHMS, rate, training) @ v_BHSK
        else:
            seen_BHMK = functional.scaled_dot_product_attention(
                q_BHMK, k_BHSK, v_BHSK, attn_mask=unseen_B11S, dropout_p=rate if training else 0.0
            )
        found.append(seen_BHMK.transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(found)


def arguments(batch: Packed, place: Any) -> dict[str, torch.Tensor]:
    """What `forward` reads of a batch of one share, on the device."""
    return {
        f"{name}_T": place(getattr(batch, f"{name}_GT")[0]) for name in ("ids", "mask", "types", "places")
    }
