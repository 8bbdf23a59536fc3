"""The model is RoBERTa, what it is asked is hidden by BERT's rule, and each of its operations is what its definition
says: JAX's own and its twin whose gradient is written by hand."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jobs.flax_mlm import model as modelling
from jobs.flax_mlm.config import Dimensions
from jobs.flax_mlm.model import Mlm
from jobs.flax_mlm.step import Masked, MaskRule, forward_flops, mask, step_flops
from jobs.runtime.jax import aot, attention_kernel, custom_gradients, ops
from jobs.runtime.processor import multiplies_bfloat16

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


BASE = {"vocab_size": 50265, "max_positions": 512, "layers": 12, "width": 768, "heads": 12, "ff_width": 3072}


def test_base_has_roberta_bases_parameters_less_the_one_token_type_and_with_its_table_filled_up() -> None:
    shapes = nnx.state(nnx.eval_shape(lambda: model_of(dimensions(**BASE))), nnx.Param)
    filling = 39 * (768 + 1)  # rows of the table and of its bias, up to the next multiple of 128
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == ROBERTA_BASE_PARAMETERS - 768 + filling


@pytest.mark.parametrize(("width", "stddev"), [(768, 0.02), (128, 0.049)])
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
    graph, params = nnx.split(model_of(dimensions(layers=1)), nnx.Param)
    tokens_BS, positions_BM = some_tokens(), jnp.array([[1, 4], [0, 5], [2, 3]])

    def surprise(params: Any) -> tuple[jax.Array, jax.Array]:
        log_BMV = jax.nn.log_softmax(nnx.merge(graph, params)(tokens_BS, positions_BM))
        return -log_BMV[..., 7].mean(), jnp.exp(log_BMV)

    gradients, shares_BMV = jax.jit(jax.grad(surprise, has_aux=True))(params)
    assert shares_BMV.shape[-1] == 128
    assert float(shares_BMV[..., 40:].max()) == 0.0
    gradient = nnx.to_pure_dict(gradients)
    for leaf in (gradient["embeddings"]["tokens"]["embedding"], gradient["head_bias"]):
        assert not np.asarray(leaf[40:]).any()
        assert np.asarray(leaf[:40]).any()


@pytest.mark.parametrize(
    ("backend", "dtype", "passed"),
    [
        ("cpu", "float32", "float32"),
        ("cpu", "bfloat16", "float32"),
        ("tpu", "float32", "float32"),
        ("tpu", "bfloat16", "bfloat16"),
    ],
)
def test_parameters_and_logits_are_float32_and_products_of_the_kind_asked_for_and_on_a_tpu_what_runs_through_the_layers(
    backend: str, dtype: str, passed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    def parts() -> tuple[Any, jax.Array, jax.Array]:
        model = Mlm(dimensions(), jnp.dtype(dtype), nnx.Rngs(0))
        hidden_BSD = model.encode(some_tokens())
        return nnx.state(model, nnx.Param), hidden_BSD, model.logits(hidden_BSD)

    params, hidden_BSD, logits_BSV = nnx.eval_shape(parts)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert [str(array.dtype) for array in (hidden_BSD, logits_BSV)] == [passed, "float32"]
    lowered = jax.jit(lambda: parts()[2]).lower().as_text()
    kinds = set(re.findall(r"dot_general.*: \(tensor<[^>]*x(\w+)>", lowered))
    assert kinds == {{"float32": "f32", "bfloat16": "bf16"}[dtype]}


def test_what_a_row_drops_depends_on_its_own_key_only_and_without_keys_nothing_is_dropped() -> None:
    model, tokens_BS = model_of(dimensions(dropout=0.5, layers=1)), some_tokens()
    whole = model.encode(tokens_BS, keys(1))
    np.testing.assert_array_equal(whole, model.encode(tokens_BS, keys(1)))
    np.testing.assert_allclose(whole[2:], model.encode(tokens_BS[2:], keys(1)[2:]), atol=1e-6)
    plain = model_of(dimensions(layers=1)).encode(tokens_BS)
    np.testing.assert_array_equal(model.encode(tokens_BS), plain)
    for other in (model.encode(tokens_BS, keys(2)), plain):
        assert not np.allclose(whole, other)


def test_every_place_of_dropout_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that shared a key would drop the same units throughout the model."""
    seen: list[tuple[int, ...]] = []

    def spy(x_BSD: jax.Array, rate: float, keys_B: jax.Array) -> jax.Array:
        seen.extend(map(tuple, jax.random.key_data(keys_B).tolist()))
        return x_BSD

    monkeypatch.setattr(modelling, "dropout", spy)
    model_of(dimensions(dropout=0.5, layers=3)).encode(some_tokens(), keys(0))
    assert len(seen) == len(set(seen)) == 3 * (1 + 2 * 3)


def test_every_position_sees_every_other_of_its_sequence_and_none_of_another() -> None:
    """It is an encoder: a causal mask would leave early positions blind to later ones."""
    model, tokens_BS = model_of(dimensions()), some_tokens()
    changed = tokens_BS.at[0, 9].set((tokens_BS[0, 9] + 1) % 40)
    full_BSD = model.encode(tokens_BS)
    moved_BS = np.abs(np.asarray(model.encode(changed) - full_BSD)).max(axis=2)
    assert (moved_BS[0] > 1e-6).all()
    assert (moved_BS[1:] < 1e-6).all()
    # Logits that are asked for at some positions are the full logits gathered.
    positions_BM = jnp.array([[9, 0, 3], [1, 2, 3], [8, 8, 7]])
    full_BSV = np.asarray(model.logits(full_BSD))
    gathered = np.stack([full_BSV[row][np.asarray(positions_BM[row])] for row in range(3)])
    np.testing.assert_allclose(model(tokens_BS, positions_BM)[..., :40], gathered, atol=1e-6)


def test_within_a_document_a_position_sees_its_own_document_alone() -> None:
    model, tokens_BS = model_of(dimensions(document_start=39)), some_tokens(1).at[0].min(38).at[0, 4].set(39)
    elsewhere = tokens_BS.at[0, 9].set((tokens_BS[0, 9] + 1) % 39)
    moved_S = np.abs(np.asarray(model.encode(elsewhere) - model.encode(tokens_BS))).max(axis=(0, 2))
    assert (moved_S[:4] == 0).all()
    assert (moved_S[4:] > 1e-6).all()
    positions_BM = jnp.array([[7, 1]])
    full_BSD, asked_BMD = model.encode(tokens_BS), model.encode(tokens_BS, None, positions_BM)
    np.testing.assert_allclose(asked_BMD[0], full_BSD[0, positions_BM[0]], atol=1e-6)


def product_flops(jaxpr: Any) -> int:
    """Two for each multiplication of every dot_general in a traced program, however deep."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * out.size * int(jnp.prod(jnp.array([left.shape[axis] for axis in contracted])))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += product_flops(inner)
    return total


@pytest.mark.parametrize(
    ("changed", "batch", "length", "slots"),
    [({}, 2, 12, 3), ({"layers": 3, "heads": 1}, 1, 7, 7), ({"width": 24, "ff_width": 5}, 3, 9, 1)],
)
def test_the_forward_pass_is_the_sum_of_the_models_own_products(
    changed: dict[str, int], batch: int, length: int, slots: int
) -> None:
    """Counted in the traced program: a product added to the model, or taken out, is missed otherwise."""
    dims = dimensions(**changed)

    def run(tokens_BS: jax.Array, positions_BM: jax.Array) -> jax.Array:
        return Mlm(dims, jnp.dtype("float32"), nnx.Rngs(0))(tokens_BS, positions_BM)

    traced = jax.make_jaxpr(run)(jnp.zeros((batch, length), int), jnp.zeros((batch, slots), int))
    filling = 2 * batch * slots * dims.width * (dims.vocab_rows - dims.vocab_size)
    counted = product_flops(traced.jaxpr) - filling
    assert counted == batch * forward_flops(dims, length=length, slots=slots)


def test_robertas_base_step_costs_what_it_is_known_to_cost() -> None:
    """8 sequences of 128 tokens: 777 GFLOP with logits everywhere, 553 with those and the last layer at 24 slots."""
    costs = [step_flops(dimensions(**BASE), batch_size=8, length=128, slots=slots) for slots in (128, 24)]
    assert costs == pytest.approx([777e9, 553e9], rel=5e-3)


SPECIAL = (0, 1, 2, 3, 49)
RULE = MaskRule(slots=4, mask_id=49, special_ids=SPECIAL, vocab_size=50)
ROWS, LENGTH = 8, 24

masked_by_rule = jax.jit(lambda seed, tokens_BS, rows_B: mask(RULE, jax.random.key(seed), tokens_BS, rows_B))


def masked(seed: int, tokens_BS: np.ndarray, rows_B: np.ndarray | None = None) -> Masked:
    rows_B = np.arange(len(tokens_BS)) if rows_B is None else rows_B
    return Masked(*(np.asarray(part) for part in masked_by_rule(seed, tokens_BS, rows_B)))  # type: ignore[arg-type]


@st.composite
def batches(draw: st.DrawFn) -> np.ndarray:
    """Eight rows with many special tokens, some rows with hardly anything else."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens_BS = random.integers(4, 49, (ROWS, LENGTH))
    special_BS = random.random((ROWS, LENGTH)) < random.choice([0.0, 0.1, 0.9, 1.0], (ROWS, 1))
    return np.where(special_BS, random.choice(SPECIAL, (ROWS, LENGTH)), tokens_BS).astype(np.int32)


@settings(max_examples=40)
@given(batches(), st.integers(0, 2**31), st.sampled_from([1, ROWS // 2]))
def test_of_every_row_so_many_ordinary_tokens_are_hidden_as_it_has_slots_and_the_rest_stays(
    tokens_BS: np.ndarray, seed: int, cut: int
) -> None:
    result = masked(seed, tokens_BS)
    assert result.positions_BM.shape == (ROWS, 4)
    assert all(len(set(positions_M.tolist())) == 4 for positions_M in np.asarray(result.positions_BM))
    is_chosen_BM = np.asarray(result.weights_BM) == 1
    ordinary_B = (~np.isin(tokens_BS, SPECIAL)).sum(axis=1)
    np.testing.assert_array_equal(is_chosen_BM.sum(axis=1), np.minimum(ordinary_B, 4))
    rows_BM = np.arange(ROWS)[:, None]
    np.testing.assert_array_equal(tokens_BS[rows_BM, result.positions_BM], result.targets_BM)
    assert not np.isin(np.asarray(result.targets_BM)[is_chosen_BM], SPECIAL).any()
    chosen_BS = np.zeros(tokens_BS.shape, bool)
    chosen_BS[rows_BM, result.positions_BM] = is_chosen_BM
    np.testing.assert_array_equal(np.asarray(result.inputs_BS)[~chosen_BS], tokens_BS[~chosen_BS])
    # A row is masked the same in whatever batch it stands.
    parts = [masked(seed, tokens_BS[rows], np.arange(ROWS)[rows]) for rows in (slice(cut), slice(cut, None))]
    for together, first, second in zip(result, *parts, strict=True):
        np.testing.assert_array_equal(together, np.concatenate([first, second]))


def test_every_ordinary_place_is_chosen_equally_often_and_80_percent_become_the_mask_10_random_wherever_they_are() -> (
    None
):
    # Token 10 between two special ones: what is neither 10 nor the mask is random, and so is 10 once in 45 times.
    tokens_BS = np.full((4000, LENGTH), 10, np.int32)
    tokens_BS[:, 0], tokens_BS[:, -1] = 0, 2
    result = masked(0, tokens_BS)
    places_N = np.asarray(result.positions_BM).ravel()
    assert not (np.asarray(masked(1, tokens_BS).positions_BM) == result.positions_BM).all()
    hidden_N = np.asarray(result.inputs_BS)[np.arange(4000)[:, None], result.positions_BM].ravel()
    counts = np.bincount(places_N, minlength=LENGTH)
    assert counts[[0, -1]].tolist() == [0, 0]
    expected = 4000 * 4 / (LENGTH - 2)
    assert (np.abs(counts[1:-1] - expected) < 5 * np.sqrt(expected)).all()

    assert (hidden_N == 10).mean() == pytest.approx(0.1 + 0.1 / 45, abs=0.012)
    # Were the choice of places and the fate of a place drawn from one key, the shares would differ by place.
    shares = [(hidden_N[places_N == place] == 49).mean() for place in range(1, LENGTH - 1)]
    assert shares == pytest.approx([0.8] * (LENGTH - 2), abs=0.08)
    assert np.mean(shares) == pytest.approx(0.8, abs=0.015)
    counts = np.bincount(hidden_N[(hidden_N != 49) & (hidden_N != 10)], minlength=49)
    assert counts[list(SPECIAL[:4])].tolist() == [0] * 4
    random = counts[[token for token in range(4, 49) if token != 10]]
    assert (np.abs(random - random.mean()) < 5 * np.sqrt(random.mean())).all()


B, S, H, K = 2, 256, 2, 64
X = np.random.default_rng(0).normal(0.5, 2.0, (3, 5, 8))
TARGETS = np.random.default_rng(1).integers(0, 10, (3, 5))
WEIGHTS = np.random.default_rng(2).integers(0, 2, (3, 5)).astype(np.float64)


@pytest.fixture(params=["cpu", "tpu", "another"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend is made believe: the operations of all are computed here. On another they are JAX's own."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    return str(request.param)


def temporary_bytes(function: Callable[..., Any], argument: Any) -> int:
    """What the compiled function needs beside its argument and its result. It is traced anew each time."""
    planned: Any = jax.jit(lambda argument: function(argument)).lower(argument).compile().memory_analysis()
    return int(planned.temp_size_in_bytes)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every activation counts as large."""
    monkeypatch.setattr(custom_gradients, "CACHED_ACTIVATION_BYTES", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 5), (9, 64, 128), (152, 64, 128)], ids=str)
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


@pytest.mark.usefixtures("large")
def test_a_large_biass_gradient_in_bfloat16_is_the_sum_and_no_copy_in_float32_is_made() -> None:
    gradient = jnp.asarray(np.random.default_rng(0).standard_normal((256, 96)), jnp.bfloat16)

    def of_bias(gradient: jax.Array) -> jax.Array:
        pull: Any = jax.vjp(custom_gradients.linear, gradient, jnp.eye(96), jnp.zeros(96))[1]
        found: jax.Array = pull(gradient)[2]
        return found

    expected = np.asarray(gradient, np.float64).sum(0)
    np.testing.assert_allclose(jax.jit(of_bias)(gradient), expected, atol=1e-4)
    assert temporary_bytes(of_bias, gradient) < 4 * gradient.size


def test_operations_are_chosen_by_the_platform_of_the_mesh_not_by_that_of_this_process() -> None:
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=1, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=gpu)
    x = jnp.ones((8, 8))

    def operations() -> str:
        return str(jax.make_jaxpr(lambda x: ops.gelu(ops.linear(x, x, x[0])))(x))

    here = operations()
    with jax.sharding.use_abstract_mesh(mesh):
        there = operations()
    assert "custom_vjp" in here
    assert "custom_vjp" not in there


@pytest.mark.skipif(not multiplies_bfloat16(), reason="on this CPU XLA turns bfloat16 into float32 first")
def test_on_a_cpu_a_transposed_matrix_of_bfloat16_is_copied_before_it_is_multiplied() -> None:
    x = jnp.ones((8, 24), jnp.bfloat16)
    compiled = jax.jit(lambda x, y: custom_gradients.transposed(x) @ y).lower(x, x).compile().as_text() or ""
    (multiplied,) = (line for line in compiled.splitlines() if " dot(" in line)
    assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in multiplied


def test_gelu_is_x_times_the_share_of_a_normal_distribution_below_x(platform: str) -> None:
    points = np.array([-8.0, -3.0, -1.0, -1e-3, 0.0, 0.5, 2.0, 8.0])
    known = [x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in points]
    found = ops.gelu(jnp.asarray(points, jnp.float32))
    np.testing.assert_allclose(found, known, atol=2e-6, err_msg=platform)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_states_at_some_positions_are_copied_to_the_last_bit(dtype: str, platform: str) -> None:
    states, positions = jnp.asarray(X, dtype), TARGETS % 5
    copied = ops.at_positions(states, jnp.asarray(positions))
    assert copied.dtype == states.dtype, platform
    expected = np.take_along_axis(np.asarray(states), positions[..., None], 1)
    np.testing.assert_array_equal(np.asarray(copied), expected, err_msg=platform)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_devices_send_is_rounded_as_a_conversion_rounds(dtype: str, platform: str) -> None:
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-38]
    values = jnp.asarray([*special, *X.ravel()], jnp.float32)
    found = np.asarray(custom_gradients.rounded(values, jnp.dtype(dtype)), np.float32)
    np.testing.assert_array_equal(found, np.asarray(values.astype(dtype), np.float32), err_msg=platform)


def test_a_gradient_written_by_hand_is_what_finite_differences_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = np.random.default_rng(1).normal(0.0, 1.0, (3, 1, 3, 2, 4))
    mask = jnp.asarray([[True, True, False]] * 3)[None, None]
    with jax.enable_x64(True):
        for of, arguments in (
            (custom_gradients.gelu, (X,)),
            (custom_gradients.linear, (X, q[0, 0].repeat(4, 0), q[0, 0, 0])),
            (lambda q, k, v: custom_gradients.attention(q, k, v, mask), (q, k, v)),
            (
                lambda x, scale, bias: custom_gradients.layer_norm(x, scale, bias, X.dtype),
                (X, X[0, 0], X[1, 1]),
            ),
            (
                lambda x, table, bias: custom_gradients.cross_entropy(x, table, bias, TARGETS, WEIGHTS, 10),
                (X, 0.5 * X.reshape(-1, 8)[:12], X.ravel()[:12]),
            ),
            (lambda table: custom_gradients.embed(table, TARGETS, X.dtype), (X.reshape(-1, 8)[:12],)),
            (lambda x: custom_gradients.at_positions(x, jnp.asarray(TARGETS % 5)), (X,)),
        ):
            for backend in ("cpu", "tpu"):
                monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
                check_grads(
                    of, tuple(map(jnp.asarray, arguments)), order=1, modes=["rev"], atol=1e-6, rtol=1e-6
                )


def test_a_loss_beyond_what_exponentials_can_hold_is_a_number_and_so_is_its_gradient() -> None:
    """By the TPU's operations, which take exponentials relative to the target's logit."""
    x, table = 100.0 * jnp.ones((1, 1, 4)), jnp.concatenate([-jnp.ones((1, 4)), jnp.ones((2, 4))])

    def loss(x: jax.Array) -> jax.Array:
        target, weight = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
        return custom_gradients.cross_entropy(x, table, jnp.zeros(3), target, weight, 3)

    nats, gradient = jax.value_and_grad(loss)(x)
    assert float(nats) == pytest.approx(custom_gradients.MOST_NATS + math.log(2))
    np.testing.assert_allclose(gradient, 2.0 * jnp.ones((1, 1, 4)), rtol=1e-5)  # away from the target's row


def test_a_layer_norm_has_the_mean_and_the_spread_that_it_was_given_and_takes_statistics_in_float32(
    platform: str,
) -> None:
    scale, bias = (np.random.default_rng(seed).normal(1.0, 0.5, 8) for seed in (1, 2))
    normal = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-5)
    found = ops.layer_norm(*(jnp.asarray(array, jnp.float32) for array in (X, scale, bias)), jnp.float32)
    np.testing.assert_allclose(found, normal * scale + bias, atol=1e-5)
    # In bfloat16 the mean of values around 100 is off by a quarter, as much as they vary.
    rows = jnp.asarray(100 + 0.5 * (np.arange(512) % 2), jnp.bfloat16)[None]
    normed = ops.layer_norm(rows, jnp.ones(512), jnp.zeros(512), rows.dtype)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.abs(np.asarray(normed, np.float32)), 1.0, atol=0.01)


@pytest.mark.parametrize(
    ("length", "dtype", "spread"),
    [
        (16, "float32", 1e-5),
        pytest.param(256, "float32", 1e-5, marks=pytest.mark.nightly),
        pytest.param(16, "bfloat16", 0.02, marks=pytest.mark.nightly),
    ],
)
def test_a_model_and_its_gradients_are_the_same_by_the_operations_of_every_platform(
    length: int, dtype: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but bfloat16's own roundings, which come in other places. A TPU's attention of 256 positions is a kernel."""
    kernel = attention_kernel.attention
    monkeypatch.setattr(attention_kernel, "attention", lambda *inputs: kernel(*inputs, True))

    def loss_and_gradients(backend: str, kind: str) -> list[np.ndarray]:
        monkeypatch.setattr(custom_gradients, "CACHED_ACTIVATION_BYTES", 0 if kind == "cpu, large" else 2**40)
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(custom_gradients, "device_kind", lambda: kind)
        dims = dimensions(max_positions=length, width=128, dropout=0.1, document_start=0)
        model = Mlm(dims, jnp.dtype(dtype), nnx.Rngs(0))
        graph, params = nnx.split(model)
        tokens_BS = jnp.asarray(np.random.default_rng(0).integers(0, dims.vocab_size, (3, length)))
        positions_BM = jnp.asarray([[1, 5, 9], [0, 2, 15], [3, 4, 5]])
        targets_BM = jnp.take_along_axis(tokens_BS, positions_BM, 1)
        weights_BM = jnp.asarray([[1.0, 1.0, 0.0]] * 3)

        def loss(params: Any) -> jax.Array:
            merged = nnx.merge(graph, params)
            return merged.cross_entropy(tokens_BS, positions_BM, targets_BM, weights_BM, keys(0, 3))

        return [
            np.asarray(leaf, np.float64)
            for leaf in jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(params))
        ]

    by_hand = {
        *custom_gradients.KINDS_BY_COLUMNS,
        *custom_gradients.KINDS_THAT_SUM_SHARES,
        *custom_gradients.KINDS_THAT_KEEP_SLOPES,
    }
    plain = loss_and_gradients("another", "another")
    for backend, kind in (
        ("cpu", "cpu"),
        ("cpu", "cpu, large"),
        ("tpu", "TPU v5 lite"),
        *(("tpu", kind) for kind in sorted(by_hand)),
    ):
        for found, expected in zip(loss_and_gradients(backend, kind), plain, strict=True):
            largest = max(np.abs(expected).max(), 1e-3 * max(np.abs(leaf).max() for leaf in plain))
            np.testing.assert_allclose(found, expected, atol=spread * largest, err_msg=kind)


def test_of_large_activations_a_cpu_keeps_only_what_the_backward_pass_computes_the_others_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dims = dimensions(max_positions=64, width=32, ff_width=128, layers=4)
    graph, params = nnx.split(Mlm(dims, jnp.dtype("bfloat16"), nnx.Rngs(0)))
    tokens_BS, positions_BM = some_tokens(8, 64), jnp.zeros((8, 1), jnp.int32)

    def bytes_kept(cached_bytes: int) -> int:
        monkeypatch.setattr(custom_gradients, "CACHED_ACTIVATION_BYTES", cached_bytes)

        def loss(params: Any) -> jax.Array:
            merged = nnx.merge(graph, params)
            return merged.cross_entropy(tokens_BS, positions_BM, positions_BM, jnp.ones((8, 1)))

        return temporary_bytes(jax.grad(loss), params)

    assert bytes_kept(0) < 0.8 * bytes_kept(2**40)


def test_dropout_keeps_the_mean_and_what_is_dropped_has_no_pattern_within_a_row_nor_between_rows() -> None:
    """Neighbours, next rows and other keys agree as often as chance says; 4.5 standard errors are allowed."""
    thinned = np.asarray(ops.dropout(jnp.ones((3, 100, 100)), 0.25, keys(0, 3)))
    assert set(np.unique(thinned)) == {np.float32(0.0), np.float32(1 / 0.75)}
    assert thinned.mean() == pytest.approx(1.0, abs=0.01)
    dropped = np.asarray(ops.dropout(jnp.ones((64, 64, 64)), 0.5, keys(3, 64))) == 0
    for shift in range(1, 4):
        for axis in range(3):
            agree = (dropped == np.roll(dropped, shift, axis)).mean()
            assert agree == pytest.approx(0.5, abs=4.5 * 0.5 / math.sqrt(dropped.size)), (shift, axis)
    assert dropped.mean(0).std() == pytest.approx(0.5 / math.sqrt(64), rel=0.05)


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
def no_tpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_compiles_pallas", lambda: False)


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

    def of_k(attend: Callable[..., jax.Array], dtype: str) -> np.ndarray:
        q, k, v = (x.astype(jnp.bfloat16).astype(dtype) for x in (q_BSHK, k_BSHK, 1 + v_BSHK))
        gradient = jax.grad(lambda k: (attend(q, k, v, None) * weights.astype(dtype)).sum())(k)
        return np.asarray(gradient, np.float64)

    exactly = of_k(ops.attend, "float32")
    for attend in (ops.attend, short):
        assert np.linalg.norm(of_k(attend, "bfloat16") - exactly) < 0.01 * np.linalg.norm(exactly)


def short(q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, of_BS: jax.Array | None) -> jax.Array:
    """By the kernel for short sequences, which takes the heads side by side."""
    q_BSD, k_BSD, v_BSD = (x.reshape(*x.shape[:2], -1) for x in (q_BSHK, k_BSHK, v_BSHK))
    return attention_kernel.attention(q_BSD, k_BSD, v_BSD, of_BS, q_BSHK.shape[2], True).reshape(q_BSHK.shape)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("kernel", ["short", "splash"])
def test_the_tpus_kernels_interpreted_give_what_our_products_give_and_their_gradients(
    monkeypatch: pytest.MonkeyPatch, kernel: str, documents: bool
) -> None:
    """The kernels' own programs, run by an interpreter: no TPU is here. Splash attention is slow: one row and head."""
    monkeypatch.setattr(ops, "SPLASH_MOST_IN_BLOCK", S // 2)
    of_BS = segments() if documents else None
    given: tuple[jax.Array, ...] = inputs()
    if kernel == "splash":
        given, of_BS = tuple(x[1:, :, :1] for x in given), None if of_BS is None else of_BS[1:]
    weights = jnp.sin(jnp.arange(given[0].size)).reshape(given[0].shape)

    def both(attend: Callable[..., jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        found, pull = jax.vjp(attend, *given)
        return found, pull(weights)

    splash = functools.partial(ops.splash, interpret=True)
    of_kernel = both(lambda q, k, v: (short if kernel == "short" else splash)(q, k, v, of_BS))
    of_products = both(lambda q, k, v: ops.attend(q, k, v, of_BS, of_BS))
    for found, expected in zip(jax.tree.leaves(of_kernel), jax.tree.leaves(of_products), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4 if kernel == "splash" else 1e-5)


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


@pytest.mark.parametrize(
    ("kind", "positions", "head_width", "kernel"),
    [
        ("TPU v3", 512, 64, None),
        ("TPU v4", 512, 64, "short"),
        ("TPU v5 lite", 256, 64, "short"),
        ("TPU v5 lite", 256, 128, "short"),
        ("TPU v5 lite", 128, 64, None),
        ("TPU v5 lite", 320, 64, None),
        ("TPU v5 lite", 256, 96, None),
        ("TPU v5 lite", 512, 96, "splash"),
        ("TPU v6 lite", 1024, 64, "splash"),
    ],
)
def test_a_kernel_takes_the_attention_of_the_generations_and_shapes_that_it_is_written_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, positions: int, head_width: int, kernel: str | None
) -> None:
    device = jax.sharding.AbstractDevice(kind, None, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("one",), abstract_device=device)
    q_BSHK = jax.ShapeDtypeStruct((1, positions, 2, head_width), jnp.bfloat16)
    seen = []

    def taken_by(name: str) -> Callable[..., jax.Array]:
        def take(q: jax.Array, *_: Any) -> jax.Array:
            seen.append(name)
            return q

        return take

    monkeypatch.setattr(ops, "splash", taken_by("splash"))
    monkeypatch.setattr(attention_kernel, "attention", taken_by("short"))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda q, k, v: ops.attend(q, k, v), q_BSHK, q_BSHK, q_BSHK)
    assert seen == ([] if kernel is None else [kernel])


@pytest.mark.parametrize("kernel", ["short", "splash"])
def test_the_operations_and_bytes_of_a_kernel_are_counted_for_all_points_of_its_grid(kernel: str) -> None:
    """Two products of all positions with all, for each head and row; q, k, v and the result."""
    rows, positions, heads, width = 2, 512, 4, 64
    q_BSHK = jax.ShapeDtypeStruct((rows, positions, heads, width), jnp.bfloat16)
    splash = functools.partial(ops.splash, interpret=True)
    attend = short if kernel == "short" else splash
    traced = jax.make_jaxpr(lambda q, k, v: attend(q, k, v, None))(q_BSHK, q_BSHK, q_BSHK)
    (counted,) = aot.kernels(traced.jaxpr)
    assert counted["count"] == 1
    assert counted["operations"] == 2 * 2 * rows * heads * positions**2 * width
    assert counted["bytes"] == pytest.approx(4 * 2 * rows * positions * heads * width, rel=0.01)
