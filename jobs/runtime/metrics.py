"""What a run measures: metrics.jsonl for programs, TensorBoard event files for people. Written by rank 0."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

from contracts.process import ProcessEnvironment
from contracts.run_directory import METRICS, TENSORBOARD, RunDirectory
from jobs.runtime.bucket_files import files_of
from jobs.runtime.preemption import watch

BUCKET_PERIOD_S = 30.0
"""An object in a bucket cannot be appended to, so there the file is put anew, at most this often."""


class Metrics:
    """The metrics of one attempt. Lines after `resumed_step`, of steps that will be taken again, are dropped.

    Raises (on any call):
        OSError: the disk is full, or the run directory cannot be written.
    """

    def __init__(self, directory: RunDirectory, resumed_step: int) -> None:
        self._directory = directory
        before = (
            directory.read_metrics() if resumed_step else []
        )  # an evaluation before step 1 is made again too
        kept = [line for line in before if line.get("step", 0) <= resumed_step]
        self._lines = [json.dumps(line) + "\n" for line in kept]
        directory.write_text(METRICS, "".join(self._lines))
        self._put_s = time.monotonic()
        self._is_closed = False
        self._events = _EventFile(directory, resumed_step)
        watch.on_leaving(self.flush)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line: `step`, `values` and the time. A value that is not finite is written as null."""
        watch.about_to_record()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, **finite, "time": round(time.time(), 3)}) + "\n"
        if self._directory.is_remote:
            self._lines.append(line)
            if time.monotonic() - self._put_s > BUCKET_PERIOD_S:
                self.flush()
        else:
            with open(self._directory.path(METRICS), "a", encoding="utf-8") as file:
                file.write(line)
        self._events.write(step, values)

    def flush(self) -> None:
        if self._is_closed:
            return
        if self._directory.is_remote:
            self._directory.write_text(METRICS, "".join(self._lines))
            self._put_s = time.monotonic()
        self._events.flush()

    def close(self) -> None:
        self.flush()
        self._is_closed = True
        self._events.close()


@contextlib.contextmanager
def recording(
    directory: RunDirectory, environment: ProcessEnvironment, resumed_step: int
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """`record(step, values)`, which every rank may call and rank 0 carries out; complete however the loop is left."""
    if not environment.is_first:
        yield lambda _step, _values: None
        return
    metrics = Metrics(directory, resumed_step)
    try:
        yield metrics.write
    finally:
        metrics.close()


class _EventFile:
    """TensorBoard's own writer; a resumed attempt tells TensorBoard to forget the steps it will take again.

    It appends, which a bucket cannot: for one the file grows on this host's disk and is put anew at each flush.
    """

    def __init__(self, directory: RunDirectory, resumed_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_type = Event
        self._directory = directory
        self._here = tempfile.mkdtemp() if directory.is_remote else directory.path(TENSORBOARD)
        os.makedirs(self._here, exist_ok=True)
        self._writer = EventFileWriter(self._here)
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(
            self._event_type(wall_time=time.time(), step=step, summary=Summary(value=scalars))
        )

    def flush(self) -> None:
        self._writer.flush()
        if self._directory.is_remote:
            for name in os.listdir(self._here):
                to = self._directory.path(f"{TENSORBOARD}/{name}")
                files_of(to).put_file(os.path.join(self._here, name), to)

    def close(self) -> None:
        self.flush()
        self._writer.close()
        if self._directory.is_remote:
            shutil.rmtree(self._here, ignore_errors=True)
