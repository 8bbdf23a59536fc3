"""What only PyTorch/XLA has to prove: a small network compiled by XLA, on a TPU or, when asked for, on a CPU."""

from __future__ import annotations

import runpy
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NAME = "pytorch_xla"
MODULES = (
    "torch", "torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.distributed.spmd",
    "torch_xla.amp.syncfree", "transformers", "accelerate", "scipy.stats", "sklearn.metrics", "safetensors.torch",
)  # fmt: skip
# On a TPU nothing is said: what PyTorch/XLA falls back to by itself is what the check wants to see.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {"cpu": {"PJRT_DEVICE": "CPU"}, "tpu": {}}
BATCH, INPUTS, WIDTH = 32, 16, 64
FILE = "state.pt"


def devices() -> tuple[str, str]:
    import torch_xla
    import torch_xla.runtime

    torch_xla.device()
    kind = torch_xla.runtime.device_type()
    return kind.lower(), f"{torch_xla.runtime.addressable_device_count()} × {kind} by PJRT"


def start() -> Any:
    import torch
    import torch_xla
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)).to(torch_xla.device())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(state: Any, number: int) -> tuple[Any, float]:
    import torch
    import torch_xla

    model, optimizer = state
    x_BI = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(number)).to(torch_xla.device())
    optimizer.zero_grad()
    loss = ((model(x_BI)[:, 0] - x_BI.sum(dim=1)) ** 2).mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    return state, float(loss)


def save(state: Any, folder: Path) -> None:
    import torch_xla.core.xla_model as xm

    model, optimizer = state
    xm.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / FILE)


def load(folder: Path) -> Any:
    import torch

    model, optimizer = start()
    saved = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def listen() -> Callable[[int], bool]:
    """The handler notes the signal, and the loop asks between two steps."""
    signals_received: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: signals_received.append(signum))
    return lambda _: bool(signals_received)


def _accelerate() -> str:
    """accelerate finds the XLA device by itself; of torch_tpu it knows nothing."""
    from accelerate import PartialState

    state = PartialState()
    if state.device.type != "xla":
        raise RuntimeError(f"accelerate chose {state.device}; it has to be an XLA device")
    return f"accelerate computes on {state.device}"


# The build left the programs that took CUDA out, and what has to work all the same.
_PROOFS: Mapping[str, Callable[[], str]] = runpy.run_path("/opt/tpu-stack/build/proof.py")["PROOFS"]
CHECKS: Mapping[str, Callable[[], str]] = {"accelerate": _accelerate, **_PROOFS}
