"""The training, read from top to bottom: the rows, the model, `fit` with its callback, and what it leaves behind.

JAX's group is formed by jobs/runtime/jax/distributed.py; Keras is told of its devices by a DataParallel only. What step
t computes is a function of the state, the seed and t: dropout's seeds are variables of the model, and so in the state.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
import optax
from keras import ops

from contracts.errors import RequestError
from jobs.glue import data, predictions, training
from jobs.glue.batches import Packed, in_order
from jobs.glue.options import learning_rate, scheduled
from jobs.glue.pretrained import Beginning
from jobs.keras_glue import export, model
from jobs.keras_glue.config import Config, problems
from jobs.runtime import processor
from jobs.runtime.jax import aot, distributed, executables
from jobs.runtime.jax.checkpoints import Checkpoints
from jobs.runtime.loop import Loop, callback
from jobs.runtime.monitoring.tracers import JaxTracer
from jobs.runtime.process import Final, Run
from jobs.runtime.storage.cache import user_cache_dir

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
    dataset, beginning = training.open_inputs(run, config, export.prepare, distributed.agree)
    # The model and its optimizer are whole on every device of every process.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    task = Task(config, dataset, beginning, jax.devices(), run.heartbeat.tick)
    if beginning.weights is not None:
        model.load(task.model, task.settings, str(config.init_from), beginning.weights)
    loop = training.begin(
        run,
        config,
        task,
        Checkpoints(run, task, keep_last=config.keep_checkpoints),
        eval_every=task.eval_every,
        devices=f"{jax.device_count()} × {jax.devices()[0].device_kind}, in {task.dtype_name}",
        tracer=JaxTracer(),
        wait=lambda: jax.block_until_ready(task.tree),
    )
    run.heartbeat.say("compiling the step and the evaluation")
    task.warm_up(executables.open_executables(run.environment))
    loop.start()
    if not loop.is_over:
        task.fit(loop)

    final = training.conclude(run, config, loop, task)
    if run.environment.is_first:
        export.write(run.directory, task.model, beginning)
        predictions.write_predictions(run.directory, dataset, task.logits_NC)
    return final


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
        trainable, fixed, optimizer, metrics = state
        inputs, labels_B = batch
        with_gradients = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, _, fixed, metrics)), gradients = with_gradients(
            trainable, fixed, metrics, inputs, labels_B, None, training=True, optimizer_variables=optimizer
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        results = {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
        return results, (trainable, fixed, optimizer, metrics)


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
    task = Task(config, dataset, beginning, devices)
    trained = task.model
    all_devices = distributed.Devices(devices)
    values = (*task.tree.values(), [variable.value for variable in trained.metrics_variables])
    shardings = jax.tree.map(lambda _: all_devices.replicated, values)
    placed = task.placed(task.batches.step(1))
    batch = aot.shapes(placed, jax.tree.map(lambda _: all_devices.by_row, placed))
    state = aot.shapes(values, shardings)
    step: Any = jax.jit(trained.train_step, donate_argnums=0, out_shardings=(None, shardings))
    with jax.sharding.use_abstract_mesh(all_devices.replicated.mesh.abstract_mesh):
        traced = step.trace(state, batch)
    return aot.TrainStep(
        traced=traced,
        arguments=(state, batch),
        parameters=state[0],
        optimizer=state[2],
        unit="rows",
        per_step=config.batch_size,
        steps=task.steps,
        model_operations=6 * task.parameters * task.batches.tokens_per_step,
    )


class Steps(keras.utils.PyDataset):  # type: ignore[misc]
    """This process's rows of the steps that an attempt takes."""

    def __init__(self, task: Task, loop: Loop) -> None:
        super().__init__()
        self._task, self._loop, self._done = task, loop, loop.done

    def __len__(self) -> int:
        return self._loop.steps - self._done

    def __getitem__(self, index: int) -> Any:
        with self._loop.input():
            return self._task.own(self._task.batches.step(self._done + index + 1))


class Task:
    """One process's part of a training: the rows, the model and its optimizer, its fit and its evaluation.

    tick: called at every sign of progress.
    """

    def __init__(
        self,
        config: Config,
        dataset: data.Dataset,
        beginning: Beginning,
        devices: Sequence[jax.Device],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.dataset, self.beginning, self.tick = config, dataset, beginning, tick
        self.settings = beginning.settings
        platform = devices[0].platform
        self.batches = training.pack(config, dataset, beginning, shares=len(devices), device=platform)
        steps = config.steps_per_execution
        self.steps = config.steps or max(1, round(config.epochs * self.batches.steps_per_epoch))
        self.eval_every = config.eval_every or max(1, round(self.batches.steps_per_epoch / steps)) * steps
        self.peak_rate = learning_rate(config, self.settings["hidden_size"])
        self.dtype_name: str = processor.dtype(config.dtype, platform, distributed.all_processes)
        self.model = self.build()
        self.parameters: int = self.model.count_params()

    def build(self) -> Trained:
        """The model, drawn from the seed, with its optimizer and its loss."""
        config = self.config
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy("mixed_bfloat16" if self.dtype_name == "bfloat16" else "float32")
        trained: Trained = model.build(self.settings, Trained, self.batches.blocks)
        optimizer = keras.optimizers.AdamW(
            Schedule(config, self.peak_rate, self.steps),
            weight_decay=config.weight_decay,
            epsilon=1e-8,
            global_clipnorm=config.clip_norm,
        )
        optimizer.exclude_from_weight_decay(
            var_list=[variable for variable in trained.trainable_variables if len(variable.shape) < 2]
        )
        optimizer.build(trained.trainable_variables)
        is_regression = self.dataset.task == "regression"
        loss = (
            keras.losses.MeanSquaredError()
            if is_regression
            else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        trained.compile(optimizer, loss, steps_per_execution=config.steps_per_execution)
        return trained

    @property
    def tree(self) -> dict[str, list[jax.Array]]:
        """All that a step changes, as it is after the last one."""
        self.model.jax_state_sync()
        return {
            name: [variable.value for variable in variables] for name, variables in self.variables().items()
        }

    @tree.setter
    def tree(self, tree: dict[str, list[jax.Array]]) -> None:
        for name, variables in self.variables().items():
            for variable, value in zip(variables, tree[name], strict=True):
                variable.assign(value)

    def variables(self) -> dict[str, list[keras.Variable]]:
        return {
            "trainable": self.model.trainable_variables,
            "others": self.model.non_trainable_variables,
            "optimizer": self.model.optimizer.variables,
        }

    def placed(self, batch: Packed) -> Any:
        """The rows of a batch as Keras takes them."""
        kind = np.float32 if self.dataset.task == "regression" else np.int32
        return model.packed_inputs(batch, self.settings), batch.labels_GN.astype(kind)

    def own(self, batch: Packed) -> Any:
        """The same of this process's rows."""
        return self.placed(batch.share(jax.process_index(), jax.process_count()))

    def on_devices(self, batch: Packed) -> Any:
        """A batch as arrays over all devices."""
        layout = keras.distribution.distribution().get_data_layout
        return jax.tree.map(
            lambda values: jax.make_array_from_process_local_data(
                layout(values.shape).backend_layout, values
            ),
            self.own(batch),
        )

    def warm_up(self, programs: executables.Executables) -> None:
        """Compile the step and the evaluation, before one is late for it."""
        trained = self.model
        state = (*self.tree.values(), [variable.value for variable in trained.metrics_variables])
        shardings = jax.tree.map(lambda value: value.sharding, state)
        step = jax.jit(trained.train_step, donate_argnums=0, out_shardings=(None, shardings))
        evaluated = model.build(self.settings, keras.Model, self.batches.held_out_blocks, trained)
        fixed = [variable.value for variable in evaluated.non_trainable_variables]
        forward = jax.jit(
            lambda weights, inputs: evaluated.stateless_call(weights, fixed, inputs, training=False)[0],
            out_shardings=shardings[0][0],
        )
        inputs, labels_GN = self.on_devices(self.batches.step(1))
        compiled = programs.compiled(step, state, (inputs, labels_GN))
        held_out, _ = self.on_devices(next(self.batches.held_out()))
        self.forward = programs.compiled(forward, state[0], held_out)

        def execution(state: Any, batches: Any) -> Any:
            results = None
            for batch in itertools.islice(batches, self.config.steps_per_execution):
                results, state = compiled(state, batch)
            return results, state

        trained.train_function = execution  # which `fit` would compile at the first step

    def fit(self, loop: Loop) -> None:
        """Take the steps that are left."""
        with warnings.catch_warnings():  # the last execution may have fewer steps
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            after_steps = callback(keras, loop, self.config.steps_per_execution)
            self.model.fit(Steps(self, loop), epochs=1, shuffle=False, verbose=0, callbacks=[after_steps])

    def numbers(self, step: int, results: Mapping[str, float]) -> dict[str, float]:
        """What is written down of a step."""
        return {**results, "learning_rate": scheduled(self.config, self.peak_rate, step, self.steps)}

    def score(self, _step: int) -> dict[str, float]:
        """The loss and the scores of the held-out rows; the same in all processes."""
        weights = self.tree["trainable"]
        rows, logits = [], []
        for batch in self.batches.held_out():
            inputs, _ = self.on_devices(batch)
            logits.append(np.asarray(self.forward(weights, inputs)))
            rows.append(batch.rows_GN)
            self.tick()
        self.logits_NC = in_order(
            *(np.concatenate(parts).reshape(-1, *parts[0].shape[2:]) for parts in (rows, logits))
        )
        return predictions.evaluation(self.dataset, self.logits_NC)
