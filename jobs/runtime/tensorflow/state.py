"""The state of a training in TensorFlow, as `tf.train.Checkpoint` writes it.

    checkpoints/<step>/state.index, state.data-00000-of-00001   for `tf.train.Checkpoint.read("…/state")`

It is whole in each checkpoint: a run may go on with another number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from jobs.runtime.tensorflow import distributed

STATE = "state"
MODEL = "model"


class State:
    """What is kept, by name: a model (MODEL), an optimizer, a dataset's iterator. See jobs.runtime.checkpoints.State.

    All their variables are there already (an optimizer's after `build`).
    """

    def __init__(self, objects: Mapping[str, Any], prepare: Callable[[], None] = lambda: None) -> None:
        """prepare: called before the state is written."""
        self._prepare = prepare
        self._model = tf.train.Checkpoint(**{MODEL: objects[MODEL]})
        self._all = tf.train.Checkpoint(**objects)

    def write(self, folder: str) -> Callable[[], None]:
        """Write at once, in every process: a variable that differs between them is averaged when it is read.

        Raises:
            OSError: the disk is full.
        """
        self._prepare()
        try:
            self._all.write(os.path.join(folder, STATE), _options())
        except tf.errors.ResourceExhaustedError as error:
            raise OSError(error.message) from None
        return lambda: None

    def read(self, folder: str, *, model_only: bool) -> Callable[[], None]:
        """Restore at once, if all checksums are right. Raises tf.errors.OpError, ValueError or AssertionError."""
        prefix = os.path.join(folder, STATE)
        tensors = tf.train.load_checkpoint(prefix)
        for name in tensors.get_variable_to_shape_map():
            tensors.get_tensor(name)  # compares its checksum, before anything is changed
        if model_only:
            self._model.read(prefix, _options()).assert_existing_objects_matched()
        else:
            self._all.read(prefix, _options()).assert_consumed()
        return lambda: None


def _options() -> Any:
    return tf.train.CheckpointOptions(experimental_io_device=distributed.io_device())
