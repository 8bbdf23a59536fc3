"""The training loop, from top to bottom: the questions, the model, then several steps in each call of the devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from contracts.errors import RequestError
from contracts.run_directory import SAMPLES, RunDirectory
from jobs.runtime import processor
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.loop import Loop
from jobs.runtime.monitoring.tracers import TensorFlowTracer
from jobs.runtime.process import Final, Run
from jobs.runtime.storage.model_folder import require_unchanged
from jobs.runtime.tensorflow import distributed
from jobs.runtime.tensorflow.state import State
from jobs.tf_squad import data, model, scores, windows
from jobs.tf_squad.config import Config, learning_rate, problems

PREDICTIONS, NULL_ODDS = "predictions.json", "null_odds.json"
"""Of SQuAD's own program: of each question's id the text, and how sure it is that there is no answer."""
MOST_SAMPLES = 12


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or the data or the model are missing or not what they should be.
        Preempted: a host got SIGTERM; the state is saved.
    """
    training = set_up(run, config)
    loop = make_loop(training)
    if notes := loop.resume():
        require_unchanged(config.init_from, notes["began_from"], training.beginning.fingerprint)
    else:
        model.begin(training.model, training.beginning, config.seed)
    run.heartbeat.say("compiling")

    for steps in loop.calls(config.steps_per_call):
        with loop.input():
            batches = training.batches(steps)
        results = training.take_steps(batches, tf.constant(steps[0] - 1), tf.constant(len(steps)))
        loop.record({name: float(value) for name, value in results.items()})  # waits for the devices

    return finish(training, loop.finish())


def set_up(run: Run, config: Config) -> Training:
    """Read the questions, open or draw the model, and record what was decided."""
    wrong = problems(config, devices=distributed.strategy().num_replicas_in_sync)
    if wrong:
        raise RequestError("; ".join(wrong))
    tf.config.experimental.enable_op_determinism()
    tf_keras.utils.set_random_seed(config.seed)  # of what is drawn without a seed nothing is used
    run.prepare(f"reading {config.data}")
    dataset = data.read(config)
    distributed.agree(f"--data {config.data}", dataset.fingerprint, run.prepare)
    for text in dataset.warnings:
        run.warn(text)
    beginning = model.prepare(config, dataset.train, Path(run.environment.cache_dir), run.prepare)
    distributed.agree(f"--init-from {config.init_from}", beginning.fingerprint, run.prepare)
    training = Training(run, config, dataset, beginning)
    run.decide(
        {
            **vars(config),
            "epochs": training.epochs,
            "steps": training.steps,
            "eval_every": training.eval_every,
            "learning_rate": training.peak_rate,
            "dtype": training.dtype,
            "padded_to": training.length,
        }
    )
    cut = training.train_windows
    run.say(
        f"{training.parameters:,} parameters on {training.strategy.num_replicas_in_sync} × {run.environment.platform}, "
        f"in {training.dtype}; {len(dataset.train):,} questions in {len(cut):,} windows to learn from, "
        f"{len(dataset.eval):,} held out; padded to {training.length} tokens, "
        f"{1 - cut.tokens.mean() / training.length:.1%} of them padding"
    )
    return training


def make_loop(training: Training) -> Loop:
    """The loop over the steps, with the checkpoints of the training's state."""
    run, config = training.run, training.config
    state = State({"model": training.model, "optimizer": training.optimizer})
    return Loop(
        run=run,
        checkpoints=Checkpoints(run, state, distributed, keep_last=config.keep_checkpoints),
        steps=training.steps,
        unit="windows",
        per_step=config.batch_size,
        flops_per_step=6 * training.parameters * config.batch_size * training.length,
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
        score=training.score,
        headline="f1",
        eval_every=training.eval_every,
        profile=config.profile,
        tracer=TensorFlowTracer(),
        read=training.numbers,
        notes={"began_from": training.beginning.fingerprint},
    )


def finish(training: Training, final: Final) -> Final:
    """Warn of a model that has learned nothing, and write the export and the answers."""
    run, config, dataset = training.run, training.config, training.dataset
    if final["f1"] <= dataset.baseline:
        run.warn(
            f"F1 {final['f1']:.3f}: no better than always answering with the most frequent place "
            f"({dataset.baseline:.3f}); begin with a model that is pre-trained (--init-from), or train for longer"
        )
    if run.environment.is_first:
        names = ("max_length", "stride", "answer_length", "best_spans", "null_threshold")
        options = {name: getattr(config, name) for name in names} | {"may_be_none": dataset.has_unanswerable}
        model.export(run.directory, training.beginning, training.model.weights_by_name(), options)
        write_answers(run.directory, dataset, training.answers)
    return {**final, "baseline": dataset.baseline}


class Rate(tf_keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Up from 0 in the warm-up, then down to 0, each in a line."""

    def __init__(self, peak: float, steps: int, warmup_share: float) -> None:
        self._peak, self._steps, self._warmup = peak, steps, warmup_share * steps

    def __call__(self, done: Any) -> Any:
        step = tf.cast(done, tf.float32) + 1
        up = step / max(self._warmup, 1)
        down = (self._steps - step + 1) / max(self._steps - self._warmup, 1)
        return self._peak * tf.minimum(up, down)


class Training:
    """One process's part of a training: the windows, the model and its optimizer, its steps and its evaluation."""

    def __init__(self, run: Run, config: Config, dataset: data.Dataset, beginning: model.Beginning) -> None:
        self.run, self.config, self.dataset, self.beginning = run, config, dataset, beginning
        self.strategy = distributed.strategy()
        run.prepare("cutting texts into windows")
        self.train_windows, self.eval_windows = (
            windows.encode(questions, beginning.tokenizer, config)
            for questions in (dataset.train, dataset.eval)
        )
        if len(self.train_windows) < config.batch_size:
            raise RequestError(
                f"--batch-size {config.batch_size}: {config.data} has only {len(self.train_windows)} windows to learn "
                "from"
            )
        self.length = windows.shared_length(self.train_windows, self.eval_windows)
        steps_per_epoch = len(self.train_windows) // config.batch_size
        self.epochs = config.epochs or (8 if config.init_from is None else 3)
        self.steps = config.steps or max(1, round(self.epochs * steps_per_epoch))
        self.eval_every = config.eval_every or steps_per_epoch
        self.peak_rate = learning_rate(config, beginning.settings["hidden_size"])
        self.dtype = processor.dtype(config.dtype, run.environment.platform, distributed.all_processes)
        with self.strategy.scope():
            self.model = model.build(beginning.settings, self.dtype)
            self.rate = Rate(self.peak_rate, self.steps, config.warmup_share)
            self.optimizer = tf_keras.optimizers.AdamW(
                self.rate, weight_decay=config.weight_decay, epsilon=1e-8, jit_compile=False
            )
            decayed = {id(variable) for variable in self.model.decayed()}
            self.optimizer.exclude_from_weight_decay(
                [variable for variable in self.model.trainable_variables if id(variable) not in decayed]
            )
            self.optimizer.build(self.model.trainable_variables)
        self.parameters = sum(int(np.prod(variable.shape)) for variable in self.model.trainable_variables)

    def batches(self, steps: range) -> windows.Batch:
        """The windows of each replica for these steps: (steps per call, windows of a replica, …)."""
        steps_per_call = self.config.steps_per_call
        rows_KB = np.stack(
            [self.rows(step) for step in (*steps, *[steps[-1]] * (steps_per_call - len(steps)))]
        )
        share = self.config.batch_size // self.strategy.num_replicas_in_sync

        def replica_batch(context: Any) -> windows.Batch:
            columns = slice(
                context.replica_id_in_sync_group * share, (context.replica_id_in_sync_group + 1) * share
            )
            taken = self.train_windows.take(rows_KB[:, columns], self.length)
            return windows.Batch(*(tf.constant(values) for values in taken))

        batches: windows.Batch = self.strategy.experimental_distribute_values_from_function(replica_batch)
        return batches

    def rows(self, step: int) -> windows.Array:
        """The windows of a step, from 1: a place in the permutation that (seed, epoch) draws."""
        size = self.config.batch_size
        epoch, place = divmod(step - 1, len(self.train_windows) // size)
        return self._epoch(epoch)[place * size : (place + 1) * size]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - there is one of these in a process
    def _epoch(self, epoch: int) -> windows.Array:
        random = np.random.Generator(np.random.Philox(key=[self.config.seed, epoch + 1]))
        order: windows.Array = random.permutation(len(self.train_windows))
        return order

    @tf.function  # type: ignore[untyped-decorator]
    def take_steps(self, batches: windows.Batch, done: Any, steps: Any) -> dict[str, Any]:
        """Take `steps` steps after `done` on the devices; the last one's loss, and the norm of its gradient."""
        loss, norm = tf.constant(0.0), tf.constant(0.0)
        for place in tf.range(steps):
            losses, norms = self.strategy.run(self.take_step, args=(batches, place, done + place + 1))
            loss, norm = (self.strategy.experimental_local_results(values)[0] for values in (losses, norms))
        return {"loss": loss, "grad_norm": norm}

    def take_step(self, batches: windows.Batch, place: Any, step: Any) -> tuple[Any, Any]:
        """One step on a replica's windows: the gradient is that of all replicas together, and so is its norm."""
        replica = tf.distribute.get_replica_context()
        batch = windows.Batch(*(values[place] for values in batches))
        seed = tf.stack([tf.constant(self.config.seed, tf.int64), tf.cast(step, tf.int64)])
        seed = tf.random.experimental.stateless_fold_in(seed, replica.replica_id_in_sync_group)
        with tf.GradientTape() as tape:
            loss = self.loss(batch, seed) / self.config.batch_size
        variables = self.model.trainable_variables
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
        *gradients, loss = replica.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, loss])
        norm = tf.linalg.global_norm(gradients)
        scale = tf.minimum(1.0, self.config.clip_norm / (norm + 1e-6))
        self.optimizer.apply_gradients(
            zip([gradient * scale for gradient in gradients], variables, strict=True),
            skip_gradients_aggregation=True,
        )
        return loss, norm

    def loss(self, batch: windows.Batch, seed: Any) -> Any:
        """The sum over windows of the mean surprise, in nats, at the answer's first and last token."""
        start_BS, end_BS = self.model(batch.ids_BS, seed)
        return tf.reduce_sum(self._surprise(batch, start_BS, end_BS))

    def _surprise(self, batch: windows.Batch, start_BS: Any, end_BS: Any) -> Any:
        places = tf.range(self.length)[None]
        can_be = (places == 0) | ((places >= batch.first_B[:, None]) & (places < batch.behind_B[:, None]))
        first_B, last_B = (
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.where(can_be, scores_BS, model.NOWHERE))
            for labels, scores_BS in ((batch.starts_B, start_BS), (batch.ends_B, end_BS))
        )
        return (first_B + last_B) / 2

    def numbers(self, step: int, results: Mapping[str, float]) -> dict[str, float]:
        """What is written down of a step."""
        return {**results, "learning_rate": float(self.rate(step - 1))}

    def score(self, _step: int) -> dict[str, float]:
        """Answer the held-out questions; the scores and the loss."""
        loss, start_NS, end_NS = self.predict()
        self.answers = windows.answers(
            self.eval_windows, start_NS, end_NS, self.config, may_be_none=self.dataset.has_unanswerable
        )
        texts = {
            question.id: answer.text for question, answer in zip(self.dataset.eval, self.answers, strict=True)
        }
        truths = {question.id: question.answers for question in self.dataset.eval}
        return {**scores.scores(texts, truths), "eval_loss": loss}

    def predict(self) -> tuple[float, windows.Array, windows.Array]:
        """The loss of the held-out windows, and their scores, (N, S) each; the same in all processes."""
        count, size = len(self.eval_windows), self.config.batch_size
        share = size // self.strategy.num_replicas_in_sync
        losses, starts, ends = [], [], []
        for begin in range(0, count, size):
            rows_B = np.minimum(np.arange(begin, begin + size), count - 1)  # the last batch is filled up

            def replica_batch(context: Any, rows_B: windows.Array = rows_B) -> windows.Batch:
                first = context.replica_id_in_sync_group * share
                return self.eval_windows.take(rows_B[first : first + share], self.length)

            batch = self.strategy.experimental_distribute_values_from_function(replica_batch)
            loss_B, start_BS, end_BS = (scores.numpy() for scores in self.evaluate(batch))
            losses.append(loss_B)
            starts.append(start_BS)
            ends.append(end_BS)
            self.run.heartbeat.tick()
        loss_N, start_NS, end_NS = (np.concatenate(parts)[:count] for parts in (losses, starts, ends))
        return float(loss_N.mean()), start_NS, end_NS

    @tf.function  # type: ignore[untyped-decorator]
    def evaluate(self, batch: windows.Batch) -> Any:
        def replica_batch(batch: windows.Batch) -> Any:
            start_BS, end_BS = self.model(batch.ids_BS)
            return self._surprise(batch, start_BS, end_BS), start_BS, end_BS

        outputs = self.strategy.run(replica_batch, args=(batch,))
        return [self.strategy.gather(values, axis=0) for values in outputs]


def write_answers(directory: RunDirectory, dataset: data.Dataset, answers: list[windows.Answer]) -> None:
    """Write the answers to the held-out questions in SQuAD's format, and some for the report."""
    pairs = list(zip(dataset.eval, answers, strict=True))
    directory.write_json(PREDICTIONS, {question.id: answer.text for question, answer in pairs})
    if dataset.has_unanswerable:
        directory.write_json(NULL_ODDS, {question.id: answer.null_odds for question, answer in pairs})
    shown = pairs[:: max(1, len(pairs) // MOST_SAMPLES)][:MOST_SAMPLES]
    samples = [
        {
            "question": question.question,
            "context": question.text,
            "truth": list(question.answers),
            "answer": answer.text,
            "probability": dict(answer.best).get(answer.text, 0.0),
        }
        for question, answer in shown
    ]
    directory.write_json(SAMPLES, {"questions": samples})
