"""The JAX group of a run's processes, on the platform that was asked for and no other, and its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from contracts.errors import RequestError
from contracts.host_interface import required
from contracts.process_environment import Platform, ProcessEnvironment
from jobs.runtime import group
from jobs.runtime.preemption import watch

JOIN_LIMIT_S: dict[Platform, int] = {"cpu": 300, "gpu": 300, "tpu": 600}

PEER_LOST_SIGNS = (
    "Gloo",
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "coordination service",
    "CoordinationService",
    "heartbeat timeout",
    "Barrier timed out",
)
"""What XLA's errors say when another process of the group is gone (jaxlib 0.12: texts are all there is)."""
JAX_PLATFORMS: dict[Platform, str] = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
COMPILATION_CACHE = "jax-compilation"
ROWS = "rows"


def start(environment: ProcessEnvironment) -> None:
    """Join the group and make sure that the devices are what RUN_PLATFORM says.

    Raises:
        RequestError: this host has no such device, or JAX found none: a run never falls back to the CPU.
        RuntimeError: the others did not come within JOIN_LIMIT_S.
    """
    required(environment.platform)
    jax.config.update("jax_platforms", JAX_PLATFORMS[environment.platform])
    if environment.platform == "cpu" and environment.local_devices is not None:
        jax.config.update("jax_num_cpu_devices", environment.local_devices)
    if environment.platform != "cpu":
        # For what is not kept as an Executable. On the CPU a program in it may be for another machine's instructions.
        jax.config.update("jax_compilation_cache_dir", str(Path(environment.cache_dir) / COMPILATION_CACHE))
    host, _, port = environment.coordinator.rpartition(":")
    loopback = host in ("127.0.0.1", "localhost")
    # It would take SIGTERM for itself, and see it only between two steps.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=environment.coordinator,
        num_processes=environment.num_processes,
        process_id=environment.process_id,
        cluster_detection_method="deactivate",  # all is known, and in a pod it warns of a package that it would ask
        initialization_timeout=JOIN_LIMIT_S[environment.platform],
        heartbeat_timeout_seconds=group.peer_silence_limit_s(environment),
        coordinator_bind_address=f"127.0.0.1:{port}" if loopback and environment.is_first else None,
    )
    watch.formed(Notes())
    try:
        backend = jax.default_backend()
    except RuntimeError as error:
        raise RequestError(
            f"RUN_PLATFORM is {environment.platform}, but JAX could not start it: {error}"
        ) from None
    group.require_platform(environment.platform, backend, "JAX")
    watch.listen_again()


class Notes:
    """The group's key-value store: see group.Board."""

    def __init__(self) -> None:
        # JAX offers its users no other way to it; Orbax takes the same one.
        self._client: Any = jax._src.distributed.global_state.client

    def put(self, name: str, text: str) -> None:
        self._client.key_value_set(f"tpu-stack/{name}", text, allow_overwrite=True)

    def get(self, name: str) -> str | None:
        try:
            text: str = self._client.key_value_try_get(f"tpu-stack/{name}")
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                return None
            raise
        return text


def rank() -> int:
    """The number of this process that RUN_PROCESS_ID has told the group: host-N of the run's files and messages.

    On a TPU `jax.process_index()` is another one: the slice numbers its hosts itself, whatever `initialize` was told.
    What JAX orders (devices, rows, what is gathered, Orbax's first process) goes by that; what names a host, by this.
    """
    return int(jax._src.distributed.global_state.process_id)


def agree(name: str, fingerprint: str, report: Callable[[str], None] = print) -> None:
    """See `group.agree`."""
    group.agree(Notes(), rank(), jax.process_count(), name, fingerprint, report)


def first_then_others[Result](
    work: Callable[[], Result], *, what: str, report: Callable[[str], None]
) -> Result:
    """See `group.first_then_others`."""
    return group.first_then_others(Notes(), rank(), work, what, report)


def all_processes(condition: bool) -> bool:
    """Whether it holds for every process; all of them ask together."""
    return bool(np.all(multihost_utils.process_allgather(np.array(condition))))


def leave() -> None:
    """Leave the group in order; all processes do so together."""
    jax.distributed.shutdown()


class Devices:
    """The devices of the group that this process has joined, or these; every process makes the same calls.

    The plainest way to train on many devices: a batch is shared out over them, everything else is whole on each.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        mesh = Mesh(np.asarray(jax.devices() if devices is None else devices), (ROWS,))
        self.by_row = NamedSharding(mesh, PartitionSpec(ROWS))
        self.replicated = NamedSharding(mesh, PartitionSpec())

    def rows(self, values_B: np.ndarray) -> jax.Array:
        """Values that every host has, (B, …), shared out: each device is given its own rows only.

        Raises:
            ValueError: B is no multiple of the number of devices.
        """
        return jax.make_array_from_callback(values_B.shape, self.by_row, lambda rows: values_B[rows])

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` compiled; what it returns is whole on every device. A mean over rows is one over all hosts'."""
        compiled: Callable[..., Any] = jax.jit(function, out_shardings=self.replicated)
        return compiled
