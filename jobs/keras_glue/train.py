"""The training, read from top to bottom: the rows, the model, `fit` with its callback, and what it leaves behind.

JAX's group is formed by jobs/runtime/jax/distributed.py; Keras is told of its devices by a DataParallel only. What step
t computes is a function of the state, the seed and t: dropout's seeds are variables of the model, and so in the state.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import optax
from keras import ops

from contracts.errors import RequestError
from jobs.glue import data, predictions
from jobs.glue.batches import Batch, in_order, make_batches
from jobs.glue.options import learning_rate, scheduled
from jobs.glue.tokenizer import open_tokenizer
from jobs.keras_glue import export, model
from jobs.keras_glue.config import Config, problems
from jobs.runtime import preemption, processor
from jobs.runtime.cache import user_cache_dir
from jobs.runtime.evaluations import Evaluations
from jobs.runtime.jax import aot, distributed, executables
from jobs.runtime.jax.checkpoints import Checkpoints
from jobs.runtime.jax.profile import Tracer
from jobs.runtime.metrics import Metrics, Rates
from jobs.runtime.model_folder import require_unchanged
from jobs.runtime.process import Final, Run
from jobs.runtime.profile import Profile, read_steps

type Array = np.ndarray[Any, Any]


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or the rows or the model are missing or not what they should be.
        Preempted: a host got SIGTERM; the state is saved.
    """
    wrong = problems(config, devices=jax.device_count())
    if wrong:
        raise RequestError("; ".join(wrong))
    run.prepare(f"reading {config.data}")
    dataset = data.read(config)
    distributed.agree(f"--data {config.data}", dataset.fingerprint)
    for text in dataset.warnings:
        run.warn(text)
    beginning = export.prepare(config, dataset, Path(run.environment.cache_dir), run.prepare)
    distributed.agree(f"--init-from {config.init_from}", beginning.fingerprint)
    training = Training(run, config, dataset, beginning)
    training.restore()
    training.fit()
    return training.finish()


class Schedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """`scheduled`, where the steps are counted on the devices from 0 on."""

    def __init__(self, config: Config, peak: float, steps: int) -> None:
        warmup = config.warmup_share * steps
        self.peak, self.steps, self.warmup = peak, steps, warmup

    def __call__(self, step: Any) -> Any:
        up = (ops.cast(step, "float32") + 1) / max(self.warmup, 1)
        down = (self.steps - ops.cast(step, "float32")) / max(self.steps - self.warmup, 1)
        return self.peak * ops.minimum(up, down)

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak, "steps": self.steps, "warmup": self.warmup}


class Trained(keras.Model):  # type: ignore[misc]
    """A model whose `fit` says the loss of a step and the norm of its gradient, in place of means over an epoch."""

    def train_step(self, state: Any, batch: Any) -> Any:
        trainable, others, optimizer, metrics = state
        inputs, labels_B = batch
        with_gradients = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, _, others, metrics)), gradients = with_gradients(
            trainable, others, metrics, inputs, labels_B, None, training=True, optimizer_variables=optimizer
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        told = {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
        return told, (trainable, others, optimizer, metrics)


def trainable(
    config: Config, settings: model.Settings, dtype: str, schedule: Schedule, *, is_regression: bool
) -> Trained:
    """The model, drawn from the seed, with its optimizer and its loss."""
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy("mixed_bfloat16" if dtype == "bfloat16" else "float32")
    made: Trained = model.build(settings, Trained, model.FastDense)
    optimizer = keras.optimizers.AdamW(
        schedule, weight_decay=config.weight_decay, epsilon=1e-8, global_clipnorm=config.clip_norm
    )
    optimizer.exclude_from_weight_decay(
        var_list=[each for each in made.trainable_variables if len(each.shape) < 2]
    )
    optimizer.build(made.trainable_variables)
    loss = (
        keras.losses.MeanSquaredError()
        if is_regression
        else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    made.compile(optimizer, loss, steps_per_execution=config.steps_per_execution)
    return made


def lower_step(config: Config, devices: Sequence[jax.Device]) -> aot.TrainStep:
    """The step on the longest batches for devices that need not be there (`fab fit`); the variables are drawn on this
    machine, as Keras makes none without values.

    Raises:
        RequestError: the rows or the model are missing or not what they should be, or the options do not suit.
    """

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    wrong = problems(config, devices=len(devices))
    if wrong:
        raise RequestError("; ".join(wrong))
    dataset = data.read(config)
    beginning = export.prepare(config, dataset, user_cache_dir(), say)
    settings, is_regression = beginning.settings, dataset.task == "regression"
    batches = make_batches(config, dataset, open_tokenizer(beginning.tokenizer), settings["pad_token_id"])
    steps = config.steps or max(1, round(config.epochs * batches.steps_per_epoch))
    dtype = processor.dtype(config.dtype, devices[0].platform, distributed.everywhere)
    schedule = Schedule(config, learning_rate(config, settings["hidden_size"]), steps)
    whole = trainable(config, settings, dtype, schedule, is_regression=is_regression)
    everywhere = distributed.Devices(devices)
    parts = (
        whole.trainable_variables,
        whole.non_trainable_variables,
        whole.optimizer.variables,
        whole.metrics_variables,
    )
    values = tuple([each.value for each in part] for part in parts)
    shardings = jax.tree.map(lambda _: everywhere.whole, values)
    longest = max(batches.one_of_each(), key=lambda batch: batch.ids_BS.shape[1])
    placed = placed_rows(longest, settings, is_regression=is_regression)
    batch = aot.shapes(placed, jax.tree.map(lambda _: everywhere.by_row, placed))
    state = aot.shapes(values, shardings)
    step: Any = jax.jit(whole.train_step, donate_argnums=0, out_shardings=(None, shardings))
    with jax.sharding.use_abstract_mesh(everywhere.whole.mesh.abstract_mesh):
        traced = step.trace(state, batch)
    return aot.TrainStep(
        traced=traced,
        arguments=(state, batch),
        parameters=state[0],
        optimizer=state[2],
        unit="rows",
        per_step=config.batch_size,
        steps=steps,
        model_operations=round(6 * whole.count_params() * longest.ids_BS.size),
    )


def placed_rows(batch: Batch, settings: model.Settings, *, is_regression: bool) -> Any:
    """The rows of a batch as Keras takes them."""
    return model.inputs_of(batch, settings), batch.labels_B.astype(np.float32 if is_regression else np.int32)


class Steps(keras.utils.PyDataset):  # type: ignore[misc]
    """This process's rows of the steps that an attempt takes."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training = training

    def __len__(self) -> int:
        return self._training.steps - self._training.done

    def __getitem__(self, index: int) -> Any:
        training = self._training
        with training.rates.input(lambda: False):
            return training.placed(training.batches.step(training.done + index + 1))


class EachStep(keras.callbacks.Callback):  # type: ignore[misc]
    """Metrics, heartbeat, evaluation, checkpoint and preemption, where they are due."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self._training, self._traced = training, contextlib.ExitStack()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras gives it
        self._traced.enter_context(self._training.profile.step(self._training.done + batch + 1))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._traced.close()
        training = self._training
        training.step_done(min(training.done + batch + 1, training.steps), logs)


class Training:
    """One process's part of a training: what it is made of, and the state that its steps change."""

    def __init__(self, run: Run, config: Config, dataset: data.Dataset, beginning: export.Beginning) -> None:
        self.run, self.config, self.dataset, self.beginning = run, config, dataset, beginning
        self.settings = beginning.settings
        self.is_regression = dataset.task == "regression"
        self.batches = make_batches(
            config, dataset, open_tokenizer(beginning.tokenizer), self.settings["pad_token_id"]
        )
        each = config.steps_per_execution
        self.steps = config.steps or max(1, round(config.epochs * self.batches.steps_per_epoch))
        self.eval_every = config.eval_every or max(1, round(self.batches.steps_per_epoch / each)) * each
        self.peak_rate = learning_rate(config, self.settings["hidden_size"])
        dtype = processor.dtype(config.dtype, run.environment.platform, distributed.everywhere)
        self.build(dtype)
        parameters = self.model.count_params()
        self.rates = Rates(
            run.time,
            name="rows_per_s",
            per_step=config.batch_size,
            flops_per_step=round(6 * parameters * self.batches.tokens_per_step),
            peak_flops_per_s=run.environment.peak_flops_per_s,
        )
        run.decide(
            {
                **vars(config),
                "steps": self.steps,
                "eval_every": self.eval_every,
                "learning_rate": self.peak_rate,
                "dtype": dtype,
                "padded_to": self.batches.lengths,
                "labels": list(dataset.labels),
            }
        )
        run.say(
            f"{parameters:,} parameters on {jax.device_count()} × {jax.devices()[0].device_kind}, in {dtype}; "
            f"{self.batches.described()}"
        )

    def build(self, dtype: str) -> None:
        """The model and its optimizer, whole on every device of every process."""
        config = self.config
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
        schedule = Schedule(config, self.peak_rate, self.steps)
        self.model = trainable(config, self.settings, dtype, schedule, is_regression=self.is_regression)
        if self.beginning.weights is not None:
            model.load(self.model, self.settings, str(config.init_from), self.beginning.weights)

    def state(self) -> dict[str, list[jax.Array]]:
        """All that a step changes, as it is after the last one."""
        self.model.jax_state_sync()
        return {name: [each.value for each in found] for name, found in self.variables().items()}

    def variables(self) -> dict[str, list[keras.Variable]]:
        return {
            "trainable": self.model.trainable_variables,
            "others": self.model.non_trainable_variables,
            "optimizer": self.model.optimizer.variables,
        }

    def take(self, state: dict[str, list[jax.Array]], *names: str) -> None:
        """Give the model these parts of a state."""
        of = self.variables()
        for name in names or of:
            for variable, value in zip(of[name], state[name], strict=True):
                variable.assign(value)

    def restore(self) -> None:
        """Continue from the newest checkpoint, else from the beginning; compile what the steps need."""
        run, config = self.run, self.config
        self.checkpoints = Checkpoints(
            run, keep_last=config.keep_checkpoints, headline="eval_score", better="higher"
        )
        self.done, self.evaluations = 0, Evaluations(run, "eval_score", patience=config.patience)
        restored = self.checkpoints.restore_latest(self.state())
        if restored is not None:
            self.done, state = restored
            self.take(state)
            notes = self.checkpoints.notes or {}
            require_unchanged(config.init_from, notes["began_from"], self.beginning.fingerprint)
            self.evaluations.restore(notes)
            run.say(f"resumed after step {self.done}")
        self.last = self.done
        self.metrics = Metrics(run.directory, self.done) if run.environment.is_first else None
        wanted = read_steps(config.profile, steps=self.steps)
        self.profile = Profile(run, wanted, Tracer(), done=self.done, settle=self.wait)
        self.warm_up()
        self.evaluations.make_up(self.done, every=self.eval_every, last=self.steps, evaluate=self.evaluate)

    def placed(self, batch: Batch) -> Any:
        """This process's rows of a batch, as Keras takes them."""
        mine = batch.share(jax.process_index(), jax.process_count())
        return placed_rows(mine, self.settings, is_regression=self.is_regression)

    def on_devices(self, batch: Batch) -> Any:
        """A batch as arrays over all devices."""
        layout_of = keras.distribution.distribution().get_data_layout
        return jax.tree.map(
            lambda values: jax.make_array_from_process_local_data(
                layout_of(values.shape).backend_layout, values
            ),
            self.placed(batch),
        )

    def warm_up(self) -> None:
        """Compile what the steps and the evaluations need, before one is late for it: a program for each length."""
        environment = self.run.environment
        kept = executables.Executables(environment.cache_dir, jax.devices(), environment.shared_cache)
        whole = self.model
        state = (*self.state().values(), [each.value for each in whole.metrics_variables])
        shardings = jax.tree.map(lambda value: value.sharding, state)
        step = jax.jit(whole.train_step, donate_argnums=0, out_shardings=(None, shardings))
        forward = jax.jit(
            lambda *of: whole.stateless_call(*of, training=False)[0], out_shardings=shardings[0][0]
        )
        shapes = self.batches.one_of_each()
        steps, self.forward = {}, {}
        for number, batch in enumerate(shapes, 1):
            self.run.heartbeat.say(f"compiling program {number} of {len(shapes)}")
            inputs, labels_B = self.on_devices(batch)
            length = batch.ids_BS.shape[1]
            steps[length] = kept.compiled(step, state, (inputs, labels_B))
            self.forward[length] = kept.compiled(forward, *state[:2], inputs)

        def execution(state: Any, batches: Any) -> Any:
            told = None
            for inputs, labels_B in itertools.islice(batches, self.config.steps_per_execution):
                told, state = steps[inputs["ids"].shape[1]](state, (inputs, labels_B))
            return told, state

        whole.train_function = execution  # which `fit` would compile at the first step of each length

    def fit(self) -> None:
        """Take the steps that are left."""
        self.run.heartbeat.say(None)
        if self.done < self.steps and not self.evaluations.is_over:
            with warnings.catch_warnings():  # the last execution may have fewer steps
                warnings.filterwarnings("ignore", message="Your input ran out of data")
                self.model.fit(Steps(self), epochs=1, shuffle=False, verbose=0, callbacks=[EachStep(self)])
        self.steps = self.last

    def step_done(self, step: int, told: dict[str, float]) -> None:
        """What is due after `step`; called once an execution."""
        run, config = self.run, self.config
        run.heartbeat.step(step)
        for _ in range(step - self.last):
            self.rates.step_done()
        if self.last == self.done:
            run.heartbeat.state("stepping")
            self.rates.start()
        self.last = step
        if step % config.log_every == 0 or step == self.steps:
            self.log(step, told)
        if step == self.steps:
            return
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
            self.model.stop_training = self.evaluations.is_over

    def wait(self) -> None:
        """Wait for the devices."""
        jax.block_until_ready(self.state())

    def log(self, step: int, told: dict[str, float]) -> None:
        if self.metrics is not None:
            with self.run.time.part("logging"):
                rate = scheduled(self.config, self.peak_rate, step, self.steps)
                self.metrics.write(step, {**told, "learning_rate": rate, **self.rates.take()})

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out rows, and write it down as of `step`."""
        found = self.evaluations.evaluate(step, self.score, self.metrics)
        self.checkpoints.evaluated(step, found["eval_score"])
        return found

    def score(self) -> dict[str, float]:
        """The loss and the scores of the held-out rows; the same in all processes."""
        state = self.state()
        rows, logits = [], []
        for batch in self.batches.held_out():
            inputs, _ = self.on_devices(batch)
            forward = self.forward[batch.ids_BS.shape[1]]
            logits.append(np.asarray(forward(state["trainable"], state["others"], inputs)))
            rows.append(batch.rows_B)
            self.run.heartbeat.tick()
        self.logits_NC = in_order(np.concatenate(rows), np.concatenate(logits))
        return predictions.evaluation(self.dataset, self.logits_NC)

    def save(self, step: int) -> None:
        """Begin a checkpoint of the state after `step`."""
        with self.run.time.part("checkpoint"):
            self.run.begin_saving()
            notes = {"began_from": self.beginning.fingerprint, **self.evaluations.notes()}
            self.checkpoints.save(step, self.state(), notes=notes)
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
            self.take(self.checkpoints.restore(exported, self.state()), "trainable")
            final = self.score()
        self.checkpoints.close()
        self.profile.close()
        warning = predictions.no_better_than_chance(self.dataset, final)
        if warning is not None:
            run.warn(warning)
        run.heartbeat.say("export")
        if self.metrics is not None:
            export.write(run.directory, self.model, self.beginning)
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
