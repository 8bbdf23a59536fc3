"""flax_mlm's own step, as its training loop calls it.

python -m bench.mlm_peers.ours_step FOLDER [--options JSON]"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np

from bench.mlm_peers.turns import answer, resident_bytes
from jobs.flax_mlm import data, sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config
from jobs.runtime.jax.executables import Executables
from jobs.runtime.storage.cache import user_cache_dir


def main(arguments: Sequence[str]) -> None:
    """See above."""
    facts = {"imported_bytes": resident_bytes()}
    parser = argparse.ArgumentParser(prog="python -m bench.mlm_peers.ours_step", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", type=json.loads, default={}, help="of flax_mlm, over those of the case")
    options = parser.parse_args(arguments)
    case = json.loads((options.folder / "case.json").read_text())
    config = Config(**{**case, **options.options})
    step(options.folder, config, facts)


def step(folder: Path, config: Config, facts: dict[str, Any]) -> None:
    """Answer as asked."""
    tokenizer = data.prepare(config, user_cache_dir(), lambda _: None).tokenizer
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    replicated, by_row = sharding.replicated(mesh), sharding.by_row(mesh)
    compiled = Executables(str(folder / "cache"), mesh.devices.flat).cached
    step_functions = steps.make_steps(config, tokenizer, mesh, compiled)
    state = step_functions.state
    params = flax.serialization.from_bytes(state["params"], (folder / "params.msgpack").read_bytes())
    state["params"] = jax.device_put(params, replicated)
    del params  # PyTorch's program does not keep what it read either
    batches = np.load(folder / "batches.npz")["tokens"]
    place = functools.partial(jax.device_put, device=by_row)
    rows_B = place(np.arange(config.batch_size, dtype=np.int32))

    def take(number: int) -> jax.Array:
        nonlocal state
        state, results = step_functions.train(state, place(batches[number % len(batches)]), rows_B)
        return results["loss"]

    dtype = steps.activations_dtype(config, mesh).name
    answer(take, {**facts, "dtype": dtype}, lambda: machine_flops_per_s(dtype))


def machine_flops_per_s(dtype: str, size: int = 1024, times: int = 30) -> float:
    """What a matrix product comes to here, the best of several."""
    square = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    took_s = []
    for _ in range(times):
        began_s = time.perf_counter()
        product(square, square).block_until_ready()
        took_s.append(time.perf_counter() - began_s)
    return 2 * size**3 / min(took_s)


if __name__ == "__main__":
    main(sys.argv[1:])
