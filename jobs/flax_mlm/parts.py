"""What lies between the matrix products: GELU, layer norm, dropout; with gradients written by hand where that pays.

Autodiff keeps what the forward pass happened to compute and goes over it once for each operation. On a CPU that was
as much work as the matrix products: three times as much for GELU and for the norm as what is written here.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

LAYER_NORM_EPSILON = 1e-5


@jax.custom_vjp
def product(x: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """x W over the last axis, in x's kind. The other axes go as rows of one matrix: on CPU products of three axes are
    slower. The gradient of W is of W's own kind: it is never rounded to x's, and never converted back."""
    return (_rows(x) @ kernel_IO.astype(x.dtype)).reshape(*x.shape[:-1], kernel_IO.shape[-1])


def _product_forward(x: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, kernel_IO), (x, kernel_IO)


def _product_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel_IO = kept
    of_x = _rows(gradient) @ transposed(kernel_IO.astype(gradient.dtype))
    of_kernel_IO = _product_of_rows(x, gradient, kernel_IO.dtype)
    return of_x.reshape(x.shape), of_kernel_IO


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def product_of_transposed(x: jax.Array, kernel_OI: jax.Array) -> jax.Array:
    """x Wᵀ, otherwise as `product`, but what comes out is of W's kind: logits are not rounded to x's."""
    found = jnp.matmul(
        _rows(x), transposed(kernel_OI.astype(x.dtype)), preferred_element_type=kernel_OI.dtype
    )
    return found.reshape(*x.shape[:-1], kernel_OI.shape[0])


def _transposed_forward(x: jax.Array, kernel_OI: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product_of_transposed(x, kernel_OI), (x, kernel_OI)


def _transposed_backward(
    kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel_OI = kept
    gradient = gradient.astype(x.dtype)
    of_x = _rows(gradient) @ kernel_OI.astype(x.dtype)
    of_kernel_OI = _product_of_rows(gradient, x, kernel_OI.dtype)
    return of_x.reshape(x.shape), of_kernel_OI


product_of_transposed.defvjp(_transposed_forward, _transposed_backward)


def _product_of_rows(x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """xᵀ y, of two activations' rows: what each product gives to the gradient of its matrix."""
    product = jnp.matmul(transposed(_rows(x)), _rows(y), preferred_element_type=dtype)
    # Or XLA would fold a swap of its axes into the product, and has none of bfloat16 for that.
    return _laid_out(product) if x.dtype == jnp.bfloat16 else product


def transposed(x: jax.Array) -> jax.Array:
    """The last two axes swapped; of bfloat16 on CPU as a copy, whose rows lie one after another.

    XLA hands a matrix to a product on CPU as it lies, and of bfloat16 one that lies the other way takes twice the time:
    27 ms instead of 12 and 1 for the copy (1,024 x 768 x 3,072, one core). Of float32 it makes no difference.
    """
    swapped = x.swapaxes(-1, -2)
    return _laid_out(swapped) if x.dtype == jnp.bfloat16 else swapped


def _laid_out(x: jax.Array) -> jax.Array:
    """On CPU: x in memory row by row, whatever XLA would choose. Elsewhere it chooses better."""
    if jax.default_backend() != "cpu":
        return x
    laid_out: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return laid_out


@jax.custom_vjp
def add_bias(x: jax.Array, bias_D: jax.Array) -> jax.Array:
    """x + b over the last axis, in x's kind."""
    return x + bias_D.astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(x, bias_D), bias_D


def _add_bias_backward(bias_D: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, _column_sums(gradient).astype(bias_D.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _column_sums(x: jax.Array) -> jax.Array:
    """The sum over all axes but the last; on CPU as a product with ones, for XLA's sum of bfloat16 is slow there."""
    rows = _rows(x)
    if jax.default_backend() != "cpu":
        return rows.sum(0, dtype=_wide_type(x))
    return jnp.matmul(jnp.ones((1, rows.shape[0]), x.dtype), rows, preferred_element_type=_wide_type(x))[0]


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x Φ(x), exact (Hendrycks & Gimpel 2016), by erf: `jax.nn.gelu` takes erfc, which is two functions on a CPU."""
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


@jax.custom_vjp
def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Over the last axis (Ba et al. 2016), its statistics in float32 at least; the result is of x's kind."""
    return _layer_norm_forward(x, scale_D, bias_D)[0]


def _layer_norm_forward(
    x: jax.Array, scale_D: jax.Array, bias_D: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    wide = widened(x)
    centred = wide - wide.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + LAYER_NORM_EPSILON)
    normal = (centred * inverse).astype(x.dtype)
    return (normal * scale_D + bias_D).astype(x.dtype), (normal, inverse, scale_D)


def _layer_norm_backward(kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    """Of x: what is left of the scaled gradient without its mean and without its part along the normalised x."""
    normal, inverse, scale_D = widened(kept[0]), kept[1], kept[2]
    wide = widened(gradient)
    scaled = wide * scale_D
    along = (scaled * normal).mean(-1, keepdims=True)
    of_x = inverse * (scaled - scaled.mean(-1, keepdims=True) - normal * along)
    rows = tuple(range(gradient.ndim - 1))
    of_scale_D, of_bias_D = (wide * normal).sum(rows), wide.sum(rows)
    return of_x.astype(gradient.dtype), of_scale_D.astype(scale_D.dtype), of_bias_D.astype(scale_D.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def dropout(x_BSD: jax.Array, rate: float, keys_B: jax.Array | None) -> jax.Array:
    """Dropout from a key for each row: what is dropped does not depend on which device holds the row.

    No keys, no dropout.
    """
    if keys_B is None or rate == 0.0:
        return x_BSD
    kept_BSD = _noise(keys_B, x_BSD.shape[1:]) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept_BSD, x_BSD / (1.0 - rate), jnp.zeros_like(x_BSD))


def widened(x: Any) -> jax.Array:
    """x in float32, or in its own kind where that is wider."""
    return jnp.asarray(x, _wide_type(x))


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


def _wide_type(x: Any) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
