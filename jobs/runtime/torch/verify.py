"""The part of `jobs.runtime.verify` in PyTorch, by any of its devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from contracts.process_environment import Platform
from jobs.runtime.torch import distributed
from jobs.runtime.verify import Work


def facts() -> dict[str, Any]:
    device = distributed.device()
    return {
        "platform": device.platform,
        "device_kind": device.hardware,
        "local_devices": 1,
        "devices": distributed.size(),
        "processes": distributed.size(),
        "process_index": distributed.rank(),
    }


def _computed(result: torch.Tensor) -> torch.Tensor:
    """Wait for the result by reading a number of it."""
    distributed.device().step_done()
    float(result.flatten()[0])
    return result


def matmuls(size: int, repeats: int, platform: Platform) -> Iterator[Work]:
    device, kind = distributed.device(), torch.float32 if platform == "cpu" else torch.bfloat16
    left = torch.ones((size, size), dtype=kind, device=device.device)
    right = torch.full((size, size), 1 / size, dtype=kind, device=device.device)

    def compute() -> torch.Tensor:
        product = left
        for _ in range(repeats):
            product = product @ right
        return _computed(product)

    name = f"{device.device} of rank {distributed.rank()}"
    yield Work(device=name, compute=compute, is_right=lambda product: bool((product == 1).all()))


def all_reduce(width: int) -> Work:
    device, devices = distributed.device(), distributed.size()
    brought = torch.full((width,), distributed.rank() + 1.0, device=device.device)

    def compute() -> torch.Tensor:
        return _computed(device.add_up(brought.clone()))

    total = devices * (devices + 1) / 2
    return Work(device="all", compute=compute, is_right=lambda sums: bool((sums == total).all()))
