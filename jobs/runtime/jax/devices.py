"""The devices of all hosts as one row, and what this host's processor can do."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS = "rows"
CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = "avx512_bf16"
"""Processors with AMX have it too. By it a product of bfloat16 ran twice as fast as one of float32
(`docs/benchmarks.md`); what XLA makes of other processors' instructions for bfloat16 was not measured."""


class Devices:
    """The devices of the group that this process has joined; every process makes the same calls.

    The plainest way to train on many devices: a batch is shared out over them, everything else is whole on each.
    """

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


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether it has instructions for products of bfloat16; without them they are many times slower."""
    return BFLOAT16 in flags(CPUINFO.read_text() if CPUINFO.exists() else "")


@functools.cache
def processor_kind() -> str:
    """Its model and its features, by which a program that was compiled for it is known from one for another."""
    cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    models = {line for line in cpuinfo.splitlines() if line.startswith(("model name", "CPU part"))}
    return f"{platform.machine()} {sorted(models)} {sorted(flags(cpuinfo))}"


def flags(cpuinfo: str) -> frozenset[str]:
    """The features that Linux names on an x86 machine; none on another."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
