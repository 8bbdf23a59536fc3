"""Self-attention through the best kernel that the platform has.

TPU, from 512 positions on: splash attention, a flash attention whose scores never leave the chip's own memory
(Dao et al. 2022, arXiv:2205.14135); below that XLA's fused products are faster. GPU in bfloat16: cuDNN's.
Anything else: XLA's, whose scores are (B, H, M, S) in memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

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
    return jax.nn.dot_product_attention(
        q_BMHK, k_BSHK, v_BSHK, mask=mask_B1MS, implementation="cudnn" if _takes_cudnn(q_BMHK) else "xla"
    )


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


def _takes_cudnn(q_BMHK: jax.Array) -> bool:
    return (
        jax.default_backend() == "gpu"
        and q_BMHK.dtype in (jnp.bfloat16, jnp.float16)
        and q_BMHK.shape[-1] <= CUDNN_MOST_HEAD_WIDTH
        and q_BMHK.shape[-1] % 8 == 0
    )
