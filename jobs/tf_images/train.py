"""The training, read from top to bottom: the shards, the model, Keras' fit, and what is done between its steps."""

from __future__ import annotations

import base64
import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from contracts.errors import RequestError
from contracts.run_directory import SAMPLES
from jobs.runtime import preemption, processor
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.evaluations import Evaluations
from jobs.runtime.metrics import Metrics, Rates
from jobs.runtime.process import Final, Run
from jobs.runtime.profile import Profile, read_steps
from jobs.runtime.tensorflow import distributed
from jobs.runtime.tensorflow.checkpoints import State
from jobs.runtime.tensorflow.profile import Tracer
from jobs.tf_images import data, model
from jobs.tf_images.config import RATE_BATCH, Config, problems
from jobs.tf_images.input_pipeline import Pictures, balanced
from jobs.tf_images.shards import place_of

LEAST_EVAL_EVERY = 50
MOST_PICTURES, MOST_PICTURE_BYTES = 24, 8000


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or shards are missing or damaged.
        Preempted: a host got SIGTERM; the state is saved.
    """
    wrong = problems(config, devices=distributed.strategy().num_replicas_in_sync)
    if wrong:
        raise RequestError("; ".join(wrong))
    run.prepare(f"reading the index of {config.data}")
    index = data.read_index(place_of(config, Path(run.environment.cache_dir)))
    distributed.agree(f"--data {config.data}", index.fingerprint, run.prepare)
    whole = {shard.name: shard.records for shard in index.shards}
    if config.damaged == "skip":
        run.prepare("reading all shards for what is damaged")
        whole = data.verified(index, "skip")
    training = Training(run, config, index, whole)
    training.restore()
    try:
        training.fit()
        return training.finish()
    except tf.errors.DataLossError:
        run.heartbeat.say("looking for the damaged record")
        data.verified(index, "refuse")
        raise


class Training(keras.callbacks.Callback):  # type: ignore[misc]
    """One process's part of a training: what it is made of, and what it does between two calls of Keras' steps."""

    def __init__(self, run: Run, config: Config, index: data.Index, whole: dict[str, int]) -> None:
        super().__init__()
        self.run, self.config, self.index = run, config, index
        self.strategy = distributed.strategy()
        self.cores = self.strategy.num_replicas_in_sync
        self.own_cores = self.cores // distributed.size()
        self.size = config.image_size or index.size or data.DEFAULT_SIZE
        self.step_pictures = config.batch_per_core * self.cores
        count = sum(whole[shard.name] for shard in index.of("train"))
        self.steps = config.steps or max(1, round(config.epochs * count / self.step_pictures))
        self.eval_every = (
            config.eval_every
            or max(
                LEAST_EVAL_EVERY // config.steps_per_execution or 1,
                round(count / self.step_pictures / config.steps_per_execution),
            )
            * config.steps_per_execution
        )
        # Other devices have batches brought to them ahead, by threads that wait in their place.
        self.is_waiting_seen = run.environment.platform == "cpu"
        self.dtype = processor.dtype(config.dtype, run.environment.platform, distributed.everywhere)
        self.pictures = Pictures(
            index=index,
            whole=whole,
            size=self.size,
            seed=config.seed,
            shuffle=config.shuffle,
            flip=config.flip,
            shift=config.shift,
            zoom=config.zoom,
            class_weights=balanced(index.counts("train")) if config.class_weights == "balanced" else (),
        )
        self.peak_rate = config.learning_rate * self.step_pictures / RATE_BATCH
        self.compile()
        self.logits = tf.function(
            lambda images: self.strategy.run(lambda mine: self.network(mine, training=False), (images,))
        )
        self.rates = Rates(
            run.time,
            name="images_per_s",
            per_step=self.step_pictures,
            peak_flops_per_s=None,
        )
        run.decide(
            {
                **vars(config),
                "steps": self.steps,
                "eval_every": self.eval_every,
                "image_size": self.size,
                "peak_learning_rate": self.peak_rate,
                "dtype": self.dtype,
                "labels": list(index.labels),
            }
        )
        held_out = sum(whole[shard.name] for shard in index.of("eval"))
        run.say(
            f"{self.network.count_params():,} parameters on {self.cores} × {run.environment.platform}, in "
            f"{self.dtype}; {count:,} pictures to learn from, {held_out:,} held out, of {len(index.labels)} classes; "
            f"{self.size} × {self.size} × {index.channels}"
        )
        shards, hosts = len(index.of("train")), distributed.size()
        if hosts > 1 and shards % hosts:
            run.say(
                f"{shards} shards cannot be shared out evenly among {hosts} hosts: each reads all of them, and keeps "
                f"every {hosts}th record; shards made with --multiple-of {hosts} are read by one host each"
            )

    def compile(self) -> None:
        """The network and its optimizer, the same on all devices."""
        config = self.config
        warmup = round(config.warmup_share * self.steps)
        self.rate = keras.optimizers.schedules.CosineDecay(
            0.0 if warmup else self.peak_rate,
            max(1, self.steps - warmup),
            warmup_target=self.peak_rate if warmup else None,
            warmup_steps=warmup,
        )
        with self.strategy.scope():
            self.network = self.build(self.dtype)
            optimizer = keras.optimizers.AdamW(self.rate, weight_decay=config.weight_decay)
            optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
            optimizer.build(self.network.trainable_variables)
            self.network.compile(
                optimizer,
                keras.losses.CategoricalCrossentropy(True, config.label_smoothing),
                steps_per_execution=config.steps_per_execution,
            )
            # By itself Keras adds up the losses of some strategies' devices, and takes the first of others'.
            self.network.distribute_reduction_method = "sum"

    def build(self, dtype: str) -> Any:
        return model.build(
            self.config,
            size=self.size,
            channels=self.index.channels,
            classes=len(self.index.labels),
            dtype=dtype,
        )

    def restore(self) -> None:
        """Continue from the newest checkpoint, else from the beginning."""
        run, config = self.run, self.config
        state = State({"model": self.network, "optimizer": self.network.optimizer})
        self.checkpoints = Checkpoints(run, state, distributed, keep_last=config.keep_checkpoints)
        self.done, self.evaluations = 0, Evaluations(run, "accuracy")
        restored = self.checkpoints.restore_latest()
        if restored is not None:
            self.done, notes = restored
            if notes["data"] != self.index.fingerprint:
                raise RequestError(
                    f"--data {config.data}: has other shards than when the run began; bring the old ones back, or "
                    "start a new run"
                )
            self.evaluations.restore(notes)
            self.checkpoints.best = self.evaluations.best_step
            run.say(f"resumed after step {self.done}")
        self.metrics = Metrics(run.directory, self.done) if run.environment.is_first else None
        self.traced = read_steps(config.profile, steps=self.steps)
        self.profile = Profile(run, self.traced, Tracer(), done=self.done, settle=lambda: None)
        self.evaluations.make_up(self.done, every=self.eval_every, last=self.steps, evaluate=self.evaluate)

    def fit(self) -> None:
        """Take the steps that are left."""
        if self.done == self.steps:
            return
        with tf.device("/CPU:0"):
            self.wait_s = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self.waited_s = 0.0
        batches = self.strategy.distribute_datasets_from_function(
            lambda _context: self.pictures.train(
                host=distributed.rank(),
                hosts=distributed.size(),
                batch=self.config.batch_per_core,
                done=self.done * self.own_cores,
                wait_s=self.wait_s,
            ),
            tf.distribute.InputOptions(experimental_fetch_to_device=not self.is_waiting_seen),
        )
        self.run.heartbeat.say("compiling the step")
        self.step = self.done
        self.network.fit(
            batches, epochs=1, steps_per_epoch=self.steps - self.done, callbacks=[self], verbose=0
        )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras gives it
        """Before a call of Keras' train function, which takes --steps-per-execution steps."""
        self.network.reset_metrics()  # the loss is that of one call
        last = self.done + batch + self.config.steps_per_execution
        wanted = self.traced
        if wanted is not None and self.done + batch < wanted.last <= last:
            last = wanted.last
        self.tracing = contextlib.ExitStack()
        self.tracing.enter_context(self.profile.step(last))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After it: what is due after the last of its steps."""
        self.tracing.close()
        config, run = self.config, self.run
        is_first, step = self.step == self.done, self.done + batch + 1
        run.heartbeat.step(step)
        for _ in range(step - self.step):
            self.rates.step_done()
        self.step = step
        if is_first:
            run.heartbeat.say(None)
            run.heartbeat.state("stepping")
            self.rates.start()
            self.waited_s = float(self.wait_s)
        if step % config.log_every == 0 or step == self.steps:
            self.log(step, float(logs["loss"]) / self.cores)
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

    def log(self, step: int, loss: float) -> None:
        if self.metrics is None:
            return
        with self.run.time.part("logging"):
            steps, rates = self.rates.steps, self.rates.take()
            if rates:
                waited_s, self.waited_s = self.waited_s, float(self.wait_s)
                rates["input_wait_s"] = round((self.waited_s - waited_s) / steps, 6)
            if not self.is_waiting_seen:
                rates.pop("input_wait_s", None)
            self.metrics.write(step, {"loss": loss, "learning_rate": float(self.rate(step - 1)), **rates})

    def even_out(self) -> None:
        """Give all devices the mean of what each has for itself: the running means of norms.

        What is saved is their mean; the run goes on with what a resumed one finds.
        """
        if self.cores == 1:
            return
        with self.strategy.scope():
            for variable in self.network.variables:
                if variable.synchronization == tf.VariableSynchronization.ON_READ:
                    variable.assign(variable.read_value())

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out pictures, and write it down as of `step`."""
        found = self.evaluations.evaluate(step, self.score, self.metrics)
        self.checkpoints.best = self.evaluations.best_step
        return found

    def score(self) -> dict[str, float]:
        """Accuracy and loss of all held-out pictures, the same in all processes; keeps the confusion matrix, and what
        this process saw wrongly classified."""
        self.even_out()
        hosts, batch = distributed.size(), self.config.batch_per_core
        most = max(self.pictures.held_out_of(host=host, hosts=hosts) for host in range(hosts))
        turns = -(-most // (batch * self.own_cores))
        batches = self.strategy.distribute_datasets_from_function(
            lambda _context: self.pictures.held_out(
                host=distributed.rank(), hosts=hosts, batch=batch, batches=turns * self.own_cores
            ).repeat()
        )
        classes = len(self.index.labels)
        self.confusion_KK, loss = np.zeros((classes, classes), np.int64), 0.0
        self.wrong: list[tuple[float, int, int, Any]] = []
        iterator = iter(batches)
        for _ in range(turns):
            images, labels = next(iterator)
            logits_BK, labels_B, images_BHWC = (
                np.concatenate([each.numpy() for each in self.strategy.experimental_local_results(values)])
                for values in (self.logits(images), labels, images)
            )
            (there,) = np.nonzero(labels_B >= 0)
            logs_BK = tf.nn.log_softmax(logits_BK[there]).numpy().astype(np.float64)
            truth_B, said_B = labels_B[there], logs_BK.argmax(axis=1)
            loss -= logs_BK[np.arange(len(there)), truth_B].sum()
            np.add.at(self.confusion_KK, (truth_B, said_B), 1)
            for row in np.nonzero(truth_B != said_B)[0]:
                sure = float(np.exp(logs_BK[row, said_B[row]]))
                self.wrong.append((sure, int(truth_B[row]), int(said_B[row]), images_BHWC[there[row]]))
            self.wrong = sorted(self.wrong, key=lambda each: -each[0])[:MOST_PICTURES]
            self.run.heartbeat.tick()
        self.confusion_KK = distributed.exchange_on_host(self.confusion_KK).sum(axis=0)
        loss = float(distributed.exchange_on_host(np.array(loss)).sum())
        count = int(self.confusion_KK.sum())
        return {"accuracy": float(np.trace(self.confusion_KK)) / count, "eval_loss": loss / count}

    def save(self, step: int) -> None:
        """Begin a checkpoint of the state after `step`."""
        with self.run.time.part("checkpoint"):
            self.run.begin_saving()
            self.even_out()
            self.checkpoints.save(step, {"data": self.index.fingerprint, **self.evaluations.notes()})
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
        baseline = self.index.baseline()
        if final["accuracy"] <= baseline:
            run.warn(
                f"accuracy {final['accuracy']:.3f}: no better than naming the most frequent class ({baseline:.3f}); "
                "train for longer, or with another --learning-rate"
            )
        run.heartbeat.say("export")
        with tf.device("/CPU:0"):
            plain = self.build("float32")  # which every CPU computes alike
            model.copy(self.network, plain)
            if self.metrics is not None:
                self.write(plain)
                self.metrics.close()
        return {
            "steps": self.steps,
            "images_per_s": self.rates.overall(),
            **final,
            "baseline": baseline,
            "best_step": best,
            "exported_step": exported,
        }

    def write(self, plain: Any) -> None:
        """Write the export, and samples.json."""
        names = self.index.labels
        pictures = self.pictures.held_out(host=0, hosts=1, batch=8, batches=1)
        examples_BHWC = next(iter(pictures))[0].numpy()
        facts = {"labels": names, "size": self.size, "channels": self.index.channels}
        refused = model.export(self.run.directory, plain, facts, examples_BHWC, tflite=self.config.tflite)
        if refused is not None:
            self.run.warn(
                f"--tflite: the converter refused the model ({refused}); the other exports are there"
            )
        found = [
            {"png": png, "truth": names[truth], "prediction": names[said], "probability": sure}
            for sure, truth, said, image_HWC in self.wrong
            if (png := _png(image_HWC)) is not None
        ]
        confusion = {"labels": list(names), "counts": self.confusion_KK.tolist()}
        self.run.directory.write_json(SAMPLES, {"confusion": confusion, "pictures": found})


def _png(image_HWC: np.ndarray[Any, Any]) -> str | None:
    """A picture as PNG in base64, smaller where it would be too large; None where that does not help."""
    from PIL import Image

    image = Image.fromarray(image_HWC[..., 0] if image_HWC.shape[-1] == 1 else image_HWC)
    for side in (224, 96, 48):
        small = image.copy()
        small.thumbnail((side, side))
        file = io.BytesIO()
        small.save(file, "PNG", optimize=True)
        if len(text := base64.b64encode(file.getvalue()).decode()) <= MOST_PICTURE_BYTES:
            return text
    return None
