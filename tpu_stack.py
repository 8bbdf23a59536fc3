"""Runs from Python, as in a notebook: started, waited for, read.

    import tpu_stack

    run = tpu_stack.train("flax_mlm", "--steps", "200", name="first")
    run.wait()
    run.metrics()          # a DataFrame where pandas is there
    tpu_stack.predict(run, ["The <mask> of the list."])

Each function takes the options of its command (`fab help train`) by their names in Python: stack="dev", hosts="2".
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contracts import run_directory
from contracts.errors import RequestError
from contracts.run_records import without_retaken
from fabfile.selector import Selector
from fabfile.train_tasks import Training
from launch import launching
from launch import runs as run_files
from launch.hosts import HostError

if TYPE_CHECKING:
    from launch.targets import Target

__all__ = ["HostError", "RequestError", "Run", "predict", "run", "runs", "train"]

LOOK_PERIOD_S = 1.0


@dataclasses.dataclass
class Run:
    """A run as its directory has it; each property looks again."""

    run_id: str
    _target: Target = dataclasses.field(repr=False)

    @property
    def _run(self) -> run_files.Run:
        return run_files.find(self._target.runs, self.run_id)

    @property
    def state(self) -> str:
        """starting, running, done, failed, stopped, preempted, hung or lost. Raises HostError: no host answers."""
        return self._target.run_state(self._run)

    @property
    def record(self) -> dict[str, Any]:
        """run.json: the options, the code's hash, slice, hosts and attempts."""
        return self._run.described

    @property
    def result(self) -> dict[str, Any] | None:
        """result.json of the latest attempt; None before its end."""
        return self._run.current_result()

    @property
    def directory(self) -> str:
        """The path or URL of the run directory."""
        return self._run.directory.url

    def metrics(self) -> Any:
        """Return metrics.jsonl, one row a line, of steps that were taken again the later values.

        A pandas DataFrame where pandas is installed, else a list of dicts.
        """
        now = self._run
        lines, _ = without_retaken(now.directory.read_metrics(), len(now.described["attempts"]))
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return [dict(line) for line in lines]
        return pandas.DataFrame(lines)

    def wait(self, limit_s: float | None = None) -> str:
        """Wait until the run has ended; return its state.

        Raises:
            TimeoutError: it has not within `limit_s` seconds.
        """
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while (state := self.state) in run_directory.ACTIVE:
            if end_s is not None and time.monotonic() > end_s:
                raise TimeoutError(f"{self.run_id} is {state} after {limit_s:g} s")
            time.sleep(LOOK_PERIOD_S)
        return state

    def stop(self, grace_s: float = 120.0) -> None:
        """Save a checkpoint and stop. grace_s: for the checkpoint, before the processes are killed."""
        from console import status

        status.stop(self._target, self.run_id, grace_s=grace_s)


def train(job: str | None = None, *arguments: str, resume: str | None = None, **options: Any) -> Run:
    """Start a run and return when all its processes have joined.

    job: as `fab jobs` lists them; None: a command of your own, with workdir=FOLDER. arguments: the job's own
    options, or the command. resume: a run that is resumed. options: those of `fab train`.

    Raises:
        RequestError: the request is wrong; nothing was started.
        HostError: a host failed; all was stopped.
        launch.launching.LaunchFailed: the processes did not form a group; all was stopped.
    """
    options, place = _split(options)
    training = Training(job=job, positionals=arguments, selector=place, **options)
    request = training.request(resume=resume)
    target = training.place(request).target()
    old = run_files.find(target.runs, resume) if resume else None
    if old is not None:
        request = dataclasses.replace(request, resume=old, job=old.described["job"])
    started = launching.launch(request, target, print)
    return Run(started.run_id, target)


def run(name: str = run_files.LATEST, **place: Any) -> Run:
    """Return a run by its id, the end of that, its name, or "latest". Raises RequestError: there is none."""
    target = Selector(**place).target()
    return Run(run_files.find(target.runs, name).run_id, target)


def runs(**place: Any) -> list[Run]:
    """Return all runs of a place, the latest first."""
    target = Selector(**place).target()
    return [Run(each_run.run_id, target) for each_run in run_files.list_runs(target.runs)]


def predict(trained: Run, inputs: Sequence[str], second: str | None = None) -> list[dict[str, Any]]:
    """Return what a run's model answers to each input, as `fab predict --json` prints it.

    Raises:
        RequestError: it has no export yet, or its job cannot answer this.
    """
    from console.models import answers as console

    return console.answers(trained._target, trained.run_id, [*inputs], second)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], Selector]:
    """Return the options of a training, and those about where it runs."""
    names = {"stack", "slice", "hosts", "platform", "python"}
    place = Selector(**{name: value for name, value in options.items() if name in names})
    return {name: value for name, value in options.items() if name not in names}, place
