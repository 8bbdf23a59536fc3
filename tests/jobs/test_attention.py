"""Whatever kernel computes it, attention is the softmax of the products, within the segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jobs.flax_mlm.attention import attend, splash

pytestmark = pytest.mark.usefixtures("two_devices")

B, S, H, K = 2, 256, 2, 64


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


@pytest.mark.parametrize("documents", [False, True])
def test_attention_is_the_softmax_of_the_products_within_a_segment(documents: bool) -> None:
    of_BS = segments() if documents else None
    expected = by_hand(*inputs(), segments() if documents else jnp.zeros((B, S)))
    np.testing.assert_allclose(attend(*inputs(), of_BS, of_BS), expected, atol=1e-5)


def test_some_positions_are_asked_for_and_get_what_they_would_have_among_all() -> None:
    q_BSHK, k_BSHK, v_BSHK = inputs()
    asked = jnp.array([0, 99, 100, 255])
    found = attend(q_BSHK[:, asked], k_BSHK, v_BSHK, segments()[:, asked], segments())
    np.testing.assert_allclose(found, by_hand(*inputs(), segments())[:, asked], atol=1e-5)


def test_what_nearly_even_attention_learns_is_not_lost_in_bfloat16() -> None:
    """The gradients of scores are small differences of large numbers there."""
    q_BSHK, k_BSHK, v_BSHK = (0.1 * x for x in inputs())
    weights = 1 + 0.1 * jax.random.normal(jax.random.key(1), v_BSHK.shape)

    def of_k(dtype: str) -> np.ndarray:
        q, k, v = (x.astype(jnp.bfloat16).astype(dtype) for x in (q_BSHK, k_BSHK, 1 + v_BSHK))
        gradient = jax.grad(lambda k: (attend(q, k, v) * weights.astype(dtype)).sum())(k)
        return np.asarray(gradient, np.float64)

    exactly = of_k("float32")
    assert np.linalg.norm(of_k("bfloat16") - exactly) < 0.01 * np.linalg.norm(exactly)


@pytest.mark.parametrize("documents", [False, True])
def test_the_tpus_kernel_interpreted_gives_what_our_products_give_and_their_gradients(
    documents: bool,
) -> None:
    """The kernel's own program, run by an interpreter: no TPU is here."""
    of_BS = segments() if documents else None

    def through(kernel: str, qkv: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_BSHK, k_BSHK, v_BSHK = qkv
        if kernel == "splash":
            return splash(q_BSHK, k_BSHK, v_BSHK, of_BS, interpret=True)
        return attend(q_BSHK, k_BSHK, v_BSHK, of_BS, of_BS)

    def summed(kernel: str) -> tuple[jax.Array, ...]:
        weights = jnp.sin(jnp.arange(B * S * H * K)).reshape(B, S, H, K)
        gradients: tuple[jax.Array, ...]
        gradients = jax.grad(lambda qkv: (through(kernel, qkv) * weights).sum())(inputs())
        return gradients

    np.testing.assert_allclose(through("splash", inputs()), through("products", inputs()), atol=2e-5)
    for ours, theirs in zip(summed("splash"), summed("products"), strict=True):
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
    attend(q_BMHK[:, :positions], k_BSHK, v_BSHK, of_BM, of_BS)
    assert seen == (["cudnn"] if takes_cudnn else [])
