"""The state of a training in PyTorch as one file of tensors, whole however they are shared out: a run may go on with
another number of processes."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

STATE = "state.safetensors"

type Tensors = dict[str, torch.Tensor]


class State:
    """A model's parameters, and what an optimizer knows of them. See jobs.runtime.checkpoints.State.

    model: the module itself, within whatever wraps it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def write(self, folder: str) -> Callable[[], None]:
        tensors = {f"model/{name}": value for name, value in self.weights().items()}
        for name, parameter in self._model.named_parameters():
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer/{key}/{name}"] = _on_host(value)
        return lambda: save_file(tensors, os.path.join(folder, STATE))

    def read(self, folder: str, *, model_only: bool) -> Callable[[], None]:
        """Raises safetensors' own errors, KeyError or ValueError: a tensor is missing, or has another shape."""
        with safe_open(os.path.join(folder, STATE), "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        for name, parameter in self._model.named_parameters():
            if tensors[f"model/{name}"].shape != parameter.shape:
                raise ValueError(f"{name} has another shape")
        return lambda: self._take(tensors, model_only=model_only)

    def weights(self) -> Tensors:
        """Copies of the parameters on the host, whole, by their names in the model."""
        return {name: _on_host(parameter) for name, parameter in self._model.named_parameters()}

    def _take(self, tensors: Tensors, *, model_only: bool) -> None:
        parameter_state = {}
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(_like(tensors[f"model/{name}"], parameter))
                parameter_state[parameter] = {
                    key: _like(value, parameter) if value.shape == parameter.shape else value
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if (value := tensors.get(f"optimizer/{key}/{name}")) is not None
                }
        if not model_only and any(parameter_state.values()):
            groups = self._optimizer.param_groups
            in_order = [parameter for group in groups for parameter in group["params"]]
            state = {index: parameter_state[parameter] for index, parameter in enumerate(in_order)}
            described = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": state, "param_groups": described})


def _on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which the next step does not change."""
    value = value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.cpu().clone().contiguous()


def _like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The value where the parameter is, and shared out as that is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
