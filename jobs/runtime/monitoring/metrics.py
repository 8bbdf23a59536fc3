"""The measurements of a run: metrics.jsonl for programs and TensorBoard event files for people, both written by rank 0;
its rates; and where an attempt's time goes.

Every second of this process belongs to one part, and the parts add up to all of it:

    start        joining the group, reading the data, and whatever else comes before the first step
    restore      reading a checkpoint
    compile      compiling, with the first step
    compute      the loop of steps, but for what follows: handing steps to the devices and waiting for their results
    input_wait   making a batch while the devices had nothing to do
    evaluation   evaluations, with what the first one compiles
    checkpoint   the host held up by a checkpoint; most of it is written while steps are computed
    logging      writing metrics
    profile      writing a trace
    finish       what comes after the last step: the export, a last look
    command      a command of the user's own, until its first line of metrics with a step; what follows is compute

Times are the host's. A batch that is made while the devices still compute is part of compute. Rates count the time of
steps only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from contracts import run_records
from contracts.run_directory import METRICS, TENSORBOARD, RunDirectory
from jobs.runtime.preemption import watch
from jobs.runtime.storage.bucket_files import files_of

BUCKET_PERIOD_S = 30.0
"""An object in a bucket cannot be appended to, so the whole file is written at most this often."""


class Metrics:
    """The metrics of one attempt. Lines after `resumed_step`, whose steps will be taken again, are dropped; an
    evaluation after it is not written twice.

    Raises (on any call):
        OSError: the disk is full, or the run directory cannot be written.
        Superseded: a newer attempt has begun.
    """

    def __init__(self, directory: RunDirectory, resumed_step: int) -> None:
        self._directory = directory
        # An evaluation before step 1 is made again too.
        before = (directory.read_text(METRICS) or "").split("\n") if resumed_step else []
        measured = [(line, run_records.metrics([line.encode()])) for line in before]
        records = [
            (line, fields[0])
            for line, fields in measured
            if fields and fields[0].get("step", 0) <= resumed_step
        ]
        self._lines = [line + "\n" for line, _ in records]
        self._resumed_step = resumed_step
        self._on_record = {
            name for _, fields in records if fields.get("step") == resumed_step for name in fields
        }
        directory.write_text(METRICS, "".join(self._lines))
        self._put_s = time.monotonic()
        self._is_closed = False
        self._events = _EventFile(directory, resumed_step)
        watch.on_leaving(self.flush)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line: `step`, `values` and the time. A value that is not finite is written as null."""
        if step == self._resumed_step and values.keys() <= self._on_record:
            return
        watch.about_to_record()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, **finite, "time": round(time.time(), 3)}) + "\n"
        if self._directory.is_remote:
            self._lines.append(line)
            if time.monotonic() - self._put_s > BUCKET_PERIOD_S:
                self.flush()
        else:
            with open(self._directory.path(METRICS), "a", encoding="utf-8") as file:
                self._directory.require_newest()  # in this order: see contracts.fencing
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


class _EventFile:
    """TensorBoard's own writer; a resumed attempt tells TensorBoard to forget the steps it will take again. For a
    bucket, which cannot append, the file grows on this host's disk and is uploaded at each flush."""

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


Part = Literal[
    "start", "restore", "compile", "compute", "input_wait", "evaluation", "checkpoint", "logging", "profile", "finish",
    "command",
]  # fmt: skip

STEPPING: tuple[Part, ...] = ("compute", "input_wait", "logging")
"""Parts of the time that a step takes; the others are no step's."""


class TimeSplit:
    """Begins with the part "start". Of parts within parts the inner one counts. One thread enters parts; others may
    read `seconds`, `wall_s` and `open_part`.

    clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_s = self._since_s = clock()
        self._open: list[Part] = ["start"]
        self._spent_s: dict[Part, float] = {}
        self._counting = threading.Lock()

    def enter(self, part: Part) -> None:
        """Count to `part`, from now on, what is in no other part."""
        self._count()
        self._open[0] = part

    @contextlib.contextmanager
    def part(self, part: Part, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Count what happens inside to `part`, or to the part around it where `unless` is true at its end."""
        self._count()
        self._spent_s.setdefault(part, 0.0)
        around = self._open[-1]
        self._open.append(part)
        try:
            yield
        finally:
            self._count(around if unless() else part)
            self._open.pop()

    def has(self, part: Part) -> bool:
        """Whether there was such a part so far, however short."""
        return part in self._spent_s

    def move(self, seconds: float, part: Part) -> None:
        """Count seconds of the open part to another one."""
        self._count()
        with self._counting:
            self._spent_s[self._open[-1]] -= seconds
            self._spent_s[part] = self._spent_s.get(part, 0.0) + seconds

    def spent_s(self, *parts: Part) -> float:
        """Seconds of these parts so far."""
        self._count()
        return sum(self._spent_s.get(part, 0.0) for part in parts)

    def seconds(self) -> dict[Part, float]:
        """Seconds of every part that there was, in the order in which they began."""
        with self._counting:
            spent_s, part = dict(self._spent_s), self._open[-1]
            spent_s[part] = spent_s.get(part, 0.0) + self._clock() - self._since_s
        return {part: round(part_s, 3) for part, part_s in spent_s.items()}

    def wall_s(self) -> float:
        """All seconds since the beginning."""
        return self._clock() - self._began_s

    @property
    def open_part(self) -> Part:
        """The part that counts now."""
        return self._open[-1]

    def _count(self, part: Part | None = None) -> None:
        """Count what has passed since the last count to `part`; None: to the part which is open."""
        with self._counting:
            now_s = self._clock()
            part = part or self._open[-1]
            self._spent_s[part] = self._spent_s.get(part, 0.0) + now_s - self._since_s
            self._since_s = now_s


class Rates:
    """Counts steps and the seconds of stepping; the first step of an attempt, which compiles, is not counted.

    Args:
        time: where the seconds come from; `start` enters its part "compute".
        name: of the rate in the metrics, as "tokens_per_s".
        per_step: number of units in a step, over all hosts.
        flops_per_step: of the model, over all hosts; None: unknown.
        peak_flops_per_s: of all devices together; None: unknown, and there is no mfu.
    """

    def __init__(
        self,
        time: TimeSplit,
        *,
        name: str,
        per_step: int,
        flops_per_step: int | None = None,
        peak_flops_per_s: float | None = None,
    ) -> None:
        self._time, self.name, self._per_step = time, name, per_step
        self._flops_per_step, self._peak_flops_per_s = flops_per_step, peak_flops_per_s
        self._started = False
        self.steps, self._total_steps, self._total_s = 0, 0, 0.0
        """steps: counted since the last `take`."""
        self._taken_s, self._taken_wait_s = 0.0, 0.0

    def start(self) -> None:
        """Begin to count steps and their time; called after the first step."""
        self._time.enter("compute")
        self._started = True
        self._take_seconds()

    def step_done(self) -> None:
        if self._started:
            self.steps += 1

    @contextlib.contextmanager
    def input(self, busy: Callable[[], bool]) -> Iterator[None]:
        """What happens inside makes a batch. It counts as waiting unless the devices are `busy` to its end, so
        input_wait_s is at most too high."""
        if not self._started:
            yield
            return
        with self._time.part("input_wait", unless=busy):
            yield

    def take(self) -> dict[str, float]:
        """The rate, step_s, and where they are known input_wait_s (per step) and mfu (0 to 1) since the last call.

        Empty where no step was counted. mfu: model FLOPs utilisation, Chowdhery et al. 2022, appendix B.
        """
        if not self.steps:
            return {}
        steps, (seconds, input_wait_s) = self.steps, self._take_seconds()
        if seconds == 0:
            return {}
        self.steps = 0
        self._total_steps, self._total_s = self._total_steps + steps, self._total_s + seconds
        taken = {
            self.name: round(steps * self._per_step / seconds, 1),
            "step_s": round(seconds / steps, 6),
        }
        if self._time.has("input_wait"):
            taken["input_wait_s"] = round(input_wait_s / steps, 6)
        if self._peak_flops_per_s is not None and self._flops_per_step is not None:
            taken["mfu"] = round(steps * self._flops_per_step / seconds / self._peak_flops_per_s, 4)
        return taken

    def overall(self) -> float | None:
        """The rate over all that was taken; None where nothing was."""
        return round(self._total_steps * self._per_step / self._total_s, 1) if self._total_s else None

    def _take_seconds(self) -> tuple[float, float]:
        """Seconds of stepping, and those of them that waited for input, since the last call."""
        spent_s, wait_s = self._time.spent_s(*STEPPING), self._time.spent_s("input_wait")
        since = spent_s - self._taken_s, wait_s - self._taken_wait_s
        self._taken_s, self._taken_wait_s = spent_s, wait_s
        return since
