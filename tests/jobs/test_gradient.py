"""The gradient that a step follows is the slope of the loss that it reports, parameter by parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jobs.flax_mlm import sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.tokenizer import TokenizerFacts

pytestmark = pytest.mark.usefixtures("two_devices", "float64")

CONFIG = Config(
    layers=2, width=8, heads=2, ff_width=12, max_positions=16, sequence_length=12, batch_size=4, steps=10
)
TOKENS_BS = np.random.default_rng(0).integers(4, 47, (4, 12)).astype(np.int32)
TOKENS_BS[:, (0, 7)] = 0  # in each row two documents begin
STEP = 1e-5
"""Truncation is about STEP², rounding about 1e-16 / STEP: 1e-10 and 1e-11."""


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(steps, "activations_dtype", lambda _: jnp.dtype("float64"))
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


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dropout": 0.3, "attend_within": "document"},
        {"dropout": 0.3, "fsdp": 2, "remat": True, "accumulate": 2},
    ],
    ids=["plain", "dropout and documents", "in parts"],
)
def test_the_gradient_of_every_parameter_is_what_central_differences_find(
    facts: TokenizerFacts, changed: dict[str, Any]
) -> None:
    """Of each parameter all entries are moved at once, each up or down by lot: one that is wrong shows in the sum."""
    params, at = loss_and_gradient(dataclasses.replace(CONFIG, **changed), facts)
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
