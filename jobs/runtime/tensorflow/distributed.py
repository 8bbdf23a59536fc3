"""The TensorFlow group of a run's processes and its strategy, on the platform that was asked for and no other.

On CPUs and GPUs the processes find each other by TF_CONFIG, which the launcher sets (`contracts.ranks`).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import tensorflow as tf

from contracts.device_nodes import required
from contracts.errors import RequestError
from contracts.process import ProcessEnvironment

PEER_LOST_KINDS = (RuntimeError, tf.errors.OpError)
PEER_LOST_SIGNS = (
    "Connection reset by peer",
    "Connection refused",
    "Socket closed",
    "failed to connect to all addresses",
    "Collective ops is aborted",
    "coordination service",
    "CoordinationService",
    "heartbeat timeout",
)
"""What errors of a strategy over several processes (2.20) say when another of them is gone."""


class _Group:
    """What `start` has made, for this process."""

    strategy: Any
    rank = 0
    size = 1


def start(environment: ProcessEnvironment) -> None:
    """Join the group and make sure that the devices are what RUN_PLATFORM says.

    Raises:
        RequestError: this host has no such device, or TensorFlow found none: a run never falls back to the CPU.
    """
    platform = environment.platform
    required(platform)
    if platform == "tpu":
        _Group.strategy = _on_tpu(environment)
    elif environment.num_processes == 1:
        _Group.strategy = tf.distribute.MirroredStrategy()
    elif "TF_CONFIG" not in os.environ:
        raise RequestError(
            "TF_CONFIG is not set, by which TensorFlow's processes find each other; `fab train` sets it"
        )
    else:
        _Group.strategy = tf.distribute.MultiWorkerMirroredStrategy()
    _Group.rank, _Group.size = environment.process_id, environment.num_processes
    found = platform_of(devices()[0])
    if found != platform:
        raise RequestError(
            f"RUN_PLATFORM is {platform}, but TensorFlow found {found}; nothing is trained on another platform than "
            "the one asked for"
        )
    # The first exchange, without which no process knows that the others have come.
    replicas = tf.function(lambda: _Group.strategy.run(lambda: tf.ones(())))
    _Group.strategy.reduce("SUM", replicas(), axis=None)


def _on_tpu(environment: ProcessEnvironment) -> Any:
    if environment.num_processes > 1:
        raise RequestError(
            "RUN_PLATFORM is tpu: one process of TensorFlow drives all hosts of a slice, and a run has one on each of "
            f"{environment.num_processes}; take a slice of one host, or JAX or PyTorch"
        )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise RequestError(
            f"RUN_PLATFORM is tpu, but TensorFlow could not start it: {str(error).splitlines()[0]}"
        ) from None
    return tf.distribute.TPUStrategy(resolver)


def strategy() -> Any:
    """The strategy that computes on all devices of the group."""
    return _Group.strategy


def devices() -> tuple[str, ...]:
    """The names of this process's devices; TensorFlow itself lists those of all workers."""
    return tuple(_Group.strategy.extended.worker_devices)


def platform_of(device: str) -> str:
    return str(tf.DeviceSpec.from_string(device).device_type).lower()


def rank() -> int:
    return _Group.rank


def size() -> int:
    """Processes in the group."""
    return _Group.size


def leave() -> None:
    """Leave the group in order; all processes do so together.

    A process that has its sum may still be asked for its part by the others, and the first one keeps the group's notes.
    """
    if _Group.size == 1:
        return
    # TensorFlow offers its users no other way to them.
    from tensorflow.python.eager import context

    notes: Any = context.context()
    notes.set_config_key_value(f"tpu-stack/left/{_Group.rank}", "yes")
    if _Group.rank == 0:
        for rank in range(_Group.size):
            notes.get_config_key_value(f"tpu-stack/left/{rank}")  # waits for it
        notes.set_config_key_value("tpu-stack/over", "yes")
    else:
        with contextlib.suppress(tf.errors.OpError):  # it may be gone before this is answered
            notes.get_config_key_value("tpu-stack/over")
