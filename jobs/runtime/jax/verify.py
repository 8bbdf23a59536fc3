"""Checks that the hosts of a slice can compute together in JAX: devices, a matmul on each, an all-reduce over all.

`python -m jobs.runtime.jax.verify` on every host, as a run's process is started. Each writes what it found to
`verify/host-<i>.json` in the run directory; whoever asked judges. Another framework has its own module beside this.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any

from contracts.process import Platform
from jobs.runtime import process

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")
MATMUL_SIZE: dict[Platform, int] = {"cpu": 512, "gpu": 8192, "tpu": 8192}
ALL_REDUCE_MIB: dict[Platform, int] = {"cpu": 1, "gpu": 64, "tpu": 64}
TIMES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of what is computed; None: those that suit the platform."""

    matmul_size: int | None = None
    """Rows of the square matrices; a power of two, so that the result is exact."""
    matmul_repeats: int = 20
    """Products that follow upon one another before the clock is read."""
    all_reduce_mib: int | None = None
    """What each device brings to the sum."""


def report(process_id: int) -> str:
    """Where a process writes what it found, relative to the run directory."""
    return f"verify/host-{process_id}.json"


def verify(run: process.Run, config: Config) -> Mapping[str, float | None]:
    """Check everything and write what was found; a wrong result raises no error here."""
    import jax

    where = run.environment.platform
    run.prepare("devices")
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "platform": jax.default_backend(),
        "device_kind": jax.local_devices()[0].device_kind,
        "local_devices": jax.local_device_count(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "process_index": jax.process_index(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": versions(),
    }
    run.prepare("matmul")
    found["matmuls"] = _matmuls(config.matmul_size or MATMUL_SIZE[where], config.matmul_repeats, where)
    run.prepare("all-reduce")
    found["all_reduce"] = _all_reduce(config.all_reduce_mib or ALL_REDUCE_MIB[where])
    # Every process comes out of the last sum at the same moment, so that this tells the clocks apart.
    found["clock_s"] = time.time()
    run.directory.write_json(report(run.environment.process_id), found)
    return {"steps": 0}


def versions() -> dict[str, str]:
    """Versions that have to be the same on all hosts."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _matmuls(size: int, repeats: int, where: Platform) -> list[dict[str, Any]]:
    """The rate of each of this host's devices, and whether its product is right.

    Ones times a matrix of 1/size are ones again, exactly, as long as `size` is a power of two.
    """
    import jax
    import jax.numpy as jnp

    kind = jnp.float32 if where == "cpu" else jnp.bfloat16

    @jax.jit
    def chain(left: jax.Array, right: jax.Array) -> jax.Array:
        product: jax.Array = jax.lax.fori_loop(0, repeats, lambda _, product: product @ right, left)
        return product

    found = []
    for device in jax.local_devices():
        left = jax.device_put(jnp.ones((size, size), kind), device)
        right = jax.device_put(jnp.full((size, size), 1 / size, kind), device)
        is_right = bool((chain(left, right) == 1).all())  # compiles as well
        took_s = []
        for _ in range(TIMES):
            began_s = time.perf_counter()
            chain(left, right).block_until_ready()
            took_s.append(time.perf_counter() - began_s)
        flops = 2 * size**3 * repeats
        found.append(
            {"device": str(device), "is_right": is_right, "flops_per_s": flops / statistics.median(took_s)}
        )
    return found


def _all_reduce(mib: int) -> dict[str, Any]:
    """The sum over all devices of all hosts, device d bringing d + 1: whether it is right, and the time it takes."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.device_count()
    width = mib * 2**20 // 4
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    each = NamedSharding(mesh, PartitionSpec("all"))
    numbers = np.arange(1, devices + 1, dtype=np.float32)

    def rows(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        return np.repeat(numbers[(index or (slice(None),))[0], None], width, axis=1)

    brought = jax.make_array_from_callback((devices, width), each, rows)
    add = jax.jit(lambda all_rows: all_rows.sum(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    total = devices * (devices + 1) / 2
    is_right = all(bool((np.asarray(shard.data) == total).all()) for shard in add(brought).addressable_shards)
    took_s = []
    for _ in range(TIMES):
        began_s = time.perf_counter()
        add(brought).block_until_ready()
        took_s.append(time.perf_counter() - began_s)
    return {"is_right": is_right, "mib": mib, "took_s": statistics.median(took_s)}


if __name__ == "__main__":
    process.main(Config, verify)
