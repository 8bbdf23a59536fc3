"""What `fab train` and `fab recover` do and print: start a run, follow it, start it again where that is asked for."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from rich.console import Console

from contracts.errors import DONE, RequestError
from contracts.run_directory import State
from launch import display, follow, recover, rollout, run_record, runs
from launch import jobs as job_index
from launch import train as launching
from launch.display import say, terminal
from launch.hosts import HostError
from launch.plan import HANG_FLOOR_S, HEARTBEAT_LIMIT_S
from launch.run_record import finalize
from launch.runs import Run
from launch.target import Target
from launch.train import Request

STOP_GRACE_S = 120.0


Open = Callable[[Run | None], Target]
"""Gives the target, as it is now; for a run that is to go on, the target that suits it."""


def train(
    open_target: Open,
    *,
    job: str | None,
    arguments: Sequence[str],
    resume: str | None,
    name: str | None,
    detach: bool,
    hang_floor_s: float = HANG_FLOOR_S,
    heartbeat_limit_s: float = HEARTBEAT_LIMIT_S,
    restarts: int,
    runtime: str | None = None,
    container_access: str | None = None,
) -> int:
    """Start a run (or go on with one) and, unless `detach`, follow it to its end; `restarts`: how often anew."""
    console = terminal()
    target = open_target(None)
    old = resumed(target, resume, job) if resume else None
    target = open_target(old) if old and target.is_local else target
    if old is None and job is None:
        raise RequestError(f"--job: say what to train; choose one of {', '.join(job_index.names())}")
    request = Request(
        job=job or (old.described["job"] if old else ""),
        arguments=tuple(arguments),
        name=name,
        resume=old,
        hang_floor_s=hang_floor_s,
        heartbeat_limit_s=heartbeat_limit_s,
        runtime=runtime,
        container_access=container_access,
    )
    return _carry_out(console, request, target, open_target, restarts, detach=detach)


def words(arguments: str, after_dashes: Sequence[str]) -> list[str]:
    """The job's own options: those of --args, which is split as a shell would, or those after `--`.

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


def resumed(target: Target, wanted: str, job: str | None) -> Run:
    """The run that is to go on.

    Raises:
        RequestError: there is none, or it is one of another job.
    """
    run = runs.find(target.runs, wanted)
    if job is not None and job != run.described["job"]:
        raise RequestError(f"--job {job}: {run.run_id} is a run of {run.described['job']}; leave --job out")
    return run


def go_on(open_target: Open, wanted: str, *, detach: bool) -> int:
    """`fab recover`: whatever happened to the run and its slice, mend it and go on from the last checkpoint."""
    console = terminal()
    target = recover.repaired(open_target(None), lambda: open_target(None), say(console))
    run = runs.find(target.runs, wanted)
    target = open_target(run) if target.is_local else target
    known = follow.look(target.find_agents(run.described), run)
    decision = recover.decide(follow.state(run, known), run)
    say(console)(f"{run.run_id}: {decision.reason}")
    if not decision.resume:
        return DONE
    return _carry_out(console, resuming(run), target, open_target, 0, detach=detach)


def _carry_out(
    console: Console, request: Request, target: Target, open_target: Open, restarts: int, *, detach: bool
) -> int:
    """Launch it and, unless `detach`, follow it to its end."""
    try:
        run = launching.launch(request, target, say(console))
    except launching.LaunchFailed as failure:
        return _report(console, failure.run, follow.state_now(target.agents, failure.run))
    if detach:
        say(console)(_how_to_come_back(run, target))
        return DONE
    return _follow(console, run, target, open_target, restarts)


def resuming(run: Run) -> Request:
    """The request to go on as the run began."""
    return Request(
        job=run.described["job"],
        arguments=(),
        name=None,
        resume=run,
        hang_floor_s=float(run.described.get("hang_limit_s", HANG_FLOOR_S)),
        heartbeat_limit_s=float(run.described.get("heartbeat_limit_s", HEARTBEAT_LIMIT_S)),
    )


def _how_to_come_back(run: Run, target: Target) -> str:
    where = "" if target.is_local else f" --stack {target.name}"
    return (
        f"it goes on by itself: `fab status{where}`, `fab logs{where} --follow`, "
        f"`fab stop{where} --run {run.run_id}`"
    )


def _follow(console: Console, run: Run, target: Target, open_target: Open, restarts: int) -> int:
    """Follow to the end, and start it again as often as that is allowed.

    Ctrl-C stops a run on this machine gracefully (a second one does not wait for that); it leaves one elsewhere alone.
    """
    shown = display.make(console)
    try:
        state = follow.follow(run, target.agents, shown)
    except KeyboardInterrupt:
        shown.close()
        if not target.is_local:
            say(console)(f"no longer following; {_how_to_come_back(run, target)}")
            return DONE
        console.print("stopping, so that the run can be resumed (Ctrl-C again: do not wait for it)")
        rollout.stop(target.agents, run.run_id, run.attempt, grace_s=STOP_GRACE_S)
        state = follow.follow(run, target.agents, display.Plain(console))
    finally:
        shown.close()
    run = _concluded(run, state)
    decision = recover.decide(state, run)
    if decision.resume and restarts > 0 and state != "stopped":
        for line in [*run_record.summary(run, state)[:2], f"{decision.reason}; {_left(restarts)}"]:
            say(console)(line)
        target = recover.repaired(target, lambda: open_target(None), say(console))
        run = runs.find(target.runs, run.run_id)
        return _carry_out(console, resuming(run), target, open_target, restarts - 1, detach=False)
    return _report(console, run, state)


def _concluded(run: Run, state: State) -> Run:
    try:
        run = runs.read(run.directory) or run
        return run if state in ("done", "lost") else finalize(run, state, None)
    except HostError:  # its hosts are gone, and its directory with them for now
        return run


def _left(restarts: int) -> str:
    return f"{restarts} restart{'s' * (restarts > 1)} left"


def _report(console: Console, run: Run, state: State) -> int:
    for line in run_record.summary(run, state):
        say(console)(line)
    return run_record.exit_code(run, state)
