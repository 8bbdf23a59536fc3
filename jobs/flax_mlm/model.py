"""RoBERTa as a Flax NNX module, in the shapes that Hugging Face's layout can be written from.

Shape letters, here and in the whole job: B sequences, S positions, D model width, H heads, K head width,
F feed-forward width, V vocabulary, M masked slots of a sequence.

Architecture: Liu et al. 2019 (arXiv:1907.11692), as `transformers`' RobertaForMaskedLM computes it: learned
positions, layer norm after each residual sum, exact GELU, embeddings tied to the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jobs.flax_mlm.config import Dimensions
from jobs.runtime.jax.ops import (
    at_positions,
    attend,
    cross_entropy,
    dropout,
    embed,
    gelu,
    layer_norm,
    linear,
    padded_logits,
    projections,
)

BERT_STDDEV, BERT_WIDTH = 0.02, 768
"""What BERT and RoBERTa draw weights with, and for which width (Devlin et al. 2019; `initializer_range`)."""
type Apply = Callable[..., jax.Array]
"""How a layer is applied: (layer, *its inputs) to its output."""


def plainly(layer: Layer, *inputs: jax.Array | None) -> jax.Array:
    return layer(*inputs)  # type: ignore[arg-type]


def init_stddev(width: int) -> float:
    """The standard deviation of the initial weights of a model of this width: RoBERTa's 0.02 at RoBERTa's width.

    A product over the width then has the same size in every model. With 0.02 at a width of 128, all positions of a
    sequence begin in nearly one hidden state, and training steps as long as the weights (docs/benchmarks.md).
    """
    return BERT_STDDEV * math.sqrt(BERT_WIDTH / width)


def sinusoids(rows: int, width: int, longest: float, stddev: float) -> jax.Array:
    """(rows, width) sines and cosines of the row in turn (Vaswani et al. 2017), of that standard deviation.

    Their wavelengths rise geometrically from 2π to `longest` rows: neighbours are as near to each other anywhere, so
    attention finds "the token before" by one linear map, which learned positions that begin as noise find late.
    """
    place_R1, column_D = jnp.arange(rows)[:, None], jnp.arange(width)
    exponent_D = (column_D // 2) * 2 / width
    angle_RD = place_R1 * (longest / (2 * math.pi)) ** -exponent_D
    return math.sqrt(2) * stddev * jnp.where(column_D % 2 == 0, jnp.sin(angle_RD), jnp.cos(angle_RD))


def _drawn(rows: int, columns: int, dims: Dimensions, rngs: nnx.Rngs) -> jax.Array:
    return init_stddev(dims.width) * jax.random.normal(rngs.params(), (rows, columns))


class Table(nnx.Module):
    """A row of numbers for each id."""

    def __init__(self, rows_RD: jax.Array, dtype: jnp.dtype) -> None:
        self.embedding, self.dtype = nnx.Param(rows_RD), dtype

    def __call__(self, ids: jax.Array) -> jax.Array:
        return embed(self.embedding[...], ids, self.dtype)


class Linear(nnx.Module):
    """x W + b, or only some columns of it, in x's dtype."""

    def __init__(self, kernel_IO: jax.Array) -> None:
        self.kernel = nnx.Param(kernel_IO)
        self.bias = nnx.Param(jnp.zeros(kernel_IO.shape[1]))

    def __call__(self, x: jax.Array, columns: slice = slice(None)) -> jax.Array:
        return linear(x, self.kernel[...][:, columns], self.bias[...][columns])

    def split(self, x: jax.Array, parts: int, columns: slice = slice(None)) -> list[jax.Array]:
        """The same in equal parts of the last axis."""
        return projections(x, self.kernel[...][:, columns], self.bias[...][columns], parts)


def _fold(keys_B: jax.Array | None, place: int) -> jax.Array | None:
    """Keys for place number `place` of the network."""
    return None if keys_B is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, place)


class Norm(nnx.Module):
    """Layer norm with its learned scale and bias. dtype: that of activations, in which a TPU's results are."""

    def __init__(self, width: int, dtype: jnp.dtype) -> None:
        self.scale, self.bias, self.dtype = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width)), dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.scale[...], self.bias[...], self.dtype)


class Embeddings(nnx.Module):
    """Token and position embeddings, normalised. The token table is also the output's matrix (`Mlm.logits`)."""

    def __init__(self, dims: Dimensions, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.tokens = Table(_drawn(dims.vocab_rows, dims.width, dims, rngs), dtype)
        rows, stddev = dims.max_positions + dims.position_offset, init_stddev(dims.width)
        self.positions = Table(sinusoids(rows, dims.width, longest=dims.max_positions, stddev=stddev), dtype)
        self.norm = Norm(dims.width, dtype)
        self.dropout, self.position_offset = dims.dropout, dims.position_offset

    def __call__(self, tokens_BS: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        positions_S = jnp.arange(tokens_BS.shape[1]) + self.position_offset
        x_BSD = self.tokens(tokens_BS) + self.positions(positions_S)
        return dropout(self.norm(x_BSD), self.dropout, keys_B)


class Layer(nnx.Module):
    """Self-attention over all positions, then the feed-forward, each summed into its input and normalised.

    The input and the sums have the dtype that `Norm` gives them, what is summed into them has `dtype`.

    Queries and keys begin as the same products, so that a position first attends to what is like it in place and
    token, its neighbours (mimetic initialisation: Trockman & Kolter 2023, arXiv:2305.09828).
    """

    def __init__(self, dims: Dimensions, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.heads, self.dropout, self.dtype = dims.heads, dims.dropout, dtype
        width, ff_width = dims.width, dims.ff_width
        q_DD, v_DD = _drawn(width, width, dims, rngs), _drawn(width, width, dims, rngs)
        self.qkv = Linear(jnp.concatenate([q_DD, q_DD, v_DD], axis=1))
        self.attention_out = Linear(_drawn(width, width, dims, rngs))
        self.attention_norm = Norm(width, dtype)
        self.ff_in = Linear(_drawn(width, ff_width, dims, rngs))
        self.ff_out = Linear(_drawn(ff_width, width, dims, rngs))
        self.ff_norm = Norm(width, dtype)

    def __call__(
        self,
        x_BSD: jax.Array,
        keys_B: jax.Array | None,
        segments_BS: jax.Array | None = None,
        positions_BM: jax.Array | None = None,
    ) -> jax.Array:
        """(B, S, D), or (B, M, D) where only some positions' results are asked for."""
        x_BMD = x_BSD if positions_BM is None else at_positions(x_BSD, positions_BM)
        attended_BMD = self.attention_out(self._attend(x_BMD, x_BSD, segments_BS, positions_BM))
        x_BMD = self.attention_norm(x_BMD + dropout(attended_BMD, self.dropout, _fold(keys_B, 0)))
        fed_BMD = self.ff_out(gelu(self.ff_in(x_BMD.astype(self.dtype))))
        return self.ff_norm(x_BMD + dropout(fed_BMD, self.dropout, _fold(keys_B, 1)))

    def _attend(
        self,
        x_BMD: jax.Array,
        x_BSD: jax.Array,
        segments_BS: jax.Array | None,
        positions_BM: jax.Array | None,
    ) -> jax.Array:
        """Attention of M positions to all S, the heads side by side."""
        d, narrow_BSD, segments_BM = x_BSD.shape[-1], x_BSD.astype(self.dtype), segments_BS
        if positions_BM is None:
            q_BMD, k_BSD, v_BSD = self.qkv.split(narrow_BSD, 3)
        else:
            q_BMD = self.qkv(x_BMD.astype(self.dtype), slice(0, d))
            k_BSD, v_BSD = self.qkv.split(narrow_BSD, 2, slice(d, None))
            segments_BM = None
            if segments_BS is not None:
                segments_BM = jnp.take_along_axis(segments_BS, positions_BM, axis=1)
        q_BMHK, k_BSHK, v_BSHK = (x.reshape(*x.shape[:2], self.heads, -1) for x in (q_BMD, k_BSD, v_BSD))
        return attend(q_BMHK, k_BSHK, v_BSHK, segments_BM, segments_BS).reshape(q_BMD.shape)


class Mlm(nnx.Module):
    """The encoder and the head that predicts tokens at masked positions.

    `dtype` is what products and what lies between them are computed in. Parameters are float32, and so is what runs
    through the layers, in which each is a small addition; on TPUs that has `dtype` too (docs/benchmarks.md).
    """

    def __init__(self, dims: Dimensions, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.vocab_size, self.document_start, self.dtype = dims.vocab_size, dims.document_start, dtype
        self.embeddings = Embeddings(dims, dtype, rngs)
        self.layers = nnx.List([Layer(dims, dtype, rngs) for _ in range(dims.layers)])
        self.head_dense = Linear(_drawn(dims.width, dims.width, dims, rngs))
        self.head_norm = Norm(dims.width, dtype)
        self.head_bias = nnx.Param(jnp.zeros(dims.vocab_rows))

    def encode(
        self,
        tokens_BS: jax.Array,
        keys_B: jax.Array | None = None,
        positions_BM: jax.Array | None = None,
        apply: Apply = plainly,
    ) -> jax.Array:
        """(B, S) token ids to hidden states, (B, S, D) or at some positions (B, M, D).

        Dropout only where (B,) keys are given. What the last layer would compute at other positions than those asked
        for, nobody reads: there only its keys and values are computed.
        """
        segments_BS = None
        if self.document_start is not None:
            segments_BS = jnp.cumsum(tokens_BS == self.document_start, axis=1)
        with jax.named_scope("embeddings"):
            x_BSD = self.embeddings(tokens_BS, _fold(keys_B, 0))
        for index, layer in enumerate(self.layers):
            asked_BM = positions_BM if index == len(self.layers) - 1 else None
            with jax.named_scope(f"layer_{index}"):
                x_BSD = apply(layer, x_BSD, _fold(keys_B, index + 1), segments_BS, asked_BM)
        return x_BSD

    def logits(self, x_BMD: jax.Array) -> jax.Array:
        """Hidden states at any positions to logits over the vocabulary, (B, M, V), in the parameters' dtype though
        the product is one of the activations'."""
        logits_BMV = self.padded_logits(x_BMD)
        return logits_BMV[..., : self.vocab_size]

    def padded_logits(self, x_BMD: jax.Array) -> jax.Array:
        """As `logits`, padded to `Dimensions.vocab_rows` with logits that are never chosen: no copy is made."""
        table_VD, bias_V = self.embeddings.tokens.embedding[...], self.head_bias[...]
        return padded_logits(self._head(x_BMD), table_VD, bias_V, self.vocab_size)

    def _head(self, x_BMD: jax.Array) -> jax.Array:
        """What the token table is multiplied with."""
        return self.head_norm(gelu(self.head_dense(x_BMD.astype(self.dtype))))

    def cross_entropy(
        self,
        tokens_BS: jax.Array,
        positions_BM: jax.Array,
        targets_BM: jax.Array,
        weights_BM: jax.Array,
        keys_B: jax.Array | None = None,
        apply: Apply = plainly,
    ) -> jax.Array:
        """The weighted sum of the cross-entropies in nats of the tokens at some positions, by `__call__`'s logits."""
        x_BMD = self.encode(tokens_BS, keys_B, positions_BM, apply)
        with jax.named_scope("head"):
            table_VD, bias_V = self.embeddings.tokens.embedding[...], self.head_bias[...]
            return cross_entropy(self._head(x_BMD), table_VD, bias_V, targets_BM, weights_BM, self.vocab_size)

    def __call__(
        self,
        tokens_BS: jax.Array,
        positions_BM: jax.Array,
        keys_B: jax.Array | None = None,
        apply: Apply = plainly,
    ) -> jax.Array:
        """Logits (B, M, vocab_rows) at `positions_BM` only: the other positions' logits are never asked for."""
        x_BMD = self.encode(tokens_BS, keys_B, positions_BM, apply)
        with jax.named_scope("head"):
            return self.padded_logits(x_BMD)
