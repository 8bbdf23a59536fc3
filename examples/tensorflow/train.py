"""Fits a line with MultiWorkerMirroredStrategy, and resumes. Of tpu-stack it knows RUN_DIR only.

fab train --framework tensorflow --workdir examples/tensorflow -- python train.py
"""

import json
import os
import time
from pathlib import Path

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
run, rank = Path(os.environ["RUN_DIR"]), strategy.cluster_resolver.task_id or 0
saved = run / "state.json"
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "weight": 0.0}
with strategy.scope():
    weight = tf.Variable(state["weight"])
    optimizer = tf.keras.optimizers.SGD(0.01)


@tf.function
def take_step(step):
    def take_share():
        x = tf.random.stateless_normal([64], seed=[step, rank])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((weight * x - 3 * x) ** 2) / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    return strategy.reduce("SUM", strategy.run(take_share), axis=None)


for step in range(state["step"] + 1, 201):
    loss = float(take_step(tf.constant(step)))
    if rank == 0 and step % 20 == 0:
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, "loss": loss, "time": time.time()}) + "\n")
        partial = run / "state.json.new"
        partial.write_text(json.dumps({"step": step, "weight": float(weight.numpy())}))
        partial.replace(saved)
print(f"rank {rank} of {strategy.num_replicas_in_sync}: weight {weight.numpy():.3f}")
