"""A step is a function of the seed, the step and the parameters, however its work is shared out; its gradient is the
slope of the loss."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contracts.errors import RequestError
from jobs.flax_mlm import sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.step import Masked, evaluate
from jobs.flax_mlm.tokenizer import TokenizerFacts
from jobs.runtime import processor

pytestmark = pytest.mark.usefixtures("two_devices")

BATCHES = [np.random.default_rng(i).integers(4, 47, (4, 12)).astype(np.int32) for i in range(2)]
CONFIG = Config(
    layers=1,
    width=8,
    heads=2,
    ff_width=12,
    max_positions=16,
    sequence_length=12,
    batch_size=4,
    steps=10,
    dropout=0.3,
    dtype="float32",
)


ROWS_B = np.arange(4, dtype=np.int32)


class Training:
    """A step of `config` for so many devices, compiled once, and two steps from the state that the seed draws."""

    def __init__(self, config: Config, facts: TokenizerFacts, devices: int) -> None:
        self.mesh = sharding.make_mesh(config.fsdp, jax.devices()[:devices])
        made = steps.make_steps(config, facts, self.mesh)
        self.shardings = sharding.shardings(made.state, self.mesh)
        rows = jax.device_put((BATCHES[0], ROWS_B), sharding.by_row(self.mesh))
        self.compiled: Any = made.train.lower(made.state, *rows).compile()  # type: ignore[attr-defined]
        self.before = jax.tree.map(np.asarray, made.state)
        self.reported = []
        self.after = self.before
        for batch in BATCHES:
            self.after, results = self.step(self.after, batch)
            self.reported.append(results)

    def step(self, state: steps.State, batch: np.ndarray) -> tuple[steps.State, dict[str, float]]:
        """The state after one more step, and what that reported."""
        given = jax.device_put(state, self.shardings)
        tokens_BS, rows_B = jax.device_put((batch, ROWS_B), sharding.by_row(self.mesh))
        after, results = self.compiled(given, tokens_BS, rows_B)
        return jax.tree.map(np.asarray, after), {name: float(value) for name, value in results.items()}


@pytest.fixture(scope="module")
def on_one(two_devices: None, facts: TokenizerFacts) -> Training:
    return Training(CONFIG, facts, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"fsdp": 2, "remat": True, "accumulate": 2},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"fsdp": 2}, marks=pytest.mark.nightly),
        pytest.param({"remat": True}, marks=pytest.mark.nightly),
        pytest.param({"accumulate": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_how_the_work_is_shared_out_over_two_devices_changes_nothing_but_rounding(
    changed: dict[str, Any], on_one: Training, facts: TokenizerFacts
) -> None:
    assert_equal_but_for_rounding(on_one, Training(dataclasses.replace(CONFIG, **changed), facts, 2))


def assert_equal_but_for_rounding(on_one: Training, on_two: Training) -> None:
    for mine, other in zip(on_one.reported, on_two.reported, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    for ours, theirs in ((on_one.before["params"], on_two.before["params"]), (on_one.after, on_two.after)):
        assert str(jax.tree.structure(ours)) == str(jax.tree.structure(theirs))
        for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
    assert int(on_two.after["step"]) == 2


def test_what_passes_between_devices_is_rounded_once_and_is_float32_before_and_afterwards() -> None:
    """On TPUs in bfloat16. A sum of many small numbers, such as a table's gradient, has to be taken before it."""
    mesh, sent = sharding.make_mesh(2, jax.devices()[:2]), jnp.dtype(jnp.bfloat16)
    specs = {"matrix": sharding.SHARDED, "table": sharding.REPLICATED, "bias": sharding.REPLICATED}
    numbers = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    params = {"matrix": numbers, "table": numbers[:3], "bias": numbers[0]}

    def weighted(params: Any) -> jax.Array:
        whole = sharding.collect(params, specs, sent)
        return jnp.stack([(leaf * leaf).sum() for leaf in jax.tree.leaves(whole)]).sum()

    def gradient(params: Any) -> Any:
        return sharding.sum_gradients(jax.grad(weighted)(params), specs, sent)

    summed = sharding.on_each_device(gradient, mesh, (specs,), specs)(params)
    rounded = {name: leaf.astype(sent).astype(np.float32) for name, leaf in params.items()}
    for name, expected in {
        "matrix": rounded["matrix"],
        "table": rounded["table"],
        "bias": numbers[0],
    }.items():
        assert summed[name].dtype == np.float32
        np.testing.assert_array_equal(summed[name], 2 * 2 * expected)


def test_devices_of_a_group_hold_a_part_of_each_matrix_which_comes_whole_to_the_host(
    on_one: Training, facts: TokenizerFacts
) -> None:
    """And of what the optimizer knows of it. Another seed draws other parameters."""
    config, mesh = dataclasses.replace(CONFIG, seed=1), sharding.make_mesh(2, jax.devices()[:2])
    _, state = steps.create(config, facts, steps.make_optimizer(config), mesh)
    leaves, on_host = jax.tree.leaves(state), jax.tree.leaves(sharding.to_host(state, mesh))
    matrices = [leaf.ndim > 1 for leaf in leaves]
    held = [leaf.addressable_shards[0].data.size / leaf.size for leaf in leaves]
    assert held == [0.5 if matrix else 1.0 for matrix in matrices]
    # The parameters and the optimizer's two means: two tables, four a layer, the head's.
    assert sum(matrices) == 3 * 7
    for leaf, whole in zip(leaves, on_host, strict=True):
        assert isinstance(whole, np.ndarray)
        np.testing.assert_array_equal(whole, leaf)
    drawn = (params["params"]["embeddings"]["tokens"]["embedding"] for params in (state, on_one.before))
    assert not np.allclose(*drawn)


@pytest.mark.slow
def test_what_is_computed_again_is_not_kept(facts: TokenizerFacts) -> None:
    """By what XLA says that the step needs besides its arguments and results."""

    def needed_bytes(**changed: Any) -> int:
        config = dataclasses.replace(
            CONFIG, layers=2, width=32, heads=2, ff_width=256, batch_size=64, **changed
        )
        mesh = sharding.make_mesh(1, jax.devices()[:1])
        made = steps.make_steps(config, facts, mesh)
        rows_B = np.arange(64, dtype=np.int32)
        lowered = made.train.lower(made.state, np.zeros((64, 12), np.int32), rows_B)  # type: ignore[attr-defined]
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    plain = needed_bytes()
    assert needed_bytes(remat=True) < 0.8 * plain
    assert needed_bytes(accumulate=4) < 0.5 * plain


def test_a_step_on_a_cpu_overwrites_the_optimizers_means_where_they_lie(on_one: Training) -> None:
    copied = re.findall(r" copy\(%(state__opt_state\w+)", on_one.compiled.as_text())
    assert copied == []


@pytest.mark.parametrize(("length", "is_finite"), [(0.3, True), (40.0, True), (1.0, False)])
def test_the_update_in_place_is_the_plain_one_and_keeps_no_copy_of_the_gradient(
    length: float, is_finite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "CACHED_BYTES", 0)
    config, lots = Config(steps=10, learning_rate=0.5, warmup_share=0.0), np.random.default_rng(0)

    def drawn() -> dict[str, np.ndarray]:
        return {
            "bias": lots.uniform(0.1, 1, 64).astype("f4"),
            "scale": lots.uniform(0.1, 1, 64).astype("f4"),
            "kernel": lots.uniform(0.1, 1, (512, 512)).astype("f4"),
        }

    optimizer, params, summed, hidden = steps.make_optimizer(config), drawn(), drawn(), jnp.array(7.0)
    opt_state = optax.tree.set(optimizer.init(params), mu=drawn(), nu=drawn())
    state = {"params": params, "opt_state": opt_state, "step": jnp.array(3)}
    summed = jax.tree.map(lambda leaf: leaf * hidden * length / optax.tree.norm(summed), summed)
    gradient, ok = steps.mean_gradient(summed, hidden), jnp.array(is_finite)
    norm = steps.norm_by_shape(gradient)
    assert norm == pytest.approx(length, rel=1e-5)

    computing_its_norm = optax.GradientTransformationExtraArgs(
        optimizer.init, lambda gradient, state, params, **_: optimizer.update(gradient, state, params)
    )
    plain = steps.updated(computing_its_norm, gradient, norm, ok, state)
    in_place: Any = jax.jit(functools.partial(steps.updated_in_place, optimizer), donate_argnums=4)
    arguments = (summed, hidden, norm, ok, jax.tree.map(jnp.array, state))
    used_bytes = in_place.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    assert used_bytes < summed["kernel"].nbytes / 10
    changed = in_place(*arguments)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6), changed, plain)
    moved = np.abs(changed["params"]["kernel"] - params["kernel"]).max()
    assert (moved > 0.01) == is_finite


def test_a_step_reports_the_loss_that_it_began_with_and_changes_every_parameter(on_one: Training) -> None:
    """One that has no gradient, or is left out of the sum over devices, stays as it was."""
    first, second = on_one.reported
    assert first["learning_rate"] == 0.0
    assert 0 < first["loss"] - np.log(48) < 0.5  # new parameters know nothing, and guess a little unevenly
    assert first["loss"] != pytest.approx(second["loss"], abs=1e-5)
    assert first["grad_norm"] > 0
    same = jax.tree.map(lambda old, new: (old == new).all(), on_one.before["params"], on_one.after["params"])
    assert [jax.tree_util.keystr(path) for path, is_same in jax.tree.leaves_with_path(same) if is_same] == []


def test_a_step_whose_numbers_are_not_finite_changes_nothing_but_the_counters(on_one: Training) -> None:
    state = jax.tree.map(np.copy, on_one.after)
    state["params"]["embeddings"]["tokens"]["embedding"][5:] = np.inf
    after, results = on_one.step(state, BATCHES[0])
    assert not np.isfinite(results["loss"])
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new, old + 1 if old.dtype == np.int32 else old)
    assert any(leaf.any() for leaf in jax.tree.leaves(after["opt_state"]) if leaf.ndim > 1)


@pytest.mark.parametrize(
    ("warmup_share", "points"),
    [
        (0.1, {0: 0.0, 50: 1e-3, 100: 2e-3, 550: 1e-3, 1000: 0.0}),
        (0.0, {0: 2e-3, 500: 1e-3, 1000: 0.0}),
        (1.0, {0: 0.0, 500: 1e-3, 999: 2e-3 * 0.999}),
    ],
)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing_at_the_last_step(
    warmup_share: float, points: dict[int, float]
) -> None:
    schedule = steps.learning_rate(Config(steps=1000, learning_rate=2e-3, warmup_share=warmup_share))
    assert {step: float(schedule(step)) for step in points} == pytest.approx(points, abs=1e-9)


def test_matrices_decay_biases_and_norms_do_not_and_a_gradient_longer_than_the_limit_is_shortened() -> None:
    config = Config(steps=10, learning_rate=0.5, warmup_share=0.0, weight_decay=0.1)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2), "scale": jnp.ones(2)}
    optimizer = steps.make_optimizer(config)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    changed = {
        name: float(np.asarray(leaf).mean()) for name, leaf in optax.apply_updates(params, updates).items()
    }
    assert changed == pytest.approx({"kernel": 1 - 0.5 * 0.1, "bias": 1.0, "scale": 1.0})

    clipped = steps.make_optimizer(dataclasses.replace(config, weight_decay=0.0, clip_norm=1e-6))
    kernel = {"kernel": jnp.zeros((1, 2))}

    def moved(length: float) -> Any:
        return clipped.update({"kernel": jnp.array([[length, 0.0]])}, clipped.init(kernel), kernel)[0][
            "kernel"
        ]

    # At AdamW's epsilon of 1e-6 the size of a first update tells how long the gradient was.
    np.testing.assert_allclose(moved(1e-6), moved(5.0), rtol=1e-4)
    assert abs(moved(1e-7)[0, 0]) < 0.5 * abs(moved(1e-6)[0, 0])


def test_the_loss_counts_slots_by_their_weight_only() -> None:
    logits_BMV = jnp.log(
        jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [[0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]]])
    )
    masked = Masked(
        inputs_BS=jnp.zeros((2, 4), jnp.int32),
        positions_BM=jnp.zeros((2, 2), jnp.int32),
        targets_BM=jnp.array([[0, 2], [1, 0]]),
        weights_BM=jnp.array([[1.0, 1.0], [1.0, 0.0]]),
    )
    nats, hits = steps.cross_entropy(logits_BMV, masked)
    assert float(nats) == pytest.approx(-np.log(0.5) - np.log(0.8) - np.log(0.2), abs=1e-6)
    assert float(hits) == 2.0


def test_activations_are_bfloat16_where_every_hosts_cpu_multiplies_it_unless_asked_for_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kinds(*able: bool) -> list[jnp.dtype]:
        monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: able[0])
        gathered = lambda mine: [mine, *able[1:]]  # noqa: E731
        monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gathered)
        mesh = sharding.make_mesh(1, jax.devices()[:1])
        return [
            steps.activations_dtype(Config(dtype=dtype), mesh) for dtype in ("auto", "float32", "bfloat16")
        ]

    assert kinds(True) == kinds(True, True) == [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    assert kinds(False) == kinds(True, False) == [jnp.float32, jnp.float32, jnp.bfloat16]


NARROW = Config(
    layers=2, width=8, heads=2, ff_width=12, max_positions=16, sequence_length=12, batch_size=4, steps=10
)
TOKENS_BS = np.random.default_rng(0).integers(4, 47, (4, 12)).astype(np.int32)
TOKENS_BS[:, (0, 7)] = 0  # in each row two documents begin
STEP = 1e-5
"""Truncation is about STEP², rounding about 1e-16 / STEP: 1e-10 and 1e-11."""


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(steps, "activations_dtype", lambda _config, _mesh: jnp.dtype("float64"))
    with jax.enable_x64(True):
        yield


KEEPS_GRADIENT = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda gradient, _state, params: (jax.tree.map(jnp.zeros_like, params), gradient),
)
"""Changes no parameter, and leaves the gradient where the optimizer's state is."""


def loss_and_gradient(
    config: Config, facts: TokenizerFacts
) -> tuple[Any, Callable[[Any], tuple[float, Any]]]:
    """Parameters as of a model that has learnt something, and what a step on two devices says of any parameters."""
    mesh = sharding.make_mesh(config.fsdp)
    graph, state = steps.create(config, facts, KEEPS_GRADIENT, mesh)
    rule = steps.mask_rule(facts, config.mask_share, config.sequence_length)
    train_step = steps.make_train_step(graph, KEEPS_GRADIENT, rule, config, mesh, state)
    batch = jax.device_put((TOKENS_BS, np.arange(4, dtype=np.int32)), sharding.by_row(mesh))
    lots = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + lots.normal(0, 0.3, leaf.shape), state["params"])

    def at(params: Any) -> tuple[float, Any]:
        opt_state = jax.tree.map(np.zeros_like, params)
        given = {"params": params, "opt_state": opt_state, "step": np.array(3, np.int32)}
        after, results = train_step(jax.device_put(given, sharding.shardings(given, mesh)), *batch)
        assert results["loss"].dtype == jnp.float64
        return float(results["loss"]), jax.tree.map(np.asarray, after["opt_state"])

    return params, at


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"dropout": 0.3, "attend_within": "document"}, id="dropout and documents"),
        pytest.param({}, id="plain", marks=pytest.mark.nightly),
        pytest.param(
            {"dropout": 0.3, "fsdp": 2, "remat": True, "accumulate": 2},
            id="in parts",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_gradient_of_every_parameter_is_what_central_differences_find(
    facts: TokenizerFacts, changed: dict[str, Any]
) -> None:
    """Of each parameter all entries are moved at once, each up or down by lot: one that is wrong shows in the sum."""
    params, at = loss_and_gradient(dataclasses.replace(NARROW, **changed), facts)
    paths, slopes = zip(*jax.tree_util.tree_leaves_with_path(at(params)[1]), strict=True)
    leaves, structure = jax.tree.flatten(params)
    lots = np.random.default_rng(2)
    steep = 0
    for index, (path, slope) in enumerate(zip(paths, slopes, strict=True)):
        direction = lots.choice([-1.0, 1.0], slope.shape)

        def moved(by: float, index: int = index, direction: np.ndarray = direction) -> float:
            leaf = leaves[index] + by * direction
            return at(jax.tree.unflatten(structure, [*leaves[:index], leaf, *leaves[index + 1 :]]))[0]

        found = (moved(STEP) - moved(-STEP)) / (2 * STEP)
        assert (slope * direction).sum() == pytest.approx(found, rel=1e-6, abs=1e-8), jax.tree_util.keystr(
            path
        )
        steep += abs(found) > 1e-3
    assert steep > 0.8 * len(leaves)  # or it would compare nothing with nothing


HELD_OUT = np.random.default_rng(0).integers(4, 47, (7, 12)).astype(np.int32)


def test_the_last_batch_is_filled_up_without_being_counted_twice_and_parts_come_to_the_same(
    config: Config, facts: TokenizerFacts
) -> None:
    config, mesh = dataclasses.replace(config, layers=1), sharding.make_mesh(1, jax.devices()[:1])
    graph, state = steps.create(config, facts, steps.make_optimizer(config), mesh)
    rule = steps.mask_rule(facts, 0.3, 12)
    whole, in_parts = (steps.make_eval_step(graph, rule, mesh, state, parts=parts) for parts in (1, 2))

    def evaluation(eval_step: Any, batch_size: int, sequences: int = 7) -> tuple[float, ...]:
        found = evaluate(
            eval_step,
            state["params"],
            lambda indices_B: jnp.asarray(HELD_OUT[indices_B]),
            jnp.asarray,
            sequences=sequences,
            batch_size=batch_size,
            tick=lambda: None,
        )
        return dataclasses.astuple(found)

    at_once = evaluation(whole, 7)
    for other in (evaluation(whole, 4), evaluation(in_parts, 4)):
        assert other == pytest.approx(at_once, abs=1e-6)
    assert evaluation(whole, 4, sequences=5) != at_once


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a TPU's device says of itself, as far as a mesh asks."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int
    process_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def chips(columns: int, rows: int, slices: int = 1) -> list[Chip]:
    return [
        Chip(id=number, coords=(number % columns, number // columns % rows, 0), slice_index=of)
        for of in range(slices)
        for number in range(of * columns * rows, (of + 1) * columns * rows)
    ]


def test_the_tpus_of_one_host_are_a_group_unless_another_one_is_asked_for() -> None:
    host, two_hosts = (
        chips(2, 2),
        [dataclasses.replace(chip, process_index=chip.id // 4) for chip in chips(4, 2)],
    )
    cpus = [dataclasses.replace(chip, platform="cpu") for chip in host]
    asked = [(1, host), (2, host), (1, two_hosts), (1, cpus)]
    shapes = [sharding.make_mesh(fsdp, devices).devices.shape for fsdp, devices in asked]
    assert shapes == [(1, 4), (2, 2), (8, 1), (4, 1)]


def test_any_number_that_divides_the_chips_of_a_slice_makes_groups_and_a_group_lies_within_its_slice() -> (
    None
):
    for columns, rows in ((2, 2), (2, 4), (4, 8), (16, 16)):
        devices = chips(columns, rows)
        for fsdp in (1, 2, 4, 8, 16, 32, 64):
            if len(devices) % fsdp == 0:
                made = sharding.grid(fsdp, devices)
                assert made.shape == (len(devices) // fsdp, fsdp)
                assert {chip.id for chip in made.flat} == {chip.id for chip in devices}
    made = sharding.grid(4, chips(2, 4, slices=2))
    assert made.shape == (4, 4)
    assert all(len({chip.slice_index for chip in group}) == 1 for group in made)
    with pytest.raises(RequestError, match="--fsdp 16: .* the 8 devices of one .* divides 8"):
        sharding.grid(16, chips(2, 4, slices=2))
