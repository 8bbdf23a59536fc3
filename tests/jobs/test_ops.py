"""Each operation is what its definition says, on every platform: JAX's own and its twin that is written for CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jobs.flax_mlm import cpu_ops, ops
from jobs.runtime.jax.executables import multiplies_bfloat16

pytestmark = pytest.mark.usefixtures("two_devices")

B, S, H, K = 2, 256, 2, 64
X = np.random.default_rng(0).normal(0.5, 2.0, (3, 5, 8))


@pytest.fixture(params=["cpu", "tpu"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend is made believe: on a TPU, which is not here, JAX's own operations are taken."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    return str(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 5), (152, 64, 128)], ids=str)
def test_a_product_and_its_gradients_are_those_of_the_same_matrices_in_float64(
    shape: tuple[int, int, int], dtype: str, platform: str
) -> None:
    rows, inputs, outputs = shape
    draw = np.random.default_rng(0).standard_normal
    x, kernel_IO, bias_O, weights = (
        draw((rows, inputs)),
        draw((inputs, outputs)),
        draw(outputs),
        draw((rows, outputs)),
    )
    x, weights = (np.asarray(jnp.asarray(array, dtype), np.float64) for array in (x, weights))
    wanted = (x @ kernel_IO + bias_O, weights @ kernel_IO.T, x.T @ weights, weights.sum(0))

    def found(multiply: Callable[..., jax.Array]) -> tuple[jax.Array, ...]:
        arguments = (
            jnp.asarray(x, dtype),
            jnp.asarray(kernel_IO, jnp.float32),
            jnp.asarray(bias_O, jnp.float32),
        )
        result, pull = jax.vjp(multiply, *arguments)
        return result, *pull(jnp.asarray(weights, result.dtype))

    for multiply in (
        ops.linear,
        jax.jit(lambda *arguments: ops.linear(*arguments)),
        jax.jit(lambda x, kernel_IO, bias_O: ops.logits(x, kernel_IO.T, bias_O)),
    ):
        for mine, its in zip(found(multiply), wanted, strict=True):
            spread = np.abs(its).max() * (1e-5 if dtype == "float32" else 0.02)
            np.testing.assert_allclose(np.asarray(mine, np.float64), its, atol=spread, err_msg=platform)
    assert found(ops.linear)[2].dtype == jnp.float32
    assert found(lambda x, kernel_IO, bias_O: ops.logits(x, kernel_IO.T, bias_O))[0].dtype == jnp.float32


@pytest.mark.skipif(not multiplies_bfloat16(), reason="on this CPU XLA turns bfloat16 into float32 first")
def test_on_a_cpu_a_transposed_matrix_of_bfloat16_is_copied_before_it_is_multiplied() -> None:
    x = jnp.ones((8, 24), jnp.bfloat16)
    compiled = jax.jit(lambda x, y: cpu_ops.transposed(x) @ y).lower(x, x).compile().as_text() or ""
    (multiplied,) = (line for line in compiled.splitlines() if " dot(" in line)
    assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in multiplied


def test_gelu_is_x_times_the_share_of_a_normal_distribution_below_x(platform: str) -> None:
    points = np.array([-8.0, -3.0, -1.0, -1e-3, 0.0, 0.5, 2.0, 8.0])
    known = [x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in points]
    found = ops.gelu(jnp.asarray(points, jnp.float32))
    np.testing.assert_allclose(found, known, atol=2e-6, err_msg=platform)


def test_a_gradient_written_by_hand_is_what_finite_differences_find() -> None:
    q, k, v = np.random.default_rng(1).normal(0.0, 1.0, (3, 1, 3, 2, 4))
    mask = jnp.asarray([[True, True, False]] * 3)[None, None]
    with jax.enable_x64(True):
        for of, arguments in (
            (cpu_ops.gelu, (X,)),
            (cpu_ops.linear, (X, q[0, 0].repeat(4, 0), q[0, 0, 0])),
            (lambda q, k, v: cpu_ops.attention(q, k, v, mask), (q, k, v)),
        ):
            check_grads(of, tuple(map(jnp.asarray, arguments)), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_a_layer_norm_has_the_mean_and_the_spread_that_it_was_given() -> None:
    scale, bias = (np.random.default_rng(seed).normal(1.0, 0.5, 8) for seed in (1, 2))
    normal = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-5)
    found = ops.layer_norm(*(jnp.asarray(array, jnp.float32) for array in (X, scale, bias)))
    np.testing.assert_allclose(found, normal * scale + bias, atol=1e-5)


def test_a_norm_of_bfloat16_takes_its_statistics_in_float32() -> None:
    """In bfloat16 the mean of values around 100 is off by a quarter, as much as they vary."""
    rows = jnp.asarray(100 + 0.5 * (np.arange(512) % 2), jnp.bfloat16)[None]
    normed = ops.layer_norm(rows, jnp.ones(512), jnp.zeros(512))
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.abs(np.asarray(normed, np.float32)), 1.0, atol=0.01)


def test_dropout_keeps_the_mean_of_what_it_thins() -> None:
    thinned = np.asarray(ops.dropout(jnp.ones((3, 100, 100)), 0.25, keys(0, 3)))
    assert set(np.unique(thinned)) == {np.float32(0.0), np.float32(1 / 0.75)}
    assert (thinned == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert thinned.mean() == pytest.approx(1.0, abs=0.01)


def test_what_is_dropped_has_no_pattern_within_a_row_nor_between_rows() -> None:
    """Neighbours, next rows and other keys agree as often as chance says; 4.5 standard errors are allowed."""
    dropped = np.asarray(ops.dropout(jnp.ones((64, 64, 64)), 0.5, keys(3, 64))) == 0
    for shift in range(1, 4):
        for axis in range(3):
            agree = (dropped == np.roll(dropped, shift, axis)).mean()
            assert agree == pytest.approx(0.5, abs=4.5 * 0.5 / math.sqrt(dropped.size)), (shift, axis)
    each_place = dropped.mean(0)
    assert each_place.std() == pytest.approx(0.5 / math.sqrt(64), rel=0.05)


def keys(seed: int, batch: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), batch)


def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    q_BSHK, k_BSHK, v_BSHK = jax.random.normal(jax.random.key(0), (3, B, S, H, K))
    return q_BSHK, k_BSHK, v_BSHK


def segments() -> jax.Array:
    """Documents of 100 positions; the second row begins in the middle of one."""
    return (jnp.arange(S)[None, :] + jnp.array([[0], [50]])) // 100


def by_hand(q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, segments_BS: jax.Array) -> np.ndarray:
    q, k, v, of = (np.asarray(x, np.float64) for x in (q_BSHK, k_BSHK, v_BSHK, segments_BS))
    scores_BHST = np.einsum("bshk,bthk->bhst", q, k) / np.sqrt(K)
    scores_BHST = np.where((of[:, :, None] == of[:, None, :])[:, None], scores_BHST, -np.inf)
    weights_BHST = np.exp(scores_BHST - scores_BHST.max(-1, keepdims=True))
    weights_BHST /= weights_BHST.sum(-1, keepdims=True)
    mixed_BSHK: np.ndarray = np.einsum("bhst,bthk->bshk", weights_BHST, v)
    return mixed_BSHK


@pytest.fixture
def no_tpu_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ops, "SPLASH_LEAST_POSITIONS", S + 1)
    yield


@pytest.mark.usefixtures("no_tpu_kernel", "platform")
@pytest.mark.parametrize("documents", [False, True])
def test_attention_is_the_softmax_of_the_products_within_a_segment_of_some_positions_or_all(
    documents: bool,
) -> None:
    of_BS = segments() if documents else None
    expected = by_hand(*inputs(), segments() if documents else jnp.zeros((B, S)))
    np.testing.assert_allclose(ops.attend(*inputs(), of_BS, of_BS), expected, atol=1e-5)
    (q_BSHK, k_BSHK, v_BSHK), asked = inputs(), jnp.array([0, 99, 100, 255])
    of_BM = of_BS[:, asked] if of_BS is not None else None
    found = ops.attend(q_BSHK[:, asked], k_BSHK, v_BSHK, of_BM, of_BS)
    np.testing.assert_allclose(found, expected[:, asked], atol=1e-5)


@pytest.mark.usefixtures("no_tpu_kernel", "platform")
def test_what_nearly_even_attention_learns_is_not_lost_in_bfloat16() -> None:
    """The gradients of scores are small differences of large numbers there."""
    q_BSHK, k_BSHK, v_BSHK = (0.1 * x for x in inputs())
    weights = 1 + 0.1 * jax.random.normal(jax.random.key(1), v_BSHK.shape)

    def of_k(dtype: str) -> np.ndarray:
        q, k, v = (x.astype(jnp.bfloat16).astype(dtype) for x in (q_BSHK, k_BSHK, 1 + v_BSHK))
        gradient = jax.grad(lambda k: (ops.attend(q, k, v) * weights.astype(dtype)).sum())(k)
        return np.asarray(gradient, np.float64)

    exactly = of_k("float32")
    assert np.linalg.norm(of_k("bfloat16") - exactly) < 0.01 * np.linalg.norm(exactly)


def test_the_tpus_kernel_interpreted_gives_what_our_products_give_and_their_gradients() -> None:
    """The kernel's own program, run by an interpreter: no TPU is here."""
    weights = jnp.sin(jnp.arange(B * S * H * K)).reshape(B, S, H, K)

    def both(attend: Callable[..., jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        found, pull = jax.vjp(attend, *inputs())
        return found, pull(weights)

    splash, of_splash = both(lambda q, k, v: ops.splash(q, k, v, segments(), interpret=True))
    plain, of_plain = both(lambda q, k, v: ops.attend(q, k, v, segments(), segments()))
    np.testing.assert_allclose(splash, plain, atol=2e-5)
    for ours, theirs in zip(of_splash, of_plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("positions", "documents", "takes_cudnn"), [(50, True, True), (51, True, False), (51, False, True)]
)
def test_on_a_gpu_an_odd_number_of_positions_with_documents_is_not_cudnns(
    monkeypatch: pytest.MonkeyPatch, positions: int, documents: bool, takes_cudnn: bool
) -> None:
    """It refuses to train on them, and our products take them. The backend is made believe."""
    seen = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *_, **how: seen.append(how["implementation"]))
    q_BMHK, k_BSHK, v_BSHK = (x.astype(jnp.bfloat16) for x in inputs())
    of_BS = segments() if documents else None
    of_BM = segments()[:, :positions] if documents else None
    ops.attend(q_BMHK[:, :positions], k_BSHK, v_BSHK, of_BM, of_BS)
    assert seen == (["cudnn"] if takes_cudnn else [])
