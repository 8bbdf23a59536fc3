"""From a request to a running run: checked, planned, rolled out. What `fab train` does, without the terminal."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from contracts import run_directory
from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from jobs.runtime.cache import user_cache_dir
from launch import follow, jobs, remote_files, rollout, runs
from launch import jobs as bundles
from launch import plan as plans
from launch.hosts import HostError, HostsError, ask_all
from launch.plan import Plan
from launch.run_record import finalize, run_record
from launch.runs import Run
from launch.target import Target

Say = Callable[[str], None]
POLL_S = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A run that somebody wants: a new one of `job`, or `resume`, a run that has been.

    runtime, container_access: as `launch.plan.choose_container` takes them.
    """

    job: str
    arguments: tuple[str, ...]
    name: str | None
    resume: Run | None
    hang_floor_s: float = plans.HANG_FLOOR_S
    heartbeat_limit_s: float = plans.HEARTBEAT_LIMIT_S
    runtime: str | None = None
    container_access: str | None = None


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
    runs.check_name(target.runs, request.name, request.resume.run_id if request.resume else None)
    _check(request, job, config, target)
    cwd = _cwd(request, target)
    before = request.resume.described if request.resume else None
    box = plans.choose_container(
        target, job.stack, request.runtime, plans.built_here, before, request.container_access
    )
    if box is not None and target.is_local:
        box = plans.container_with_files(box, dataclasses.asdict(config), cwd)
    code = bundles.bundle(jobs.CHECKOUT)
    now = datetime.datetime.now(datetime.UTC)
    run_id = request.resume.run_id if request.resume else runs.new_run_id(job.name, now, random.Random())
    directory = request.resume.directory if request.resume else target.runs.directory(run_id)
    with _only_resume_of(run_id) if request.resume else contextlib.nullcontext():
        attempt = _next_attempt(request.resume, target)
        before = directory.read_json(run_directory.RUN) if request.resume else None
        plan = plans.on(
            target,
            run_id=run_id,
            attempt=attempt,
            job=job.name,
            stack=job.stack,
            arguments=job.words(config),
            run_dir=directory.url,
            cwd=cwd,
            bundle_sha256=code.sha256,
            hang_floor_s=request.hang_floor_s,
            heartbeat_limit_s=request.heartbeat_limit_s,
            container=box,
        )
        began_s = time.monotonic()
        try:
            facts = rollout.preflight(plan, target.agents)
            sent = rollout.stage(plan, code, target.agents, facts)
            rollout.pull(plan, target.agents, facts, say)
        except BaseException:
            _remove_if_empty(plan, target)
            raise
        plan = plans.settled(plan, facts, token=secrets.token_hex(16))
        say(
            f"preflight passed on {_hosts(target)}"
            + (f", code {code.sha256[:12]} sent" if sent else f", code {code.sha256[:12]} is there")
        )
        described = run_record(plan, target, config, name=request.name, now=now, before=before)
        directory.remove(run_directory.RESULT)
        directory.write_json(run_directory.RUN, described)
        try:
            rollout.start(plan, target.agents)
            say(f"started {run_id}" + (f", attempt {attempt}" if attempt else "") + f" in {directory.url}")
            rollout.join(plan, target.agents)
        except HostsError as error:  # what had been started has been stopped again
            finalize(_read(directory), "failed", str(error))
            raise
        except rollout.NotJoined as error:
            _settle(directory)
            rollout.stop(target.agents, run_id, attempt, grace_s=rollout.STOP_NOW_S)
            if error.outcome == "failed" and (hint := plans.container_hint(box, target.platform)):
                say(hint)
            raise LaunchFailed(finalize(_read(directory), error.outcome, str(error))) from None
        except KeyboardInterrupt:
            rollout.stop(target.agents, run_id, attempt, grace_s=rollout.STOP_NOW_S)
            raise LaunchFailed(finalize(_read(directory), "stopped", "interrupted")) from None
        except BaseException:
            rollout.stop(target.agents, run_id, attempt, grace_s=rollout.STOP_NOW_S)
            raise
        say(f"all joined after {time.monotonic() - began_s:.1f} s")
    return _read(directory)


MOST_NAMED = 4
REMOVE_LIMIT_S = 10.0


def _hosts(target: Target) -> str:
    names = [host.name for host in target.hosts]
    shown = ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
    return f"{len(names)} host{'s' * (len(names) > 1)} ({shown})"


def _remove_if_empty(plan: Plan, target: Target) -> None:
    """The run directory that a preflight made to see whether it can be made, and that nobody needs now."""
    if target.runs_on_share:
        # Of all hosts: any of them may be the one that does not answer, and what went wrong is being told already.
        requests = [{"path": plan.run_dir}] * len(target.agents)
        ask_all(target.agents, "remove", requests, timeout_s=REMOVE_LIMIT_S)


def _check(request: Request, job: jobs.Job, config: Any, target: Target) -> None:
    if part := target.part_of_tpu:
        raise RequestError(part)
    problems = job.problems(config, devices=target.devices)
    if not problems:
        problems = _bucket_problems(config, target)
    if not problems and target.is_local:
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


def _bucket_problems(config: Any, target: Target) -> list[str]:
    """Of where runs lie and, on this machine, of what the options name: a stack's hosts have rights of their own."""
    wanted = [(target.runs_url, target.runs_url)]
    options = dataclasses.asdict(config).items() if target.is_local else ()
    wanted += [
        (value, f"--{name.replace('_', '-')} {value}") for name, value in options if isinstance(value, str)
    ]

    def problem(url: str, asked: str) -> str | None:
        try:
            remote_files.reach(url, asked, one_object=url != target.runs_url)
        except HostError as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        return [found for found in pool.map(problem, *zip(*wanted, strict=True)) if found]


def _data_problems(request: Request, job: jobs.Job, config: Any, target: Target) -> list[str]:
    """Looked for from where the run is carried out: a resumed run's own directory, not where one stands now."""
    try:
        with contextlib.chdir(_cwd(request, target)):
            return job.data_problems(config, Path(target.cache_dir))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return [
            f"{_cwd(request, target)}: the directory that the run was started in cannot be entered; make it again"
        ]


def _cwd(request: Request, target: Target) -> str:
    if request.resume:
        return str(request.resume.described["cwd"])
    return os.getcwd() if target.is_local else plans.HOME


def _settle(directory: RunDirectory) -> None:
    """Where a process failed, let the agents find out which was the first and why: a stop would cut them short."""
    deadline = time.monotonic() + rollout.AGENTS_LIMIT_S
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


def _next_attempt(resume: Run | None, target: Target) -> int:
    if resume is None:
        return 0
    fresh = runs.read(resume.directory) or resume
    agents = target.find_agents(fresh.described)
    now = follow.state_now(agents, fresh)
    if now in run_directory.ACTIVE:
        raise RequestError(
            f"--resume {fresh.run_id}: the run is {now}; `fab stop --run {fresh.run_id}` stops it"
        )
    if now == "done":
        raise RequestError(f"--resume {fresh.run_id}: the run is done, there is nothing left to resume")
    # A failed attempt's agents still end its processes and write its result, which must not meet the next one's.
    deadline = time.monotonic() + run_directory.FINISHING_LIMIT_S
    while any(entry["supervised"] for entry in follow.look(agents, fresh).processes):
        if time.monotonic() > deadline:
            raise RequestError(
                f"--resume {fresh.run_id}: its processes are still ending; try again in a moment"
            )
        time.sleep(POLL_S)
    _record_outcome(fresh.directory, now)
    return fresh.attempt + 1


def _record_outcome(directory: RunDirectory, outcome: str) -> None:
    """Keep how the latest attempt ended in run.json, where the next attempt's result will not overwrite it."""
    described = directory.read_json(run_directory.RUN)
    if described is not None:
        described["attempts"][-1]["outcome"] = outcome
        directory.write_json(run_directory.RUN, described)


@contextlib.contextmanager
def _only_resume_of(run_id: str) -> Iterator[None]:
    """Two that resume one run at once would start it twice; the second is refused."""
    locks = user_cache_dir(os.environ) / "launch"
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
