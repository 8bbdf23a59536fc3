"""What this host's CPU can do."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = "avx512_bf16"
"""Processors with AMX have it too. By it a product of bfloat16 ran twice as fast as one of float32
(`docs/benchmarks.md`); what XLA makes of other processors' instructions for bfloat16 was not measured."""


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether it has instructions for products of bfloat16; without them they are many times slower."""
    return BFLOAT16 in flags(CPUINFO.read_text() if CPUINFO.exists() else "")


@functools.cache
def kind() -> str:
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
