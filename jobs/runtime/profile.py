"""Traces some steps into the run's directory, by the framework's own profiler.

What lies under profile/ each framework's module says (`jobs.runtime.<framework>.tracer`).
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jobs.runtime.bucket_files import files_of, pauses_s, retry
from jobs.runtime.option_rules import Steps as Steps
from jobs.runtime.option_rules import read_steps as read_steps

if TYPE_CHECKING:
    from jobs.runtime.process import Run

PROFILE = "profile"
STEP = "train"
"""What a step is called in a trace, where its number stands beside it."""


class Tracer(Protocol):
    """A framework's profiler."""

    def start(self, folder: str) -> None: ...

    def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """What happens inside is the step that the trace names so."""
        ...

    def stop(self) -> None: ...

    def files(self, folder: Path, traced: Steps, process_id: int) -> Iterator[tuple[Path, str]]:
        """The files that it has written, with their names in the run directory."""
        ...


class Profile:
    """Traces the wanted steps of one process, if any; every process makes the same calls.

    Args:
        done: the step that the attempt resumes after, or 0.
        settle: wait for steps under way: none may run when the trace begins, and all must be in it.
    """

    def __init__(
        self,
        run: Run,
        requested: Steps | None,
        tracer: Tracer | None,
        *,
        done: int,
        settle: Callable[[], None],
    ) -> None:
        self._run, self._tracer, self._settle = run, tracer, settle
        self._wanted = requested
        self._folder: str | None = None
        self._traced: Steps | None = None
        if requested is not None and done >= requested.first:
            if done >= requested.last:
                self._wanted = None
                run.say(f"--profile: step {requested.last} was taken before this attempt; nothing is traced")
            else:
                self._wanted = Steps(first=done + 1, last=requested.last)
                run.say(f"--profile: steps up to {done} were taken before this attempt; the rest is traced")

    def steps_together(self, done: int, limit: int) -> int:
        """How many of the `most` steps after `done` may be given to the devices in one call: a step that is traced has
        a call of its own."""
        if self._wanted is None or done >= self._wanted.last:
            return limit
        return max(1, min(limit, self._wanted.first - 1 - done))

    @contextlib.contextmanager
    def step(self, steps: range) -> Iterator[None]:
        """What happens inside is the host's part of these steps, which the trace names by the last one."""
        requested, tracer = self._wanted, self._tracer
        if requested is None or tracer is None or steps[-1] < requested.first or requested.last < steps[0]:
            yield
            return
        if self._traced is None:
            self._start(tracer)
        with tracer.step(steps[-1]):
            yield
        self._traced = Steps(first=requested.first, last=min(steps[-1], requested.last))
        if steps[-1] >= requested.last:
            self._settle()
            self.close()

    def close(self) -> None:
        """End the trace, if any, and write it; of fewer steps if the run ends early.

        Raises:
            OSError: it cannot be written; a bucket's library has kinds of its own too.
        """
        folder, traced, directory = self._folder, self._traced, self._run.directory
        if folder is None or traced is None or self._tracer is None:
            return
        self._folder = None
        with self._run.time.part("profile"):
            # It may take longer than any step, and a silent process counts as hung.
            self._run.heartbeat.say("writing the trace")
            try:
                self._tracer.stop()
                self._run.heartbeat.tick()
                for file, name in self._tracer.files(Path(folder), traced, self._run.environment.process_id):
                    to = directory.path(name)
                    upload = functools.partial(files_of(to).put_file, str(file), to)
                    retry(upload, what=name, pauses_s=pauses_s(directory))
                    self._run.heartbeat.tick()
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            self._run.heartbeat.say(None)
        self._run.say(f"steps {traced} are traced in {directory.path(PROFILE)}")

    def _start(self, tracer: Tracer) -> None:
        self._settle()
        with self._run.time.part("profile"):
            self._folder = tempfile.mkdtemp(prefix="profile-")
            tracer.start(self._folder)
