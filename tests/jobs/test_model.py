"""The model is RoBERTa: its size, its gradients, its dropout, and logits only where they are asked for."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jobs.flax_mlm import model as modelling
from jobs.flax_mlm.model import Dimensions, Mlm

pytestmark = pytest.mark.usefixtures("two_devices")

ROBERTA_BASE_PARAMETERS = 124_697_433
"""RobertaForMaskedLM of roberta-base: 50,265 tokens, 514 positions, one token type, the output tied."""


def dimensions(**changed: Any) -> Dimensions:
    small = {"vocab_size": 40, "max_positions": 12, "position_offset": 2, "layers": 2, "width": 8}
    return Dimensions(**{**small, "heads": 2, "ff_width": 12, **changed})


def model_of(dims: Dimensions, seed: int = 0) -> Mlm:
    return Mlm(dims, jnp.dtype("float32"), nnx.Rngs(seed))


def some_tokens(batch: int = 3, length: int = 10) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (batch, length), 0, 40)


def keys(seed: int, batch: int = 3) -> jax.Array:
    return jax.random.split(jax.random.key(seed), batch)


def test_base_has_roberta_bases_parameters_less_the_one_token_type_and_with_its_table_filled_up() -> None:
    dims = dimensions(vocab_size=50265, max_positions=512, layers=12, width=768, heads=12, ff_width=3072)
    shapes = nnx.state(nnx.eval_shape(lambda: model_of(dims)), nnx.Param)
    filling = 39 * (768 + 1)  # rows of the table and of its bias, up to the next multiple of 128
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == ROBERTA_BASE_PARAMETERS - 768 + filling


@pytest.mark.parametrize(("width", "stddev"), [(768, 0.02), (192, 0.04), (128, 0.049)])
def test_initial_weights_are_robertas_at_its_width_and_larger_in_narrower_models(
    width: int, stddev: float
) -> None:
    model = model_of(dimensions(width=width, ff_width=256, layers=1, vocab_size=512))
    layer = model.layers[0]
    drawn = [model.embeddings.tokens.embedding, model.embeddings.positions.embedding, model.head_dense.kernel]
    drawn += [one.kernel for one in (layer.qkv, layer.attention_out, layer.ff_in, layer.ff_out)]
    for leaf in drawn:
        assert float(leaf[...].std()) == pytest.approx(stddev, rel=0.1)


def test_positions_begin_as_near_to_each_other_as_they_lie_in_the_text() -> None:
    table_RD = np.asarray(modelling.sinusoids(514, 128, longest=512, stddev=0.05))
    nearness_RR = table_RD @ table_RD.T
    for shift in (0, 1, 5, 40):
        along = np.diagonal(nearness_RR, shift)
        assert along == pytest.approx(along[0], abs=1e-4)  # wherever the two positions are
    distances = nearness_RR[0, [0, 1, 2, 4, 8, 16, 64]]
    assert (np.diff(distances) < 0).all()


def test_the_filling_of_the_token_table_is_never_guessed_and_never_learned() -> None:
    graph, params = nnx.split(model_of(dimensions()), nnx.Param)
    tokens_BS, positions_BM = some_tokens(), jnp.array([[1, 4], [0, 5], [2, 3]])

    def surprise(params: Any) -> jax.Array:
        return -jax.nn.log_softmax(nnx.merge(graph, params)(tokens_BS, positions_BM))[..., 7].mean()

    shares_BMV = jax.nn.softmax(nnx.merge(graph, params)(tokens_BS, positions_BM))
    assert shares_BMV.shape[-1] == 128
    assert float(shares_BMV[..., 40:].max()) == 0.0
    gradient = nnx.to_pure_dict(jax.grad(surprise)(params))
    for leaf in (gradient["embeddings"]["tokens"]["embedding"], gradient["head_bias"]):
        assert not np.asarray(leaf[40:]).any()
        assert np.asarray(leaf[:40]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_and_what_runs_through_the_layers_are_float32_and_products_of_the_kind_asked_for(
    dtype: str,
) -> None:
    def parts() -> tuple[Any, jax.Array, jax.Array]:
        model = Mlm(dimensions(), jnp.dtype(dtype), nnx.Rngs(0))
        hidden_BSD = model.encode(some_tokens())
        return nnx.state(model, nnx.Param), hidden_BSD, model.logits(hidden_BSD)

    params, hidden_BSD, logits_BSV = nnx.eval_shape(parts)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert [str(array.dtype) for array in (hidden_BSD, logits_BSV)] == ["float32", "float32"]
    lowered = jax.jit(lambda: parts()[2]).lower().as_text()
    kinds = set(re.findall(r"dot_general.*: \(tensor<[^>]*x(\w+)>", lowered))
    assert kinds == {{"float32": "f32", "bfloat16": "bf16"}[dtype]}


def test_gradients_are_the_slopes_that_finite_differences_find() -> None:
    """One slope for each parameter, along its own gradient: one that is too long, short or askew differs."""
    dims = dimensions(layers=1)
    tokens_BS, positions_BM = some_tokens(2, 6), jnp.array([[1, 4], [0, 5]])
    targets_BM1 = np.array([[[3], [9]], [[0], [39]]])
    # Wider than at the start of training, so that attention and normalisation are far from linear.
    start, structure = jax.tree.flatten(nnx.to_pure_dict(nnx.state(model_of(dims), nnx.Param)))
    leaves = [np.asarray(leaf, np.float64) * 4 + 0.02 for leaf in start]
    step = 2e-4
    with jax.enable_x64(True):
        graph = nnx.split(nnx.eval_shape(lambda: Mlm(dims, jnp.dtype("float64"), nnx.Rngs(0))))[0]

        @jax.jit
        def loss_and_gradient(leaves: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            def loss(leaves: list[jax.Array]) -> jax.Array:
                logits_BMV = nnx.merge(graph, jax.tree.unflatten(structure, leaves))(tokens_BS, positions_BM)
                return -jnp.take_along_axis(jax.nn.log_softmax(logits_BMV), targets_BM1, axis=-1).mean()

            return jax.value_and_grad(loss)(leaves)

        gradients = [np.asarray(gradient) for gradient in loss_and_gradient(leaves)[1]]
        assert len(gradients) == 21
        for index, gradient in enumerate(gradients):
            slope = float(np.linalg.norm(gradient))

            def moved(by: float, index: int = index, unit: Any = gradient / slope) -> float:
                changed = [leaf + by * unit if i == index else leaf for i, leaf in enumerate(leaves)]
                return float(loss_and_gradient(changed)[0])

            assert slope == pytest.approx((moved(step) - moved(-step)) / (2 * step), rel=5e-3, abs=2e-3)


def test_without_a_key_nothing_is_dropped() -> None:
    dropping, plain = model_of(dimensions(dropout=0.5)), model_of(dimensions())
    np.testing.assert_array_equal(dropping.encode(some_tokens()), plain.encode(some_tokens()))


def test_the_same_keys_drop_the_same_and_other_keys_drop_other_activations() -> None:
    model, tokens_BS = model_of(dimensions(dropout=0.5)), some_tokens()
    first = model.encode(tokens_BS, keys(1))
    np.testing.assert_array_equal(first, model.encode(tokens_BS, keys(1)))
    assert not np.allclose(first, model.encode(tokens_BS, keys(2)))
    assert not np.allclose(first, model.encode(tokens_BS))


def test_what_a_row_drops_depends_on_its_own_key_alone() -> None:
    model, tokens_BS = model_of(dimensions(dropout=0.5)), some_tokens()
    whole, part = model.encode(tokens_BS, keys(1)), model.encode(tokens_BS[2:], keys(1)[2:])
    np.testing.assert_allclose(whole[2:], part, atol=1e-6)


def test_every_place_of_dropout_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that shared a key would drop the same units throughout the model."""
    seen: list[tuple[int, ...]] = []

    def spy(x_BSD: jax.Array, rate: float, keys_B: jax.Array) -> jax.Array:
        seen.extend(map(tuple, jax.random.key_data(keys_B).tolist()))
        return x_BSD

    monkeypatch.setattr(modelling, "dropout", spy)
    model_of(dimensions(dropout=0.5, layers=3)).encode(some_tokens(), keys(0))
    assert len(seen) == len(set(seen)) == 3 * (1 + 2 * 3)


def test_logits_at_masked_positions_are_the_full_logits_gathered() -> None:
    model, tokens_BS = model_of(dimensions()), some_tokens()
    positions_BM = jnp.array([[9, 0, 3], [1, 2, 3], [8, 8, 7]])
    full_BSV = model.logits(model.encode(tokens_BS))
    gathered = np.stack([np.asarray(full_BSV[row])[np.asarray(positions_BM[row])] for row in range(3)])
    asked_BMV = model(tokens_BS, positions_BM)
    np.testing.assert_allclose(asked_BMV[..., :40], gathered, atol=1e-6)
    np.testing.assert_allclose(model.logits(model.encode(tokens_BS, None, positions_BM)), gathered, atol=1e-6)


def test_a_sequence_knows_nothing_of_the_others_in_its_batch() -> None:
    model, tokens_BS = model_of(dimensions()), some_tokens()
    np.testing.assert_allclose(model.encode(tokens_BS)[1:2], model.encode(tokens_BS[1:2]), atol=1e-6)


def test_every_position_sees_every_other() -> None:
    """It is an encoder: a causal mask would leave early positions blind to later ones."""
    model, tokens_BS = model_of(dimensions()), some_tokens(1)
    changed = tokens_BS.at[0, 9].set((tokens_BS[0, 9] + 1) % 40)
    moved_S = np.abs(np.asarray(model.encode(changed) - model.encode(tokens_BS))).max(axis=(0, 2))
    assert (moved_S > 1e-6).all()


def test_within_a_document_a_position_sees_its_own_document_alone() -> None:
    model, tokens_BS = model_of(dimensions(document_start=39)), some_tokens(1).at[0].min(38).at[0, 4].set(39)
    elsewhere = tokens_BS.at[0, 9].set((tokens_BS[0, 9] + 1) % 39)
    moved_S = np.abs(np.asarray(model.encode(elsewhere) - model.encode(tokens_BS))).max(axis=(0, 2))
    assert (moved_S[:4] == 0).all()
    assert (moved_S[4:] > 1e-6).all()
    positions_BM = jnp.array([[7, 1]])
    full_BSD, asked_BMD = model.encode(tokens_BS), model.encode(tokens_BS, None, positions_BM)
    np.testing.assert_allclose(asked_BMD[0], full_BSD[0, positions_BM[0]], atol=1e-6)
