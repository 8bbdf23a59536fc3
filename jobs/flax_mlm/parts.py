"""What lies between the matrix products: GELU, layer norm, dropout; with gradients written by hand where that pays.

Autodiff keeps what the forward pass happened to compute and goes over it once for each operation. On a CPU that was
as much work as the matrix products: three times as much for GELU and for the norm as what is written here.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jobs.flax_mlm.products import wide_type

LAYER_NORM_EPSILON = 1e-5


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
    return jnp.asarray(x, wide_type(x))


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
