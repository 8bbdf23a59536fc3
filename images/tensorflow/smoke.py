"""What only TensorFlow has to prove: its own optimizer and checkpoints, tf-keras, text operations, transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NAME = "tensorflow"
MODULES = (
    "tensorflow", "tf_keras", "tensorflow_text", "transformers", "scipy.stats", "sklearn.datasets", "PIL.Image",
    "safetensors.tensorflow",
)  # fmt: skip
# Off a TPU host libtpu asks for a metadata server that is not there, and listing the devices waits for it.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {"cpu": {"TPU_SKIP_MDS_QUERY": "1"}, "tpu": {}}
BATCH, INPUTS, WIDTH = 32, 16, 64
CHECKPOINT = "state"


def devices() -> tuple[str, str]:
    import tensorflow as tf

    # Listing names a TPU_SYSTEM where the TPU's library is, also where there is no TPU: only its cores count.
    cores = tf.config.list_logical_devices("TPU") or _initialized()
    if cores:
        return "tpu", f"{len(cores)} TPU cores"
    return "cpu", f"{len(tf.config.list_logical_devices('CPU'))} × CPU"


def _initialized() -> list[Any]:
    """The cores of the TPU of this machine; none where there is none."""
    import glob

    import tensorflow as tf

    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        return []
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return list(tf.config.list_logical_devices("TPU"))


@functools.cache
def _strategy() -> Any:
    import tensorflow as tf

    return tf.distribute.TPUStrategy() if _initialized() else tf.distribute.OneDeviceStrategy("/cpu:0")


def start() -> Any:
    import tensorflow as tf
    import tf_keras

    tf_keras.utils.set_random_seed(0)
    with _strategy().scope():
        model = tf_keras.Sequential(
            [tf_keras.layers.Dense(WIDTH, activation="gelu"), tf_keras.layers.Dense(1)]
        )
        model.build((None, INPUTS))
        optimizer = tf_keras.optimizers.AdamW(1e-2)
        optimizer.build(model.trainable_variables)
    return tf.train.Checkpoint(model=model, optimizer=optimizer)


def step(state: Any, number: int) -> tuple[Any, float]:
    import tensorflow as tf

    update = _update(state)
    return state, float(update(tf.constant(number)))


@functools.cache
def _update(state: Any) -> Callable[..., Any]:
    import tensorflow as tf

    strategy = _strategy()

    def replica(number: Any) -> Any:
        x_BI = tf.random.stateless_normal((BATCH, INPUTS), seed=[0, number])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((state.model(x_BI)[:, 0] - tf.reduce_sum(x_BI, axis=1)) ** 2)
        variables = state.model.trainable_variables
        state.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    def update(number: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica, args=(number,)), axis=None)

    compiled: Callable[..., Any] = tf.function(update)
    return compiled


def save(state: Any, folder: Path) -> None:
    state.write(str(folder / CHECKPOINT))


def load(folder: Path) -> Any:
    state = start()
    state.read(str(folder / CHECKPOINT)).assert_consumed()
    return state


def listen() -> Callable[[int], bool]:
    """TensorFlow leaves SIGTERM to Python."""
    import signal

    signals_received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals_received.append(number))
    return lambda _: bool(signals_received)


def _keras_fit() -> str:
    import numpy as np
    import tensorflow as tf

    keras = tf.keras.layers.Layer.__module__
    if not keras.startswith("tf_keras."):
        raise ValueError(f"tf.keras is {keras}, which is Keras 3; TF_USE_LEGACY_KERAS=1 makes it tf-keras")
    with _strategy().scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse", steps_per_execution=4)
    x_BI = np.random.default_rng(0).normal(size=(256, INPUTS)).astype("float32")
    losses = model.fit(x_BI, x_BI.sum(axis=1), batch_size=BATCH, epochs=2, verbose=0).history["loss"]
    if losses[1] >= losses[0]:
        raise ValueError(f"model.fit: the loss of two epochs is {losses}; it has to fall")
    return f"tf.keras is tf-keras, fit with 4 steps an execution, loss {losses[0]:.3g} → {losses[1]:.3g}"


def _text() -> str:
    import tensorflow_text as text

    tokens = text.UnicodeScriptTokenizer().tokenize(["no TPU, no fun"]).to_list()[0]
    if len(tokens) != 5:
        raise ValueError(f"tensorflow_text makes {tokens} of 'no TPU, no fun'; that is 5 words and marks")
    return f"{len(tokens)} words by an operation of its own library"


def _transformers() -> str:
    """A model of transformers' own code for TensorFlow trains by a step's worth of gradient."""
    import tensorflow as tf
    from transformers import BertConfig, TFBertForMaskedLM

    small = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = TFBertForMaskedLM(small)
    tokens_BS = tf.constant([[1, 2, 3, 4]])
    with tf.GradientTape() as tape:
        loss = model(input_ids=tokens_BS, labels=tokens_BS).loss
    gradients = tape.gradient(loss, model.trainable_variables)
    reached = sum(gradient is not None for gradient in gradients)
    return f"TFBertForMaskedLM, loss {float(tf.reduce_mean(loss)):.3g}, gradients of {reached} variables"


CHECKS: Mapping[str, Callable[[], str]] = {
    "keras fit": _keras_fit,
    "text": _text,
    "transformers": _transformers,
}
