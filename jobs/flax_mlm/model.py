"""RoBERTa as a Flax NNX module, in the shapes that Hugging Face's layout can be written from.

Shape letters, here and in the whole job: B sequences, S positions, D model width, H heads, K head width,
F feed-forward width, V vocabulary, M masked slots of a sequence.

Architecture: Liu et al. 2019 (arXiv:1907.11692), as `transformers`' RobertaForMaskedLM computes it: learned
positions, layer norm after each residual sum, exact GELU, embeddings tied to the output.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jobs.flax_mlm.parts import dropout, gelu, layer_norm

INIT_STDDEV = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes of one model; all that is needed to build it.

    position_offset: row of the position table that the first token takes. In RoBERTa it is the padding
    token's id + 1, so 2: the rows before it are never used.
    """

    vocab_size: int
    max_positions: int
    position_offset: int
    layers: int
    width: int
    heads: int
    ff_width: int
    dropout: float = 0.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def _linear(inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, dtype=dtype, rngs=rngs, kernel_init=nnx.initializers.normal(INIT_STDDEV)
    )


def _fold(keys_B: jax.Array | None, place: int) -> jax.Array | None:
    """Keys for another place of the network."""
    return None if keys_B is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, place)


class Norm(nnx.Module):
    """Layer norm with its learned scale and bias."""

    def __init__(self, width: int) -> None:
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.scale[...], self.bias[...])


class Embeddings(nnx.Module):
    """Token and position embeddings, normalised. The token table is also the output's matrix (`Mlm.logits`)."""

    def __init__(self, dims: Dimensions, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(INIT_STDDEV)
        rows = dims.max_positions + dims.position_offset
        self.tokens = nnx.Embed(dims.vocab_size, dims.width, dtype=dtype, embedding_init=init, rngs=rngs)
        self.positions = nnx.Embed(rows, dims.width, dtype=dtype, embedding_init=init, rngs=rngs)
        self.norm = Norm(dims.width)
        self.dropout, self.position_offset = dims.dropout, dims.position_offset

    def __call__(self, tokens_BS: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        positions_S = jnp.arange(tokens_BS.shape[1]) + self.position_offset
        x_BSD = self.tokens(tokens_BS) + self.positions(positions_S)
        return dropout(self.norm(x_BSD), self.dropout, keys_B)


class Layer(nnx.Module):
    """Self-attention over all positions, then the feed-forward, each summed into its input and normalised."""

    def __init__(self, dims: Dimensions, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.heads, self.dropout = dims.heads, dims.dropout
        self.qkv = _linear(dims.width, 3 * dims.width, dtype, rngs)
        self.attention_out = _linear(dims.width, dims.width, dtype, rngs)
        self.attention_norm = Norm(dims.width)
        self.ff_in = _linear(dims.width, dims.ff_width, dtype, rngs)
        self.ff_out = _linear(dims.ff_width, dims.width, dtype, rngs)
        self.ff_norm = Norm(dims.width)

    def __call__(self, x_BSD: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        b, s, d = x_BSD.shape
        # Matrix products take all positions of all sequences as rows of one matrix: N = B S.
        qkv_BS3HK = self.qkv(x_BSD.reshape(b * s, d)).reshape(b, s, 3, self.heads, d // self.heads)
        q_BSHK, k_BSHK, v_BSHK = (qkv_BS3HK[:, :, i] for i in range(3))
        mixed_ND = jax.nn.dot_product_attention(q_BSHK, k_BSHK, v_BSHK).reshape(b * s, d)
        attended_BSD = self.attention_out(mixed_ND).reshape(b, s, d)
        x_BSD = self.attention_norm(x_BSD + dropout(attended_BSD, self.dropout, _fold(keys_B, 0)))
        inner_NF = gelu(self.ff_in(x_BSD.reshape(b * s, d)))
        fed_BSD = self.ff_out(inner_NF).reshape(b, s, d)
        return self.ff_norm(x_BSD + dropout(fed_BSD, self.dropout, _fold(keys_B, 1)))


class Mlm(nnx.Module):
    """The encoder and the head that predicts tokens at masked positions.

    `dtype` is what activations are computed in; parameters are float32.
    """

    def __init__(self, dims: Dimensions, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.embeddings = Embeddings(dims, dtype, rngs)
        self.layers = nnx.List([Layer(dims, dtype, rngs) for _ in range(dims.layers)])
        self.head_dense = _linear(dims.width, dims.width, dtype, rngs)
        self.head_norm = Norm(dims.width)
        self.head_bias = nnx.Param(jnp.zeros(dims.vocab_size))

    def encode(self, tokens_BS: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """(B, S) token ids to (B, S, D) hidden states; dropout only where (B,) keys are given."""
        x_BSD = self.embeddings(tokens_BS, _fold(keys_B, 0))
        for index, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, _fold(keys_B, index + 1))
        return x_BSD

    def logits(self, x_BMD: jax.Array) -> jax.Array:
        """Hidden states at any positions to float32 logits over the vocabulary, (B, M, V)."""
        x_BMD = self.head_norm(gelu(self.head_dense(x_BMD)))
        logits_BMV = self.embeddings.tokens.attend(x_BMD)
        return logits_BMV.astype(jnp.float32) + self.head_bias[...]

    def __call__(
        self, tokens_BS: jax.Array, positions_BM: jax.Array, keys_B: jax.Array | None = None
    ) -> jax.Array:
        """Logits (B, M, V) at `positions_BM` only: the other positions' logits are never asked for."""
        x_BSD = self.encode(tokens_BS, keys_B)
        return self.logits(jnp.take_along_axis(x_BSD, positions_BM[:, :, None], axis=1))
