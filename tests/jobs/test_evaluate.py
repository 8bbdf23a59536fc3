"""An evaluation hides the same tokens whatever the batch: its figures do not depend on how it is cut."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jobs.flax_mlm import sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config
from jobs.flax_mlm.evaluate import Evaluation, evaluate
from jobs.flax_mlm.tokenizer import TokenizerFacts

pytestmark = pytest.mark.usefixtures("two_devices")

HELD_OUT = np.random.default_rng(0).integers(4, 47, (7, 12)).astype(np.int32)


def evaluations(config: Config, facts: TokenizerFacts, batches: dict[int, int]) -> list[Evaluation]:
    """For each batch size the evaluation of the first so many held-out sequences."""
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    graph, state = steps.create(config, facts, steps.make_optimizer(config), mesh)
    eval_step = steps.make_eval_step(graph, steps.mask_rule(facts, 0.3, 12), mesh, state)
    return [
        evaluate(
            eval_step,
            state["params"],
            lambda indices_B: jax.numpy.asarray(HELD_OUT[indices_B]),
            jax.numpy.asarray,
            sequences=sequences,
            batch_size=batch_size,
            tick=lambda: None,
        )
        for batch_size, sequences in batches.items()
    ]


def test_the_last_batch_is_filled_up_without_being_counted_twice(
    config: Config, facts: TokenizerFacts
) -> None:
    first, second, third, fewer = evaluations(config, facts, {7: 7, 3: 7, 10: 7, 4: 5})
    for other in (second, third):
        assert dataclasses.astuple(other) == pytest.approx(dataclasses.astuple(first), abs=1e-6)
    assert fewer != first


def test_rows_taken_in_parts_come_to_the_same(config: Config, facts: TokenizerFacts) -> None:
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    graph, state = steps.create(config, facts, steps.make_optimizer(config), mesh)
    rule, rows_B = steps.mask_rule(facts, 0.3, 12), jax.numpy.arange(4)
    whole, parts = (
        steps.make_eval_step(graph, rule, mesh, state, parts=parts)(
            state["params"], jax.numpy.asarray(HELD_OUT[:4]), rows_B, jax.numpy.ones(4)
        )
        for parts in (1, 2)
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-6)
