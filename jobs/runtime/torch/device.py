"""What differs between the platforms of PyTorch: a process's device, its backend, compiling, parallel models, seeds.

A CPU, a GPU, a TPU by torch_tpu (device "tpu"), and an XLA device by PyTorch/XLA. A process has one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from contracts.errors import RequestError
from contracts.process_environment import Platform, ProcessEnvironment
from jobs.runtime.group import require_platform

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "tpu": "cpu:gloo,tpu:tpu_dist", "xla": "gloo"}
"""By the device's type: what exchanges tensors on the host, and on the device. XLA's exchanges are part of its
programs."""
INDUCTOR_CACHE = "torch-inductor"
COMPILERS = ("g++", "clang++")
MOST_PROGRAMS = 64
"""That torch.compile keeps of one model; its own limit of 8 is for models that never stop changing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One process's device. platform: cpu, gpu or tpu. hardware: what it is, in words."""

    device: torch.device
    platform: Platform
    hardware: str

    @property
    def type(self) -> str:
        return str(self.device.type)

    @property
    def backend(self) -> str:
        return BACKENDS[self.type]

    def place(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """The values on the device; the host goes on while they are copied."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def seed(self, seed: int) -> None:
        """Fix what random numbers come next, on the device too."""
        torch.manual_seed(seed)
        if self.type == "xla":
            import torch_xla

            torch_xla.manual_seed(seed)

    def autocast(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        """Compute in `dtype` where torch holds that to be safe; parameters stay as they are."""
        if dtype == torch.float32:
            return contextlib.nullcontext()
        narrow: contextlib.AbstractContextManager[Any] = torch.autocast(self.type, dtype=dtype)
        return narrow

    def parallel(
        self, model: torch.nn.Module, layers: Iterable[torch.nn.Module], *, fsdp: bool, compiled: bool
    ) -> Any:
        """The model on this device as one of the group's replicas; what to call in its place.

        Gradients become means over the processes, here or, on XLA, by `reduce`. fsdp: each process has a share of each
        of `layers`, the largest parts of the model. compiled: for each shape that the model is given; XLA compiles all
        that it computes anyway.
        """
        model.to(self.device)
        if self.type == "xla":
            return model
        if compiled:
            torch._dynamo.config.recompile_limit = MOST_PROGRAMS
            for part in layers if fsdp else [model]:
                part.compile(dynamic=False, backend="tpu" if self.type == "tpu" else "inductor")
        if fsdp:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.type, (dist.get_world_size(),))
            for part in (*layers, model):
                fully_shard(part, mesh=mesh)
            return model
        if dist.get_world_size() == 1:
            return model
        ids = [self.device] if self.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)

    def why_not_compiled(self) -> str | None:
        """Why torch.compile cannot work here; None where it can."""
        if self.type == "cpu" and not any(map(shutil.which, COMPILERS)):
            return f"there is no C++ compiler ({' or '.join(COMPILERS)})"
        return None

    def adamw(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """AdamW in the form that the device is fastest in. Its learning rate is changed by `set_rate`."""
        if self.type in ("cpu", "cuda"):
            return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-6, fused=True)
        rate = torch.tensor(0.0, device=self.device)  # a number would make each step a new program
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-6, capturable=True)

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def reduce(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients means over the processes, where `parallel` has not seen to it."""
        size = dist.get_world_size()
        if self.type != "xla" or size == 1:
            return
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        if xr.world_size() == size:
            xm.reduce_gradients(optimizer)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = self.add_up(parameter.grad) / size

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every process's values, on the device."""
        if self.type != "xla":
            dist.all_reduce(values)
            return values
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        if xr.world_size() == dist.get_world_size():
            total: torch.Tensor = xm.all_reduce(xm.REDUCE_SUM, values)
            return total
        # PyTorch/XLA's CPUs know nothing of each other: `xm.all_reduce` would return what it was given.
        on_host = values.cpu()
        dist.all_reduce(on_host)
        return on_host.to(self.device)

    def wait(self) -> None:
        """Wait until the device has computed everything."""
        if self.type == "xla":
            import torch_xla

            torch_xla.sync(wait=True)
        elif self.type != "cpu":
            torch.accelerator.synchronize()

    def step_done(self) -> None:
        """Have the device compute the step; only XLA needs this."""
        if self.type == "xla":
            import torch_xla

            torch_xla.sync()


def find(environment: ProcessEnvironment) -> Device:
    """The device of RUN_PLATFORM and RUN_FRAMEWORK, for this process's rank on its host.

    Raises:
        RequestError: torch finds none.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(environment.cache_dir) / INDUCTOR_CACHE))
    platform, local_rank = environment.platform, environment.local_rank
    try:
        if environment.framework == "pytorch_xla":
            import torch_xla
            import torch_xla.runtime as xr

            device, actual = torch_xla.device(), xr.device_type().lower().replace("cuda", "gpu")
        elif platform == "cpu":
            device, actual = torch.device("cpu"), "cpu"
        else:
            kind = torch.accelerator.current_accelerator(check_available=True)
            actual = {None: "no accelerator", "cuda": "gpu"}.get(kind and kind.type, kind and kind.type)
            # A TPU's rank sees its own chip only.
            device = torch.device("cuda", local_rank) if actual == "gpu" else kind or torch.device("cpu")
            if actual == "gpu":
                torch.cuda.set_device(device)
    except (RuntimeError, ImportError) as error:
        raise RequestError(
            f"RUN_PLATFORM is {platform}, but torch could not start it: {str(error).splitlines()[0]}"
        ) from None
    require_platform(platform, str(actual), "torch")
    named = torch.cuda.get_device_name(device) if actual == "gpu" else actual
    return Device(device=device, platform=platform, hardware=named)
