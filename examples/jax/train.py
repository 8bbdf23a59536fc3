"""Fits a line on all devices, each with points of its own. Of tpu-stack it knows RUN_DIR, and the exit code 75.

fab train --workdir examples/jax -- python train.py
fab train examples/jax/train.py
fab fit --accelerator v5litepod-16 -- examples/jax/train.py
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.6", "numpy"]
# ///

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import reached_preemption_sync_point
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
POINTS = 64  # of a device


def loss(weight, x):
    return jnp.mean((weight * x - 3 * x) ** 2)


@jax.jit
def take_step(weight, x):
    error, gradient = jax.value_and_grad(loss)(weight, x)
    return weight - 0.01 * gradient, error


def layout(devices):
    mesh = Mesh(np.asarray(devices), ("rows",))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))


def lower_step(devices):
    """Hands the step over to `fab fit`, with shapes in place of arrays, on devices that need not be there."""
    replicated, by_row = layout(devices)
    weight = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
    x = jax.ShapeDtypeStruct((POINTS * len(devices),), jnp.float32, sharding=by_row)
    settings = {"parameters": weight, "unit": "points", "per_step": x.size, "steps": STEPS}
    return {"step": take_step, "arguments": (weight, x), **settings}


def main():
    jax.distributed.initialize()
    run, rank = Path(os.environ["RUN_DIR"]), jax.process_index()
    replicated, by_row = layout(jax.devices())
    state = run / "state.json"
    saved = json.loads(state.read_text()) if state.exists() else {"step": 0, "weight": 0.0}
    step, weight = saved["step"], jax.device_put(np.float32(saved["weight"]), replicated)
    while step < STEPS:
        step += 1
        drawn = np.random.default_rng(step).standard_normal(POINTS * jax.device_count(), np.float32)
        x = jax.make_array_from_callback(drawn.shape, by_row, lambda rows, drawn=drawn: drawn[rows])
        weight, error = take_step(weight, x)
        # JAX itself takes the SIGTERM of a stop or a preemption, and all processes agree on the step to leave at.
        leaving = reached_preemption_sync_point(step)
        if rank == 0 and step % 20 == 0:
            with (run / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step, "loss": float(error), "time": time.time()}) + "\n")
        if rank == 0 and (step % 20 == 0 or leaving):
            partial = run / "state.json.new"
            partial.write_text(json.dumps({"step": step, "weight": float(weight)}))
            partial.replace(state)
        if leaving:
            sys.exit(75)
    print(f"process {rank} of {jax.process_count()}: weight {float(weight):.3f}")


if __name__ == "__main__":
    main()
