"""Checkpoints of a run, whatever its framework writes: complete or absent, the last few kept and the best one.

    checkpoints/<step>/notes.json    what a resumed run has to know besides the state
    checkpoints/<step>/…             the state, in files of the framework's own

JAX's are Orbax's (jobs/runtime/jax/checkpoints.py); `restore_newest` serves them too.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from contracts.atomic import beside_name, remove
from contracts.errors import RequestError, first_line
from contracts.run_directory import CHECKPOINT_NOTES, CHECKPOINTS, CHECKSUMS, COMMITTED, unfinished
from jobs.runtime.group import Membership
from jobs.runtime.preemption import Preempted, watch
from jobs.runtime.process import Run
from jobs.runtime.storage.bucket_files import BucketFiles, files_of, pauses_s, retry

TORN = "checkpoints-torn"


class State(Protocol):
    """What is kept, as files. All processes make the same calls."""

    def write(self, folder: str) -> Callable[[], None]:
        """Copy the state; returns what writes the copy into `folder`, which rank 0 calls while training continues."""
        ...

    def read(self, folder: str, *, model_only: bool) -> Callable[[], None]:
        """Read what `write` wrote, whole; returns what gives it to the model and, but for `model_only`, the optimizer.

        Raises anything where the files are torn, or of another state.
        """
        ...


class Reading(NamedTuple):
    """A checkpoint that was read. restore: gives it to the state. problem: why it cannot be read, if it cannot."""

    restore: Callable[[], None]
    notes: dict[str, Any]
    problem: str | None = None


class Checkpoints:
    """The checkpoints of one run: the last `keep_last`, and the one that `best` names. Rank 0 writes; all processes
    make the same calls."""

    def __init__(self, run: Run, state: State, group: Membership, *, keep_last: int) -> None:
        self._run, self._directory = run, run.directory
        self._state, self._group, self._keep_last = state, group, keep_last
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self.best: int | None = None
        """The step whose checkpoint is kept whatever comes after it."""

    def save(self, step: int, notes: Mapping[str, Any]) -> None:
        """Begin to write the state after `step`, unless there is a checkpoint of it. notes: JSON values.

        Raises:
            Preempted: all processes are to leave here, and the checkpoint is complete.
            OSError: this one or an earlier one could not be written.
        """
        watch.about_to_save(step)
        self.wait()
        if self._group.all_processes(step not in self._directory.checkpoint_steps()):
            temporary = self._temporary(step)
            try:
                write = self._state.write(temporary)
            except BaseException:
                remove(temporary)
                raise
            if self._group.rank() == 0:
                self._pending = self._writer.submit(self._write, step, temporary, write, dict(notes))
            else:
                remove(temporary)
        if watch.save_begun(step, self.wait):
            self.wait()
            raise Preempted(step)

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            OSError: it could not be; a bucket's library has kinds of its own too.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore_latest(self) -> tuple[int, dict[str, Any]] | None:
        """See `restore_newest`."""
        return restore_newest(self._run, self._group, self._read)

    def restore_model(self, step: int) -> None:
        """Restore the model as it was after `step`, and nothing else.

        Raises:
            RequestError: that checkpoint cannot be read.
        """
        self.wait()
        self._group.all_processes(True)  # rank 0 has written it
        restore_step(self._group, step, self._read(step, model_only=True))

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _temporary(self, step: int) -> str:
        """A new folder to write into. A rename makes rank 0's a checkpoint; others are removed."""
        if self._directory.is_remote or self._group.rank() > 0:
            return tempfile.mkdtemp()
        temporary = self._directory.path(self._unfinished(step))
        os.makedirs(temporary)
        return temporary

    def _unfinished(self, step: int) -> str:
        return unfinished(self._run.environment.attempt, str(step))

    def _write(self, step: int, temporary: str, write: Callable[[], None], notes: Mapping[str, Any]) -> None:
        name = f"{CHECKPOINTS}/{step}"
        try:
            write()
            notes_path = Path(temporary, CHECKPOINT_NOTES)
            notes_path.write_text(json.dumps({**notes, CHECKSUMS: _checksums(temporary)}), encoding="utf-8")
            for file in Path(temporary).iterdir():  # safetensors makes files that nobody else can resume from
                file.chmod(notes_path.stat().st_mode)
            if self._directory.is_remote:
                upload = lambda: self._upload(temporary, name)  # noqa: E731
                retry(upload, what=f"checkpoint {step}", pauses_s=pauses_s(self._directory))
                self._directory.write_text(f"{name}/{COMMITTED}", "")
            else:
                self._directory.commit(os.path.relpath(temporary, self._directory.url), name)
        finally:
            remove(temporary)
        for old in self._directory.checkpoint_steps()[: -self._keep_last]:
            if old != self.best:
                self._directory.require_newest()
                self._remove(old)

    def _upload(self, folder: str, name: str) -> None:
        """Put a folder of this host into the bucket, where it is no checkpoint yet. Its files come to their names by
        the bucket's server, from names of this attempt: see contracts.fencing."""
        files, to = BucketFiles(), self._directory.path(name)
        uploaded = self._directory.path(self._unfinished(int(name.rpartition("/")[2])))
        files.put_folder(folder, uploaded)
        self._directory.require_newest()
        files.remove_folder(to, COMMITTED)
        files.move_folder(uploaded, to)

    def _remove(self, step: int) -> None:
        name = f"{CHECKPOINTS}/{step}"
        if self._directory.is_remote:
            # The sign that it is whole goes first.
            for file in sorted(self._directory.list(name), key=lambda file: file != COMMITTED):
                self._directory.remove(f"{name}/{file}")
        else:
            hidden = self._directory.path(f"{CHECKPOINTS}/{beside_name(str(step))}")
            os.replace(self._directory.path(name), hidden)
            remove(hidden)

    def _read(self, step: int, *, model_only: bool = False) -> Reading:
        folder = self._directory.path(f"{CHECKPOINTS}/{step}")
        try:
            with tempfile.TemporaryDirectory() as copy:
                if self._directory.is_remote:
                    names = [
                        name for name in self._directory.list(f"{CHECKPOINTS}/{step}") if name != COMMITTED
                    ]
                    contents = files_of(folder).read([f"{folder}/{name}" for name in names])
                    for name, data in zip(names, contents, strict=True):
                        Path(copy, name).write_bytes(data or b"")
                    folder = copy
                notes: dict[str, Any] = json.loads(Path(folder, CHECKPOINT_NOTES).read_bytes())
                _compare(notes.pop(CHECKSUMS), folder)
                return Reading(self._state.read(folder, model_only=model_only), notes)
        except Exception as error:  # a torn file makes frameworks raise many kinds; all are reported
            return Reading(lambda: None, {}, first_line(error))


def restore_newest(
    run: Run,
    group: Membership,
    read: Callable[[int], Reading],
    *,
    moved: Callable[[], None] = lambda: None,
) -> tuple[int, dict[str, Any]] | None:
    """Restore the newest checkpoint that all processes can read; its step and notes, or None where there is none.

    Newer ones are put aside in TORN with a warning. A resumed run without a checkpoint is warned of too.
    moved: called when they have been put aside.

    Raises:
        RequestError: there are checkpoints and none can be read; they are left where they are.
    """
    torn: dict[int, str] = {}
    for step in reversed(run.directory.checkpoint_steps()):
        reading = read(step)
        if group.all_processes(reading.problem is None):
            if torn:
                _put_aside(run, torn, step, moves=group.rank() == 0)
                group.all_processes(True)
                moved()
            reading.restore()
            watch.restored(step)
            return step, reading.notes
        torn[step] = reading.problem or "another host could not read it"
    if torn:
        reasons = "; ".join(f"{step}: {reason}" for step, reason in torn.items())
        raise RequestError(
            f"none of the run's {len(torn)} checkpoints can be read by this code, and nothing was changed: {reasons}; "
            "resume with the code that wrote them (run.json has the commit), or start a new run"
        )
    _warn_of_a_new_beginning(run)
    return None


def restore_step(group: Membership, step: int, reading: Reading) -> None:
    """Raises RequestError: some process cannot read it."""
    if not group.all_processes(reading.problem is None):
        raise RequestError(f"checkpoint {step} cannot be read: {reading.problem or 'by another host'}")
    reading.restore()


def _put_aside(run: Run, torn: Mapping[int, str], used: int, *, moves: bool) -> None:
    for step, reason in torn.items():
        run.warn_everywhere(
            f"checkpoint {step} cannot be read ({reason}); it is put aside in {TORN}/ and {used} is used"
        )
        if moves:
            folder = run.directory.path(f"{CHECKPOINTS}/{step}")
            files_of(folder).move_folder(folder, run.directory.path(f"{TORN}/{step}-{time.time_ns()}"))


def _warn_of_a_new_beginning(run: Run) -> None:
    """Warn that a resumed run takes steps again from the first one, as there is no checkpoint."""
    if not run.environment.is_first or run.environment.attempt == 0:
        return
    steps = [step for line in run.directory.read_metrics() if isinstance(step := line.get("step"), int)]
    if steps:
        run.warn(
            f"there is no complete checkpoint in {run.directory.path(CHECKPOINTS)}: the run begins anew, and had come "
            f"to step {max(steps)}"
        )


def _checksums(folder: str) -> dict[str, int]:
    """The CRC-32 of each file in a folder, which holds no other folders."""
    checksums = {}
    for path in sorted(Path(folder).iterdir()):
        with path.open("rb") as file:
            checksum = 0
            while piece := file.read(1 << 20):
                checksum = zlib.crc32(piece, checksum)
        checksums[path.name] = checksum
    return checksums


def _compare(expected: Mapping[str, int], folder: str) -> None:
    """Raises ValueError: a file is not what was written."""
    actual = _checksums(folder)
    for name, checksum in expected.items():
        if name not in actual:
            raise ValueError(f"{name} is missing")
        if actual[name] != checksum:
            raise ValueError(f"{name} is not what was written: its checksum differs")
