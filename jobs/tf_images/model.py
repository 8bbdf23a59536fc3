"""The networks, and what a run leaves of one: a .keras file, a SavedModel, and TFLite where it is asked for."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras

from contracts.errors import JobFailed, RequestError, first_line
from contracts.run_directory import EXPORT, RunDirectory
from jobs.runtime.storage.bucket_files import files_of, pauses_s, retry
from jobs.runtime.tensorflow import distributed
from jobs.tf_images.config import Config

KERAS, SAVED_MODEL, TFLITE, FACTS = "model.keras", "saved_model", "model.tflite", "pictures.json"
STAGES = 4
"""Of the ConvNet."""
TOLERANCE = 1e-4
"""Of probabilities, between the model that is written and what is loaded."""


def build(config: Config, *, size: int, channels: int, classes: int, dtype: str) -> Any:
    """A model of pictures (B, size, size, channels), 0 to 255, to logits (B, classes) in float32."""
    # tf.data compares TensorFlow's own with 0, which a tensor cannot be.
    keras.utils.set_random_seed(config.seed + 1)
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if dtype == "bfloat16" else "float32")
    try:
        inputs = keras.layers.Input((size, size, channels))
        if config.model == "convnet":
            features = _convnet(inputs, config.width)
        else:
            features = _efficientnet(inputs, config.weights, size)
        features = keras.layers.GlobalAveragePooling2D()(features)
        logits = keras.layers.Dense(classes, dtype="float32", name="logits")(features)
        return keras.Model(inputs, logits)
    finally:
        keras.mixed_precision.set_global_policy(before)


def _convnet(inputs: Any, width: int) -> Any:
    """STAGES times a convolution and a norm, with half the resolution and twice the channels between them."""
    features = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    for stage in range(STAGES):
        features = keras.layers.Conv2D(width << stage, 3, padding="same", use_bias=False)(features)
        features = keras.layers.BatchNormalization(momentum=0.9)(features)
        features = keras.layers.ReLU()(features)
        if stage < STAGES - 1:
            features = keras.layers.MaxPooling2D(padding="same")(features)
    return features


def _efficientnet(inputs: Any, weights: str | None, size: int) -> Any:
    """Tan and Le 2021; it wants three channels, and 32 pixels at least."""
    if inputs.shape[-1] == 1:
        inputs = keras.layers.Concatenate()([inputs, inputs, inputs])
    if size < 32:
        raise RequestError(f"--image-size {size}: must be at least 32 for --model efficientnetv2-b0")
    try:
        network = keras.applications.EfficientNetV2B0(
            include_top=False, weights=weights, input_shape=(size, size, 3), include_preprocessing=True
        )
    except (OSError, ValueError) as error:
        raise RequestError(
            f"--weights {weights}: cannot be read as weights of EfficientNetV2-B0 without its top "
            f"({str(error).splitlines()[0]})"
        ) from None
    return network(inputs)


def copy(source: Any, target: Any) -> None:
    """Give `target`, on this host alone, the variables of a model that is shared out; all processes do so together."""
    for mine, source_variable in zip(target.variables, source.variables, strict=True):
        mine.assign(source_variable.read_value())


def export(
    directory: RunDirectory,
    model: Any,
    facts: dict[str, Any],
    examples_BHWC: np.ndarray[Any, Any],
    *,
    tflite: bool,
) -> str | None:
    """Write the model, whose probabilities of the examples are the same when it is loaded again, on the CPU.

    Returns: why there is no TFLite, where it was asked for.

    Raises:
        JobFailed: what was written does not answer as the model does.
    """
    inputs = keras.layers.Input(model.input_shape[1:], dtype=tf.uint8, name="pictures")
    with_softmax = keras.Model(
        inputs, keras.layers.Softmax(dtype="float32", name="probabilities")(model(inputs))
    )
    wanted_BK = with_softmax(examples_BHWC, training=False).numpy()
    refused = None
    with tempfile.TemporaryDirectory() as folder:
        with_softmax.save(os.path.join(folder, KERAS))
        options = tf.saved_model.SaveOptions(experimental_io_device=distributed.io_device())
        tf.saved_model.save(with_softmax, os.path.join(folder, SAVED_MODEL), options=options)
        Path(folder, FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        if tflite:
            try:
                converter = tf.lite.TFLiteConverter.from_saved_model(os.path.join(folder, SAVED_MODEL))
                Path(folder, TFLITE).write_bytes(converter.convert())
            except Exception as error:  # the converter raises many kinds; the model is there without it
                refused = first_line(error, 200)
        with tf.device("/CPU:0"):
            for name, found_BK in _answers(folder, examples_BHWC).items():
                furthest = float(np.abs(found_BK - wanted_BK).max())
                if not furthest <= TOLERANCE:
                    raise JobFailed(
                        f"{EXPORT}/{name}: answers otherwise than the model that it was written from, by "
                        f"{furthest:.2g}; the checkpoints are whole"
                    )
        to = directory.path(EXPORT)
        retry(lambda: files_of(to).put_folder(folder, to), what=EXPORT, pauses_s=pauses_s(directory))
    return refused


def _answers(folder: str, examples_BHWC: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What each of the files answers, loaded as others would."""
    loaded = keras.models.load_model(os.path.join(folder, KERAS), compile=False)
    served = tf.saved_model.load(os.path.join(folder, SAVED_MODEL)).signatures["serving_default"]
    return {
        KERAS: loaded(examples_BHWC, training=False).numpy(),
        SAVED_MODEL: next(iter(served(tf.constant(examples_BHWC)).values())).numpy(),
    }
