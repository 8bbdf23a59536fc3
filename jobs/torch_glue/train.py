"""The training loop, read from top to bottom: the rows, the model, then step after step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from contracts.errors import RequestError
from jobs.glue import data, predictions, training
from jobs.glue.batches import Packed, in_order
from jobs.glue.options import learning_rate, problems, scheduled
from jobs.glue.pretrained import Beginning, prepare
from jobs.runtime import processor
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.monitoring.tracers import TorchTracer
from jobs.runtime.process import Final, Run
from jobs.runtime.torch import distributed
from jobs.runtime.torch.state import State
from jobs.torch_glue import encoder, model
from jobs.torch_glue.config import Config


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or the rows or the model are missing or not what they should be.
        Preempted: a host got SIGTERM; the state is saved.
    """
    wrong = problems(config, devices=distributed.size())
    if config.fsdp and distributed.device().type == "xla":
        wrong.append("--fsdp: works with --framework pytorch, and not with pytorch_xla")
    if wrong:
        raise RequestError("; ".join(wrong))
    dataset, beginning = training.open_inputs(run, config, prepare, distributed.agree)
    task = Task(run, config, dataset, beginning)
    state = State(task.model, task.optimizer)
    compiled = ", compiled" if task.is_compiled else ""
    loop = training.begin(
        run,
        config,
        task,
        Checkpoints(run, state, distributed, keep_last=config.keep_checkpoints),
        eval_every=config.eval_every or task.batches.steps_per_epoch,
        devices=f"{distributed.size()} × {task.device.hardware}, in {task.dtype_name}{compiled}",
        tracer=TorchTracer(),
        wait=task.device.wait,
        compile="yes" if task.is_compiled else "no",
    )
    task.warm_up()

    for step in loop:
        with loop.input():
            batch = task.batches.step(step).share(distributed.rank(), distributed.size())
        loop.record(task.take_step(step, batch))

    final = training.conclude(run, config, loop, task)
    weights = state.weights()
    if run.environment.is_first:
        model.export(run.directory, task.model, weights, beginning)
        predictions.write_predictions(run.directory, dataset, task.logits_NC)
    return final


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """What a process's random numbers of a step begin with: the same however long the process has lived."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


class Task:
    """One process's part of a training: the rows, the model and its optimizer, a step and an evaluation."""

    def __init__(self, run: Run, config: Config, dataset: data.Dataset, beginning: Beginning) -> None:
        self.run, self.config, self.dataset, self.beginning = run, config, dataset, beginning
        self.device = distributed.device()
        self.batches = training.pack(
            config, dataset, beginning, shares=distributed.size(), device=self.device.type
        )
        self.steps = config.steps or max(1, round(config.epochs * self.batches.steps_per_epoch))
        self.peak_rate = learning_rate(config, beginning.settings["hidden_size"])
        self.dtype_name: str = processor.dtype(config.dtype, self.device.type, distributed.all_processes)
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)

        self.model = model.build(beginning, config.seed)
        self.is_compiled = self.decide_compile()
        layers = self.model.base_model.encoder.layer
        self.encoder = encoder.Encoder(self.model).train()
        self.replica = self.device.parallel(self.encoder, layers, fsdp=config.fsdp, compiled=self.is_compiled)
        matrices, vectors = (
            [parameter for parameter in self.model.parameters() if (parameter.dim() > 1) is is_matrix]
            for is_matrix in (True, False)
        )
        self.optimizer = self.device.adamw(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ]
        )
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def decide_compile(self) -> bool:
        """Whether to compile, as --compile says or as it pays here."""
        reason = self.device.why_not_compiled()
        if self.config.compile == "yes" and reason is not None:
            raise RequestError(f"--compile yes: {reason} on this host; install one, or leave --compile out")
        pays = self.device.type != "cpu"  # whose layers are written by hand
        return reason is None and (self.config.compile == "yes" or (self.config.compile == "auto" and pays))

    def warm_up(self) -> None:
        """Compile what the steps need, before a step is late for it. Takes no step."""
        if self.device.type == "xla":  # which compiles whole steps, each at its first
            return
        self.run.heartbeat.say("compiling the model" if self.is_compiled else "taking the first step once")
        with self.run.time.part("compile"):
            self.loss(self.batches.step(1).share(distributed.rank(), distributed.size())).backward()
            self.optimizer.zero_grad()

    def take_step(self, step: int, batch: Packed) -> dict[str, torch.Tensor]:
        """One step on this process's rows; the loss of these and the norm of the gradient, on the device."""
        config, device = self.config, self.device
        device.seed(dropout_seed(config.seed, step, distributed.rank()))
        loss = self.loss(batch)
        loss.backward()
        device.reduce(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        device.set_rate(self.optimizer, self.rate(step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        device.step_done()
        return {"loss": loss.detach(), "grad_norm": norm}

    def rate(self, step: int) -> float:
        return scheduled(self.config, self.peak_rate, step, self.steps)

    def logits(self, batch: Packed) -> torch.Tensor:
        """(rows, classes), or (rows, 1) numbers, in float32."""
        noise_N = None
        if self.device.type == "cpu" and self.encoder.training:
            noise_N = encoder.draw(self.encoder.numbers(batch.blocks))
        with self.device.autocast(self.dtype):
            logits_BC = self.replica(self.encoder.arguments(batch, self.device.place), batch.blocks, noise_N)
        wide_BC: torch.Tensor = logits_BC.float()
        return wide_BC

    def loss(self, batch: Packed) -> torch.Tensor:
        """The mean over the rows of this process."""
        logits, labels_B = self.logits(batch), self.device.place(batch.labels_GN[0])
        if self.dataset.task == "regression":
            return functional.mse_loss(logits[:, 0], labels_B)
        return functional.cross_entropy(logits, labels_B)

    def numbers(self, step: int, results: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """What is written down of a step: the loss is the mean over all processes."""
        norm = results["grad_norm"]
        full_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        mean = float(distributed.exchange_on_host(results["loss"].cpu()).mean())
        return {"loss": mean, "learning_rate": self.rate(step), "grad_norm": float(full_norm)}

    def score(self, _step: int) -> dict[str, float]:
        """The loss and the scores of the held-out rows; the same in all processes."""
        self.logits_NC = self.predict()
        return predictions.evaluation(self.dataset, self.logits_NC)

    def predict(self) -> np.ndarray[Any, Any]:
        """(rows, classes) logits of all held-out rows in their order; the same in all processes."""
        rows, logits = [], []
        self.encoder.eval()
        with torch.no_grad():
            for batch in self.batches.held_out():
                mine = batch.share(distributed.rank(), distributed.size())
                logits.append(self.logits(mine).cpu())
                rows.append(torch.from_numpy(mine.rows_GN[0]))
                self.run.heartbeat.tick()
        self.encoder.train()
        rows_N, logits_NC = (
            distributed.exchange_on_host(torch.cat(parts)).flatten(0, 1).numpy() for parts in (rows, logits)
        )
        return in_order(rows_N, logits_NC)
