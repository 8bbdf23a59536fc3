"""What this host's processor is, and what activations are computed in on it. Imports no framework."""

from __future__ import annotations

import functools
import platform as python_platform
from collections.abc import Callable
from pathlib import Path
from typing import Literal

type DtypeOption = Literal["auto", "float32", "bfloat16"]

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = "avx512_bf16"
"""Processors with AMX have it too. By it a product of bfloat16 ran twice as fast as one of float32
(`docs/benchmarks.md`); what XLA makes of other processors' instructions for bfloat16 was not measured."""


def dtype(
    requested: DtypeOption, platform: str, all_processes: Callable[[bool], bool]
) -> Literal["float32", "bfloat16"]:
    """What an option --dtype means: "auto" is bfloat16, and on CPUs only where those of all processes multiply it fast.

    all_processes: whether something holds in all processes, which ask together.
    """
    if requested != "auto":
        return requested
    return "bfloat16" if platform != "cpu" or all_processes(multiplies_bfloat16()) else "float32"


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16; without them they are many times slower."""
    return BFLOAT16 in flags(_cpuinfo())


@functools.cache
def kind() -> str:
    """The model and features of this host's processor, which a compiled program depends on."""
    models = {line for line in _cpuinfo().splitlines() if line.startswith(("model name", "CPU part"))}
    return f"{python_platform.machine()} {sorted(models)} {sorted(flags(_cpuinfo()))}"


def flags(cpuinfo: str) -> frozenset[str]:
    """The features that /proc/cpuinfo names on an x86 machine; none on another."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _cpuinfo() -> str:
    return CPUINFO.read_text() if CPUINFO.exists() else ""
