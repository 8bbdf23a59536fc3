"""From a request to a running run: checked, planned, rolled out. What `fab train` does, without the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from filelock import FileLock, Timeout

from jobs.runtime import run_directory
from jobs.runtime.errors import RequestError
from jobs.runtime.run_directory import RunDirectory
from launch import bundle as bundles
from launch import follow, jobs, rollout, runs, targets
from launch.agents import HostsError
from launch.conclude import conclude
from launch.describe import describe
from launch.plan import Plan
from launch.runs import Run
from launch.targets import Target

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A run that somebody wants: a new one of `job`, or `resume`, a run that has been."""

    job: str
    arguments: tuple[str, ...]
    name: str | None
    resume: Run | None


class LaunchFailed(Exception):
    """The processes did not form a group; they have been stopped and `run` says why."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"{run.run_id} did not start")
        self.run = run


def launch(request: Request, target: Target, say: Say) -> Run:
    """Start the run on all hosts of the target; returns when every process has joined the group.

    Raises:
        RequestError: the request cannot be carried out; nothing was started.
        HostsError: hosts failed the preflight (nothing was started) or a start (all was stopped again).
        LaunchFailed: the processes did not form a group; all was stopped again.
    """
    job = jobs.find(request.job)
    base = (
        job.config_of(request.resume.run_id, request.resume.described["config"]) if request.resume else None
    )
    config = job.parse(request.arguments, base=base)
    _check(request, job, config, target)
    code = bundles.build(jobs.CHECKOUT)
    now = datetime.datetime.now(datetime.UTC)
    run_id = request.resume.run_id if request.resume else runs.new_run_id(job.name, now, random.Random())
    directory = RunDirectory(
        request.resume.directory.url if request.resume else str(target.runs_dir / run_id)
    )
    with _only_resume_of(run_id, target) if request.resume else contextlib.nullcontext():
        attempt = _next_attempt(request.resume)
        before = directory.read_json(run_directory.RUN)
        plan = _plan(request, job, config, target, run_id, attempt, directory, code.sha256)
        began_s = time.monotonic()
        try:
            facts = rollout.preflight(plan, target.agents)
            sent = rollout.stage(plan, code, target.agents, facts)
        except BaseException:
            with contextlib.suppress(OSError):  # what a preflight made to see whether it can be made
                os.rmdir(directory.url)
            raise
        say(
            f"preflight passed on {plan.processes} host{'s' * (plan.processes > 1)} "
            f"({', '.join(agent.host for agent in target.agents)})"
            + (f", code {code.sha256[:12]} sent" if sent else f", code {code.sha256[:12]} is there")
        )
        described = describe(plan, target, config, name=request.name, now=now, before=before)
        directory.remove(run_directory.RESULT)
        directory.write_json(run_directory.RUN, described)
        try:
            rollout.start(plan, target.agents)
            say(f"started {run_id}" + (f", attempt {attempt}" if attempt else "") + f" in {directory.url}")
            rollout.join(target.agents, lambda: runs.read(directory))
        except HostsError as error:  # what had been started has been stopped again
            conclude(_read(directory), "failed", str(error))
            raise
        except rollout.NotJoined as error:
            _settle(directory)
            rollout.stop(target.agents, run_id, attempt, grace_s=rollout.STOP_NOW_S)
            raise LaunchFailed(conclude(_read(directory), "failed", str(error))) from None
        except KeyboardInterrupt:
            rollout.stop(target.agents, run_id, attempt, grace_s=rollout.STOP_NOW_S)
            raise LaunchFailed(conclude(_read(directory), "stopped", "interrupted")) from None
        except BaseException:
            rollout.stop(target.agents, run_id, attempt, grace_s=rollout.STOP_NOW_S)
            raise
        say(f"all joined after {time.monotonic() - began_s:.1f} s")
    return _read(directory)


def _check(request: Request, job: jobs.Job, config: Any, target: Target) -> None:
    problems = job.problems(config, devices=target.devices)
    if not problems and target.sees_files:
        problems = _data_problems(request, job, config, target)
    if request.resume is not None:
        changes = job.changes_on_resume(request.resume.described["config"], config)
        if changes:
            problems.append(
                f"--resume {request.resume.run_id}: a resumed run goes on as it began, but these options differ:\n  "
                + "\n  ".join(changes)
                + "\n  leave them out, or start a new run"
            )
    if problems:
        raise RequestError("\n".join(problems))


def _data_problems(request: Request, job: jobs.Job, config: Any, target: Target) -> list[str]:
    """Looked for from where the run is carried out: a resumed run's own directory, not where one stands now."""
    try:
        with contextlib.chdir(_cwd(request)):
            return job.data_problems(config, target.cache_dir)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return [
            f"{_cwd(request)}: the directory that the run was started in cannot be entered; make it again"
        ]


def _cwd(request: Request) -> str:
    return str(request.resume.described["cwd"]) if request.resume else os.getcwd()


def _settle(directory: RunDirectory) -> None:
    """Where a process failed, let the agents find out which was the first and why: a stop would cut them short."""
    deadline = time.monotonic() + rollout.AGENTS_LIMIT_S
    while time.monotonic() < deadline:
        run = _read(directory)
        failing = any(beat is not None and beat["state"] == "failed" for beat in run.current())
        if run.current_result() is not None or not failing:
            return
        time.sleep(rollout.POLL_S)


def _read(directory: RunDirectory) -> Run:
    run = runs.read(directory)
    if run is None:
        raise RequestError(f"{directory.url}: the run's directory has vanished")
    return run


def _next_attempt(resume: Run | None) -> int:
    if resume is None:
        return 0
    fresh = runs.read(resume.directory) or resume
    agents = targets.agents_of(fresh.described)
    now = follow.state(agents, fresh)
    if now in runs.ACTIVE:
        raise RequestError(
            f"--resume {fresh.run_id}: the run is {now}; `fab stop --run {fresh.run_id}` stops it"
        )
    if now == "done":
        raise RequestError(f"--resume {fresh.run_id}: the run is done, there is nothing left to resume")
    # A failed attempt's agents still end its processes and write its result, which must not meet the next one's.
    deadline = time.monotonic() + runs.FINISHING_LIMIT_S
    while any(entry["supervised"] for entry in follow.processes(agents, fresh)):
        if time.monotonic() > deadline:
            raise RequestError(
                f"--resume {fresh.run_id}: its processes are still ending; try again in a moment"
            )
        time.sleep(rollout.POLL_S)
    _record_outcome(fresh.directory, now)
    return fresh.attempt + 1


def _record_outcome(directory: RunDirectory, outcome: str) -> None:
    """Keep how the latest attempt ended in run.json, where the next attempt's result will not overwrite it."""
    described = directory.read_json(run_directory.RUN)
    if described is not None:
        described["attempts"][-1]["outcome"] = outcome
        directory.write_json(run_directory.RUN, described)


def _plan(
    request: Request,
    job: jobs.Job,
    config: Any,
    target: Target,
    run_id: str,
    attempt: int,
    directory: RunDirectory,
    bundle_sha256: str,
) -> Plan:
    return Plan(
        run_id=run_id,
        attempt=attempt,
        job=job.name,
        stack=job.stack,
        arguments=tuple(job.words(config)),
        platform=target.platform,
        run_dir=directory.url,
        cache_dir=str(target.cache_dir),
        cwd=_cwd(request),
        python=target.python,
        agent_root=target.agents[0].root,
        bundle_sha256=bundle_sha256,
        coordinator_host=target.coordinator_host,
        coordinator_port=free_port(target.coordinator_host),
        local_devices=target.slice.devices_per_host if target.platform == "cpu" else None,
        cpus=target.cpus,
    )


@contextlib.contextmanager
def _only_resume_of(run_id: str, target: Target) -> Iterator[None]:
    """Two that resume one run at once would start it twice; the second is refused."""
    locks = target.cache_dir / "launch"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{run_id}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RequestError(f"{run_id} is being launched by another process; `fab status` shows it") from None
    try:
        yield
    finally:
        lock.release()


def free_port(host: str) -> int:
    """A TCP port that nothing listens on now, chosen by the system from its ephemeral range."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
