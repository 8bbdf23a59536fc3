"""The TensorFlow group of a run's processes and its strategy, on the platform that was asked for and no other.

On CPUs and GPUs the processes find each other by TF_CONFIG, which the launcher sets (`contracts.ranks`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from contracts.errors import RequestError
from contracts.host_interface import required
from contracts.process_environment import ProcessEnvironment
from jobs.runtime import group
from jobs.runtime.preemption import watch

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

NO_STRATEGY = tf.distribute.get_strategy()
"""Computes on one device, and has the methods of the others."""


class _Group:
    """What `start` has made, for this process."""

    strategy: Any
    notes: Notes | OwnNotes
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
        # On one CPU nothing is shared out, and a strategy would take a tenth of a small model's step.
        is_on_gpu = bool(tf.config.list_logical_devices("GPU"))
        _Group.strategy = tf.distribute.MirroredStrategy() if is_on_gpu else NO_STRATEGY
    elif "TF_CONFIG" not in os.environ:
        raise RequestError(
            "TF_CONFIG is not set, by which TensorFlow's processes find each other; `fab train` sets it"
        )
    else:
        _bear_silence(environment)
        _Group.strategy = tf.distribute.MultiWorkerMirroredStrategy()
    _Group.rank, _Group.size = environment.process_id, environment.num_processes
    group.require_platform(platform, device_platform(devices()[0]), "TensorFlow")
    all_processes(True)  # the first exchange, without which no process knows that the others have come
    _Group.notes = Notes() if _Group.size > 1 else OwnNotes()
    watch.formed(_Group.notes)
    watch.listen_again()


def _bear_silence(environment: ProcessEnvironment) -> None:
    """Give up a silent peer later than after TensorFlow's 10 s: on a busy machine one that works can be silent as long.
    It offers its users no way to say so."""
    from tensorflow.python.eager import context

    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec()
    worker = context.coordination_config_pb2.CoordinatedJob(
        name="worker", num_tasks=cluster.num_tasks("worker")
    )
    # Else as the strategy configures it where nobody has.
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        coordinated_jobs=[worker],
        heartbeat_timeout_in_ms=group.peer_silence_limit_s(environment) * 1000,
    )


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
    if _Group.strategy is NO_STRATEGY:
        return (tf.config.list_logical_devices("CPU")[0].name,)
    return tuple(_Group.strategy.extended.worker_devices)


def device_platform(device: str) -> str:
    return str(tf.DeviceSpec.from_string(device).device_type).lower()


def rank() -> int:
    return _Group.rank


def size() -> int:
    """Processes in the group."""
    return _Group.size


def io_device() -> str | None:
    """Where variables are brought before they are written to a file: a TPU has no files."""
    return "/job:localhost" if isinstance(_Group.strategy, tf.distribute.TPUStrategy) else None


def exchange_on_host(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of this process, (…), on the host, with those of all others: (processes, …), in the order of ranks."""
    if _Group.size == 1:
        return np.asarray(values)[None]
    return np.asarray(_added_up(tf.one_hot(_Group.rank, _Group.size), tf.constant(values)))


def _add_up(mine: Any, values: Any) -> Any:
    """Values, (…), in the row of this process among (processes, …), whose others are 0: their sum has all of them."""

    def replica_rows() -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        is_first = number == _Group.rank * len(devices())
        rows = tf.reshape(tf.cast(mine, bool) & is_first, [-1] + [1] * values.shape.rank)
        return tf.where(rows, values[None], tf.zeros((), values.dtype))

    return _Group.strategy.reduce("SUM", _Group.strategy.run(replica_rows), axis=None)


_added_up = tf.function(_add_up)


def all_processes(condition: bool) -> bool:
    """Whether it holds for every process; all of them ask together."""
    return bool(exchange_on_host(np.array(condition, np.int32)).all())


def agree(name: str, fingerprint: str, report: Callable[[str], None] = print) -> None:
    """See `group.agree`."""
    group.agree(_Group.notes, rank(), size(), name, fingerprint, report)


class Notes:
    """The store of TensorFlow's coordination service, which process 0 keeps: see group.Board.

    A query with a time limit costs the store 35 KB for ever (2.20), and a process looks every second; so a thread waits
    for each note.
    """

    def __init__(self) -> None:
        # TensorFlow offers its users no other way to them.
        from tensorflow.python.eager import context

        self._store: Any = context.context()
        self._asked: dict[str, Future[str]] = {}

    def put(self, name: str, text: str) -> None:
        """Leave a note; the first of a name stays."""
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self._store.set_config_key_value(f"tpu-stack/{name}", text)

    def get(self, name: str) -> str | None:
        if name not in self._asked:
            self._asked[name] = Future()
            threading.Thread(target=self._ask, args=(name,), name=f"note {name}", daemon=True).start()
        note = self._asked[name]
        return note.result() if note.done() else None

    def wait(self, name: str) -> str:
        """Wait until the note is there."""
        return str(self._store.get_config_key_value(f"tpu-stack/{name}"))

    def _ask(self, name: str) -> None:
        try:
            self._asked[name].set_result(self.wait(name))
        except Exception as error:  # the group is gone; `get` raises it
            self._asked[name].set_exception(error)


class OwnNotes:
    """A board of one process, for which there is no coordination service."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        self._notes[name] = text

    def get(self, name: str) -> str | None:
        return self._notes.get(name)


def leave() -> None:
    """Leave the group in order; all processes do so together.

    A process that has its sum may still be asked for its part by the others, and the first one keeps the group's notes.
    """
    notes = _Group.notes
    if isinstance(notes, OwnNotes):
        return
    notes.put(f"over/{_Group.rank}", "yes")
    if _Group.rank == 0:
        for rank in range(_Group.size):
            notes.wait(f"over/{rank}")
        notes.put("over", "yes")
    else:
        with contextlib.suppress(tf.errors.OpError):  # it may be gone before this is answered
            notes.wait("over")
