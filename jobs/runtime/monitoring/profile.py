"""Traces some steps into the run's directory, by the framework's own profiler: those of `--profile`, and those that
are requested while the run works (`fab profile`).

What lies under profile/ `jobs.runtime.monitoring.tracers` says, which has the profilers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from contracts import atomic
from contracts.host_interface import PROFILE_REQUEST, profile_answer
from contracts.run_directory import PROFILE as PROFILE
from jobs.runtime.option_rules import Steps as Steps
from jobs.runtime.option_rules import read_steps as read_steps
from jobs.runtime.storage.bucket_files import files_of, pauses_s, retry

if TYPE_CHECKING:
    from contracts.process_environment import ProcessEnvironment
    from jobs.runtime.process import Run

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
        self._requests = _Requests(run.environment)
        self._request_id: str | None = None
        """Of the request that the wanted steps are from; None: they are those of --profile."""
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
        self._look(steps[0])
        requested, tracer = self._wanted, self._tracer
        if requested is None or tracer is None or steps[-1] < requested.first or requested.last < steps[0]:
            yield
            return
        if self._traced is None and not self._start(tracer):
            yield
            return
        with tracer.step(steps[-1]):
            yield
        self._traced = Steps(first=requested.first, last=min(steps[-1], requested.last))
        if steps[-1] >= requested.last:
            self._settle()
            self.close()

    def close(self) -> None:
        """End the trace, if any, and write it; of fewer steps if the run ends early.

        Raises:
            OSError: that of --profile cannot be written; a bucket's library has kinds of its own too.
        """
        folder, traced, request_id = self._folder, self._traced, self._request_id
        if folder is None or traced is None or self._tracer is None:
            return
        self._folder = self._traced = self._wanted = self._request_id = None
        with self._run.time.part("profile"):
            # It may take longer than any step, and a silent process counts as hung.
            self._run.heartbeat.say("writing the trace")
            try:
                names = self._write(self._tracer, folder, traced)
            except Exception as error:  # a profiler and a bucket have kinds of their own
                if request_id is None:
                    raise
                self._refuse(request_id, f"the trace is not written: {error}")
                return
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                self._run.heartbeat.say(None)
        self._run.say(f"steps {traced} are traced in {self._run.directory.path(PROFILE)}")
        if request_id is not None:
            self._requests.answer(request_id, steps=str(traced), files=names)

    def _write(self, tracer: Tracer, folder: str, traced: Steps) -> list[str]:
        """End the trace and write its files; return their names in the run directory."""
        directory, names = self._run.directory, []
        tracer.stop()
        self._run.heartbeat.tick()
        for file, name in tracer.files(Path(folder), traced, self._run.environment.process_id):
            to = directory.path(name)
            upload = functools.partial(files_of(to).put_file, str(file), to)
            retry(upload, what=name, pauses_s=pauses_s(directory))
            self._run.heartbeat.tick()
            names.append(name)
        return names

    def _start(self, tracer: Tracer) -> bool:
        """Begin the trace; whether it has begun, which that of --profile has to."""
        self._settle()
        with self._run.time.part("profile"):
            self._folder = folder = tempfile.mkdtemp(prefix="profile-")
            try:
                tracer.start(folder)
            except (
                Exception
            ) as error:  # each framework has kinds of its own, as where a profiler runs already
                shutil.rmtree(folder, ignore_errors=True)
                if self._request_id is None:
                    raise
                request_id, self._folder, self._wanted = self._request_id, None, None
                self._refuse(request_id, f"the profiler does not start: {error}")
                return False
        return True

    def _look(self, next_step: int) -> None:
        """Take a new request, or notice that one was withdrawn."""
        if not self._requests.have_changed():
            return
        if self._request_id is not None and self._folder is None:
            self._wanted = self._request_id = None
        request = self._requests.read()
        if request is None:
            return
        request_id = request["id"]
        if self._tracer is None:
            self._refuse(request_id, "this job has no profiler")
        elif self._wanted is not None and next_step <= self._wanted.last:
            self._refuse(request_id, f"the steps {self._wanted} are to be traced first")
        else:
            first = max(request["first"], next_step)
            self._wanted = Steps(first=first, last=first + request["steps"] - 1)
            self._request_id = request_id

    def _refuse(self, request_id: str, problem: str) -> None:
        self._run.say(f"fab profile: {problem}")
        self._requests.answer(request_id, problem=problem)


class _Requests:
    """Where `fab profile` leaves its requests for a process (`host.agent.attempt_process.profile`), and its answers."""

    def __init__(self, environment: ProcessEnvironment) -> None:
        self._control_dir, self._rank = environment.control_dir, environment.local_rank
        self._ranks = environment.ranks_per_host
        self._seen_ns: int | None = None

    def have_changed(self) -> bool:
        """Whether there is another request than at the last call, or none any more; asked before every step."""
        if self._control_dir is None:
            return False
        try:
            changed_ns = os.stat(os.path.join(self._control_dir, PROFILE_REQUEST)).st_mtime_ns
        except OSError:
            changed_ns = None
        has_changed, self._seen_ns = changed_ns != self._seen_ns, changed_ns
        return has_changed

    def read(self) -> dict[str, Any] | None:
        assert self._control_dir is not None
        try:
            with open(os.path.join(self._control_dir, PROFILE_REQUEST), encoding="utf-8") as file:
                return dict(json.load(file))
        except FileNotFoundError:
            return None

    def answer(self, request_id: str, **values: Any) -> None:
        assert self._control_dir is not None
        answer = {"id": request_id, "ranks": self._ranks, **values}
        try:
            atomic.write_json(os.path.join(self._control_dir, profile_answer(self._rank)), answer)
        except OSError as error:  # the disk is full, which does not end a run
            print(f"fab profile: its answer is not written: {error}", flush=True)
