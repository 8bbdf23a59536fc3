"""All devices of all hosts as one row: a batch is shared out over them, everything else is whole on each.

The plainest way to train on many devices, for a job that needs no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = "rows"


class Devices:
    """The devices of the group that this process has joined; every process makes the same calls."""

    def __init__(self) -> None:
        mesh = Mesh(np.asarray(jax.devices()), (ROWS,))
        self._by_row, self._whole = (
            NamedSharding(mesh, PartitionSpec(ROWS)),
            NamedSharding(mesh, PartitionSpec()),
        )

    def rows(self, values_B: np.ndarray) -> jax.Array:
        """Values that every host has, (B, …), shared out: each device is given its own rows only.

        Raises:
            ValueError: B is no multiple of the number of devices.
        """
        return jax.make_array_from_callback(values_B.shape, self._by_row, lambda rows: values_B[rows])

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` compiled; what it returns is whole on every device. A mean over rows is one over all hosts'."""
        compiled: Callable[..., Any] = jax.jit(function, out_shardings=self._whole)
        return compiled
