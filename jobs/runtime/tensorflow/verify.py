"""The part of `jobs.runtime.verify` in TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from contracts.process_environment import Platform
from jobs.runtime.tensorflow import distributed
from jobs.runtime.verify import Work


def facts() -> dict[str, Any]:
    devices = distributed.devices()
    platform = distributed.device_platform(devices[0])
    return {
        "platform": platform,
        "device_kind": platform,
        "local_devices": len(devices),
        "devices": distributed.strategy().num_replicas_in_sync,
        "processes": distributed.size(),
        "process_index": distributed.rank(),
    }


def matmuls(size: int, repeats: int, platform: Platform) -> Iterator[Work]:
    kind = tf.float32 if platform == "cpu" else tf.bfloat16

    def chain(left: Any, right: Any) -> Any:
        product = left
        for _ in tf.range(repeats):
            product = product @ right
        return product

    compiled = tf.function(chain)
    for device in distributed.devices():
        with tf.device(device):
            left = tf.ones((size, size), kind)
            right = tf.fill((size, size), tf.cast(1 / size, kind))

        def compute(device: str = device, left: Any = left, right: Any = right) -> Any:
            with tf.device(device):
                product = compiled(left, right)
            product[0, 0].numpy()
            return product

        yield Work(
            device=device, compute=compute, is_right=lambda product: bool((product.numpy() == 1).all())
        )


def all_reduce(width: int) -> Work:
    strategy = distributed.strategy()
    devices = strategy.num_replicas_in_sync

    def replica() -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group + 1
        return tf.fill((width,), tf.cast(number, tf.float32))

    def add() -> Any:
        return strategy.reduce("SUM", strategy.run(replica), axis=None)

    compiled, total = tf.function(add), devices * (devices + 1) / 2
    return Work(
        device="all", compute=lambda: compiled().numpy(), is_right=lambda sums: bool((sums == total).all())
    )
