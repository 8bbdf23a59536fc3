"""The training loop, read from top to bottom: the data, the state, then step after step."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from contracts.errors import JobFailed, RequestError
from jobs.flax_mlm import data, hugging_face, predict, sharding
from jobs.flax_mlm import step as steps
from jobs.flax_mlm.config import Config, dimensions, problems, settings
from jobs.flax_mlm.data import Tokens, unigram_entropy
from jobs.flax_mlm.hugging_face import Pretrained
from jobs.flax_mlm.input_pipeline import InputPipeline
from jobs.flax_mlm.loss_guard import MOST_KEPT, MOST_WRITTEN, LossGuard, Outlier, batch_file, save_batch
from jobs.runtime import preemption
from jobs.runtime.evaluations import Evaluations
from jobs.runtime.jax import distributed
from jobs.runtime.jax.checkpoints import Checkpoints
from jobs.runtime.jax.executables import Executables
from jobs.runtime.jax.profile import Tracer
from jobs.runtime.metrics import Metrics, Rates
from jobs.runtime.process import Final, Run
from jobs.runtime.profile import Profile, read_steps

IN_FLIGHT = 2
"""Steps whose results the host does not wait for, so that the devices always have the next one at hand."""


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or the data is missing, too small or not the same on all hosts.
        Preempted: a host got SIGTERM; the state is saved.
        JobFailed: the numbers say that training on is of no use; the batch is saved.
    """
    config, begun_from = hugging_face.adopt(config, Path(run.environment.cache_dir), run.prepare)
    wrong = problems(config, devices=jax.device_count())
    if wrong:
        raise RequestError("; ".join(wrong))
    if begun_from is not None:
        distributed.agree(f"--init-from {begun_from.source}", begun_from.fingerprint)
    tokens = prepare_data(run, config)
    config = steps.decided(config, run.environment.platform)
    run.decide(settings(config, vocab_size=tokens.tokenizer.vocab_size))
    for text in tokens.warnings:
        run.warn(text)
    run.heartbeat.say("compiling the first step")
    training = Training(run, config, tokens)
    training.restore(begun_from)
    training.loop()
    return training.finish()


def prepare_data(run: Run, config: Config) -> Tokens:
    """Tokenise the corpus, or find it in the cache; it is the same on every host."""
    what, shared = f"--data {config.data}", run.environment.shared_cache
    prepare = functools.partial(data.prepare, config, Path(run.environment.cache_dir), run.prepare, shared)
    if config.remote_cache is None and shared is None:
        tokens = prepare()
    else:
        tokens = distributed.first_then_others(prepare, what=what, say=run.prepare)
    distributed.agree(what, tokens.fingerprint)
    return tokens


class Training:
    """One process's part of a training: what it is made of, and the state that its steps change."""

    def __init__(self, run: Run, config: Config, tokens: Tokens) -> None:
        """Compile the steps, draw the first state."""
        self.run, self.config, self.tokens = run, config, tokens
        self.baseline = unigram_entropy(tokens.eval, tokens.tokenizer.special_ids)
        self.mesh = sharding.make_mesh(config.fsdp)
        self.inputs = InputPipeline(tokens, config, self.mesh)
        environment = run.environment
        self.compiled = Executables(
            environment.cache_dir, self.mesh.devices.flat, environment.shared_cache
        ).of
        # Not kept whole: where a checkpoint is restored the first state's memory has to become free.
        made = steps.make_steps(config, tokens.tokenizer, self.mesh, self.compiled)
        self.graph, self.state, self.train_step, self.eval_step, slots = made
        self.rates = Rates(
            run.time,
            name="tokens_per_s",
            per_step=config.batch_size * config.sequence_length,
            flops_per_step=steps.step_flops(
                dimensions(config, tokens.tokenizer),
                batch_size=config.batch_size,
                length=config.sequence_length,
                slots=slots,
            ),
            peak_flops_per_s=run.environment.peak_flops_per_s,
        )
        self.in_flight: deque[tuple[int, dict[str, jax.Array]]] = deque()

    def restore(self, begun_from: Pretrained | None) -> None:
        """Continue from the newest checkpoint, else from the model of --init-from, else from the drawn state."""
        run, config = self.run, self.config
        run.say(
            f"{sum(leaf.size for leaf in jax.tree.leaves(self.state['params'])):,} parameters on "
            f"{jax.device_count()} devices of {jax.process_count()} processes, in {config.dtype}; "
            f"{self.inputs.sequences('train'):,} sequences of {config.sequence_length} tokens to learn from, "
            f"{self.inputs.sequences('eval'):,} held out; their unigram entropy is {self.baseline:.3f} nats"
        )
        self.checkpoints = Checkpoints(run, keep_last=config.keep_checkpoints)
        self.done = 0
        restored = self.checkpoints.restore_latest(self.state)
        if restored is not None:
            self.done, self.state = restored
            run.say(f"resumed after step {self.done}")
        if begun_from is not None:
            begun_from.check_began(run.directory, step=self.done, writes=run.environment.is_first)
            if not self.done:
                self.state = steps.with_params(self.state, begun_from.params())
        self.evaluations = Evaluations(run, "eval_loss", better="lower")
        self.metrics = Metrics(run.directory, self.done) if run.environment.is_first else None
        self.guard = LossGuard.from_notes(self.checkpoints.notes)
        wanted = read_steps(config.profile, steps=config.steps)
        self.profile = Profile(run, wanted, Tracer(), done=self.done, settle=self.settle)
        if begun_from is not None and not self.done:
            self.evaluate(0, self.inputs.sequences("eval"))
        self.evaluations.make_up(
            self.done, every=config.eval_every, last=config.steps, evaluate=self.evaluate_some
        )

    def loop(self) -> None:
        """Take the steps, with evaluations and checkpoints where they are due."""
        config, run = self.config, self.run
        rows_B = self.inputs.place(np.arange(config.batch_size, dtype=np.int32))
        is_held_back = False
        for step in range(self.done + 1, config.steps + 1):
            with self.profile.step(step):
                with self.rates.input(self.is_busy):
                    tokens_BS = self.inputs.step(step)
                self.state, results = self.train_step(self.state, tokens_BS, rows_B)
                self.in_flight.append((step, results))
            if step == self.done + 1:
                self.settle()
                run.heartbeat.state("stepping")
                self.rates.start()
            self.settle(but=IN_FLIGHT)
            if step == config.steps:
                break

            leaving = preemption.notified(step)
            evaluating = step % config.eval_every == 0 and not leaving
            saving = step % config.checkpoint_every == 0 or leaving or (is_held_back and not self.guard.row)
            if evaluating or saving:
                self.settle()
                # Among outliers only who leaves saves: the newest checkpoint is to be from before a trouble that stays.
                is_held_back = bool(self.guard.row) and not leaving
                if not is_held_back:
                    self.save(step)
                if leaving:
                    run.leave(step, self.checkpoints, self.metrics, self.profile)
                run.heartbeat.state("stepping")
                if evaluating:
                    self.evaluate_some(step)
                    run.heartbeat.say(None)
        self.settle()

    def finish(self) -> Final:
        """Write the last checkpoint, evaluate and export; returns the final metrics."""
        config, run = self.config, self.run
        run.time.enter("finish")
        self.save(config.steps)
        held_out = self.inputs.sequences("eval")
        final = self.evaluate(config.steps, held_out)
        with run.time.part("checkpoint"):
            self.checkpoints.close()
        run.heartbeat.say("final evaluation")
        predict_step = jax.jit(
            predict.make_sharded_predict(self.graph, self.mesh, self.state["params"]),
            out_shardings=sharding.whole(self.mesh),
        )
        sampled = predict.sample(
            sequences=held_out, length=config.sequence_length, trained_rows=config.steps * config.batch_size
        )
        seen = predict.final_eval(
            self.compiled(predict_step),
            self.state["params"],
            self.tokens.rows("eval", sampled, config.sequence_length),
            self.tokens.tokenizer,
            self.inputs.place,
            batch_size=config.batch_size,
            tick=run.heartbeat.tick,
        )
        params = sharding.to_host(self.state["params"], self.mesh)
        if run.environment.is_first:
            hugging_face.export(run.directory, config, params, self.tokens.tokenizer)
        if self.metrics is not None:
            self.metrics.close()
        return {
            "steps": config.steps,
            "tokens_per_s": self.rates.overall(),
            **final,
            "unigram_entropy": self.baseline,
            "outliers": self.guard.outliers,
            "skipped_updates": self.guard.skipped,
            **seen,
        }

    def is_busy(self) -> bool:
        """Whether the devices still have a step to compute."""
        return bool(self.in_flight) and not self.in_flight[-1][1]["loss"].is_ready()  # type: ignore[attr-defined]

    def settle(self, but: int = 0) -> None:
        """Wait for the steps that were begun, all but the last `but`, and log those that are due."""
        while len(self.in_flight) > but:
            step, results = self.in_flight.popleft()
            values = {name: float(value) for name, value in results.items()}
            self.rates.step_done()
            self.run.heartbeat.step(step)
            before = self.guard.row
            outlier = self.guard.check(values)
            is_due = step % self.config.log_every == 0 or step == self.config.steps
            is_told = outlier is not None and (outlier.ends or self.guard.outliers <= MOST_WRITTEN)
            if self.metrics is not None and (is_due or is_told):
                with self.run.time.part("logging"):
                    counted = {"outliers": self.guard.outliers} if outlier else {}
                    self.metrics.write(step, {**values, **(self.rates.take() if is_due else {}), **counted})
            if outlier is not None:
                self.handle(step, outlier)
            elif before:
                self.run.say(
                    f"step {step}: the loss is {values['loss']:.4g}, as usual, after {before} outliers"
                )

    def handle(self, step: int, outlier: Outlier) -> None:
        """Rank 0 keeps the batch of an outlier that is the first of several, and of the one too many, which ends the
        run unless that is not wanted."""
        run, said = self.run, f"step {step}: {outlier}"
        is_end = outlier.ends and self.config.on_trouble == "stop"
        if is_end or (outlier.row == 1 and self.guard.series <= MOST_KEPT):
            said += f"; its batch is in {run.directory.path(batch_file(step))}"
            if self.metrics is not None:
                save_batch(run.directory, step, str(outlier), self.tokens, self.inputs.step_on_host(step))
        if outlier.row == 1 and not is_end:
            run.warn(said)
        if not is_end:
            return
        if self.metrics is not None:
            self.metrics.close()
        self.checkpoints.wait()
        multihost_utils.sync_global_devices("the batch is saved")  # or whoever ends first takes rank 0 along
        self.profile.close()
        raise JobFailed(f"{said}. To go on all the same: --on-trouble warn")

    def evaluate_some(self, step: int) -> None:
        """Evaluate on the --eval-sequences, on the way."""
        found = self.evaluate(step, self.config.eval_sequences)
        self.checkpoints.evaluated(step, found["eval_loss"])

    def evaluate(self, step: int, most: int) -> dict[str, float]:
        """Evaluate on the first `most` held-out sequences, and write it down as of `step`."""
        return self.evaluations.evaluate(step, lambda: self.score(most), self.metrics)

    def score(self, most: int) -> dict[str, float]:
        """The loss and the accuracy of the first `most` held-out sequences; the same in all processes."""
        result = steps.evaluate(
            self.eval_step,
            self.state["params"],
            self.inputs.held_out,
            self.inputs.place,
            sequences=min(most, self.inputs.sequences("eval")),
            batch_size=self.config.batch_size,
            tick=self.run.heartbeat.tick,
        )
        return {"eval_loss": result.loss, "eval_accuracy": result.accuracy}

    def save(self, step: int) -> None:
        """Begin a checkpoint of the state after `step`."""
        with self.run.time.part("checkpoint"):
            self.run.begin_saving()
            self.checkpoints.save(step, self.state, notes=self.guard.notes())
            self.run.heartbeat.tick()
