"""The training loop, from top to bottom: the questions, the model, then several steps in each call of the devices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from contracts.errors import RequestError
from contracts.run_directory import SAMPLES
from jobs.runtime import preemption, processor
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.evaluations import Evaluations
from jobs.runtime.metrics import Metrics, Rates
from jobs.runtime.model_folder import require_unchanged
from jobs.runtime.process import Final, Run
from jobs.runtime.profile import Profile, read_steps
from jobs.runtime.tensorflow import distributed
from jobs.runtime.tensorflow.checkpoints import State
from jobs.runtime.tensorflow.profile import Tracer
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
    training.restore()
    training.loop()
    return training.finish()


class Rate(tf_keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Up from 0 in the warm-up, then down to 0, each in a line."""

    def __init__(self, peak: float, steps: int, warmup_share: float) -> None:
        self._peak, self._steps, self._warmup = peak, steps, warmup_share * steps

    def __call__(self, done: Any) -> Any:
        step = tf.cast(done, tf.float32) + 1
        up, down = (
            step / max(self._warmup, 1),
            (self._steps - step + 1) / max(self._steps - self._warmup, 1),
        )
        return self._peak * tf.minimum(up, down)


class Training:
    """One process's part of a training: what it is made of, and the state that its steps change."""

    def __init__(self, run: Run, config: Config, dataset: data.Dataset, beginning: model.Beginning) -> None:
        self.run, self.config, self.dataset, self.beginning = run, config, dataset, beginning
        self.strategy = distributed.strategy()
        run.prepare("cutting texts into windows")
        self.train_windows, self.eval_windows = (
            windows.encode(each, beginning.tokenizer, config) for each in (dataset.train, dataset.eval)
        )
        if len(self.train_windows) < config.batch_size:
            raise RequestError(
                f"--batch-size {config.batch_size}: {config.data} has only {len(self.train_windows)} windows to learn "
                "from"
            )
        self.length = windows.shared_length(self.train_windows, self.eval_windows)
        steps_per_epoch = len(self.train_windows) // config.batch_size
        epochs = config.epochs or (8 if config.init_from is None else 3)
        self.steps = config.steps or max(1, round(epochs * steps_per_epoch))
        self.eval_every = config.eval_every or steps_per_epoch
        peak = learning_rate(config, beginning.settings["hidden_size"])
        dtype = processor.dtype(config.dtype, run.environment.platform, distributed.everywhere)
        with self.strategy.scope():
            self.model = model.build(beginning.settings, dtype)
            self.rate = Rate(peak, self.steps, config.warmup_share)
            self.optimizer = tf_keras.optimizers.AdamW(
                self.rate, weight_decay=config.weight_decay, epsilon=1e-8, jit_compile=False
            )
            decayed = {id(each) for each in self.model.decayed()}
            self.optimizer.exclude_from_weight_decay(
                [each for each in self.model.trainable_variables if id(each) not in decayed]
            )
            self.optimizer.build(self.model.trainable_variables)
        parameters = sum(int(np.prod(each.shape)) for each in self.model.trainable_variables)
        self.rates = Rates(
            run.time,
            name="windows_per_s",
            per_step=config.batch_size,
            flops_per_step=6 * parameters * config.batch_size * self.length,
            peak_flops_per_s=run.environment.peak_flops_per_s,
        )
        decided: dict[str, Any] = {"epochs": epochs, "steps": self.steps, "eval_every": self.eval_every}
        decided |= {"learning_rate": peak, "dtype": dtype}
        run.decide({**vars(config), **decided, "padded_to": self.length})
        run.say(
            f"{parameters:,} parameters on {self.strategy.num_replicas_in_sync} × {run.environment.platform}, in "
            f"{dtype}; {len(dataset.train):,} questions in {len(self.train_windows):,} windows to learn from, "
            f"{len(dataset.eval):,} held out; padded to {self.length} tokens, "
            f"{1 - self.train_windows.tokens.mean() / self.length:.1%} of them padding"
        )

    def restore(self) -> None:
        """Continue from the newest checkpoint, else from the beginning."""
        run, config, beginning = self.run, self.config, self.beginning
        state = State({"model": self.model, "optimizer": self.optimizer})
        self.checkpoints = Checkpoints(run, state, distributed, keep_last=config.keep_checkpoints)
        self.done, self.evaluations = 0, Evaluations(run, "f1")
        restored = self.checkpoints.restore_latest()
        if restored is None:
            model.begin(self.model, beginning, config.seed)
        else:
            self.done, notes = restored
            require_unchanged(config.init_from, notes["began_from"], beginning.fingerprint)
            run.say(f"resumed after step {self.done}")
        self.metrics = Metrics(run.directory, self.done) if run.environment.is_first else None
        self.profiled = read_steps(config.profile, steps=self.steps)
        self.profile = Profile(run, self.profiled, Tracer(), done=self.done, settle=lambda: None)
        run.heartbeat.say("compiling")
        self.evaluations.make_up(self.done, every=self.eval_every, last=self.steps, evaluate=self.evaluate)

    def loop(self) -> None:
        """Take the steps, with evaluations and checkpoints where they are due."""
        config, run, step, began = self.config, self.run, self.done, self.done
        while step < self.steps:
            before, step = step, self.until(step)
            with self.profile.step(step):
                with self.rates.input(lambda: False):
                    batches = self.batches(before, step)
                told = self.take_steps(batches, tf.constant(before), tf.constant(step - before))
                loss, norm = (float(each) for each in told)  # the devices are done
            run.heartbeat.step(step)
            for _ in range(before, step):
                self.rates.step_done()
            if before == began:
                run.heartbeat.say(None)
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

    def until(self, step: int) -> int:
        """The last step of the next call: before anything is due that Python has to do, and one by one in a trace."""
        config, traced = self.config, self.profiled
        if traced is not None and traced.first - 1 <= step < traced.last:
            return step + 1
        due = [
            -step % every or every for every in (config.log_every, self.eval_every, config.checkpoint_every)
        ]
        if traced is not None and step < traced.first:
            due.append(traced.first - 1 - step)
        return step + min(config.steps_per_call, self.steps - step, *due)

    def batches(self, done: int, until: int) -> windows.Batch:
        """The windows of each replica for the steps after `done`: (steps per call, windows of a replica, …)."""
        steps = [min(step, until) for step in range(done + 1, done + 1 + self.config.steps_per_call)]
        rows_KB = np.stack([self.rows(step) for step in steps])
        each = self.config.batch_size // self.strategy.num_replicas_in_sync

        def of_replica(context: Any) -> windows.Batch:
            here = slice(
                context.replica_id_in_sync_group * each, (context.replica_id_in_sync_group + 1) * each
            )
            taken = self.train_windows.take(rows_KB[:, here], self.length)
            return windows.Batch(*(tf.constant(values) for values in taken))

        found: windows.Batch = self.strategy.experimental_distribute_values_from_function(of_replica)
        return found

    def rows(self, step: int) -> windows.Array:
        """The windows of a step, from 1: a place in the permutation that (seed, epoch) draws."""
        size = self.config.batch_size
        epoch, place = divmod(step - 1, len(self.train_windows) // size)
        return self._epoch(epoch)[place * size : (place + 1) * size]

    @functools.lru_cache(maxsize=2)  # noqa: B019 - there is one of these in a process
    def _epoch(self, epoch: int) -> windows.Array:
        random = np.random.Generator(np.random.Philox(key=[self.config.seed, epoch + 1]))
        found: windows.Array = random.permutation(len(self.train_windows))
        return found

    @tf.function  # type: ignore[untyped-decorator]
    def take_steps(self, batches: windows.Batch, done: Any, steps: Any) -> tuple[Any, Any]:
        """Take `steps` steps after `done` on the devices; the last one's loss, and the norm of its gradient."""
        loss, norm = tf.constant(0.0), tf.constant(0.0)
        for place in tf.range(steps):
            losses, norms = self.strategy.run(self.take_step, args=(batches, place, done + place + 1))
            loss, norm = (self.strategy.experimental_local_results(each)[0] for each in (losses, norms))
        return loss, norm

    def take_step(self, batches: windows.Batch, place: Any, step: Any) -> tuple[Any, Any]:
        """One step on a replica's windows: the gradient is that of all replicas together, and so is its norm."""
        replica, batch = (
            tf.distribute.get_replica_context(),
            windows.Batch(*(each[place] for each in batches)),
        )
        seed = tf.stack([tf.constant(self.config.seed, tf.int64), tf.cast(step, tf.int64)])
        seed = tf.random.experimental.stateless_fold_in(seed, replica.replica_id_in_sync_group)
        with tf.GradientTape() as tape:
            loss = self.loss(batch, seed) / self.config.batch_size
        variables = self.model.trainable_variables
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, variables)]
        *gradients, loss = replica.all_reduce(tf.distribute.ReduceOp.SUM, [*gradients, loss])
        norm = tf.linalg.global_norm(gradients)
        scale = tf.minimum(1.0, self.config.clip_norm / (norm + 1e-6))
        self.optimizer.apply_gradients(
            zip([each * scale for each in gradients], variables, strict=True),
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

    def log(self, step: int, loss: float, norm: float) -> None:
        if self.metrics is not None:
            with self.run.time.part("logging"):
                rate = float(self.rate(step - 1))
                values = {"loss": loss, "learning_rate": rate, "grad_norm": norm}
                self.metrics.write(step, {**values, **self.rates.take()})

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out questions, and write it down as of `step`."""
        return self.evaluations.evaluate(step, self.answer, self.metrics)

    def answer(self) -> dict[str, float]:
        """Answer the held-out questions; the scores and the loss."""
        loss, start_NS, end_NS = self.predict()
        self.answers = windows.answers(
            self.eval_windows, start_NS, end_NS, self.config, may_be_none=self.dataset.has_unanswerable
        )
        said = {each.id: answer.text for each, answer in zip(self.dataset.eval, self.answers, strict=True)}
        truths = {each.id: each.answers for each in self.dataset.eval}
        return {**scores.scores(said, truths), "eval_loss": loss}

    def predict(self) -> tuple[float, windows.Array, windows.Array]:
        """The loss of the held-out windows, and their scores, (N, S) each; the same in all processes."""
        count, size = len(self.eval_windows), self.config.batch_size
        each = size // self.strategy.num_replicas_in_sync
        losses, starts, ends = [], [], []
        for begin in range(0, count, size):
            rows_B = np.minimum(np.arange(begin, begin + size), count - 1)  # the last batch is filled up

            def of_replica(context: Any, rows_B: windows.Array = rows_B) -> windows.Batch:
                first = context.replica_id_in_sync_group * each
                return self.eval_windows.take(rows_B[first : first + each], self.length)

            batch = self.strategy.experimental_distribute_values_from_function(of_replica)
            loss_B, start_BS, end_BS = (found.numpy() for found in self.score(batch))
            losses.append(loss_B)
            starts.append(start_BS)
            ends.append(end_BS)
            self.run.heartbeat.tick()
        loss_N, start_NS, end_NS = (np.concatenate(found)[:count] for found in (losses, starts, ends))
        return float(loss_N.mean()), start_NS, end_NS

    @tf.function  # type: ignore[untyped-decorator]
    def score(self, batch: windows.Batch) -> Any:
        def of_replica(batch: windows.Batch) -> Any:
            start_BS, end_BS = self.model(batch.ids_BS)
            return self._surprise(batch, start_BS, end_BS), start_BS, end_BS

        found = self.strategy.run(of_replica, args=(batch,))
        return [self.strategy.gather(each, axis=0) for each in found]

    def save(self, step: int) -> None:
        """Write a checkpoint of the state after `step`."""
        with self.run.time.part("checkpoint"):
            self.run.begin_saving()
            self.checkpoints.save(step, {"began_from": self.beginning.fingerprint})
            self.run.heartbeat.tick()

    def finish(self) -> Final:
        """Write the last checkpoint, evaluate, export; returns the final metrics."""
        run, baseline = self.run, self.dataset.baseline
        run.time.enter("finish")
        self.save(self.steps)
        final = self.evaluate(self.steps)
        self.checkpoints.close()
        if final["f1"] <= baseline:
            run.warn(
                f"F1 {final['f1']:.3f}: no better than always answering with the most frequent place ({baseline:.3f}); "
                "begin with a model that is pre-trained (--init-from), or train for longer"
            )
        run.heartbeat.say("export")
        if self.metrics is not None:
            names = ("max_length", "stride", "answer_length", "best_spans", "null_threshold")
            notes = {name: getattr(self.config, name) for name in names}
            notes["may_be_none"] = self.dataset.has_unanswerable
            model.export(run.directory, self.beginning, self.model.weights_by_name(), notes)
            self.write_answers()
            self.metrics.close()
        return {"steps": self.steps, "windows_per_s": self.rates.overall(), **final, "baseline": baseline}

    def write_answers(self) -> None:
        """Write the answers to the held-out questions in SQuAD's format, and some for the report."""
        asked = list(zip(self.dataset.eval, self.answers, strict=True))
        directory = self.run.directory
        directory.write_json(PREDICTIONS, {each.id: answer.text for each, answer in asked})
        if self.dataset.has_unanswerable:
            directory.write_json(NULL_ODDS, {each.id: answer.null_odds for each, answer in asked})
        shown = asked[:: max(1, len(asked) // MOST_SAMPLES)][:MOST_SAMPLES]
        samples = [
            {
                "question": each.question,
                "context": each.text,
                "truth": list(each.answers),
                "answer": answer.text,
                "probability": dict(answer.best).get(answer.text, 0.0),
            }
            for each, answer in shown
        ]
        directory.write_json(SAMPLES, {"questions": samples})
