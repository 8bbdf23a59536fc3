"""What of torch has to work without NVIDIA's libraries: each function says in a few words what it found, or raises.

Part of the images' smoke tests; on the CPU, because the libraries that were left out are no part of a TPU's path."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 120
# What libraries ask on the CPU too, such as transformers whether a graph is captured now.
QUIET = """
import contextlib
import torch
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
with contextlib.suppress(RuntimeError):
    torch.cuda.is_current_stream_capturing()
"""
# The profiler looks for devices by itself, and prints on standard error what it does.
PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU]) as profiled:
    torch.ones(8, 8) @ torch.ones(8, 8)
assert any(event.key == "aten::mm" for event in profiled.key_averages())
"""


def _network() -> Any:
    """Convolution, attention, normalisation, embedding: one of each that NVIDIA has a library for."""
    import torch
    from torch import nn

    class Network(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 16)
            self.narrow = nn.Conv1d(16, 16, 3, padding=1)
            self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
            self.norm = nn.LayerNorm(16)
            self.out = nn.Linear(16, 32)

        def forward(self, tokens_BS: Any) -> Any:
            x_BSD = self.embed(tokens_BS)
            x_BSD = self.narrow(x_BSD.transpose(1, 2)).transpose(1, 2)
            x_BSD = self.norm(x_BSD + self.attend(x_BSD, x_BSD, x_BSD, need_weights=False)[0])
            return self.out(torch.nn.functional.gelu(x_BSD))

    torch.manual_seed(0)
    return Network()


def published() -> str:
    """torch's files are there, byte for byte as its wheel's own record names them."""
    files = [
        file for file in importlib.metadata.files("torch") or () if file.parts[0] == "torch" and file.hash
    ]
    wrong = []
    for file in files:
        with contextlib.suppress(FileNotFoundError), Path(str(file.locate())).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").digest()
            if file.hash and base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value:
                continue
        wrong.append(str(file))
    if wrong or not files:
        raise RuntimeError(f"{len(wrong)} of torch's {len(files)} files are not as published: {wrong[:5]}")
    return f"{len(files)} files of torch are as published"


def quiet() -> str:
    """torch prints nothing in a process of its own where nobody uses CUDA."""
    if output := _run(QUIET):
        raise RuntimeError(f"torch prints on standard error: {output}")
    _run(PROFILED)
    return "imports without a word, profiles, finds no CUDA"


def _run(program: str) -> str:
    """Its standard error; a warning ends it."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"a program ends with {done.returncode}: {done.stderr.strip()}\n{program}")
    return done.stderr.strip()


def refused() -> str:
    import torch

    try:
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return f"device cuda raises {str(error).splitlines()[0]!r}"
    raise RuntimeError("a tensor on device cuda was made, in an image without CUDA")


def compiled() -> str:
    """Traced and differentiated ahead of time; the code that Inductor writes would take a C++ compiler."""
    import torch

    model, tokens_BS = _network(), torch.randint(0, 32, (2, 8))
    graph = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(graph(tokens_BS), model(tokens_BS))
    graph(tokens_BS).sum().backward()
    return "torch.compile gives what eager gives, forwards and backwards"


def loaded() -> str:
    """DataLoader's workers are processes that hand tensors over in shared memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(64).view(64, 1))
    batches = [batch for (batch,) in DataLoader(data, batch_size=8, num_workers=2, timeout=LIMIT_S)]
    if torch.cat(batches).view(-1).tolist() != list(range(64)):
        raise RuntimeError("two workers delivered other data than was asked for")
    return "two workers, 8 batches"


def algebra() -> str:
    """LAPACK, FFT and a collective of one: the libraries on the CPU that stand beside cuSOLVER, cuFFT and NCCL."""
    import tempfile

    import torch

    a_NN = torch.randn(16, 16, dtype=torch.float64)
    u, s, v = torch.linalg.svd(a_NN)
    torch.testing.assert_close(u @ torch.diag(s) @ v, a_NN)
    torch.testing.assert_close(torch.fft.ifft(torch.fft.fft(a_NN)).real, a_NN)
    with tempfile.NamedTemporaryFile() as store:
        place = f"file://{store.name}"
        torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
        torch.distributed.all_reduce(s)
        torch.distributed.destroy_process_group()
    return "svd, fft, gloo"


PROOFS: Mapping[str, Callable[[], str]] = {
    "published": published,
    "no cuda": quiet,
    "cuda refused": refused,
    "compile": compiled,
    "data loader": loaded,
    "algebra": algebra,
}
