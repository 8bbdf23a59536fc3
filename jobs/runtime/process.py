"""One process of a job from start to exit code: the only part of a job that knows how a run ends.

Exit codes: 0 done; 2 the request was wrong; 75 saved, resume me; 76 another host was lost; 81 a newer attempt has
begun; 1 anything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import functools
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TextIO

from contracts import process_environment as process_environment
from contracts import run_directory
from contracts.causes import ADDRESS_IN_USE, cause, free_space
from contracts.errors import (
    DONE,
    FAILED,
    PEER_LOST,
    RESUME_ME,
    SUPERSEDED,
    UNAVAILABLE,
    JobFailed,
    RequestError,
    Superseded,
    exit_code_for,
)
from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import RunDirectory
from jobs.runtime import option_rules, preemption
from jobs.runtime.monitoring import sampler
from jobs.runtime.monitoring.heartbeat import Heartbeat
from jobs.runtime.monitoring.metrics import TimeSplit
from jobs.runtime.ranks import secret_values
from jobs.runtime.storage.bucket_files import files_of, is_outage, pauses_s, retry

STACKS = "stacks.txt"
RUNTIMES = {"pytorch": "torch", "pytorch_xla": "torch"}
"""The folder beside this file that serves a framework, where it does not have the framework's name."""
GROUP = "distributed"

type Final = Mapping[str, Any]
"""What a job has measured in the end, of what JSON can hold: it becomes part of result.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a job's training function is given.

    time: a job that tells its parts apart (`with run.time.part("checkpoint"):`) has them in result.json.
    """

    environment: ProcessEnvironment
    directory: RunDirectory
    heartbeat: Heartbeat
    time: TimeSplit = dataclasses.field(default_factory=TimeSplit)

    def __post_init__(self) -> None:
        self.heartbeat.time = self.time

    def say(self, text: str) -> None:
        """A line in the log, from rank 0 only."""
        if self.environment.is_first:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        """Warn the user, in the log, to followers of the run, in its report and in result.json; from rank 0 only."""
        if self.environment.is_first:
            print(f"warning: {text}", flush=True)
            self.heartbeat.warn(text)

    def warn_everywhere(self, text: str) -> None:
        """The same, with a line in every rank's own log."""
        if self.environment.is_first:
            self.warn(text)
        else:
            print(f"warning: {text}", flush=True)

    def decide(self, settings: Mapping[str, Any]) -> None:
        """Write settings.json, the decided values of options that run.json leaves open; by rank 0."""
        if self.environment.is_first:
            self.directory.write_json(run_directory.SETTINGS, settings)

    def begin_saving(self) -> None:
        """Report that a checkpoint is being written, and first write the metrics of its steps, which a resumed run does
        not take again."""
        self.heartbeat.state("saving")
        preemption.watch.flush()

    def prepare(self, text: str) -> None:
        """Report work before the first step, in every host's log and to followers of the run."""
        print(text, flush=True)
        self.heartbeat.say(text)


def import_train(module: str) -> Callable[[Run, Any], Final]:
    """`train` of a job's module, which is imported when the group has formed: options are checked before the module
    loads its framework."""
    return lambda run, config: importlib.import_module(module).train(run, config)


def main[Config](config_type: type[Config], train: Callable[[Run, Config], Final]) -> None:
    """Read the environment and the options, join the group, train, write the result, and exit.

    `train` returns the run's final metrics, and may raise RequestError (exit 2), Unreachable (exit 69), JobFailed
    (exit 1) or Preempted (exit 75).
    """
    faulthandler.enable()
    preemption.watch.listen()
    try:
        environment = process_environment.read(os.environ)
        config = _parse(config_type)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(exit_code_for(error))
    stacks = answer_sigusr1(environment.control_dir)
    directory = fenced_directory(environment)
    run = Run(environment=environment, directory=directory, heartbeat=Heartbeat(directory, environment))
    preemption.watch.start(
        rank=environment.process_id,
        size=environment.num_processes,
        step_now=lambda: run.heartbeat.last_step,
        leave=functools.partial(_leave, run),
        told=drop_unread_output,
    )
    code = _carry_out(run, config, train)
    if stacks is not None:
        stacks.close()
    _exit(code)


class _Output:
    """A standard stream whose reader may be gone: what is written then is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._unless_unread(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_unread(self._stream.flush)

    def _unless_unread(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drop_unread_output() -> None:
    """Let a process that was told to stop end as such, though whoever read its output may have been told so too."""
    sys.stdout, sys.stderr = _Output(sys.stdout), _Output(sys.stderr)


def fenced_directory(environment: ProcessEnvironment) -> RunDirectory:
    """The run directory as this process's attempt writes it."""
    run_dir = environment.run_dir
    return RunDirectory(run_dir, files_of(run_dir), attempt=environment.attempt)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure the group's own exit handlers would wait for processes that are gone.
    os._exit(code)


def _parse[Config](config_type: type[Config]) -> Config:
    values, problems = option_rules.parse(config_type, sys.argv[1:])
    if problems:
        raise RequestError("\n".join(problems))
    return config_type(**values)


def answer_sigusr1(control_dir: str | None) -> TextIO | None:
    """On SIGUSR1 write the stacks of all threads, even of a process that hangs in native code."""
    if control_dir is None:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        return None
    file = open(os.path.join(control_dir, STACKS), "a", encoding="utf-8")  # noqa: SIM115 - open until exit
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    return file


def _carry_out[Config](run: Run, config: Config, train: Callable[[Run, Config], Final]) -> int:
    try:
        run.heartbeat.start()
        sampler.start(run.environment)
        # Imported here: a wrong option or variable is answered before a framework is loaded.
        group = framework_module(run.environment)
        try:
            group.start(run.environment)
            run.heartbeat.state("joined")
            final = train(run, config)
            preemption.watch.end()
            finish(run, "done", final)
        except preemption.Preempted as notice:
            preemption.watch.flush()
            finish_early(run, notice.step)
            preemption.watch.part()
            return RESUME_ME
        group.leave()
        return DONE
    except Exception as error:
        preemption.watch.claim()
        with contextlib.suppress(Exception):  # the first failure says why
            preemption.watch.flush()
        return _fail(run, error)


def framework_module(environment: ProcessEnvironment, name: str = GROUP) -> Any:
    """A module of the run's framework. "distributed" forms a group, with `start(environment)` and `leave()`."""
    return importlib.import_module(_module_name(environment, name))


def _module_name(environment: ProcessEnvironment, name: str = GROUP) -> str:
    return f"jobs.runtime.{RUNTIMES.get(environment.framework, environment.framework)}.{name}"


def _leave(run: Run, step: int) -> NoReturn:
    """End a process that got SIGTERM, from a thread of its own: the main thread may be busy for long."""
    try:
        finish_early(run, step)
        preemption.watch.part()
        _exit(RESUME_ME)
    except Exception as error:  # the disk may be full
        _exit(_fail(run, error))


def finish_early(run: Run, step: int) -> None:
    """Report that the run was stopped or preempted, and how to resume it.

    step: the last saved one; 0 if this attempt has not restored a checkpoint.
    """
    outcome = "stopped" if preemption.was_requested(run.environment.control_dir) else "preempted"
    step = step or run.directory.newest_checkpoint() or 0
    progress = f"saved after step {step}" if step else "nothing was computed yet"
    reason = preemption.stop_reason(run.environment.control_dir) if outcome == "stopped" else None
    cause_text = f" because {reason}" if reason else ""
    run.say(f"{outcome}{cause_text}: {progress}; resume with `fab train --resume {run.environment.run_id}`")
    finish(run, outcome, {"steps": step, **(run_directory.out_of_budget(reason) if reason else {})})


def _fail(run: Run, error: Exception) -> int:
    """Say what went wrong; the exit code."""
    with contextlib.suppress(Exception):  # an outage, which is reported below
        try:
            run.directory.require_newest()
        except Superseded as superseded:  # whatever has failed, failed because of that
            print(superseded, file=sys.stderr, flush=True)
            return SUPERSEDED
    if isinstance(error, RequestError):
        return end_as_refused(run, error)
    if isinstance(error, JobFailed):
        print(f"error: {error}", file=sys.stderr, flush=True)
        end_as_failed(run, str(error), says_all=True)
        with contextlib.suppress(RuntimeError):  # XLA's own, where another process was lost just now
            framework_module(run.environment).leave()
        return FAILED
    code, message = explain(error, run.environment)
    run.heartbeat.make_room()
    traceback.print_exception(error)
    print(f"error: {message}", file=sys.stderr, flush=True)
    end_as_failed(run, message)
    return code


def finish(run: Run, outcome: str, final: Final) -> None:
    """Rank 0 writes the result and the report; then every rank's last heartbeat says the outcome."""
    if run.environment.is_first:
        parts = run.time.seconds()
        result = run_directory.result(
            outcome,
            attempt=run.environment.attempt,
            steps=final.get("steps"),
            time=time.time(),
            wall_s=round(run.time.wall_s(), 3),
            measured={
                **{name: value for name, value in final.items() if name != "steps"},
                # A job that tells no parts apart has only its start, which would say that it never began.
                **({"time_s": parts} if len(parts) > 1 else {}),
                "warnings": list(run.heartbeat.warnings),
            },
        )
        from jobs.runtime.report.render import read_and_render

        # All are at the same end, and say so themselves in a moment.
        ended = {"state": outcome, "message": None, **({"step": final["steps"]} if "steps" in final else {})}
        page = read_and_render(run.directory.url, ended=ended, result=result, hosts=run.environment.hosts)
        _write_text(run.directory, run_directory.REPORT, page)
        _write_text(run.directory, run_directory.RESULT, json.dumps(result, indent=2) + "\n")
    run.heartbeat.end("done" if outcome == "done" else "stopped" if outcome == "stopped" else "preempted")


def _write_text(directory: RunDirectory, name: str, text: str) -> None:
    write = functools.partial(directory.write_text, name, text)
    retry(write, what=name, pauses_s=pauses_s(directory))


def end_as_failed(run: Run, message: str, *, says_all: bool = False) -> None:
    try:
        run.heartbeat.end("failed", secret_values.masked(message), says_all=says_all)
    except (OSError, Superseded) as error:
        print(f"heartbeat not written: {error}", file=sys.stderr, flush=True)


def end_as_refused(run: Run, error: RequestError) -> int:
    """Say what was wrong with the request; return the exit code."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    end_as_failed(run, str(error), says_all=True)
    return exit_code_for(error)


def explain(error: Exception, environment: ProcessEnvironment) -> tuple[int, str]:
    """The exit code of a failure, and one sentence for a person who does not read the traceback.

    A library may wrap the error that tells the cause (Orbax raises TimeoutError whenever a barrier fails), so the
    errors that it was raised from count too.
    """
    errors = [*_with_causes(error)]
    if any(
        (isinstance(raised, OSError) and raised.errno == errno.ENOSPC)
        or "No space left on device" in str(raised)
        for raised in errors
    ):
        return FAILED, (
            f"the disk is full: {free_space(_places(environment))}. Checkpoints that were complete are still there: "
            f"free some space, then `fab train --resume {environment.run_id}`"
        )
    group = sys.modules.get(_module_name(environment))  # without it, there was no group to lose anybody of
    # Frameworks' errors are kinds of RuntimeError mostly, but XLA's UNKNOWN can come as a plain ValueError.
    kinds: tuple[type[Exception], ...] = getattr(group, "PEER_LOST_KINDS", (RuntimeError, ValueError))
    signs: tuple[str, ...] = getattr(group, "PEER_LOST_SIGNS", ())
    lines = [line for raised in errors if isinstance(raised, kinds) for line in str(raised).splitlines()]
    lost = next((line for line in lines if any(sign in line for sign in signs)), None)
    if lost is not None:
        return PEER_LOST, f"another host of the run was lost: {lost[:300]}"
    text = str(error)
    if ADDRESS_IN_USE.search(text):
        return UNAVAILABLE, cause(text, coordinator=environment.coordinator, places=()) or text
    # Orbax says TimeoutError of any barrier, and what else is built in may come from a peer.
    if any(is_outage(raised) for raised in errors if type(raised).__module__ != "builtins"):
        return UNAVAILABLE, (
            f"something outside the run did not answer ({type(error).__name__}: {text[:300]}); try again later: "
            f"`fab train --resume {environment.run_id}`"
        )
    return FAILED, f"{type(error).__name__}: {text.splitlines()[0][:300] if text else ''}"


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _places(environment: ProcessEnvironment) -> list[str]:
    return [environment.run_dir, environment.cache_dir]
