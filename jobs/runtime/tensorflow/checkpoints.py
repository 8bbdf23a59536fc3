"""Checkpoints of a run in TensorFlow: what `tf.train.Checkpoint` writes, with notes beside it; complete or absent.

    checkpoints/<step>/state.index, state.data-00000-of-00001   for `tf.train.Checkpoint.read("…/state")`
    checkpoints/<step>/notes.json                               what else a resumed run has to know

The state is whole in each checkpoint: a run may go on with another number of processes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tensorflow as tf

from contracts.atomic import beside_name, remove
from contracts.errors import RequestError
from contracts.run_directory import CHECKPOINTS, COMMITTED, RunDirectory
from jobs.runtime.bucket_files import files_of, pauses_s, retry
from jobs.runtime.preemption import Preempted, watch
from jobs.runtime.tensorflow import distributed
from jobs.runtime.torn_checkpoints import none_readable, put_aside

STATE = "state"
NOTES = "notes.json"


class Checkpoints:
    """The checkpoints of one run: the last `keep_last`, and the one that `best` names. Rank 0 writes; all processes
    make the same calls.

    objects: what is kept, by name: a model, an optimizer, a dataset's iterator. All their variables are there already
    (an optimizer's after `build`).
    """

    def __init__(self, directory: RunDirectory, objects: Mapping[str, Any], *, keep_last: int) -> None:
        self._directory, self._keep_last = directory, keep_last
        self._objects = dict(objects)
        self._state = tf.train.Checkpoint(**self._objects)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Future[None] | None = None
        self.best: int | None = None
        """The step whose checkpoint is kept whatever comes after it."""

    def save(self, step: int, notes: Mapping[str, Any]) -> None:
        """Write the state after `step`, and begin to bring it to the bucket where there is one; a step that is already
        there is left as it is.

        notes: of what JSON can hold.

        Raises:
            Preempted: all processes are to leave here, and the checkpoint is complete.
            OSError: it cannot be written, or an earlier one could not be brought to the bucket.
        """
        watch.about_to_save(step)
        self.wait()
        if distributed.everywhere(step not in self._directory.checkpoint_steps()):
            self._write(step, notes)
        if watch.save_begun(step, self.wait):
            self.wait()
            raise Preempted(step)

    def wait(self) -> None:
        """Wait until what was begun is written.

        Raises:
            OSError: it could not be; a bucket's library has kinds of its own too.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def restore_latest(self) -> tuple[int, dict[str, Any]] | None:
        """Give the objects the newest state that can be read; its step and notes, or None where there is none.

        Checkpoints that cannot be read are said, put aside under checkpoints-torn/ and passed over for the one before
        them, by all processes alike.

        Raises:
            RequestError: there are checkpoints and none can be read; they are left where they are.
        """
        torn: dict[int, str] = {}
        for step in reversed(self._directory.checkpoint_steps()):
            notes, reason = self._read(step, self._state)
            if distributed.everywhere(reason is None):
                put_aside(self._directory, torn, step, moves=distributed.rank() == 0)
                watch.restored(step)
                return step, notes
            torn[step] = reason or "another host could not read it"
        if torn:
            raise none_readable(torn)
        return None

    def restore_only(self, name: str, step: int) -> None:
        """Give one of the objects, as the model, its state of one checkpoint, and leave the others as they are.

        Raises:
            RequestError: it cannot be read.
        """
        self.wait()
        distributed.everywhere(True)  # rank 0 has written it
        _, reason = self._read(step, tf.train.Checkpoint(**{name: self._objects[name]}), is_all=False)
        if not distributed.everywhere(reason is None):
            raise RequestError(f"checkpoint {step} cannot be read: {reason or 'by another host'}")

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _write(self, step: int, notes: Mapping[str, Any]) -> None:
        """Write in every process, as a variable that differs between them is averaged when it is read; rank 0's is
        kept."""
        is_kept = distributed.rank() == 0 and not self._directory.is_remote
        beside = (
            self._directory.path(f"{CHECKPOINTS}/{beside_name(str(step))}") if is_kept else tempfile.mkdtemp()
        )
        try:
            os.makedirs(beside, exist_ok=True)
            options = tf.train.CheckpointOptions(experimental_io_device=distributed.io_device())
            try:
                self._state.write(os.path.join(beside, STATE), options)
            except tf.errors.ResourceExhaustedError as error:
                raise OSError(f"checkpoint {step}: {error.message}") from None
            Path(beside, NOTES).write_text(json.dumps(notes))
        except BaseException:
            remove(beside)
            raise
        if distributed.rank() == 0:
            self._begun = self._writer.submit(self._place, step, beside)
        else:
            remove(beside)

    def _place(self, step: int, beside: str) -> None:
        """Give what lies `beside` the name of a checkpoint, and remove older ones."""
        folder = self._directory.path(f"{CHECKPOINTS}/{step}")
        if self._directory.is_remote:
            put = lambda: files_of(folder).put_folder(beside, folder)  # noqa: E731
            try:
                retry(put, what=f"checkpoint {step}", pauses_s=pauses_s(self._directory))
            finally:
                remove(beside)
            self._directory.write_text(f"{CHECKPOINTS}/{step}/{COMMITTED}", "")
        else:
            os.replace(beside, folder)
        kept = self._directory.checkpoint_steps()
        for old in kept[: -self._keep_last]:
            if old != self.best:
                self._remove(old)

    def _remove(self, step: int) -> None:
        name = f"{CHECKPOINTS}/{step}"
        if self._directory.is_remote:
            # The sign that it is whole goes first.
            for each in sorted(self._directory.list(name), key=lambda each: each != COMMITTED):
                self._directory.remove(f"{name}/{each}")
        else:
            hidden = self._directory.path(f"{CHECKPOINTS}/{beside_name(str(step))}")
            os.replace(self._directory.path(name), hidden)
            remove(hidden)

    def _read(self, step: int, into: Any, *, is_all: bool = True) -> tuple[dict[str, Any], str | None]:
        """The notes of a step, once its state is `into`, or why it cannot be read. is_all: it has no other state."""
        folder = self._directory.path(f"{CHECKPOINTS}/{step}")
        try:
            with tempfile.TemporaryDirectory() as here:
                if self._directory.is_remote:
                    names = [
                        name for name in self._directory.list(f"{CHECKPOINTS}/{step}") if name != COMMITTED
                    ]
                    for name, data in zip(
                        names, files_of(folder).read([f"{folder}/{name}" for name in names]), strict=True
                    ):
                        Path(here, name).write_bytes(data or b"")
                    folder = here
                notes: dict[str, Any] = json.loads(Path(folder, NOTES).read_text())
                prefix = os.path.join(folder, STATE)
                tensors = tf.train.load_checkpoint(prefix)
                for name in tensors.get_variable_to_shape_map():
                    tensors.get_tensor(name)  # compares its checksum, before anything is changed
                options = tf.train.CheckpointOptions(experimental_io_device=distributed.io_device())
                status = into.read(prefix, options)
                (status.assert_consumed if is_all else status.assert_existing_objects_matched)()
        except Exception as error:  # TensorFlow raises many kinds for a torn file; all are reported
            return {}, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        return notes, None
