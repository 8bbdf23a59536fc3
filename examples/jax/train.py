"""Fits a line, each process on points of its own. Of tpu-stack it knows RUN_DIR only.

fab train --workdir examples/jax -- python train.py
"""

import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.multihost_utils import process_allgather

jax.distributed.initialize()
run, rank = Path(os.environ["RUN_DIR"]), jax.process_index()
state = run / "state.json"
saved = json.loads(state.read_text()) if state.exists() else {"step": 0, "weight": 0.0}
step, weight = saved["step"], jnp.float32(saved["weight"])


def loss(weight, x):
    return jnp.mean((weight * x - 3 * x) ** 2)


value_and_grad = jax.jit(jax.value_and_grad(loss))
while step < 200:
    step += 1
    x = jax.random.normal(jax.random.fold_in(jax.random.key(step), rank), (64,))
    error, gradient = (jnp.mean(process_allgather(each)) for each in value_and_grad(weight, x))
    weight -= 0.01 * gradient
    if rank == 0 and step % 20 == 0:
        line = {"step": step, "loss": float(error), "time": time.time()}
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
        beside = run / "state.json.new"
        beside.write_text(json.dumps({"step": step, "weight": float(weight)}))
        beside.replace(state)
print(f"process {rank} of {jax.process_count()}: weight {float(weight):.3f}")
