"""The operations that models are written in: JAX's own, and for CPUs and TPUs their twins written by hand
(`custom_gradients`).

Statistics, scores and GELU are computed in float32 at least; a result has the dtype of the activations that went in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jobs.runtime.jax import attention_kernel, custom_gradients
from jobs.runtime.jax.custom_gradients import (
    LAYER_NORM_EPSILON,
    NEVER,
    device_kind,
    leaves_caches,
    platform,
    wide_type,
    widened,
)

SPLASH_LEAST_POSITIONS = 512
SPLASH_BLOCK = 128
"""Positions are taken in blocks of a multiple of this many, so there must be a multiple of it."""
SPLASH_MOST_IN_BLOCK = 512
"""Each block is a turn of the kernel's grid. Splash attention's own default, 128, takes 16 turns for what one does, and
the products of such a turn are 20 ns of a v5e's peak. The operations and bytes are the same."""
KINDS_WITHOUT_PALLAS = ("TPU v2", "TPU v3")
"""Pallas compiles no products of bfloat16 for them."""
CUDNN_MOST_HEAD_WIDTH = 128


def by_hand[**Arguments, Result](
    twin: Callable[Arguments, Result], *platforms: str
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Where the program is compiled for one of these platforms, `twin` is called in place of the decorated function."""

    def decorate(plain: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(plain)
        def chosen(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            return (twin if platform() in platforms else plain)(*args, **kwargs)

        return chosen

    return decorate


@by_hand(custom_gradients.linear, "cpu", "tpu")
def linear(x: jax.Array, kernel_IO: jax.Array, bias_O: jax.Array) -> jax.Array:
    """x W + b over the last axis, in x's dtype."""
    return x @ kernel_IO.astype(x.dtype) + bias_O.astype(x.dtype)


@by_hand(custom_gradients.projections, "tpu")
def projections(x: jax.Array, kernel_IO: jax.Array, bias_O: jax.Array, parts: int) -> list[jax.Array]:
    """x W + b in equal parts of the last axis."""
    return jnp.split(linear(x, kernel_IO, bias_O), parts, axis=-1)


@by_hand(custom_gradients.embed, "tpu")
def embed(table_RD: jax.Array, ids: jax.Array, _narrow: jnp.dtype) -> jax.Array:
    """A table's rows with these numbers. _narrow: the dtype to which the twin that is written by hand rounds them."""
    return table_RD[ids]


@by_hand(custom_gradients.at_positions, "tpu")
def at_positions(x_BSD: jax.Array, positions_BM: jax.Array) -> jax.Array:
    """(B, M, D): x_BSD at these positions."""
    return jnp.take_along_axis(x_BSD, positions_BM[..., None], axis=1)


@by_hand(custom_gradients.logits, "cpu")
def logits(x: jax.Array, table_VD: jax.Array, bias_V: jax.Array) -> jax.Array:
    """x Eᵀ + b over the last axis, in the table's dtype, though the product is one of x's."""
    product = jnp.matmul(x, table_VD.T.astype(x.dtype), preferred_element_type=table_VD.dtype)
    return product + bias_V


@by_hand(custom_gradients.gelu, "cpu", "tpu")
def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x), exact (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    return jax.nn.gelu(widened(x), approximate=False).astype(x.dtype)


@by_hand(custom_gradients.layer_norm, "tpu")
def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array, _kept: jnp.dtype) -> jax.Array:
    """Layer norm over the last axis (Ba et al. 2016, arXiv:1607.06450).

    _kept: the dtype in which the twin that is written by hand gives its result and keeps values for the backward pass.
    On a CPU, of a large x nothing else is kept.
    """
    norm = jax.checkpoint(_layer_norm) if leaves_caches(x) else _layer_norm
    return norm(x, scale_D, bias_D)


def _layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    centred = widened(x) - widened(x).mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + LAYER_NORM_EPSILON)
    return (normal * scale_D + bias_D).astype(x.dtype)


def nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy in nats at each place: (…, V) logits and the (…) indices of what was there to (…)."""
    of_targets = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_targets


def padded_logits(x: jax.Array, table_VD: jax.Array, bias_V: jax.Array, tokens: int) -> jax.Array:
    """`logits`, which beyond the table's first `tokens` rows are such that they are never chosen: no copy is made."""
    padded = logits(x, table_VD, bias_V)
    rows = table_VD.shape[0]
    return padded if rows == tokens else jnp.where(jnp.arange(rows) < tokens, padded, NEVER)


@by_hand(custom_gradients.cross_entropy, "tpu")
def cross_entropy(
    x_BMD: jax.Array,
    table_VD: jax.Array,
    bias_V: jax.Array,
    targets_BM: jax.Array,
    weights_BM: jax.Array,
    tokens: int,
) -> jax.Array:
    """The weighted sum of the cross-entropies in nats of `padded_logits`."""
    return (nats(padded_logits(x_BMD, table_VD, bias_V, tokens), targets_BM) * weights_BM).sum()


def dropout(x_BSD: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Dropout from a key for each row: what is dropped does not depend on which device holds the row.

    No keys, no dropout.
    """
    if keys_B is None or rate == 0.0:
        return x_BSD
    kept_BSD = _noise(keys_B, x_BSD.shape[1:]) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept_BSD, x_BSD / (1.0 - rate), jnp.zeros_like(x_BSD))


def _noise(keys_B: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 bits for each place of each row: a hash of the place and of two words drawn from the row's key.

    A multiply-and-shift hash with the constants of lowbias32 (Wellons 2018, "Prospecting for hash functions"). It is
    no generator for cryptography, but in dropout nobody looks for a pattern; it costs a fifth of threefry.
    """
    words_B2 = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys_B)
    first, second = (words_B2[:, i].reshape(-1, *(1 for _ in shape)) for i in range(2))
    noise = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(1, *shape) + first
    noise = (noise ^ (noise >> 16)) * jnp.uint32(0x7FEB352D) ^ second
    noise = (noise ^ (noise >> 15)) * jnp.uint32(0x846CA68B)
    return noise ^ (noise >> 16)


def attend(
    q_BMHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    segments_BM: jax.Array | None = None,
    segments_BS: jax.Array | None = None,
) -> jax.Array:
    """(B, M, H, K): for each of M positions the values of all S, weighted by softmax of q k / √K.

    TPU v4 and later: kernels whose scores never leave the chip (flash attention: Dao et al. 2022, arXiv:2205.14135);
    up to 512 positions `attention_kernel`, beyond that splash attention. GPU in bfloat16: cuDNN's. Anything else, and
    shapes that those do not take: `attention`.

    segments_BM, segments_BS: whole numbers; a position sees those of its own number only. None: it sees all.
    """
    if _takes_kernel(q_BMHK, k_BSHK):
        q_BSD, k_BSD, v_BSD = (x.reshape(*x.shape[:2], -1) for x in (q_BMHK, k_BSHK, v_BSHK))
        heads = q_BMHK.shape[2]
        return attention_kernel.attention(q_BSD, k_BSD, v_BSD, segments_BS, heads).reshape(q_BMHK.shape)
    if _takes_splash(q_BMHK, k_BSHK):
        return splash(q_BMHK, k_BSHK, v_BSHK, segments_BS)
    mask_B1MS = None
    if segments_BM is not None and segments_BS is not None:
        mask_B1MS = (segments_BM[:, :, None] == segments_BS[:, None, :])[:, None]
    if _takes_cudnn(q_BMHK, k_BSHK, mask_B1MS):
        return jax.nn.dot_product_attention(q_BMHK, k_BSHK, v_BSHK, mask=mask_B1MS, implementation="cudnn")
    return attention(q_BMHK, k_BSHK, v_BSHK, mask_B1MS)


@by_hand(custom_gradients.attention, "cpu", "tpu")
def attention(
    q_BMHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask_B1MS: jax.Array | None,
    kept_BHMS: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k / √K) v, (B, M, H, K), in q's dtype. kept_BHMS: what shares are multiplied by.

    Shares stay float32, so that their gradients do: `jax.nn.dot_product_attention` rounds both, and while attention is
    nearly even the gradient of a score is smaller than what is rounded off (docs/benchmarks.md).
    """
    wide = wide_type(q_BMHK)
    scores_BHMS = jnp.einsum("bmhk,bshk->bhms", q_BMHK, k_BSHK, preferred_element_type=wide)
    scores_BHMS = scores_BHMS * q_BMHK.shape[-1] ** -0.5
    if mask_B1MS is not None:
        scores_BHMS = jnp.where(mask_B1MS, scores_BHMS, -jnp.inf)
    shares_BHMS = jax.nn.softmax(scores_BHMS)
    if kept_BHMS is not None:
        shares_BHMS = shares_BHMS * kept_BHMS
    return jnp.einsum("bhms,bshk->bmhk", shares_BHMS, v_BSHK.astype(wide)).astype(q_BMHK.dtype)


def splash(
    q_BSHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    segments_BS: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """(B, S, H, K) by splash attention. interpret: on a device that is no TPU, slowly, for tests."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    _, length, heads, head_width = q_BSHK.shape
    sizes = range(SPLASH_BLOCK, SPLASH_MOST_IN_BLOCK + 1, SPLASH_BLOCK)
    kernel = _splash_kernel(length, heads, max(size for size in sizes if length % size == 0), interpret)

    def of_row(q_SHK: jax.Array, k_SHK: jax.Array, v_SHK: jax.Array, segments_S: Any) -> jax.Array:
        q_HSK, k_HSK, v_HSK = (x.swapaxes(0, 1) for x in (q_SHK * head_width**-0.5, k_SHK, v_SHK))
        ids = None if segments_S is None else SegmentIds(segments_S, segments_S)
        mixed_HSK: jax.Array = kernel(q_HSK, k_HSK, v_HSK, segment_ids=ids)
        return mixed_HSK.swapaxes(0, 1)

    return jax.vmap(of_row)(q_BSHK, k_BSHK, v_BSHK, segments_BS)


@functools.lru_cache(maxsize=4)
def _splash_kernel(length: int, heads: int, block: int, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        FullMask,
        MultiHeadMask,
        make_splash_mha,
    )

    sizes = BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    with jax.ensure_compile_time_eval():
        return make_splash_mha(
            MultiHeadMask([FullMask((length, length))] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


def _takes_kernel(q_BMHK: jax.Array, k_BSHK: jax.Array) -> bool:
    return _compiles_pallas() and q_BMHK.shape == k_BSHK.shape and attention_kernel.takes(q_BMHK.shape)


def _compiles_pallas() -> bool:
    return platform() == "tpu" and device_kind() not in KINDS_WITHOUT_PALLAS


def _takes_splash(q_BMHK: jax.Array, k_BSHK: jax.Array) -> bool:
    length = k_BSHK.shape[1]
    return (
        _compiles_pallas()
        and q_BMHK.shape[1] == length
        and length >= SPLASH_LEAST_POSITIONS
        and length % SPLASH_BLOCK == 0
    )


def _takes_cudnn(q_BMHK: jax.Array, k_BSHK: jax.Array, mask_B1MS: jax.Array | None) -> bool:
    """Whether cuDNN takes these shapes: with a mask it refuses to train on an odd number of positions (jax 0.12)."""
    is_even = q_BMHK.shape[1] % 2 == 0 and k_BSHK.shape[1] % 2 == 0
    return (
        (mask_B1MS is None or is_even)
        and platform() == "gpu"
        and q_BMHK.dtype in (jnp.bfloat16, jnp.float16)
        and q_BMHK.shape[-1] <= CUDNN_MOST_HEAD_WIDTH
        and q_BMHK.shape[-1] % 8 == 0
    )
