"""Self-attention through the best kernel that the platform has.

TPU, from 512 positions on: splash attention, a flash attention whose scores never leave the chip's own memory
(Dao et al. 2022, arXiv:2205.14135). GPU in bfloat16: cuDNN's. Anything else, and shapes that those do not take:
products with a gradient written by hand, whose scores are in memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jobs.flax_mlm.parts import widened
from jobs.flax_mlm.products import transposed, wide_type

SPLASH_LEAST_POSITIONS = 512
SPLASH_BLOCK = 128
"""Positions are taken in blocks of this many, so there must be a multiple of it."""
CUDNN_MOST_HEAD_WIDTH = 128


def attend(
    q_BMHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    segments_BM: jax.Array | None = None,
    segments_BS: jax.Array | None = None,
) -> jax.Array:
    """(B, M, H, K): for each of M positions the values of all S, weighted by softmax of q k / √K.

    segments: whole numbers; a position sees those of its own number only. None: every position sees all.
    """
    if _takes_splash(q_BMHK, k_BSHK):
        return splash(q_BMHK, k_BSHK, v_BSHK, segments_BS)
    mask_B1MS = None
    if segments_BM is not None and segments_BS is not None:
        mask_B1MS = (segments_BM[:, :, None] == segments_BS[:, None, :])[:, None]
    if _takes_cudnn(q_BMHK, k_BSHK, mask_B1MS):
        return jax.nn.dot_product_attention(q_BMHK, k_BSHK, v_BSHK, mask=mask_B1MS, implementation="cudnn")
    q_BHMK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BMHK, k_BSHK, v_BSHK))
    return in_products(q_BHMK * q_BHMK.shape[-1] ** -0.5, k_BHSK, v_BHSK, mask_B1MS).swapaxes(1, 2)


@jax.custom_vjp
def in_products(
    q_BHMK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, mask_B1MS: jax.Array | None
) -> jax.Array:
    """softmax(q k) v, (B, H, M, K), of queries that are scaled already.

    Of all that is as large as the scores, (B, H, M, S), only their exponentials are kept, and nothing so large is ever
    divided: the sums of the exponentials divide the results, which are smaller, and in the backward pass their
    gradients (as flash attention does it, Dao et al. 2022, appendix B). On a CPU such passes over memory took half as
    long as attention's matrix products.

    Scores, and what the gradient of each of them is the difference of, are float32 at least and of the same rounded
    exponentials: while attention is nearly even that difference is smaller than what bfloat16 rounds off, and a small
    model then learns late what to attend to (`docs/benchmarks.md`).
    """
    return _in_products_forward(q_BHMK, k_BHSK, v_BHSK, mask_B1MS)[0]


def _in_products_forward(
    q_BHMK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, mask_B1MS: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores_BHMS = _widely(q_BHMK, transposed(k_BHSK))
    if mask_B1MS is not None:
        scores_BHMS = jnp.where(mask_B1MS, scores_BHMS, jnp.asarray(-jnp.inf, scores_BHMS.dtype))
    highest_BHM1 = scores_BHMS.max(axis=-1, keepdims=True)
    exponentials_BHMS = jnp.exp(scores_BHMS - highest_BHM1).astype(q_BHMK.dtype)
    sums_BHM1 = widened(exponentials_BHMS).sum(axis=-1, keepdims=True)
    mixed_BHMK = _widely(exponentials_BHMS, v_BHSK) / sums_BHM1
    return mixed_BHMK.astype(q_BHMK.dtype), (q_BHMK, k_BHSK, v_BHSK, exponentials_BHMS, sums_BHM1, mixed_BHMK)


def _in_products_backward(
    kept: tuple[jax.Array, ...], gradient_BHMK: jax.Array
) -> tuple[jax.Array | None, ...]:
    q_BHMK, k_BHSK, v_BHSK, exponentials_BHMS, sums_BHM1, mixed_BHMK = kept
    shared_BHMK = (gradient_BHMK / sums_BHM1).astype(q_BHMK.dtype)
    along_BHM1 = (widened(shared_BHMK) * mixed_BHMK).sum(axis=-1, keepdims=True)
    of_shares_BHMS = _widely(shared_BHMK, transposed(v_BHSK))
    of_scores_BHMS = (exponentials_BHMS * (of_shares_BHMS - along_BHM1)).astype(q_BHMK.dtype)
    of_q_BHMK = of_scores_BHMS @ k_BHSK
    of_k_BHSK = transposed(of_scores_BHMS) @ q_BHMK
    of_v_BHSK = transposed(exponentials_BHMS) @ shared_BHMK
    return of_q_BHMK, of_k_BHSK, of_v_BHSK, None


in_products.defvjp(_in_products_forward, _in_products_backward)


def _widely(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, not rounded to their own kind."""
    return jnp.matmul(x, y, preferred_element_type=wide_type(x))


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
    kernel = _splash_kernel(length, heads, interpret)

    def of_row(q_SHK: jax.Array, k_SHK: jax.Array, v_SHK: jax.Array, segments_S: Any) -> jax.Array:
        q_HSK, k_HSK, v_HSK = (x.swapaxes(0, 1) for x in (q_SHK * head_width**-0.5, k_SHK, v_SHK))
        ids = None if segments_S is None else SegmentIds(segments_S, segments_S)
        mixed_HSK: jax.Array = kernel(q_HSK, k_HSK, v_HSK, segment_ids=ids)
        return mixed_HSK.swapaxes(0, 1)

    return jax.vmap(of_row)(q_BSHK, k_BSHK, v_BSHK, segments_BS)


@functools.lru_cache(maxsize=4)
def _splash_kernel(length: int, heads: int, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import FullMask, MultiHeadMask, make_splash_mha

    with jax.ensure_compile_time_eval():
        return make_splash_mha(
            MultiHeadMask([FullMask((length, length))] * heads),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


def _takes_splash(q_BMHK: jax.Array, k_BSHK: jax.Array) -> bool:
    length = k_BSHK.shape[1]
    return (
        jax.default_backend() == "tpu"
        and q_BMHK.shape[1] == length
        and length >= SPLASH_LEAST_POSITIONS
        and length % SPLASH_BLOCK == 0
    )


def _takes_cudnn(q_BMHK: jax.Array, k_BSHK: jax.Array, mask_B1MS: jax.Array | None) -> bool:
    """With a mask cuDNN refuses to train on an odd number of positions (jax 0.12)."""
    is_even = q_BMHK.shape[1] % 2 == 0 and k_BSHK.shape[1] % 2 == 0
    return (
        (mask_B1MS is None or is_even)
        and jax.default_backend() == "gpu"
        and q_BMHK.dtype in (jnp.bfloat16, jnp.float16)
        and q_BMHK.shape[-1] <= CUDNN_MOST_HEAD_WIDTH
        and q_BMHK.shape[-1] % 8 == 0
    )
