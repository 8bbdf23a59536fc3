"""What lies between the products is what its definition says, and so are the gradients that were written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jobs.flax_mlm import parts

pytestmark = pytest.mark.usefixtures("two_devices")

X = np.random.default_rng(0).normal(0.5, 2.0, (3, 5, 8))
SCALE, BIAS = (np.random.default_rng(seed).normal(1.0, 0.5, 8) for seed in (1, 2))


def keys(seed: int, batch: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), batch)


def test_gelu_is_x_times_the_share_of_a_normal_distribution_below_x() -> None:
    points = np.array([-8.0, -3.0, -1.0, -1e-3, 0.0, 0.5, 2.0, 8.0])
    known = [x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in points]
    np.testing.assert_allclose(parts.gelu(jnp.asarray(points, jnp.float32)), known, atol=2e-6)


def test_a_layer_norm_has_the_mean_and_the_spread_that_it_was_given() -> None:
    normal = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-5)
    found = parts.layer_norm(*(jnp.asarray(array, jnp.float32) for array in (X, SCALE, BIAS)))
    np.testing.assert_allclose(found, normal * SCALE + BIAS, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "arguments"), [(parts.gelu, (X,)), (parts.layer_norm, (X, SCALE, BIAS))], ids=["gelu", "norm"]
)
def test_a_gradient_written_by_hand_is_what_finite_differences_find(
    part: Callable[..., jax.Array], arguments: tuple[np.ndarray, ...]
) -> None:
    with jax.enable_x64(True):
        check_grads(part, tuple(map(jnp.asarray, arguments)), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_a_result_and_its_gradients_are_of_the_kind_of_what_they_belong_to(kind: str) -> None:
    x, scale, bias = jnp.asarray(X, kind), jnp.asarray(SCALE, jnp.float32), jnp.asarray(BIAS, jnp.float32)
    normed, pull = jax.vjp(parts.layer_norm, x, scale, bias)
    assert [str(array.dtype) for array in (normed, *pull(normed))] == [kind, kind, "float32", "float32"]
    curved, pull = jax.vjp(parts.gelu, x)
    assert [str(array.dtype) for array in (curved, *pull(curved))] == [kind, kind]


def test_a_norm_of_bfloat16_takes_its_statistics_in_float32() -> None:
    """In bfloat16 the mean of values around 100 is off by a quarter, as much as they vary."""
    rows = jnp.asarray(100 + 0.5 * (np.arange(512) % 2), jnp.bfloat16)[None]
    normed = parts.layer_norm(rows, jnp.ones(512), jnp.zeros(512))
    np.testing.assert_allclose(np.abs(np.asarray(normed, np.float32)), 1.0, atol=0.01)


def test_dropout_keeps_the_mean_of_what_it_thins() -> None:
    thinned = np.asarray(parts.dropout(jnp.ones((3, 100, 100)), 0.25, keys(0, 3)))
    assert set(np.unique(thinned)) == {np.float32(0.0), np.float32(1 / 0.75)}
    assert (thinned == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert thinned.mean() == pytest.approx(1.0, abs=0.01)


def test_what_is_dropped_has_no_pattern_within_a_row_nor_between_rows() -> None:
    """Neighbours, next rows and other keys agree as often as chance says; 4.5 standard errors are allowed."""
    dropped = np.asarray(parts.dropout(jnp.ones((64, 64, 64)), 0.5, keys(3, 64))) == 0
    for shift in range(1, 4):
        for axis in range(3):
            agree = (dropped == np.roll(dropped, shift, axis)).mean()
            assert agree == pytest.approx(0.5, abs=4.5 * 0.5 / math.sqrt(dropped.size)), (shift, axis)
    each_place = dropped.mean(0)
    assert each_place.std() == pytest.approx(0.5 / math.sqrt(64), rel=0.05)
