"""From a request to processes on every host: planned, prepared, recorded, started, joined; or stopped again.

Also what is recorded of a run, and what is done about one that has ended: `fab train --max-restarts`, `fab recover` and
the keeper show it to the policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from contracts import fencing, run_directory
from contracts.aliases import Say
from contracts.durations import spoken
from contracts.errors import WRONG_REQUEST, RequestError, Superseded, failure_kind
from contracts.inventory import Slice
from contracts.run_directory import RunDirectory, State
from contracts.run_records import moment
from jobs.runtime.monitoring import metric_definitions
from jobs.runtime.monitoring.metric_definitions import UNDECLARED, finite
from jobs.runtime.storage.cache import user_cache_dir
from launch import jobs, policy, pricing, runs
from launch import plan as plans
from launch.code import precompiled
from launch.code.bundles import Bundle, keep, left_out_lines
from launch.control import control_documents
from launch.control.control_documents import Limits
from launch.hosts import STOP_NOW_S, HostError, HostsError
from launch.jobs import Submitted
from launch.output import printable
from launch.policy import ENDING_S, Action, Presence, RunObserved
from launch.pricing import list_price
from launch.request.run_environment import check_references
from launch.request.run_request import Planned, Request, work_out
from launch.runs import AtWorkError, Run
from launch.targets import Launcher, Plan, Require, Target

POLL_S = 0.25


def is_in_use(error: Exception) -> bool:
    """Whether a run could not be started because somebody else is at work on its hosts."""
    errors = error.errors if isinstance(error, HostsError) else ()
    return isinstance(error, AtWorkError) or (
        bool(errors) and all(error_of_host.is_in_use for error_of_host in errors)
    )


class LaunchFailed(Exception):
    """The processes did not form a group; they have been stopped and `run` says why.

    is_interrupted: somebody interrupted this process meanwhile.
    """

    def __init__(self, run: Run, *, is_interrupted: bool = False) -> None:
        super().__init__(f"{run.run_id} did not start")
        self.run, self.is_interrupted = run, is_interrupted


def launch(
    request: Request,
    target: Target,
    say: Say,
    *,
    hold: Callable[[], AbstractContextManager[Require]] | None = None,
    now_s: Callable[[], float] = time.time,
) -> Run:
    """Start the run on all hosts of the target, and return when every process has joined the group.

    A `fab stop` that comes meanwhile ends a run that is resumed: its result is then that it was stopped.

    hold: as `launch.targets.Backend.hold`; None: the backend's. now_s: a clock in Unix seconds, which those of the
    hosts are compared with.

    Raises:
        RequestError: the request cannot be carried out; nothing was started.
        HostsError: hosts failed the preflight (nothing was started) or a start (all was stopped again).
        LaunchFailed: the processes did not form a group; all was stopped again. Or somebody asked for a stop.
    """
    planned = work_out(request, target, say)
    plan, directory, run_id = planned.plan, planned.directory, planned.plan.run_id
    target = plan.target
    if planned.needs_environment:
        target.make_environment(plan.framework, say)
    only = exclusive_launch(run_id) if request.resume else contextlib.nullcontext()
    with only, (hold or target.backend.hold)() as require, _unless_superseded(run_id):
        attempt, before = _next_attempt(request.resume, target)
        plan = dataclasses.replace(plan, attempt=attempt)
        check_references(plan.secrets, os.environ)
        for line in (*planned.notes, *left_out_lines(planned.bundles)):
            say(line)
        if plan.budget is not None:
            say(plan.budget.text)
        if ending := ending_line(target.slice, now_s()):
            say(ending)
        if planned.precompiled is not None:
            precompiled.begin_upload(planned.precompiled, say)
        began_s = time.monotonic()
        _require_wanted(request, directory)
        plan = planned.launcher.prepare(plan, planned.bundles, say, now_s)
        require()  # a resumed run may be somebody else's by now, and its record too
        directory = fencing.take(directory, attempt, launch=attempt)
        now = datetime.datetime.fromtimestamp(now_s(), datetime.UTC)
        described = run_record(
            plan,
            planned.config,
            name=request.name,
            track=request.track,
            processes_per_host=planned.processes_per_host,
            sweep=request.sweep,
            submitted=request.submitted,
            now=now,
            before=before,
            launcher_record=planned.launcher.record,
        )
        directory.remove(run_directory.RESULT)
        _keep_bundles(plan, planned.bundles, directory)
        directory.write_json(run_directory.RUN, described)
        require()
        _require_wanted(request, directory)
        run = Run(directory=directory, described=described, result=None, heartbeats=())
        _start_and_join(plan, planned.launcher, run, say)
        # Of a command of the user's own nobody knows whether its processes form a group.
        event = "all joined" if plan.command is None else "the command runs on all hosts"
        say(f"{event} after {time.monotonic() - began_s:.1f} s")
    return _read(directory.unfenced())


def ending_line(tpu_slice: Slice, now_s: float) -> str | None:
    """Return when the slice of a run is taken back and what becomes of the run then; None where it has no end.

    Raises:
        RequestError: it is so soon that nothing is started on it any more.
    """
    if tpu_slice.ends_s is None:
        return None
    left_s = tpu_slice.ends_s - now_s
    if left_s < ENDING_S:
        raise RequestError(
            f"the slice {tpu_slice.name} ({tpu_slice.capacity}) is taken back at {tpu_slice.ends_at}; `pulumi up "
            "--refresh` makes it again then, and the keeper does so by itself"
        )
    return (
        f"{tpu_slice.name} ({tpu_slice.capacity}) is taken back in {spoken(left_s)}: the run saves and "
        "leaves before that, and goes on once the slice is made again"
    )


def submitted(planned: Planned) -> Submitted:
    """Return what a planned run is, to be carried out later whatever this checkout holds by then."""
    plan, config = planned.plan, planned.config
    now = datetime.datetime.now(datetime.UTC)
    described = run_record(plan, config, name=None, now=now, before=None)
    return Submitted(
        name=plan.job,
        framework=plan.framework,
        options=described["config"],
        arguments=plan.arguments,
        metric_definitions=described["metric_definitions"],
        code={name: described["code"][name] for name in ("git_commit", "git_dirty")},
        cwd=plan.cwd,
        bundles=planned.bundles,
    )


def _keep_bundles(plan: Plan, bundles: Sequence[Bundle], directory: RunDirectory) -> None:
    """Keep what a run is started from with it."""
    # Also where run.json names the same: a launcher that was killed between the two has left others.
    for name, bundle in zip((run_directory.CODE, run_directory.FOLDER), bundles, strict=False):
        if plan.stored_at(bundle.sha256) is None:
            directory.write_text(name, bundle.text)
    for bundle in bundles[1:]:
        if (path := plan.stored_at(bundle.sha256)) is not None:
            keep(bundle, path, directory.files)


def _start_and_join(plan: Plan, launcher: Launcher, run: Run, say: Say) -> None:
    """Start every process and wait until all have joined; otherwise stop all, and write the reason to result.json.

    Raises:
        HostsError: a process could not be started.
        LaunchFailed: the processes did not form a group, or somebody interrupted.
    """

    def stop_all() -> None:
        answers = target.backend.stop(run, grace_s=STOP_NOW_S)
        error = next((answer for answer in answers if isinstance(answer, HostError)), None)
        if error is not None:
            say(f"{error}; it may go on: `fab stop {plan.run_id}`")

    target, directory = plan.target, run.directory
    try:
        launcher.begin(plan, say)
        attempt = f", attempt {plan.attempt}" if plan.attempt else ""
        say(f"started {plan.run_id}{attempt} in {directory.url}")
        join(plan, launcher)
    except (HostsError, HostError, RequestError) as error:  # what had been started has been stopped again
        if not isinstance(error, AtWorkError):  # the run is another launcher's
            _finalized(directory, "failed", str(error))
        raise
    except NotJoined as error:
        _settle(directory)
        stop_all()
        if error.outcome == "failed" and (hint := plans.container_hint(plan.container, target.platform)):
            say(hint)
        raise LaunchFailed(_finalized(directory, error.outcome, str(error), error.exit_code)) from None
    except KeyboardInterrupt:
        stop_all()
        ended = _finalized(directory, "stopped", "interrupted")
        raise LaunchFailed(ended, is_interrupted=True) from None
    except BaseException:
        stop_all()
        raise


def _finalized(directory: RunDirectory, outcome: str, error: str, exit_code: int | None = None) -> Run:
    """Put the end of an attempt on record as that attempt; return the run for whoever goes on with it."""
    run = finalize(_read(directory), outcome, error, exit_code)
    return dataclasses.replace(run, directory=directory.unfenced())


def _require_wanted(request: Request, directory: RunDirectory) -> None:
    """Make sure that nobody has asked for a stop of the run that is resumed, but for one that is overruled.

    Raises:
        LaunchFailed: somebody has, which is on record as the end of the latest attempt in `directory`.
    """
    if request.resume is not None and stop_asked(request.resume) not in (None, request.overruled):
        directory.remove(run_directory.RESULT)
        raise LaunchFailed(_finalized(directory, "stopped", "`fab stop` was told to stop it before it began"))


def _settle(directory: RunDirectory) -> None:
    """If a process failed, wait until the agents know which was the first and why: a stop would cut them short."""
    deadline = time.monotonic() + AGENTS_LIMIT_S
    while time.monotonic() < deadline:
        run = _read(directory)
        failing = any(beat is not None and beat["state"] == "failed" for beat in run.current())
        if run.current_result() is not None or not failing:
            return
        time.sleep(POLL_S)


def _read(directory: RunDirectory) -> Run:
    run = runs.read(directory)
    if run is None:
        raise RequestError(f"{directory.url}: the run's directory has vanished")
    return run


@contextlib.contextmanager
def _unless_superseded(run_id: str) -> Iterator[None]:
    try:
        yield
    except Superseded as error:
        raise AtWorkError(f"{run_id}: {error}; `fab status` shows it") from None


def _next_attempt(resume: Run | None, target: Target) -> tuple[int, dict[str, Any] | None]:
    """Return the number of the next attempt, and run.json with how the latest one ended, which it overwrites.

    Of several who get the same number, one can take its token.
    """
    if resume is None:
        return 0, None
    newest_taken = resume.directory.newest_attempt() or 0
    fresh = runs.read(resume.directory) or resume
    now = target.run_state(fresh)
    if now in run_directory.ACTIVE:
        raise AtWorkError(
            f"--resume {fresh.run_id}: the run is {now}; `fab stop {fresh.run_id}` stops it"
            f"{about_other_slice(fresh, target)}"
        )
    if now == "done":
        raise RequestError(f"--resume {fresh.run_id}: the run is done, there is nothing left to resume")
    # A failed attempt's agents still end its processes and write its result, which must not meet the next one's.
    deadline = time.monotonic() + run_directory.FINISHING_LIMIT_S
    while any(entry["supervised"] for entry in target.backend.status([fresh]).for_run(fresh).processes):
        if time.monotonic() > deadline:
            raise AtWorkError(
                f"--resume {fresh.run_id}: its processes are still ending; try again in a moment"
            )
        time.sleep(POLL_S)
    *earlier, latest = fresh.described["attempts"]
    ended = {**latest, "outcome": now, **fresh.measured()}
    before = {**fresh.described, "attempts": [*earlier, ended]}
    return max(fresh.attempt, newest_taken) + 1, before


def about_other_slice(run: Run, target: Target) -> str:
    """Return what to add to a message that a run is active: where, if that is not the target's slice."""
    before = run.slice_record
    name, origin = before.get("name"), before.get("origin")
    if not before or (name, origin) == (target.slice.name, target.slice.origin):
        return ""
    return (
        f". It is on the slice {name} ({origin}); if that is gone, the run counts as lost after"
        f" {run_directory.SILENCE_LIMIT_S:.0f} s without a heartbeat: try again then"
    )


@contextlib.contextmanager
def exclusive_launch(run_id: str) -> Iterator[None]:
    """Refuse what would start a run while it is held: a second resume at the same time would start it twice."""
    locks = user_cache_dir(os.environ) / "launch"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{run_id}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise AtWorkError(f"{run_id} is being launched by another process; `fab status` shows it") from None
    try:
        yield
    finally:
        lock.release()


AGENTS_LIMIT_S = 4.0
"""How long the agents of a run in which a process failed have to end the others and to say what happened; they need
about two seconds. After that the launcher stops what is left."""


class NotJoined(Exception):
    """Not every process entered the group.

    outcome: what the run's is: failed, or that somebody stopped it meanwhile. exit_code: where that tells the kind of
    the failure.
    """

    def __init__(self, message: str, outcome: str = "failed", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.outcome, self.exit_code = outcome, exit_code


def join(plan: Plan, launcher: Launcher, *, limit_s: float | None = None) -> None:
    """Wait until every process has entered the group. Whoever started them stops them where this raises.

    limit_s: None is `launch.plan.JOIN_LIMIT_S` of the platform.

    Raises:
        NotJoined: one failed, or the time ran out: the message says who is missing.
    """
    limit_s = plans.JOIN_LIMIT_S[plan.target.platform] if limit_s is None else limit_s
    answers = launcher.join(plan, limit_s=limit_s, answer_limit_s=AGENTS_LIMIT_S + 30)
    silent = [str(answer) for answer in answers if isinstance(answer, HostError)]
    if silent:
        raise NotJoined("; ".join(silent))
    hosts = [host.name for host in plan.target.hosts]
    by_host = {host: answer for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, dict)}
    for outcome in ("stopped", "preempted"):
        stopped = [host for host, answer in by_host.items() if answer["state"] == outcome]
        if stopped:
            raise NotJoined(f"{', '.join(stopped)} left before all had joined: told to stop", outcome)
    failed = {host: answer for host, answer in by_host.items() if _has_failed(answer)}
    if failed:
        reasons = "; ".join(f"{host}: {_reason(answer)}" for host, answer in failed.items())
        codes = {(answer["beat"] or {}).get("exit_code") for answer in failed.values()}
        message = f"a process failed before all had joined: {reasons}"
        raise NotJoined(message, exit_code=failure_kind(codes))
    missing = [host for host, answer in by_host.items() if answer["state"] == "starting"]
    if missing:
        raise NotJoined(f"{', '.join(missing)} did not join within {spoken(limit_s)}")


def _reason(answer: Mapping[str, Any]) -> str:
    beat, process = answer["beat"] or {}, answer["process"]
    state = answer["state"] if process["state"] == "running" else process["state"]
    return printable(str(beat.get("message") or process.get("reason") or state))


def _has_failed(answer: Mapping[str, Any]) -> bool:
    ended = answer["process"]["state"] not in ("starting", "running")
    return answer["state"] == "failed" or (ended and answer["state"] != "done")


# --- records ----------------------------------------------------------------------------------------------------------


def run_record(
    plan: Plan,
    config: Any,
    *,
    name: str | None,
    track: Sequence[str] = (),
    processes_per_host: str | None = None,
    sweep: Mapping[str, Any] | None = None,
    submitted: Submitted | None = None,
    now: datetime.datetime,
    before: Mapping[str, Any] | None,
    launcher_record: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of run.json for a new attempt.

    before: its content so far, for a run that is resumed. launcher_record: the launcher's part.
    """
    target, own = plan.target, plan.command
    runs_here = target.capabilities.shares_files and target.python == sys.executable
    git, metrics = _code_record(plan, config, submitted, before)
    attempt = _attempt_record(plan, now)
    return {
        "version": run_directory.RUN_VERSION,
        "run_id": plan.run_id,
        "name": name or (before["name"] if before else None),
        "job": plan.job,
        "stack": plan.framework,
        "target": target.name,
        "platform": target.platform,
        **({} if processes_per_host is None else {"processes_per_host": processes_per_host}),
        **({"track": [*track]} if track else {}),
        **({"sweep": member} if (member := sweep or (before or {}).get("sweep")) else {}),
        **({"max_usd": plan.budget.max_usd} if plan.budget is not None else {}),
        **({"env": dict(plan.env)} if plan.env else {}),
        **(
            {"secrets": {name: secret.source for name, secret in plan.secrets.items()}}
            if plan.secrets
            else {}
        ),
        **(launcher_record or {}),
        "runtime": "bare" if plan.container is None else "docker",
        "args": list(plan.arguments),
        "config": dataclasses.asdict(config),
        "metric_definitions": metrics,
        "code": {
            "bundle": plan.bundle_sha256,
            **({"folder": own.folder_sha256} if own is not None else {}),
            **git,
        },
        "image": attempt["image"],
        "container_access": plan.container.access if plan.container is not None else None,
        "hang_limit_s": plan.hang_floor_s,
        "heartbeat_limit_s": plan.heartbeat_limit_s,
        "versions": versions() if runs_here and plan.container is None and plan.framework == "jax" else {},
        "slice": dataclasses.asdict(target.slice),
        "hosts": [
            {"index": host.index, "name": host.name, "address": host.internal_address}
            for host in target.hosts
        ],
        "created": before["created"] if before else attempt["started"],
        "cwd": plan.cwd,
        "cache_dir": target.cache_dir,
        "attempts": [*(before["attempts"] if before else []), attempt],
    }


def _attempt_record(plan: Plan, now: datetime.datetime) -> dict[str, Any]:
    created, active_at = plan.target.slice.created, plan.target.slice.active_at
    return {
        "attempt": plan.attempt,
        "started": moment(now.timestamp()),
        "processes": plan.processes,
        "coordinator": plan.coordinator,
        "bundle": plan.bundle_sha256,
        "image": plan.container.image if plan.container is not None else None,
        "price": list_price(plan.target.slice),
        **({"slice_created": created} if created else {}),
        **({"slice_active_at": active_at} if active_at else {}),
        "outcome": None,
    }


def _code_record(
    plan: Plan, config: Any, submitted: Submitted | None, before: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Any]:
    """Return git's part of the code, and what the job says of its metrics."""
    own = plan.command
    if submitted is not None:
        git, metrics = dict(submitted.code), submitted.metric_definitions
    else:
        commit = jobs.git_commit(jobs.CHECKOUT if own is None else Path(config.workdir))
        git = {"git_commit": commit and commit.hash, "git_dirty": commit and commit.is_dirty}
        metrics = metric_definitions.as_json(UNDECLARED if own is not None else jobs.find(plan.job).metrics)
    if before is not None and own is not None and before["code"]["folder"] == own.folder_sha256:
        git = {name: before["code"][name] for name in git}  # this machine may not have the folder
    return git, metrics


def versions() -> dict[str, str]:
    """Return the versions of this interpreter and of the libraries that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def finalize(run: Run, outcome: str, error: str | None, exit_code: int | None = None) -> Run:
    """Write result.json, if the attempt has none, and the report; return the run as it is then.

    A result that the job or an agent wrote is left as it is, readable or not: they were there. exit_code: of the
    process that failed first, where it is known.
    """
    fresh = runs.read(run.directory) or run
    if fresh.current_result() is None and fresh.unread_result is None:
        step, _ = runs.progress(fresh)
        kind: dict[str, Any] = {} if exit_code is None else {"exit_code": exit_code}
        kind |= {"request": True} if exit_code == WRONG_REQUEST else {}
        result = run_directory.result(
            outcome, attempt=fresh.attempt, steps=step, time=time.time(), error=error, measured=kind
        )
        fresh.directory.write_json(run_directory.RESULT, result)
    from jobs.runtime.report.render import read_and_render  # no launch needs it before its end

    with contextlib.suppress(OSError):  # a report is worth having, but not worth hiding how the run ended
        fresh.directory.write_text(run_directory.REPORT, read_and_render(fresh.directory.url))
    return runs.read(fresh.directory) or fresh


# --- what is done about a run that has ended --------------------------------------------------------------------------


def observed(run: Run, state: State, *, living: Presence = "absent", silent: int = 0) -> RunObserved:
    """Return what the policy has to know of a run in this state. living: whether its processes are. silent: hosts that
    do not answer.

    Raises:
        RequestError: how it ended cannot be read.
    """
    if run.unread_result is not None:
        raise RequestError(f"{run.run_id}: how it ended cannot be read: {run.unread_result}")
    result = run.current_result() or {}
    saved = None if living == "present" else run.directory.newest_checkpoint()
    cause = policy.failure_cause(state, result)
    error = str(result.get("reason") or result.get("error") or "").partition("\n")[0]
    if cause == "done":
        _, latest = runs.progress(run)
        error = runs.figure(run, latest)
    return RunObserved(
        living=living,
        state=state,
        cause=cause,
        attempt=run.attempt,
        silent=silent,
        checkpoint=-1 if saved is None else saved,
        error=error,
        cost_usd=pricing.least_usd(run),
        max_usd=finite(run.described.get("max_usd")),
        is_own_command=run.is_own_command,
    )


def desired(run: Run, target: Target, restarts: int | None = None) -> control_documents.Run:
    """Return a run as its launcher wants it, who looks after it himself. restarts: how often it may be started again
    after failures; None: as often as the policy says."""
    return control_documents.Run(
        run_id=run.run_id,
        stack=target.inventory.stack,
        runs_url=target.runs_url,
        slices=(target.slice.name,),
        slice=target.slice.name,
        limits=Limits(restarts=restarts),
    )


def decide(state: State, run: Run) -> Action:
    """Decide whether `fab recover` resumes a run in this state; its hosts are there. A run that was stopped goes on, as
    somebody asks for that now."""
    if state in run_directory.ACTIVE:
        return Action(do="wait", reason=f"it is {state}, there is nothing to recover")
    if state == "done":
        return Action(do="end", outcome="done", reason="it is done, there is nothing left to do")
    if run.unread_result is not None:
        return Action(do="end", reason=f"how it ended cannot be read: {run.unread_result}")
    observation = observed(run, state)
    if observation.cause == "stopped":
        observation = dataclasses.replace(observation, cause="lost")
    return policy.judge(
        control_documents.Run(run_id=run.run_id, stack="", runs_url="", slices=()), observation, time.time()
    )


def stop_asked(run: Run) -> dict[str, Any] | None:
    """Return what `fab stop` has written of a run of which nothing ran, after its latest attempt had begun."""
    stop = run.directory.read_json(run_directory.STOP)
    return stop if stop is not None and stop["attempt"] >= run.attempt else None


class StopAsked(Exception):
    """`fab stop` was told to stop the run that is about to be started again."""


STOP_LOOK_S = 5.0
"""Between two looks for a `fab stop`, each of which is billed where the run is in a bucket."""


@dataclasses.dataclass
class StopWatch:
    """Sleeps while a run cannot be started again yet, and wakes when somebody asks for a stop of it.

    run: None: its directory cannot be read, and so nobody can ask. overruled: as `Request` has it.
    """

    run: Run | None
    overruled: Mapping[str, Any] | None = None
    _next_look_s: float = float("-inf")

    def sleep(self, seconds: float) -> None:
        """Sleep, and look every STOP_LOOK_S, as often as this is called. Raises StopAsked."""
        until = time.monotonic() + seconds
        while True:
            if self.run is not None and time.monotonic() >= self._next_look_s:
                with contextlib.suppress(HostError, RequestError, OSError):  # nobody knows: it is wanted
                    if stop_asked(self.run) not in (None, self.overruled):
                        raise StopAsked
                self._next_look_s = time.monotonic() + STOP_LOOK_S
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, STOP_LOOK_S))


def ask_to_stop(run: Run) -> None:
    """Let whoever is starting a run again leave that."""
    run.directory.write_json(run_directory.STOP, {"attempt": run.attempt, "time": time.time()})
