"""The training, read from top to bottom: the shards, the model, Keras' fit, and what is done between its steps."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from contracts.errors import RequestError
from contracts.run_directory import SAMPLES
from jobs.runtime import processor
from jobs.runtime.checkpoints import Checkpoints
from jobs.runtime.loop import Loop, callback
from jobs.runtime.monitoring.tracers import TensorFlowTracer
from jobs.runtime.process import Final, Run
from jobs.runtime.tensorflow import distributed
from jobs.runtime.tensorflow.state import State
from jobs.tf_images import data, model
from jobs.tf_images.config import RATE_BATCH, Config, problems
from jobs.tf_images.input_pipeline import Pictures, balanced
from jobs.tf_images.shards import shards_folder

LEAST_EVAL_EVERY = 50
MOST_PICTURES, MOST_PICTURE_BYTES = 24, 8000


def train(run: Run, config: Config) -> Final:
    """Train to the end; returns the final metrics of result.json.

    Raises:
        RequestError: the options cannot work here, or shards are missing or damaged.
        Preempted: a host got SIGTERM; the state is saved.
    """
    training = set_up(run, config)
    loop = make_loop(training)
    resume(training, loop)
    try:
        loop.start()
        if not loop.is_over:
            run.heartbeat.say("compiling the step")
            training.fit(loop)
        final = loop.finish(best=config.best)
    except tf.errors.DataLossError:
        run.heartbeat.say("looking for the damaged record")
        data.verified(training.index, "refuse")
        raise
    return {**finish(training, final), "best_step": loop.best_step, "exported_step": loop.exported_step}


def set_up(run: Run, config: Config) -> Training:
    """Read the index of the shards, build the network, and record what was decided."""
    wrong = problems(config, devices=distributed.strategy().num_replicas_in_sync)
    if wrong:
        raise RequestError("; ".join(wrong))
    run.prepare(f"reading the index of {config.data}")
    index = data.read_index(shards_folder(config, Path(run.environment.cache_dir)))
    distributed.agree(f"--data {config.data}", index.fingerprint, run.prepare)
    records = {shard.name: shard.records for shard in index.shards}
    if config.damaged == "skip":
        run.prepare("reading all shards for what is damaged")
        records = data.verified(index, "skip")
    training = Training(run, config, index, records)
    run.decide(
        {
            **vars(config),
            "steps": training.steps,
            "eval_every": training.eval_every,
            "image_size": training.size,
            "peak_learning_rate": training.peak_rate,
            "dtype": training.dtype,
            "labels": list(index.labels),
        }
    )
    count, held_out = (
        sum(records[shard.name] for shard in index.split_shards(split)) for split in ("train", "eval")
    )
    run.say(
        f"{training.network.count_params():,} parameters on {training.cores} × {run.environment.platform}, in "
        f"{training.dtype}; {count:,} pictures to learn from, {held_out:,} held out, of {len(index.labels)} classes; "
        f"{training.size} × {training.size} × {index.channels}"
    )
    shards, hosts = len(index.split_shards("train")), distributed.size()
    if hosts > 1 and shards % hosts:
        run.say(
            f"{shards} shards cannot be shared out evenly among {hosts} hosts: each reads all of them, and keeps "
            f"every {hosts}th record; shards made with --multiple-of {hosts} are read by one host each"
        )
    return training


def make_loop(training: Training) -> Loop:
    """The loop over the steps, with the checkpoints of the training's state."""
    run, config = training.run, training.config
    state = State({"model": training.network, "optimizer": training.network.optimizer}, training.even_out)
    return Loop(
        run=run,
        checkpoints=Checkpoints(run, state, distributed, keep_last=config.keep_checkpoints),
        steps=training.steps,
        unit="images",
        per_step=training.step_pictures,
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
        score=training.score,
        headline="accuracy",
        eval_every=training.eval_every,
        profile=config.profile,
        tracer=TensorFlowTracer(),
        wait=training.count_waiting,
        read=training.numbers,
        notes={"data": training.index.fingerprint},
    )


def resume(training: Training, loop: Loop) -> None:
    """Restore the newest checkpoint, which is of the same shards."""
    notes, data_option = loop.resume(), training.config.data
    if notes and notes["data"] != training.index.fingerprint:
        raise RequestError(
            f"--data {data_option}: has other shards than when the run began; bring the old ones back, or "
            "start a new run"
        )


def finish(training: Training, final: Final) -> Final:
    """Warn of a network that has learned nothing, and write the export."""
    baseline = training.index.baseline()
    if final["accuracy"] <= baseline:
        training.run.warn(
            f"accuracy {final['accuracy']:.3f}: no better than naming the most frequent class ({baseline:.3f}); "
            "train for longer, or with another --learning-rate"
        )
    training.export()
    return {**final, "baseline": baseline}


class Training:
    """One process's part of a training: the pictures, the network and its optimizer, its fit and its evaluation."""

    def __init__(self, run: Run, config: Config, index: data.Index, records: dict[str, int]) -> None:
        self.run, self.config, self.index = run, config, index
        self.strategy = distributed.strategy()
        self.cores = self.strategy.num_replicas_in_sync
        self.own_cores = self.cores // distributed.size()
        self.size = config.image_size or index.size or data.DEFAULT_SIZE
        self.step_pictures = config.batch_per_core * self.cores
        count = sum(records[shard.name] for shard in index.split_shards("train"))
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
        self.dtype = processor.dtype(config.dtype, run.environment.platform, distributed.all_processes)
        self.pictures = Pictures(
            index=index,
            counts=records,
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

    def fit(self, loop: Loop) -> None:
        """Take the steps that are left."""
        with tf.device("/CPU:0"):
            self.wait_s = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self.waited_s: float | None = None
        batches = self.strategy.distribute_datasets_from_function(
            lambda _context: self.pictures.train(
                host=distributed.rank(),
                hosts=distributed.size(),
                batch=self.config.batch_per_core,
                done=loop.done * self.own_cores,
                steps=self.steps * self.own_cores,
                wait_s=self.wait_s,
            ),
            tf.distribute.InputOptions(experimental_fetch_to_device=not self.is_waiting_seen),
        )
        # The loss is that of one call.
        reset = keras.callbacks.LambdaCallback(on_batch_begin=lambda *_, **__: self.network.reset_metrics())
        self.network.fit(
            batches,
            epochs=1,
            steps_per_epoch=self.steps - loop.done,
            callbacks=[reset, callback(keras, loop, self.config.steps_per_execution)],
            verbose=0,
        )

    def count_waiting(self) -> None:
        """Count what was waited for batches since the last call as such."""
        if not self.is_waiting_seen:
            return
        waited_s, self.waited_s = self.waited_s, float(self.wait_s)
        if waited_s is not None:
            self.run.time.move(self.waited_s - waited_s, "input_wait")

    def numbers(self, step: int, results: Mapping[str, float]) -> dict[str, float]:
        """What is written down of a step."""
        self.count_waiting()
        return {"loss": float(results["loss"]) / self.cores, "learning_rate": float(self.rate(step - 1))}

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

    def score(self, _step: int) -> dict[str, float]:
        """Accuracy and loss of all held-out pictures, the same in all processes; keeps the confusion matrix, and what
        this process saw wrongly classified."""
        self.even_out()
        hosts, batch = distributed.size(), self.config.batch_per_core
        longest = max(self.pictures.count_held_out(host=host, hosts=hosts) for host in range(hosts))
        turns = -(-longest // (batch * self.own_cores))
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
                np.concatenate([local.numpy() for local in self.strategy.experimental_local_results(values)])
                for values in (self.logits(images), labels, images)
            )
            (present,) = np.nonzero(labels_B >= 0)
            logs_BK = tf.nn.log_softmax(logits_BK[present]).numpy().astype(np.float64)
            truth_B, said_B = labels_B[present], logs_BK.argmax(axis=1)
            loss -= logs_BK[np.arange(len(present)), truth_B].sum()
            np.add.at(self.confusion_KK, (truth_B, said_B), 1)
            for row in np.nonzero(truth_B != said_B)[0]:
                sure = float(np.exp(logs_BK[row, said_B[row]]))
                self.wrong.append((sure, int(truth_B[row]), int(said_B[row]), images_BHWC[present[row]]))
            self.wrong = sorted(self.wrong, key=lambda local: -local[0])[:MOST_PICTURES]
            self.run.heartbeat.tick()
        self.confusion_KK = distributed.exchange_on_host(self.confusion_KK).sum(axis=0)
        loss = float(distributed.exchange_on_host(np.array(loss)).sum())
        count = int(self.confusion_KK.sum())
        return {"accuracy": float(np.trace(self.confusion_KK)) / count, "eval_loss": loss / count}

    def export(self) -> None:
        """Write the export and samples.json, by rank 0."""
        with tf.device("/CPU:0"):
            plain = self.build("float32")  # which every CPU computes alike
            model.copy(self.network, plain)
            if self.run.environment.is_first:
                self.write(plain)

    def write(self, plain: Any) -> None:
        names = self.index.labels
        pictures = self.pictures.held_out(host=0, hosts=1, batch=8, batches=1)
        examples_BHWC = next(iter(pictures))[0].numpy()
        facts = {"labels": names, "size": self.size, "channels": self.index.channels}
        refused = model.export(self.run.directory, plain, facts, examples_BHWC, tflite=self.config.tflite)
        if refused is not None:
            self.run.warn(
                f"--tflite: the converter refused the model ({refused}); the other exports are there"
            )
        shown = [
            {"png": png, "truth": names[truth], "prediction": names[predicted], "probability": sure}
            for sure, truth, predicted, image_HWC in self.wrong
            if (png := _png(image_HWC)) is not None
        ]
        confusion = {"labels": list(names), "counts": self.confusion_KK.tolist()}
        self.run.directory.write_json(SAMPLES, {"confusion": confusion, "pictures": shown})


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
