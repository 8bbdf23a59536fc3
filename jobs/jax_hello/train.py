from typing import Any

import jax
import jax.numpy as jnp
import optax

from jobs.jax_hello.config import Config
from jobs.jax_hello.data import points
from jobs.runtime import process
from jobs.runtime.jax import aot, checkpoints, distributed, executables
from jobs.runtime.loop import Loop

ADAM = optax.adam(1e-2)


def first_state() -> Any:
    params = {name: jax.random.normal(jax.random.key(n), (32,)) for n, name in enumerate("abc")}
    return params, ADAM.init(params)


def take_step(state: Any, x_B: jax.Array, y_B: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        hidden_BF = jnp.tanh(jnp.outer(x_B, params["a"]) + params["b"])
        return jnp.mean((hidden_BF @ params["c"] - y_B) ** 2)

    error, gradient = jax.value_and_grad(loss)(state[0])
    updates, adam = ADAM.update(gradient, state[1])
    return (optax.apply_updates(state[0], updates), adam), error


def train(run: process.Run, config: Config) -> process.Final:
    devices, programs = distributed.Devices(), executables.open_executables(run.environment)
    state, step_on = checkpoints.Tree(devices.jit(first_state)()), programs.cached(devices.jit(take_step))
    loop = Loop(
        run=run,
        checkpoints=checkpoints.Checkpoints(run, state, keep_last=2),
        steps=config.steps,
        unit="points",
        per_step=config.batch_size,
        checkpoint_every=config.save_every,
    )
    loop.resume()
    for step in loop:
        state.tree, error = step_on(state.tree, *map(devices.rows, points(step, config.batch_size)))
        loop.record({"loss": error})
    return loop.finish()


def lower_step(config: Config, devices: Any) -> aot.TrainStep:
    point_B = jax.ShapeDtypeStruct((config.batch_size,), jnp.float32)
    return aot.plain_step(devices, first_state, take_step, (point_B, point_B), "points", config.steps)
