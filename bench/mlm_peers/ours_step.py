"""flax_mlm's own step, as its training loop calls it: python -m bench.mlm_peers.ours_step FOLDER DTYPE."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from bench.mlm_peers.case import BATCHES, config_of
from bench.mlm_peers.turns import answer
from jobs.flax_mlm import data, sharding
from jobs.flax_mlm import step as steps
from jobs.runtime.cache import user_cache_dir


def main(folder: Path, dtype: str) -> None:
    """See above."""
    case = json.loads((folder / "case.json").read_text())
    config = config_of(case["case"], dropout=case["dropout"], dtype=dtype)
    facts = data.prepare(config, user_cache_dir(), lambda _: None).tokenizer
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    everywhere, by_row = sharding.whole(mesh), sharding.by_row(mesh)
    optimizer = steps.make_optimizer(config)
    graph, state = steps.create(config, facts, optimizer, mesh)
    same = flax.serialization.from_bytes(state["params"], (folder / "params.msgpack").read_bytes())
    state["params"] = jax.device_put(same, everywhere)
    rule = steps.mask_rule(facts, config.mask_share, config.sequence_length)
    train_step = steps.make_train_step(graph, optimizer, rule, config, mesh, state)
    batches = np.load(folder / "batches.npz")["tokens"]
    rows_B = jax.device_put(np.arange(config.batch_size, dtype=np.int32), by_row)

    def take(step: int) -> jax.Array:
        nonlocal state
        state, results = train_step(state, jax.device_put(batches[step % BATCHES], by_row), rows_B)
        return results["loss"]

    answer(take, {"machine_flops_per_s": machine_flops_per_s()})


def machine_flops_per_s(size: int = 1024, times: int = 30) -> float:
    """What a matrix product of float32 comes to here, the best of several."""
    square = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    took_s = []
    for _ in range(times):
        began_s = time.perf_counter()
        product(square, square).block_until_ready()
        took_s.append(time.perf_counter() - began_s)
    return 2 * size**3 / min(took_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
