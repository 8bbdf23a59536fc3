"""tf_images beside a plain `fit`: the same model, optimizer, batch and pictures, on this machine's CPU, by turns.

    python -m bench.tf_images --pictures 3000 --size 28 --steps 46 --dtype float32

The pictures are JPEGs of 320 x 240, cut out of scikit-learn's two. tf_images reads shards of them, as docs/jobs.md
says. The plain program is that of TensorFlow's tutorials "Load and preprocess images" and "Data augmentation":
`image_dataset_from_directory`, preprocessing layers in a `map`, `.prefetch(AUTOTUNE)`, `model.fit`; and the same with
`.cache()` before the map, for sets that fit into memory.
The first epoch is left out: TensorFlow builds its programs then, and fills the cache.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from pathlib import Path
from typing import Any

from bench import rounds
from jobs.tf_images.config import Config
from jobs.tf_images.data import DEFAULT_SIZE, Index, read_index

SHARDS, FILES = "shards", "files"
PHOTO = (320, 240)
HELD_OUT_EVERY, LOG_EVERY = 50, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pictures", type=int, default=12_800)
    parser.add_argument("--size", type=int, default=0, help="side that pictures are brought to")
    parser.add_argument(
        "--steps", type=int, default=200, help="that are measured; at least, as epochs are whole"
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all programs"
    )
    rounds.main(
        parser,
        module="bench.tf_images",
        framework="tensorflow",
        ours={"tf_images": _ours},
        theirs={
            "plain fit": functools.partial(_plain, is_cached=False),
            "plain fit, cached": functools.partial(_plain, is_cached=True),
        },
        columns={
            "rate": ("pictures/s", ".1f"),
            "input_wait": ("waiting for input", ".2%"),
            "peak_mib": ("peak memory, MiB", ".0f"),
            "loss": ("loss of the last steps", ".4f"),
        },
        prepare=_make,
    )


def _decided(arguments: argparse.Namespace, folder: Path) -> tuple[Index, Config, int, int]:
    """What the pictures turned out to be, what all programs train, steps of an epoch, and epochs."""
    index = read_index(str(folder / SHARDS))
    config = Config(data=index.place, image_size=arguments.size or index.size or DEFAULT_SIZE)
    epoch = math.ceil(sum(index.counts("train")) / config.batch_per_core)
    return index, config, epoch, 1 + math.ceil(arguments.steps / epoch)


def _make(arguments: argparse.Namespace, folder: Path) -> rounds.Measured:
    """Pieces of scikit-learn's pictures of a temple and of a flower, 640 x 427 each, as files in folders by class, and
    as shards of these."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    from jobs.tf_images import shards

    random, photos = np.random.default_rng(0), load_sample_images()
    for number in range(arguments.pictures):
        name, pixels = ("temple", "flower")[number % 2], photos.images[number % 2]
        left, top = (int(random.integers(limit)) for limit in (640 - PHOTO[0], 427 - PHOTO[1]))
        split = "train" if number % HELD_OUT_EVERY else "test"
        to = folder / FILES / split / name / f"{number}.jpg"
        to.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[top : top + PHOTO[1], left : left + PHOTO[0]]).save(to, quality=90)
    options = shards.Options(size=arguments.size)
    shards.write(shards.read_source(str(folder / FILES)), str(folder / SHARDS), options, print)
    return {}


def _ours(arguments: argparse.Namespace, folder: Path) -> rounds.Measured:
    _, config, epoch, epochs = _decided(arguments, folder)
    steps = epoch * epochs
    options = {
        "data": config.data,
        "image_size": config.image_size,
        "dtype": arguments.dtype,
        "steps": steps,
        "log_every": LOG_EVERY,
        "eval_every": steps,
        "checkpoint_every": steps,
    }
    lines, measured = rounds.run_job("tf_images", "tensorflow", options, folder)
    lines = [line for line in lines if "images_per_s" in line and line["step"] > epoch]
    waited_s, spent_s = (sum(line[name] for line in lines) for name in ("input_wait_s", "step_s"))
    rate = rounds.rate(lines, "images_per_s")
    return {"rate": rate, "input_wait": waited_s / spent_s, "loss": lines[-1]["loss"], **measured}


def _plain(arguments: argparse.Namespace, folder: Path, *, is_cached: bool) -> rounds.Measured:
    import tensorflow as tf
    import tf_keras as keras

    from jobs.tf_images import model

    index, config, epoch, epochs = _decided(arguments, folder)
    pictures = keras.utils.image_dataset_from_directory(
        folder / FILES / "train",
        label_mode="categorical",
        color_mode="grayscale" if index.channels == 1 else "rgb",
        batch_size=config.batch_per_core,
        image_size=(config.image_size, config.image_size),
        seed=0,
    )
    move = keras.layers.RandomTranslation(config.shift, config.shift, fill_mode="constant")
    augment = keras.Sequential([move, keras.layers.RandomZoom(config.zoom, fill_mode="constant")])
    pictures = (pictures.cache() if is_cached else pictures).map(
        lambda images, labels: (augment(images, training=True), labels), tf.data.AUTOTUNE
    )
    side, classes = config.image_size or 0, len(index.labels)
    network = model.build(config, size=side, channels=index.channels, classes=classes, dtype=arguments.dtype)
    peak, steps = config.learning_rate, epoch * epochs
    warmup = round(config.warmup_share * steps)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=peak, warmup_steps=warmup
    )
    optimizer = keras.optimizers.AdamW(rate, weight_decay=config.weight_decay)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    network.compile(optimizer, keras.losses.CategoricalCrossentropy(True, config.label_smoothing))
    ends_s: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends_s.append(time.perf_counter()))
    history: Any = network.fit(
        pictures.prefetch(tf.data.AUTOTUNE), epochs=epochs, callbacks=[clock], verbose=2
    )
    pictures_trained = sum(index.counts("train")) * (epochs - 1)
    return {"rate": pictures_trained / (ends_s[-1] - ends_s[0]), "loss": history.history["loss"][-1]}


if __name__ == "__main__":
    main()
