"""Checkpoints of a run, by Orbax: written while training goes on, complete or absent."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep
from orbax.checkpoint.path import atomicity, atomicity_defaults

from contracts.errors import first_line
from contracts.run_directory import CHECKPOINTS, UNFINISHED, RunDirectory
from jobs.runtime.checkpoints import Reading, restore_newest, restore_step
from jobs.runtime.jax import distributed
from jobs.runtime.preemption import Preempted, watch
from jobs.runtime.process import Run

STATE, NOTES = "state", "notes"
CHECKSUM = "checksum"
"""In the notes: `checksum` of the state. Orbax's files have checksums only of what says where the values lie."""


class State(Protocol):
    """What is kept: a tree of jax.Array, the same on all processes, whose values each step replaces."""

    tree: Any


@dataclasses.dataclass
class Tree:
    """A state that its training loop replaces as a whole."""

    tree: Any


class Checkpoints:
    """The checkpoints of one run: the last `keep_last` of them and the one that `best` names. Every process makes the
    same calls."""

    def __init__(self, run: Run, state: State, *, keep_last: int) -> None:
        self.best: int | None = None
        """The step whose checkpoint is kept whatever comes after it."""
        self._run, self._state = run, state
        policies = [keep.LatestN(keep_last), _Best(self)]
        self._manager = ocp.CheckpointManager(
            run.directory.path(CHECKPOINTS),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy(policies),
                # Orbax skips a step while another is being written; here every save that is asked for is made.
                enable_should_save_is_saving_in_progress_check=False,
                cleanup_tmp_directories=True,
                temporary_path_class=_unfinished_path(run.directory, run.environment.attempt),
                async_options=ocp.AsyncOptions(barrier_sync_fn=_meet),
            ),
        )

    def save(self, step: int, notes: Mapping[str, Any]) -> None:
        """Begin to write the state after `step`, unless there is a checkpoint of it.

        notes: JSON values, the same on all processes.

        Raises:
            Preempted: all processes are to leave here, and the checkpoint is complete.
            OSError, ValueError: an earlier write failed (Orbax reports it at the next call).
        """
        watch.about_to_save(step)
        if step not in self._manager.all_steps():
            tree = self._state.tree
            noted = {**notes, CHECKSUM: checksum(tree)}
            both = ocp.args.Composite(**{STATE: ocp.args.StandardSave(tree), NOTES: ocp.args.JsonSave(noted)})
            self._manager.save(step, args=both, force=True)
        if watch.save_begun(step, self.wait):
            self.wait()
            raise Preempted(step)

    def wait(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            OSError, ValueError: it could not be written.
        """
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def restore_latest(self) -> tuple[int, dict[str, Any]] | None:
        """See `restore_newest`."""
        return restore_newest(self._run, distributed, self._read, moved=self._manager.reload)

    def restore_model(self, step: int) -> None:
        """Restore the state as it was after `step`.

        Raises:
            RequestError: that checkpoint cannot be read.
        """
        self.wait()
        restore_step(distributed, step, self._read(step))

    def _read(self, step: int) -> Reading:
        abstract = jax.tree.map(ocp.tree.to_shape_dtype_struct, self._state.tree)
        state: dict[str, Any] = {STATE: ocp.args.StandardRestore(abstract)}
        try:
            noted = {NOTES: ocp.args.JsonRestore()}
            restored = self._manager.restore(step, args=ocp.args.Composite(**state, **noted))
            notes = dict(restored[NOTES])
            if notes.pop(CHECKSUM) != checksum(restored[STATE]):
                raise ValueError("its values are not those that were written: their checksum differs")
            return Reading(functools.partial(setattr, self._state, "tree", restored[STATE]), notes)
        except Exception as error:  # Orbax and TensorStore raise many kinds for a torn file; all are reported
            return Reading(lambda: None, {}, first_line(error))

    def close(self) -> None:
        self._manager.close()


def checksum(state: Any) -> int:
    """A 32-bit checksum of a tree of arrays, the same however they are shared out to devices.

    Of each value's bits, times an odd number that its place gives, the sum modulo 2³²: one value that changes, changes
    it.
    """
    total: Any = np.uint32(0)
    for array in jax.tree.leaves(state):
        total = _add_checksum(total, array)
    return int(total)


@jax.jit  # an array at a time: many have one shape, and are compiled once
def _add_checksum(total: jax.Array, array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    place, stride = jnp.uint32(0), 1
    for axis in reversed(range(bits.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return total * jnp.uint32(31) + jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def _unfinished_path(directory: RunDirectory, attempt: int) -> type[atomicity.TemporaryPathBase]:
    """Where Orbax writes a checkpoint of an attempt before it is complete, and how it becomes complete: only while no
    newer attempt has begun (contracts.fencing). Orbax raises in `wait` what is raised here.

    In a bucket Orbax writes the files under their own names, and a small one last that says that they are complete.
    """

    class Renamed(atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
        @classmethod
        def from_final(cls, final_path: epath.Path, **options: Any) -> Renamed:
            if final_path.parent.name != CHECKPOINTS:  # a part of a checkpoint
                part: Renamed = super().from_final(final_path, **options)
                return part
            folder = epath.Path(directory.path(f"{UNFINISHED}/{attempt}"))
            return cls(folder / f"{final_path.name}{atomicity.TMP_DIR_SUFFIX}", final_path, **options)

        async def finalize(self) -> None:
            if self.get_final().parent.name == CHECKPOINTS:
                directory.require_newest()
            await super().finalize()

    class Marked(atomicity.CommitFileTemporaryPath):  # type: ignore[misc]
        async def finalize(self) -> None:
            directory.require_newest()
            await super().finalize()

    usual = atomicity_defaults.get_default_temporary_path_class(epath.Path(directory.url))
    return Renamed if usual is atomicity.AtomicRenameTemporaryPath else Marked


class _Best:
    """A preservation policy: keeps the checkpoint that is named as the best one, known long after it was written."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def should_preserve(
        self,
        checkpoints: Sequence[keep.PolicyCheckpointInfo],
        *,
        context: keep.PreservationContext,  # noqa: ARG002 - Orbax gives it
    ) -> Sequence[bool]:
        return [info.step == self._checkpoints.best for info in checkpoints]


def _meet(*, key: str, timeout_ms: int) -> None:
    """Wait for the other processes at one of Orbax's barriers, unless this process's own write has failed.

    Orbax comes here from a `finally` too. A process whose disk is full would then wait for the others, which
    wait for it at another barrier, until the limit of 20 minutes: it has to say at once what went wrong.
    """
    failure = sys.exception()
    if failure is not None:
        raise failure
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)
