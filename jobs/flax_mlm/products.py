"""Matrix products over the last axis, and the bias that is added to them, with gradients written by hand: of the kinds
of numbers and in the layouts in which XLA is fast."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


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


def _of_transposed_forward(
    x: jax.Array, kernel_OI: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product_of_transposed(x, kernel_OI), (x, kernel_OI)


def _of_transposed_backward(
    kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel_OI = kept
    gradient = gradient.astype(x.dtype)
    of_x = _rows(gradient) @ kernel_OI.astype(x.dtype)
    of_kernel_OI = _product_of_rows(gradient, x, kernel_OI.dtype)
    return of_x.reshape(x.shape), of_kernel_OI


product_of_transposed.defvjp(_of_transposed_forward, _of_transposed_backward)


def _product_of_rows(x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """xᵀ y, of two activations' rows: what each product gives to the gradient of its matrix."""
    found = jnp.matmul(transposed(_rows(x)), _rows(y), preferred_element_type=dtype)
    # Where the gradient's axes are swapped afterwards, XLA makes that a part of the product, which in bfloat16 is slow.
    return _laid_out(found) if x.dtype == jnp.bfloat16 else found


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
        return rows.sum(0, dtype=wide_type(x))
    return jnp.matmul(jnp.ones((1, rows.shape[0]), x.dtype), rows, preferred_element_type=wide_type(x))[0]


def wide_type(x: Any) -> jnp.dtype:
    """float32, or x's own kind where that is wider."""
    return jnp.promote_types(x.dtype, jnp.float32)
