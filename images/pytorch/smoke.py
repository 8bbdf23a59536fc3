"""What only PyTorch with torch_tpu has to prove: a small network trained eagerly, on the TPU where there is one."""

from __future__ import annotations

import functools
import runpy
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NAME = "pytorch"
MODULES = (
    "torch", "torch.distributed", "transformers", "accelerate", "scipy.stats", "sklearn.metrics",
    "safetensors.torch",
)  # fmt: skip
# torch loads torch_tpu by itself, where it is installed. On a TPU nothing more is said: what torch falls back to by
# itself is what the check wants to see.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {"cpu": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "tpu": {}}
BATCH, INPUTS, WIDTH = 32, 16, 64
FILE = "state.pt"


@functools.cache
def _device() -> Any:
    """As a job of one's own would choose: an accelerator if torch knows of one, else the CPU."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def devices() -> tuple[str, str]:
    import torch

    device = _device()
    if device.type == "cpu":
        return "cpu", f"torch {torch.__version__} with {torch.get_num_threads()} threads"
    return device.type, f"{torch.accelerator.device_count()} × {device.type}"


def start() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)).to(_device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(state: Any, number: int) -> tuple[Any, float]:
    import torch

    model, optimizer = state
    x_BI = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(number)).to(_device())
    optimizer.zero_grad()
    loss = ((model(x_BI)[:, 0] - x_BI.sum(dim=1)) ** 2).mean()
    loss.backward()
    optimizer.step()
    return state, float(loss)


def save(state: Any, folder: Path) -> None:
    import torch

    model, optimizer = state
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / FILE)


def load(folder: Path) -> Any:
    import torch

    model, optimizer = start()
    saved = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def listen() -> Callable[[int], bool]:
    """torch has no notice of its own: the handler notes the signal, and the loop asks between two steps."""
    signals_received: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: signals_received.append(signum))
    return lambda _: bool(signals_received)


def _backend() -> str:
    """torch_tpu and libtpu load beside this torch, with a device or without: without one it leaves torch as it is."""
    import importlib.metadata
    import importlib.util

    if importlib.util.find_spec("torch_tpu") is None:
        return "the image for CPUs has no torch_tpu"
    import torch_tpu._loader
    from torch_tpu._internal.utils import hardware

    torch_tpu._loader.load()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch_tpu", "libtpu")]
    return f"{', '.join(versions)}, {hardware.get_tpu_device_count()} TPUs here"


# The build left the programs that took CUDA out, and what has to work all the same.
_PROOFS: Mapping[str, Callable[[], str]] = runpy.run_path("/opt/tpu-stack/build/proof.py")["PROOFS"]
CHECKS: Mapping[str, Callable[[], str]] = {"torch_tpu": _backend, **_PROOFS}
