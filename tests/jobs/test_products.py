"""A product is the matrices' product in either kind of numbers, and so are its gradients."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jobs.flax_mlm.products import product, product_of_transposed, transposed
from jobs.runtime.processor import multiplies_bfloat16

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 4, 5), (8, 16, 24), (152, 64, 128)], ids=str)
def test_a_product_and_its_gradients_are_those_of_the_same_matrices_in_float64(
    shape: tuple[int, int, int], dtype: str
) -> None:
    rows, inputs, outputs = shape
    draw = np.random.default_rng(0).standard_normal
    x, kernel_IO, weights = draw((rows, inputs)), draw((inputs, outputs)), draw((rows, outputs))
    x, weights = (np.asarray(jnp.asarray(array, dtype), np.float64) for array in (x, weights))
    wanted = (x @ kernel_IO, weights @ kernel_IO.T, x.T @ weights)

    def found(multiply: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, ...]:
        arguments = jnp.asarray(x, dtype), jnp.asarray(kernel_IO, jnp.float32)
        result, pull = jax.vjp(multiply, *arguments)
        return result, *pull(jnp.asarray(weights, result.dtype))

    of_swapped = jax.jit(lambda x, kernel_IO: product(x, kernel_IO.T))
    for multiply in (
        product,
        jax.jit(product),
        jax.jit(lambda x, kernel_IO: product_of_transposed(x, kernel_IO.T)),
        lambda x, kernel_IO: of_swapped(x, kernel_IO.T),
    ):
        for mine, its in zip(found(multiply), wanted, strict=True):
            spread = np.abs(its).max() * (1e-5 if dtype == "float32" else 0.02)
            np.testing.assert_allclose(np.asarray(mine, np.float64), its, atol=spread)
    assert found(product)[2].dtype == jnp.float32


@pytest.mark.skipif(not multiplies_bfloat16(), reason="on this CPU XLA turns bfloat16 into float32 first")
def test_on_a_cpu_a_transposed_matrix_of_bfloat16_is_copied_before_it_is_multiplied() -> None:
    x = jnp.ones((8, 24), jnp.bfloat16)
    compiled = jax.jit(lambda x, y: transposed(x) @ y).lower(x, x).compile().as_text() or ""
    (multiplied,) = (line for line in compiled.splitlines() if " dot(" in line)
    assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in multiplied
