"""What the TPU compiler estimates for one large product, 8,192 by 8,192 by 8,192 in bfloat16 on one device: operations
in a cycle, beside which `bench.tpu` puts those of a training step. Run by it in the environment that has libtpu.

python -m bench.tpu_product REQUEST …, each a slice as `jobs.runtime.jax.aot.slice_devices` takes it, as JSON."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jobs.runtime.jax import aot, hlo

SIDE = 8192


def operations_per_cycle(request: dict[str, object]) -> float:
    mesh = Mesh(np.asarray(aot.slice_devices(request)[:1]), ("one",))
    square = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    text = jax.jit(jnp.matmul).lower(square, square).compile().as_text() or ""
    return float(2 * SIDE**3 / hlo.summary(text, [(0, 0)]).all_cycles)


if __name__ == "__main__":
    print(json.dumps([operations_per_cycle(json.loads(request)) for request in sys.argv[1:]]))
