"""The part of `jobs.runtime.verify` in JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from contracts.process_environment import Platform
from jobs.runtime.verify import Work


def facts() -> dict[str, Any]:
    return {
        "platform": jax.default_backend(),
        "device_kind": jax.local_devices()[0].device_kind,
        "local_devices": jax.local_device_count(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "process_index": jax.process_index(),
    }


def matmuls(size: int, repeats: int, platform: Platform) -> Iterator[Work]:
    kind = jnp.float32 if platform == "cpu" else jnp.bfloat16

    @jax.jit
    def chain(left: jax.Array, right: jax.Array) -> jax.Array:
        product: jax.Array = jax.lax.fori_loop(0, repeats, lambda _, product: product @ right, left)
        return product

    for device in jax.local_devices():
        left = jax.device_put(jnp.ones((size, size), kind), device)
        right = jax.device_put(jnp.full((size, size), 1 / size, kind), device)

        def compute(left: jax.Array = left, right: jax.Array = right) -> jax.Array:
            product: jax.Array = chain(left, right)
            return product.block_until_ready()

        yield Work(device=str(device), compute=compute, is_right=lambda product: bool((product == 1).all()))


def all_reduce(width: int) -> Work:
    devices = jax.device_count()
    mesh = Mesh(np.asarray(jax.devices()), ("all",))
    by_device = NamedSharding(mesh, PartitionSpec("all"))
    numbers = np.arange(1, devices + 1, dtype=np.float32)

    def rows(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        return np.repeat(numbers[(index or (slice(None),))[0], None], width, axis=1)

    brought = jax.make_array_from_callback((devices, width), by_device, rows)
    add = jax.jit(lambda all_rows: all_rows.sum(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    total = devices * (devices + 1) / 2

    def is_right(sums: jax.Array) -> bool:
        return all(bool((np.asarray(shard.data) == total).all()) for shard in sums.addressable_shards)

    return Work(device="all", compute=lambda: add(brought).block_until_ready(), is_right=is_right)
