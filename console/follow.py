"""A run from `fab train` to its end: launched, watched, and, where that is asked for, started again."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from rich.console import Console

from console import display
from console import track as tracking
from console.display import Display, Progress
from console.summary import exit_code, summary
from contracts import run_directory, run_records
from contracts.aliases import Say
from contracts.errors import DONE, RequestError
from contracts.host_interface import STOP_GRACE_S
from contracts.run_directory import State
from contracts.run_records import Unread
from jobs.runtime.monitoring.metric_definitions import Metrics, finite
from launch import jobs as job_index
from launch import launching, policy, runs
from launch.control import control_documents
from launch.hosts import STOP_NOW_S, HostError
from launch.launching import finalize
from launch.output import counted, printable, say, terminal
from launch.request.run_environment import require_references
from launch.request.run_request import Request, resuming, work_out
from launch.runs import Run
from launch.targets import Target

PRESENT, LOST = "present", "lost"
"""What a launcher puts in place of the time when a slice was created: whether all its hosts answer."""


Open = Callable[[Run | None], Target]
"""Returns the present target; for a run that is resumed, the one that fits it."""


class HandOver(Protocol):
    """Something, such as the keeper, that restarts a run from now on."""

    def check(self, target: Target) -> None:
        """Raises RequestError: it cannot."""

    def take(self, run: Run, target: Target) -> str:
        """Take over a run that was started; return a line about it."""


def train(
    open_target: Open,
    request: Request,
    *,
    resume: str | None,
    detach: bool,
    restarts: int | None,
    track: Sequence[str] | None = None,
    dry_run: bool = False,
    hand_over: HandOver | None = None,
) -> int:
    """Start or resume a run and, unless `detach`, follow it to its end.

    request: its job is "" if none was named. resume: the run to resume. restarts: how often it may be started again,
    by its backend if that does so; None: the default. track: the trackers that it is mirrored to; None: the default.
    dry_run: only print what would be done. hand_over: takes over the run once it has started.
    """
    console = terminal()
    target = open_target(None)
    if detach and restarts and not target.capabilities.restarts_runs:
        raise RequestError(
            f"--detach --max-restarts {restarts}: a run is started again only while `fab train` follows it; leave one "
            "of the two out, or take --keep where the stack has a keeper"
        )
    if hand_over is not None:
        hand_over.check(target)
        require_references({name: secret.source for name, secret in request.secrets.items()}, "--keep")
    old = resumed(target, resume, request.job or None) if resume else None
    target = open_target(old) if old and target.capabilities.hosts_follow_run else target
    if old is None:
        require_job(request)
    request = dataclasses.replace(
        request,
        job=request.job or (old.described["job"] if old else ""),
        resume=old,
        overruled=launching.stop_asked(old) if old else None,
        restarts=restarts if target.capabilities.restarts_runs else None,
        track=tracking.selected(track, os.environ, old.described.get("track", ()) if old else None),
    )
    if dry_run:
        from console import dry_run as showing  # a launch does without
        from console.compiler import fit

        planned = work_out(request, target, say(console))
        for line in itertools.chain(showing.lines(planned, target), fit.dry_run_lines(planned, target)):
            console.print(line, soft_wrap=True)
        return DONE
    by_us = 0 if target.capabilities.restarts_runs else restarts or 0
    return _carry_out(console, request, target, open_target, by_us, detach=detach, hand_over=hand_over)


def require_job(request: Request) -> None:
    """Make sure that a request says what to train.

    Raises:
        RequestError: it names neither a job nor a command.
    """
    if not request.job and request.command is None:
        raise RequestError(
            f"--job: say what to train; choose one of {', '.join(job_index.names())}, or name the folder of a command "
            "of your own, as in: fab train --workdir ~/my-project -- python train.py"
        )


def job_arguments(arguments: str, after_dashes: Sequence[str]) -> list[str]:
    """Return the job's own options: those of --args, which is split as a shell would, or those after `--`.

    Raises:
        RequestError: both are given, or --args cannot be split.
    """
    if arguments and after_dashes:
        raise RequestError(
            f"--args {shlex.quote(arguments)} and -- {shlex.join(after_dashes)}: the job's options are given twice; "
            "write them all in one of the two places"
        )
    try:
        return shlex.split(arguments) or list(after_dashes)
    except ValueError as error:
        raise RequestError(f"--args: {arguments!r} has a quote that is not closed ({error})") from None


def resumed(target: Target, name: str, job: str | None) -> Run:
    """Return the run that is to be resumed.

    Raises:
        RequestError: there is none, or it is one of another job.
    """
    run = runs.find(target.runs, name)
    if job is not None and job != run.described["job"]:
        raise RequestError(f"--job {job}: {run.run_id} is a run of {run.described['job']}; leave --job out")
    return run


def go_on(open_target: Open, name: str, *, detach: bool) -> int:
    """Carry out `fab recover`: restore the slice and hosts of a run, then resume it from its last checkpoint."""
    console = terminal()
    target = open_target(None)
    before = _readable(target, name)
    stops = launching.StopWatch(before, launching.stop_asked(before) if before else None)
    if before is not None and target.platform == "tpu" and target.backend.status().errors:
        _compile_meanwhile(resuming(before), target, say(console))
    try:
        target = target.backend.ensure(target, lambda: open_target(None), say(console), stops.sleep)
    except launching.StopAsked:
        assert before is not None
        request = resuming(before, stops.overruled)  # whose launch ends it
        return _carry_out(console, request, target, open_target, 0, detach=detach, is_recovery=True)
    run = runs.find(target.runs, before.run_id if before else name)  # "latest" may be another one by now
    target = open_target(run) if target.capabilities.hosts_follow_run else target
    decision = launching.decide(target.run_state(run), run)
    elsewhere = launching.about_other_slice(run, target) if decision.do == "wait" else ""
    say(console)(f"{run.run_id}: {decision.reason}{elsewhere}")
    if decision.do != "start":
        return DONE
    overruled = stops.overruled if before else launching.stop_asked(run)
    request = resuming(run, overruled)
    return _carry_out(console, request, target, open_target, 0, detach=detach, is_recovery=True)


def _readable(target: Target, name: str) -> Run | None:
    """Return the run; None where its directory is on hosts that do not answer, or may have lost their share."""
    try:
        return runs.find(target.runs, name)
    except HostError:
        return None
    except RequestError:
        if not target.runs_on_share:
            raise
        return None


def _carry_out(
    console: Console,
    request: Request,
    target: Target,
    open_target: Open,
    restarts: int,
    *,
    detach: bool,
    is_recovery: bool = False,
    hand_over: HandOver | None = None,
) -> int:
    """Launch a run and, unless `detach`, follow it to its end; start it again as often as that is allowed.

    is_recovery: whether it was lost before, so that people may have been notified.
    """
    desired: control_documents.Run | None = None
    if not target.capabilities.hosts_outlive_runs:
        _compile_meanwhile(request, target, say(console))
    while True:
        try:
            run = launching.launch(request, target, say(console))
        except launching.LaunchFailed as failure:
            ended = target.run_state(failure.run)
            _notify(failure.run, ended, say(console))
            return _report(console, failure.run, ended)
        if run.attempt and is_recovery:
            _notify(run, "recovered", say(console))
        if hand_over is not None:
            say(console)(hand_over.take(run, target))
        tracking.start(run, target, say(console))
        if detach:
            say(console)(_how_to_come_back(run, target))
            return DONE
        state = _to_its_end(console, run, target)
        if state is None:
            return DONE
        run, state = concluded(run, state, target)
        _notify(run, state, say(console))
        desired = desired or launching.desired(run, target, restarts)
        observed = launching.observed(run, state)
        is_there = not target.backend.status().errors
        action = policy.judge(desired, observed, time.time(), created=PRESENT if is_there else LOST)
        if action.do == "end" or restarts == 0:
            return _report(console, run, state)
        desired = (
            policy.begin_attempt(desired, observed, PRESENT, time.time()) if action.do == "start" else desired
        )
        left = _left(desired.limits.restarts or 0)
        for line in [*summary(run, state)[:2], f"{action.reason}; {left}"]:
            say(console)(line)
        stops = launching.StopWatch(run)
        with contextlib.suppress(launching.StopAsked):  # the launch ends it, and no slice is made for that
            stops.sleep(desired.not_before_s - time.time() if action.do == "wait" else 0.0)
            if action.do == "wait":
                desired = policy.begin_attempt(desired, observed, PRESENT, time.time())
            if not is_there:
                _compile_meanwhile(resuming(run), target, say(console))
            target = target.backend.ensure(target, lambda: open_target(None), say(console), stops.sleep)
        request = resuming(runs.find(target.runs, run.run_id))
        is_recovery = True


def _compile_meanwhile(request: Request, target: Target, say: Say) -> None:
    """Have a run's step compiled while its hosts are waited for."""
    if target.platform == "tpu":
        from console.compiler import compile_ahead  # few launches wait for a TPU

        compile_ahead.begin(request, target, say)


def _notify(run: Run, event: State | Literal["recovered"], say: Say) -> None:
    from console import notify  # few have a channel

    notify.about(run, event, say)


def _how_to_come_back(run: Run, target: Target) -> str:
    option = target.stack_option
    return (
        f"it goes on by itself: `fab status{option}`, `fab logs{option} --follow`, "
        f"`fab stop {run.run_id}{option}`"
    )


def _to_its_end(console: Console, run: Run, target: Target) -> State | None:
    """Follow a run until it has ended; None: somebody stopped following.

    Ctrl-C stops a run on this machine gracefully (a second one does not wait for that); a run elsewhere continues.
    """
    shown = display.make(console)
    try:
        return follow(run, target, shown)
    except KeyboardInterrupt:
        shown.close()
        if not target.capabilities.stops_with_launcher:
            say(console)(f"no longer following; {_how_to_come_back(run, target)}")
            return None
        console.print("stopping, so that the run can be resumed (Ctrl-C again: do not wait for it)")
        target.backend.stop(run, grace_s=STOP_GRACE_S)
        return follow(run, target, display.Plain(console))
    finally:
        shown.close()


def concluded(run: Run, state: State, target: Target) -> tuple[Run, State]:
    """Return a run that has ended with its result, and how it ended: what is known of a lost one is a failure."""
    try:
        run = runs.read(run.directory) or run
        conclusion = target.backend.conclude(run.run_id) if state not in ("done", "stopped") else None
        if conclusion is not None and state == "lost":
            return finalize(run, "failed", conclusion.error, conclusion.exit_code), "failed"
        if conclusion is not None and conclusion.exit_code is not None:
            # It would have been started again, so what its result says of the attempt is not how the run ended.
            before = str((run.current_result() or {}).get("error") or run_directory.ENDED[state])
            run.directory.remove(run_directory.RESULT)
            error = f"{conclusion.error}\nbefore that: {before}"
            return finalize(run, "failed", error, conclusion.exit_code), "failed"
        return (run if state in ("done", "lost") else finalize(run, state, None)), state
    except HostError:  # its hosts are gone, and its directory with them for now
        return run, state


def _left(restarts: int) -> str:
    return f"{counted(restarts, 'restart')} left"


def _report(console: Console, run: Run, state: State) -> int:
    for line in summary(run, state):
        say(console)(line)
    for line in tracking.progress(run):
        say(console)(line)
    return exit_code(run, state)


POLL_S = 0.5
BUCKET_POLL_S = 5.0
"""Each look at a run in a bucket is billed, and its heartbeats are written every 10 s only."""
AGENTS_PERIOD_S = 5.0
PACE_LOOKS = 60
"""Half a minute of looks at a quick run."""
ENDING_LIMIT_S = 45.0
"""How long the hosts of a run in which a process failed have to end the others and to say what happened; they need
two seconds, and half a minute where one of them does not answer. After that the launcher stops what is left."""


RUNNING = "running; `fab logs --follow` shows what it prints; steps and loss appear here if it writes a metrics.jsonl"
"""Of an own command that has measured nothing, which it need not."""
UNHEARD_LIMIT_S = 15 * 60.0
"""How long a run on pods that seems to have ended is followed while its cluster, which may start it again, is away."""


def follow(run: Run, target: Target, display: Display) -> State:
    """Show the run's progress until it has ended on all hosts; return how it ended.

    A host that failed takes the others down: they are stopped if they do not end by themselves.
    """
    asked_s, look = float("-inf"), target.backend.status([run]).for_run(run)
    watch = _Watch(display)
    failed_s: float | None = None
    unheard_s: float | None = None
    unheard: set[str] = set()
    delayed: Mapping[int, str] = {}
    unread = ""
    while True:
        fresh, unread = _read(run, display, unread)
        run = with_agents_beats(fresh, look)
        with contextlib.suppress(HostError, OSError):
            watch.show(run)
        looks_ended = run.current_result() is not None or any(
            beat is not None and beat["state"] in ("failed", "done", "stopped", "preempted")
            for beat in run.current()
        )
        if looks_ended or time.monotonic() - asked_s > AGENTS_PERIOD_S:
            asked_s, look = time.monotonic(), target.backend.status([run]).for_run(run)
            unheard = _tell_unheard(display, look, unheard)
            delayed = _tell_delays(display, look, delayed)
        now = runs.state_by(run, look)
        if now == "failed" and any(p["state"] == "running" or p.get("supervised") for p in look.processes):
            # The hosts end it among themselves, and of a run that hung they save the stacks first.
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s > ENDING_LIMIT_S and not look.begins_again:
                target.backend.stop(run, grace_s=STOP_NOW_S)
        elif now == "failed" and run.current_result() is None and _recently_ended(look):
            pass  # the agent is finding out which host failed first
        elif now not in run_directory.ACTIVE:
            unheard_s = unheard_s or time.monotonic()
            is_in_doubt = runs.may_be_restarted(run, look, now)
            if not is_in_doubt or time.monotonic() - unheard_s > UNHEARD_LIMIT_S:
                return now
        else:
            unheard_s = None
        time.sleep(BUCKET_POLL_S if run.directory.is_remote and not looks_ended else POLL_S)


def _read(run: Run, display: Display, before: str) -> tuple[Run, str]:
    """Return the run as it is now, or as it was if its directory cannot be read just now, and why it cannot.

    This is said, once; of hosts that do not answer elsewhere.
    """
    try:
        fresh = runs.read(run.directory) or run
    except (HostError, RequestError, OSError) as error:
        is_said_here = run.directory.is_remote or not isinstance(error, HostError)
        if is_said_here and not before:
            display.note(printable(f"{error}; it is asked again"))
        return run, str(error) if is_said_here else ""
    if before:
        display.note(f"{run.directory.url} answers again")
    return fresh, ""


def with_agents_beats(run: Run, look: runs.Look) -> Run:
    """Return the run with the hosts' own copies of the heartbeats, where these are newer than its directory's."""
    beats = list(run.heartbeats)
    for entry in look.for_run(run).processes:
        rank = entry["process_id"]
        beat, _ = run_records.heartbeat(entry.get("beat") or {}, run_directory.heartbeat(rank))
        if beat and rank < len(beats) and beat["time"] > ((beats[rank] or {}).get("time") or 0):
            beats[rank] = beat
    return dataclasses.replace(run, heartbeats=tuple(beats))


def _tell_unheard(display: Display, look: runs.Look, before: set[str]) -> set[str]:
    """Say once of each host that it does not answer, and once that it does again."""
    for error in look.errors:
        if error.host not in before:
            display.note(f"{error}; it is asked again")
    now = {error.host for error in look.errors}
    for host in sorted(before - now):
        display.note(f"{host} answers again")
    return now


def _tell_delays(display: Display, look: runs.Look, before: Mapping[int, str]) -> Mapping[int, str]:
    """Say why a process has not started yet, once for as long as that stays the reason."""
    now = {
        entry["process_id"]: str(entry["reason"])
        for entry in look.processes
        if entry["state"] == "starting" and entry.get("reason")
    }
    for process, reason in now.items():
        if before.get(process) != reason:
            display.note(printable(f"process {process} waits to start: {reason}"))
    running = {entry["process_id"] for entry in look.processes if entry["state"] == "running"}
    return {process: reason for process, reason in {**before, **now}.items() if process not in running}


def is_ending(look: runs.Look) -> bool:
    """Whether the agents of a run in which a process failed may still end others and write its result."""
    return any(p["state"] == "running" or p.get("supervised") for p in look.processes) or _recently_ended(
        look
    )


def _recently_ended(look: runs.Look) -> bool:
    ended = [p["ended"] for p in look.processes if p.get("ended")]
    return bool(ended) and time.time() - max(ended) < run_directory.FINISHING_LIMIT_S


class _Watch:
    """What has been shown of a run's metrics so far; each look reads only what is new."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._offset = -runs.METRICS_TAIL_BYTES
        self._last: dict[str, Any] = {}
        self._unread = Unread()
        self._warned: set[str] = set()
        self._pace = Pace()

    def show(self, run: Run) -> None:
        lines, self._offset = run.directory.read_new_metrics(self._offset, self._unread)
        began_s = run.started_s
        for line in lines:
            if run.attempt and line.get("time", began_s) < began_s:
                continue  # an earlier attempt's
            evaluation = _evaluation(run.metrics, line)
            if evaluation:
                self._display.note(printable(evaluation))
            self._last |= line
        for problem in run.problems:
            self._unread.add(problem)
        for problem in self._unread.unannounced():
            self._display.note(printable(problem))
        for warning in warnings(run):
            if warning not in self._warned:
                self._warned.add(warning)
                self._display.note(f"warning: {printable(warning)}")
        beats = [beat for beat in run.current() if beat]
        if not beats or any(beat["state"] in ("starting", "joined") for beat in beats):
            messages = [beat["message"] for beat in beats if beat.get("message")]
            self._display.waiting(printable(messages[0]) if messages else "starting")
            return
        step = max([*(beat["step"] for beat in beats), int(self._last.get("step", 0))])
        if run.is_own_command and not step and not self._last:
            self._display.waiting(RUNNING)
            return
        total, step_s = run.total_steps, self._last.get("step_s") or self._pace.step_s(step, time.monotonic())
        figures = ((run.metrics.get(name), finite(self._last.get(name))) for name in run.metrics.progress)
        self._display.progress(
            Progress(
                step=step if step or not run.is_own_command or "step" in self._last else None,
                total=total,
                figures=tuple(
                    printable(metric.named(value)) for metric, value in figures if value is not None
                ),
                left_s=(total - step) * step_s if total and step_s else None,
            )
        )


class Pace:
    """Measures how long a step takes, for a job that does not say so itself."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=PACE_LOOKS)

    def step_s(self, step: int, now_s: float) -> float | None:
        """Note that `step` is the latest at `now_s`; return the seconds of a step, None while too little is known."""
        if not self._seen or step != self._seen[-1][1]:
            self._seen.append((now_s, step))
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last_s - first_s) / (last - first) if last > first and last_s > first_s else None


def warnings(run: Run) -> list[str]:
    """Return what its processes have warned of in the latest attempt."""
    return list(dict.fromkeys(text for beat in run.current() if beat for text in beat.get("warnings") or ()))


def _evaluation(metrics: Metrics, line: dict[str, Any]) -> str | None:
    """Return the evaluation in a line of metrics, in words; None if it has none."""
    metrics_shown = [metric for metric in metrics.metrics if metric.is_evaluation and metric.name in line]
    figures = [
        f"{metric.title} is not a finite number" if value is None else metric.named(value)
        for metric, value in ((metric, finite(line[metric.name])) for metric in metrics_shown)
    ]
    at = f"step {line['step']}: " if "step" in line else ""
    return at + ", ".join(figures) if figures else None
