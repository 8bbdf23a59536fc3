"""Operations of models written by hand for CPUs, each with the name of its plain twin in `ops`, which chooses it.

XLA compiles the plain ones well for TPU and GPU. On a CPU it passes over memory once for each operation of the backward
pass, and is slow at some shapes, orders and sums of bfloat16; docs/benchmarks.md has what each of these is worth.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def wide_type(x: Any) -> jnp.dtype:
    """float32, or x's own dtype where that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)


def widened(x: Any) -> jax.Array:
    """x in float32, or in its own dtype where that is wider."""
    return jnp.asarray(x, wide_type(x))


def linear(x: jax.Array, kernel_IO: jax.Array, bias_O: jax.Array) -> jax.Array:
    """x W + b over the last axis, in x's dtype."""
    return _add_bias(_product(x, kernel_IO), bias_O)


def logits(x: jax.Array, table_VD: jax.Array, bias_V: jax.Array) -> jax.Array:
    """x Eᵀ + b over the last axis, in the table's dtype."""
    return _add_bias(_product_of_transposed(x, table_VD), bias_V)


@jax.custom_vjp
def _product(x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """x W in x's dtype. The other axes go as rows of one matrix: products of three axes are slower here. The gradient
    of W has W's own dtype: it is never rounded to x's, and never converted back."""
    return (_rows(x) @ kernel_IO.astype(x.dtype)).reshape(*x.shape[:-1], kernel_IO.shape[-1])


def _product_forward(x: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel_IO), (x, kernel_IO)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel_IO = kept
    of_x = _rows(gradient) @ transposed(kernel_IO.astype(gradient.dtype))
    of_kernel_IO = _product_of_rows(x, gradient, kernel_IO.dtype)
    return of_x.reshape(x.shape), of_kernel_IO


_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def _product_of_transposed(x: jax.Array, kernel_OI: jax.Array) -> jax.Array:
    """x Wᵀ, otherwise as `_product`, but in W's dtype: logits are not rounded to x's."""
    found = jnp.matmul(
        _rows(x), transposed(kernel_OI.astype(x.dtype)), preferred_element_type=kernel_OI.dtype
    )
    return found.reshape(*x.shape[:-1], kernel_OI.shape[0])


def _of_transposed_forward(
    x: jax.Array, kernel_OI: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product_of_transposed(x, kernel_OI), (x, kernel_OI)


def _of_transposed_backward(
    kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel_OI = kept
    gradient = gradient.astype(x.dtype)
    of_x = _rows(gradient) @ kernel_OI.astype(x.dtype)
    of_kernel_OI = _product_of_rows(gradient, x, kernel_OI.dtype)
    return of_x.reshape(x.shape), of_kernel_OI


_product_of_transposed.defvjp(_of_transposed_forward, _of_transposed_backward)


def _product_of_rows(x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """xᵀ y, of two activations' rows: what each product gives to the gradient of its matrix."""
    found = jnp.matmul(transposed(_rows(x)), _rows(y), preferred_element_type=dtype)
    # Where the gradient's axes are swapped afterwards, XLA makes that a part of the product, which in bfloat16 is slow.
    return _by_rows(found) if x.dtype == jnp.bfloat16 else found


def transposed(x: jax.Array) -> jax.Array:
    """The last two axes swapped; of bfloat16 as a copy, whose rows lie one after another.

    XLA hands a matrix to a product as it lies, and of bfloat16 one that lies the other way takes twice the time: 27 ms
    instead of 12 and 1 for the copy (1,024 x 768 x 3,072, one core). Of float32 it makes no difference.
    """
    swapped = x.swapaxes(-1, -2)
    return _by_rows(swapped) if x.dtype == jnp.bfloat16 else swapped


def _by_rows(x: jax.Array) -> jax.Array:
    """x in memory row by row, whatever XLA would choose."""
    laid_out: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return laid_out


@jax.custom_vjp
def _add_bias(x: jax.Array, bias_D: jax.Array) -> jax.Array:
    """x + b over the last axis, in x's dtype."""
    return x + bias_D.astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _add_bias(x, bias_D), bias_D


def _add_bias_backward(bias_D: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bias's gradient is a product with ones, for XLA's sum of bfloat16 is slow."""
    rows = _rows(gradient)
    ones = jnp.ones((1, rows.shape[0]), gradient.dtype)
    sums = jnp.matmul(ones, rows, preferred_element_type=wide_type(gradient))[0]
    return gradient, sums.astype(bias_D.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x) by erf: `jax.nn.gelu` takes erfc, which is two functions on a CPU."""
    return (x * _normal_below(x)).astype(x.dtype)


def _normal_below(x: jax.Array) -> jax.Array:
    """Φ(x), the share of a normal distribution that lies below x; in float32 at least."""
    return 0.5 * (1 + jax.lax.erf(widened(x) * math.sqrt(0.5)))


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    """Φ(x) + x φ(x): only x is kept, Φ is computed again."""
    wide = widened(x)
    slope = _normal_below(x) + wide * jnp.exp(-0.5 * wide * wide) * math.sqrt(0.5 / math.pi)
    return ((gradient * slope).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def attention(
    q_BMHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, mask_B1MS: jax.Array | None
) -> jax.Array:
    """softmax(q k / √K) v, (B, M, H, K), in q's dtype."""
    q_BHMK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BMHK, k_BSHK, v_BSHK))
    return _attention(q_BHMK * q_BHMK.shape[-1] ** -0.5, k_BHSK, v_BHSK, mask_B1MS).swapaxes(1, 2)


@jax.custom_vjp
def _attention(
    q_BHMK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, mask_B1MS: jax.Array | None
) -> jax.Array:
    """softmax(q k) v of scaled queries.

    Of all that is as large as the scores, (B, H, M, S), only their exponentials are kept, and nothing so large is ever
    divided: the sums of the exponentials divide the results, which are smaller, and in the backward pass their
    gradients (as flash attention does it, Dao et al. 2022, appendix B). On a CPU such passes over memory took half as
    long as attention's matrix products.

    Scores, and what the gradient of each of them is the difference of, are float32 at least and of the same rounded
    exponentials: while attention is nearly even that difference is smaller than what bfloat16 rounds off, and a small
    model then learns late what to attend to (`docs/benchmarks.md`).
    """
    return _attention_forward(q_BHMK, k_BHSK, v_BHSK, mask_B1MS)[0]


def _attention_forward(
    q_BHMK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, mask_B1MS: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    scores_BHMS = _wide_product(q_BHMK, transposed(k_BHSK))
    if mask_B1MS is not None:
        scores_BHMS = jnp.where(mask_B1MS, scores_BHMS, jnp.asarray(-jnp.inf, scores_BHMS.dtype))
    highest_BHM1 = scores_BHMS.max(axis=-1, keepdims=True)
    exponentials_BHMS = jnp.exp(scores_BHMS - highest_BHM1).astype(q_BHMK.dtype)
    sums_BHM1 = widened(exponentials_BHMS).sum(axis=-1, keepdims=True)
    mixed_BHMK = _wide_product(exponentials_BHMS, v_BHSK) / sums_BHM1
    return mixed_BHMK.astype(q_BHMK.dtype), (q_BHMK, k_BHSK, v_BHSK, exponentials_BHMS, sums_BHM1, mixed_BHMK)


def _attention_backward(
    kept: tuple[jax.Array, ...], gradient_BHMK: jax.Array
) -> tuple[jax.Array | None, ...]:
    q_BHMK, k_BHSK, v_BHSK, exponentials_BHMS, sums_BHM1, mixed_BHMK = kept
    shared_BHMK = (gradient_BHMK / sums_BHM1).astype(q_BHMK.dtype)
    along_BHM1 = (widened(shared_BHMK) * mixed_BHMK).sum(axis=-1, keepdims=True)
    of_shares_BHMS = _wide_product(shared_BHMK, transposed(v_BHSK))
    of_scores_BHMS = (exponentials_BHMS * (of_shares_BHMS - along_BHM1)).astype(q_BHMK.dtype)
    of_q_BHMK = of_scores_BHMS @ k_BHSK
    of_k_BHSK = transposed(of_scores_BHMS) @ q_BHMK
    of_v_BHSK = transposed(exponentials_BHMS) @ shared_BHMK
    return of_q_BHMK, of_k_BHSK, of_v_BHSK, None


_attention.defvjp(_attention_forward, _attention_backward)


def _wide_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y, not rounded to their own dtype."""
    return jnp.matmul(x, y, preferred_element_type=wide_type(x))
