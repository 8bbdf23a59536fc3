"""Checkpoints of a run in PyTorch: a file of all tensors, written while training goes on, complete or absent.

The state is whole in each checkpoint, however it is shared out: a run may go on with another number of processes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from contracts.atomic import atomic_path, beside_name, remove
from contracts.errors import RequestError
from contracts.run_directory import CHECKPOINTS, COMMITTED, RunDirectory
from jobs.runtime.bucket_files import files_of, pauses_s, retry
from jobs.runtime.preemption import Preempted, watch
from jobs.runtime.torch import distributed
from jobs.runtime.torn_checkpoints import none_readable, put_aside

STATE = "state.safetensors"

type Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run: the last `keep_last`, and the one that `best` names. Rank 0 writes; all processes
    make the same calls.

    model: the module itself, within whatever wraps it. Its parameters and what the optimizer knows of them are kept.
    """

    def __init__(
        self,
        directory: RunDirectory,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        keep_last: int,
    ) -> None:
        self._directory, self._keep_last = directory, keep_last
        self._model, self._optimizer = model, optimizer
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Future[None] | None = None
        self.best: int | None = None
        """The step whose checkpoint is kept whatever comes after it."""

    def save(self, step: int, notes: Mapping[str, Any]) -> None:
        """Begin to write the state after `step`; a step that is already there is left as it is.

        notes: what else a resumed run has to know, of what JSON can hold.

        Raises:
            Preempted: all processes are to leave here, and the checkpoint is complete.
            OSError: an earlier write failed.
        """
        watch.about_to_save(step)
        self.wait()
        if distributed.everywhere(step not in self._directory.checkpoint_steps()):
            tensors = self._tensors()
            if distributed.rank() == 0:
                self._begun = self._writer.submit(self._write, step, tensors, dict(notes))
        if watch.save_begun(step, self.wait):
            self.wait()
            raise Preempted(step)

    def wait(self) -> None:
        """Wait until what was begun is written.

        Raises:
            OSError: it could not be; a bucket's library has kinds of its own too.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def restore_latest(self) -> tuple[int, dict[str, Any]] | None:
        """Give model and optimizer the newest state that can be read; its step and notes, or None where there is none.

        Checkpoints that cannot be read are said, put aside under checkpoints-torn/ and passed over for the one before
        them, by all processes alike.

        Raises:
            RequestError: there are checkpoints and none can be read; they are left where they are.
        """
        torn: dict[int, str] = {}
        for step in reversed(self._directory.checkpoint_steps()):
            found, notes, reason = self._read(step)
            if distributed.everywhere(reason is None):
                put_aside(self._directory, torn, step, moves=distributed.rank() == 0)
                self._take(found)
                watch.restored(step)
                return step, notes
            torn[step] = reason or "another host could not read it"
        if torn:
            raise none_readable(torn)
        return None

    def restore_model(self, step: int) -> None:
        """Give the model the parameters of one checkpoint, and leave the optimizer as it is.

        Raises:
            RequestError: it cannot be read.
        """
        self.wait()
        distributed.everywhere(True)  # rank 0 has written it
        found, _, reason = self._read(step)
        if not distributed.everywhere(reason is None):
            raise RequestError(f"checkpoint {step} cannot be read: {reason or 'by another host'}")
        self._take({name: value for name, value in found.items() if name.startswith("model/")})

    def weights(self) -> Tensors:
        """Copies of the parameters on the host, whole, by their names in the model."""
        return {name: _whole(parameter) for name, parameter in self._model.named_parameters()}

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any]) -> None:
        folder = self._directory.path(f"{CHECKPOINTS}/{step}")
        metadata = {"notes": json.dumps(notes)}
        if self._directory.is_remote:
            with tempfile.TemporaryDirectory() as beside:
                save_file(dict(tensors), os.path.join(beside, STATE), metadata)
                put = lambda: files_of(folder).put_folder(beside, folder)  # noqa: E731
                retry(put, what=f"checkpoint {step}", pauses_s=pauses_s(self._directory))
            self._directory.write_text(f"{CHECKPOINTS}/{step}/{COMMITTED}", "")
        else:
            with atomic_path(folder) as fresh:
                os.mkdir(fresh)
                save_file(dict(tensors), os.path.join(fresh, STATE), metadata)
        kept = self._directory.checkpoint_steps()
        for old in kept[: -self._keep_last]:
            if old != self.best:
                self._remove(old)

    def _remove(self, step: int) -> None:
        folder = self._directory.path(f"{CHECKPOINTS}/{step}")
        if self._directory.is_remote:
            for name in (COMMITTED, STATE):  # the sign that it is whole goes first
                self._directory.remove(f"{CHECKPOINTS}/{step}/{name}")
        else:
            hidden = self._directory.path(f"{CHECKPOINTS}/{beside_name(str(step))}")
            os.replace(folder, hidden)
            remove(hidden)

    def _tensors(self) -> Tensors:
        """Copies on the host of everything, whole."""
        found = {f"model/{name}": value for name, value in self.weights().items()}
        for name, parameter in self._model.named_parameters():
            for key, value in self._optimizer.state[parameter].items():
                found[f"optimizer/{key}/{name}"] = _whole(value)
        return found

    def _take(self, found: Tensors) -> None:
        """Give model and, where it is among `found`, optimizer what `_tensors` has returned."""
        of_parameter = {}
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(_like(found[f"model/{name}"], parameter))
                of_parameter[parameter] = {
                    key: _like(value, parameter) if value.shape == parameter.shape else value
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if (value := found.get(f"optimizer/{key}/{name}")) is not None
                }
        if any(of_parameter.values()):
            groups = self._optimizer.param_groups
            in_order = [parameter for group in groups for parameter in group["params"]]
            state = {index: of_parameter[parameter] for index, parameter in enumerate(in_order)}
            described = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": state, "param_groups": described})

    def _read(self, step: int) -> tuple[Tensors, dict[str, Any], str | None]:
        """The tensors and notes of a step, or why it cannot be read."""
        name = f"{CHECKPOINTS}/{step}/{STATE}"
        try:
            with tempfile.TemporaryDirectory() as here:
                path = self._directory.path(name)
                if self._directory.is_remote:
                    (data,) = files_of(path).read([path])
                    path = os.path.join(here, STATE)
                    Path(path).write_bytes(data or b"")
                with safe_open(path, "pt") as file:
                    notes = json.loads(file.metadata()["notes"])
                    found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            shapes = {name: found[f"model/{name}"].shape for name, _ in self._model.named_parameters()}
            other = [name for name, each in self._model.named_parameters() if each.shape != shapes[name]]
        except Exception as error:  # safetensors raises many kinds for a torn file; all are reported
            return {}, {}, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        return found, notes, f"{other[0]} has another shape" if other else None


def _whole(value: torch.Tensor) -> torch.Tensor:
    """A copy on the host: what is there already is changed by the next step."""
    value = value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.cpu().clone().contiguous()


def _like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The value where the parameter is, and shared out as that is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
