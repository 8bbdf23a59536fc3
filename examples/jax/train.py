"""Fits a line, each process on points of its own. Of tpu-stack it knows RUN_DIR, and the exit code 75.

fab train --workdir examples/jax -- python train.py
"""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.multihost_utils import process_allgather, reached_preemption_sync_point

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
jax.distributed.initialize()
run, rank = Path(os.environ["RUN_DIR"]), jax.process_index()
state = run / "state.json"
saved = json.loads(state.read_text()) if state.exists() else {"step": 0, "weight": 0.0}
step, weight = saved["step"], jnp.float32(saved["weight"])


def loss(weight, x):
    return jnp.mean((weight * x - 3 * x) ** 2)


value_and_grad = jax.jit(jax.value_and_grad(loss))
while step < STEPS:
    step += 1
    x = jax.random.normal(jax.random.fold_in(jax.random.key(step), rank), (64,))
    error, gradient = (jnp.mean(process_allgather(each)) for each in value_and_grad(weight, x))
    weight -= 0.01 * gradient
    # JAX itself takes the SIGTERM of a stop or a preemption, and all processes agree on the step to leave at.
    leaving = reached_preemption_sync_point(step)
    if rank == 0 and step % 20 == 0:
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, "loss": float(error), "time": time.time()}) + "\n")
    if rank == 0 and (step % 20 == 0 or leaving):
        beside = run / "state.json.new"
        beside.write_text(json.dumps({"step": step, "weight": float(weight)}))
        beside.replace(state)
    if leaving:
        sys.exit(75)
print(f"process {rank} of {jax.process_count()}: weight {float(weight):.3f}")
