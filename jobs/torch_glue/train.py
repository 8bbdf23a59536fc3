"""The training loop, read from top to bottom: the rows, the model, then step after step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

from contracts.errors import RequestError
from jobs.glue import data, predictions
from jobs.glue.batches import Batch, in_order, make_batches
from jobs.glue.options import learning_rate, problems, scheduled
from jobs.runtime import preemption, processor
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.evaluations import Evaluations
from jobs.runtime.metrics import Metrics, Rates
from jobs.runtime.model_folder import require_unchanged
from jobs.runtime.process import Final, Run
from jobs.runtime.profile import Profile, read_steps
from jobs.runtime.torch import distributed
from jobs.runtime.torch.checkpoints import State
from jobs.runtime.torch.profile import Tracer
from jobs.torch_glue import model
from jobs.torch_glue.config import Config

COMPILED_FROM_STEPS = 5_000
"""On a CPU compiling takes as long as some hundred steps, and makes each a little faster."""


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
    run.prepare(f"reading {config.data}")
    dataset = data.read(config)
    distributed.agree(f"--data {config.data}", dataset.fingerprint, run.prepare)
    for text in dataset.warnings:
        run.warn(text)
    beginning = model.prepare(config, dataset, Path(run.environment.cache_dir), run.prepare)
    distributed.agree(f"--init-from {config.init_from}", beginning.fingerprint, run.prepare)
    training = Training(run, config, dataset, beginning)
    training.restore(beginning)
    training.loop()
    return training.finish()


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """What a process's random numbers of a step begin with: the same however long the process has lived."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


class Training:
    """One process's part of a training: what it is made of, and the state that its steps change."""

    def __init__(self, run: Run, config: Config, dataset: data.Dataset, beginning: model.Beginning) -> None:
        self.run, self.config, self.dataset = run, config, dataset
        self.tokenizer, self.device = beginning.tokenizer, distributed.device()
        self.is_regression = dataset.task == "regression"
        backend, pad_id = self.tokenizer.backend_tokenizer, self.tokenizer.pad_token_id
        self.batches = make_batches(config, dataset, backend, pad_id)
        self.steps = config.steps or max(1, round(config.epochs * self.batches.steps_per_epoch))
        self.eval_every = config.eval_every or self.batches.steps_per_epoch
        self.peak_rate = learning_rate(config, beginning.settings.hidden_size)
        chosen = processor.dtype(config.dtype, self.device.type, distributed.everywhere)
        self.dtype: torch.dtype = getattr(torch, chosen)

        self.model = model.build(beginning, config.seed)
        is_compiled = self.decide_compile()
        self.model.train()
        layers = self.model.base_model.encoder.layer
        self.replica = self.device.parallel(self.model, layers, fsdp=config.fsdp, compiled=is_compiled)
        matrices, others = (
            [each for each in self.model.parameters() if (each.dim() > 1) is is_matrix]
            for is_matrix in (True, False)
        )
        self.optimizer = self.device.adamw(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
        )
        parameters = sum(each.numel() for each in self.model.parameters())
        self.rates = Rates(
            run.time,
            name="rows_per_s",
            per_step=config.batch_size,
            flops_per_step=round(6 * parameters * self.batches.tokens_per_step),
            peak_flops_per_s=run.environment.peak_flops_per_s,
        )
        dtype = str(self.dtype).removeprefix("torch.")
        run.decide(
            {
                **vars(config),
                "steps": self.steps,
                "eval_every": self.eval_every,
                "learning_rate": self.peak_rate,
                "dtype": dtype,
                "compile": "yes" if is_compiled else "no",
                "padded_to": self.batches.lengths,
                "labels": list(dataset.labels),
            }
        )
        run.say(
            f"{parameters:,} parameters on {distributed.size()} × {self.device.hardware}, in {dtype}"
            f"{', compiled' if is_compiled else ''}; {self.batches.described()}"
        )

    def decide_compile(self) -> bool:
        """Whether to compile, as --compile says or as it pays here."""
        reason = self.device.why_not_compiled()
        if self.config.compile == "yes" and reason is not None:
            raise RequestError(f"--compile yes: {reason} on this host; install one, or leave --compile out")
        pays = self.device.type != "cpu" or self.steps >= COMPILED_FROM_STEPS
        return reason is None and (self.config.compile == "yes" or (self.config.compile == "auto" and pays))

    def restore(self, beginning: model.Beginning) -> None:
        """Continue from the newest checkpoint, else from the beginning; compile what the steps need."""
        run, config = self.run, self.config
        self.state = State(self.model, self.optimizer)
        self.checkpoints = Checkpoints(run, self.state, distributed, keep_last=config.keep_checkpoints)
        self.done, self.evaluations = 0, Evaluations(run, "eval_score", patience=config.patience)
        restored = self.checkpoints.restore_latest()
        if restored is not None:
            self.done, notes = restored
            require_unchanged(config.init_from, notes["began_from"], beginning.fingerprint)
            self.evaluations.restore(notes)
            self.checkpoints.best = self.evaluations.best_step
            run.say(f"resumed after step {self.done}")
        self.notes: dict[str, Any] = {"began_from": beginning.fingerprint}
        self.metrics = Metrics(run.directory, self.done) if run.environment.is_first else None
        wanted = read_steps(config.profile, steps=self.steps)
        self.profile = Profile(run, wanted, Tracer(), done=self.done, settle=self.device.wait)
        self.warm_up()
        self.evaluations.make_up(self.done, every=self.eval_every, last=self.steps, evaluate=self.evaluate)

    def warm_up(self) -> None:
        """Compile what the steps need, before a step is late for it. Takes no step."""
        if self.device.type == "xla":  # which compiles whole steps, each at its first
            return
        shapes = self.batches.one_of_each()
        for number, batch in enumerate(shapes, 1):
            self.run.heartbeat.say(f"compiling program {number} of {len(shapes)}")
            self.loss(batch.share(distributed.rank(), distributed.size())).backward()
            self.optimizer.zero_grad()

    def loop(self) -> None:
        """Take the steps, with evaluations and checkpoints where they are due."""
        config, run = self.config, self.run
        run.heartbeat.say(None)
        for step in range(self.done + 1, self.steps + 1):
            if self.evaluations.is_over:
                self.steps = step - 1
                break
            with self.profile.step(step):
                with self.rates.input(lambda: False):
                    batch = self.batches.step(step).share(distributed.rank(), distributed.size())
                loss, norm = self.take_step(step, batch)
            run.heartbeat.step(step)
            self.rates.step_done()
            if step == self.done + 1:
                self.device.wait()
                run.heartbeat.state("stepping")
                self.rates.start()
            if step % config.log_every == 0 or step == self.steps:
                self.log(step, loss, norm)
            if step == self.steps:
                break
            leaving = preemption.notified(step)
            evaluating = step % self.eval_every == 0 and not leaving
            if leaving or evaluating or step % config.checkpoint_every == 0:
                self.save(step)
                if leaving:
                    run.leave(step, self.checkpoints, self.metrics, self.profile)
                run.heartbeat.state("stepping")
            if evaluating:
                self.evaluate(step)
                run.heartbeat.say(None)

    def take_step(self, step: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
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
        return loss.detach(), norm

    def rate(self, step: int) -> float:
        return scheduled(self.config, self.peak_rate, step, self.steps)

    def logits(self, batch: Batch) -> torch.Tensor:
        """(rows, classes), or (rows, 1) numbers, in float32."""
        place = self.device.place
        types = {"token_type_ids": place(batch.types_BS)} if self.model.config.type_vocab_size > 1 else {}
        with self.device.autocast(self.dtype):
            found = self.replica(input_ids=place(batch.ids_BS), attention_mask=place(batch.mask_BS), **types)
        logits: torch.Tensor = found.logits.float()
        return logits

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean over the rows of this process."""
        logits, labels_B = self.logits(batch), self.device.place(batch.labels_B)
        if self.is_regression:
            return functional.mse_loss(logits[:, 0], labels_B)
        return functional.cross_entropy(logits, labels_B)

    def log(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        mean = float(distributed.exchange_on_host(loss.cpu()).mean())
        if self.metrics is not None:
            with self.run.time.part("logging"):
                values = {"loss": mean, "learning_rate": self.rate(step), "grad_norm": float(whole)}
                self.metrics.write(step, {**values, **self.rates.take()})

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out rows, and write it down as of `step`."""
        found = self.evaluations.evaluate(step, self.score, self.metrics)
        self.checkpoints.best = self.evaluations.best_step
        return found

    def score(self) -> dict[str, float]:
        """The loss and the scores of the held-out rows; the same in all processes."""
        self.logits_NC = self.predict()
        return predictions.evaluation(self.dataset, self.logits_NC)

    def predict(self) -> np.ndarray[Any, Any]:
        """(rows, classes) logits of all held-out rows in their order; the same in all processes."""
        rows, logits = [], []
        self.model.eval()
        with torch.no_grad():
            for batch in self.batches.held_out():
                mine = batch.share(distributed.rank(), distributed.size())
                logits.append(self.logits(mine).cpu())
                rows.append(torch.from_numpy(mine.rows_B))
                self.run.heartbeat.tick()
        self.model.train()
        rows_N, logits_NC = (
            distributed.exchange_on_host(torch.cat(each)).flatten(0, 1).numpy() for each in (rows, logits)
        )
        return in_order(rows_N, logits_NC)

    def save(self, step: int) -> None:
        """Begin a checkpoint of the state after `step`."""
        with self.run.time.part("checkpoint"):
            self.run.begin_saving()
            self.checkpoints.save(step, {**self.notes, **self.evaluations.notes()})
            self.run.heartbeat.tick()

    def finish(self) -> Final:
        """Write the last checkpoint, evaluate, export; returns the final metrics."""
        config, run = self.config, self.run
        run.time.enter("finish")
        self.save(self.steps)
        final = self.evaluate(self.steps)
        exported, best = self.steps, self.evaluations.best_step
        if config.best and best != self.steps:
            exported = best
            self.checkpoints.restore_model(exported)
            final = self.score()
        self.checkpoints.close()
        self.profile.close()
        warning = predictions.no_better_than_chance(self.dataset, final)
        if warning is not None:
            run.warn(warning)
        run.heartbeat.say("export")
        weights = self.state.weights()
        if self.metrics is not None:
            model.export(run.directory, self.model, weights, self.tokenizer)
            predictions.write_predictions(run.directory, self.dataset, self.logits_NC)
            self.metrics.close()
        return {
            "steps": self.steps,
            "rows_per_s": self.rates.overall(),
            **final,
            "baseline": self.dataset.baseline,
            "best_step": best,
            "exported_step": exported,
            "padding": round(self.batches.padding, 4),
        }
