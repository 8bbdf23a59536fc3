"""What only JAX has to prove: a two-layer network in Flax NNX, Optax and Orbax, and the libraries beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NAME = "jax"
MODULES = (
    "jax", "jax.experimental.multihost_utils", "flax.nnx", "optax", "orbax.checkpoint", "grain", "haiku", "chex",
    "keras", "scipy.stats", "sklearn.metrics", "safetensors.numpy",
)  # fmt: skip
# On a TPU nothing is said: what JAX falls back to by itself is what the check wants to see.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "cpu": {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
    "tpu": {"KERAS_BACKEND": "jax"},
}
BATCH, INPUTS, WIDTH = 32, 16, 64


def devices() -> tuple[str, str]:
    import jax

    all_devices = jax.devices()
    return jax.default_backend(), f"{len(all_devices)} × {all_devices[0].device_kind}"


def start() -> Any:
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.hidden = nnx.Linear(INPUTS, WIDTH, rngs=rngs)
            self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x_BI: Any) -> Any:
            return self.out(nnx.gelu(self.hidden(x_BI)))

    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@functools.cache
def _update() -> Callable[..., Any]:
    from flax import nnx

    def update(model: Any, optimizer: Any, x_BI: Any) -> Any:
        def loss_function(model: Any) -> Any:
            return ((model(x_BI)[:, 0] - x_BI.sum(axis=1)) ** 2).mean()

        loss, gradients = nnx.value_and_grad(loss_function)(model)
        optimizer.update(model, gradients)
        return loss

    return nnx.jit(update)


def step(state: Any, number: int) -> tuple[Any, float]:
    import jax

    x_BI = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (BATCH, INPUTS))
    return state, float(_update()(*state, x_BI))


def save(state: Any, folder: Path) -> None:
    import orbax.checkpoint as ocp
    from flax import nnx

    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "state", nnx.to_pure_dict(nnx.state(state)))


def load(folder: Path) -> Any:
    import orbax.checkpoint as ocp
    from flax import nnx

    fresh = start()
    state = nnx.state(fresh)
    with ocp.StandardCheckpointer() as reader:
        saved = reader.restore(folder / "state", nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(fresh, state)
    return fresh


def listen() -> Callable[[int], bool]:
    """JAX's own notice, which all hosts of a slice get at the same step; here a group of one."""
    import socket

    import jax
    from jax.experimental import multihost_utils

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Nobody to compute with: gloo would look for this machine's name, which a container without a network has not.
    jax.config.update("jax_cpu_collectives_implementation", None)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
    return lambda number: bool(multihost_utils.reached_preemption_sync_point(number))


def _haiku() -> str:
    import haiku as hk
    import jax

    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3)(x)))
    x = jax.numpy.ones((2, 4))
    return f"a layer makes {net.apply(net.init(jax.random.key(0), x), x).shape}"


def _grain() -> str:
    import grain

    def batches() -> Any:
        return iter(grain.MapDataset.range(100).shuffle(seed=1).batch(10).to_iter_dataset())

    straight, resumed = batches(), batches()
    next(straight)
    resumed.set_state(straight.get_state())
    if list(next(straight)) != list(next(resumed)):
        raise ValueError("an iterator that was given another's state goes on with other data")
    return "an iterator goes on from another's state"


CHECKS: Mapping[str, Callable[[], str]] = {"haiku": _haiku, "grain": _grain}
