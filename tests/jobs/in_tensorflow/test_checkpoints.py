"""Checkpoints in TensorFlow: what is restored is what was saved, and a torn one is never half restored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from contracts.errors import RequestError
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.process import Run
from jobs.runtime.tensorflow import distributed
from jobs.runtime.tensorflow.state import State

pytestmark = pytest.mark.usefixtures("group")
MakeRun = Callable[..., Run]


class _Trained:
    """A model with a norm, whose mean is kept otherwise than a weight is, an optimizer, and the checkpoints of both."""

    def __init__(self, run: Run, *, width: int = 3) -> None:
        with distributed.strategy().scope():
            layers = [keras.layers.Input((2,)), keras.layers.Dense(width), keras.layers.BatchNormalization()]
            self.model = keras.Sequential(layers)
            self.optimizer = keras.optimizers.AdamW(0.1)
            self.optimizer.build(self.model.trainable_variables)
        state = State({"model": self.model, "optimizer": self.optimizer})
        self.checkpoints = Checkpoints(run, state, distributed, keep_last=2)

    def step(self, number: int) -> None:
        inputs = tf.constant(np.random.default_rng(number).normal(size=(4, 2)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(inputs, training=True) ** 3)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def save_through(self, steps: int) -> None:
        for step in range(1, steps + 1):
            self.step(step)
            self.checkpoints.save(step, {"said": f"after {step}"})
        self.checkpoints.wait()

    def state(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in [*self.model.variables, *self.optimizer.variables]]


@pytest.mark.parametrize("place", ["run", "memory://checkpoints-of-tensorflow"])
def test_a_checkpoint_brings_everything_back_wherever_it_lies(make_run: MakeRun, place: str) -> None:
    run = make_run(place)
    trained = _Trained(run)
    trained.checkpoints.best = 1
    trained.save_through(4)
    assert run.directory.checkpoint_steps() == [1, 3, 4]

    other = _Trained(run)
    assert other.checkpoints.restore_latest() == (4, {"said": "after 4"})
    for found, wanted in zip(other.state(), trained.state(), strict=True):
        np.testing.assert_array_equal(found, wanted)

    after = [variable.numpy() for variable in other.optimizer.variables]
    other.checkpoints.restore_model(1)
    assert not np.array_equal(other.model.variables[0], trained.model.variables[0])
    np.testing.assert_array_equal(other.optimizer.variables[1], after[1])


def test_a_checkpoint_of_another_model_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    _Trained(run).save_through(1)
    with pytest.raises(RequestError, match="none of the run's 1 checkpoints can be read"):
        _Trained(run, width=5).checkpoints.restore_latest()
