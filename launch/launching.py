"""From a request to processes on every host: checked, planned, preflight, staged, started, joined; or stopped again.

Each phase is one question to every host, asked of all at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from contracts import fencing, run_directory
from contracts.durations import spoken
from contracts.errors import RequestError, Superseded, Unreachable
from contracts.files import is_url
from contracts.run_directory import RunDirectory
from jobs.runtime.bucket_files import unreadable
from jobs.runtime.cache import user_cache_dir
from launch import costs, jobs, remote_files, runs
from launch import plan as plans
from launch.bundles import Bundle, left_out_lines
from launch.hosts import STOP_NOW_S, HostError, HostsError
from launch.jobs import Job, Submitted
from launch.output import printable
from launch.plan import Plan
from launch.run_record import finalize, run_record
from launch.runs import AtWorkError, Run
from launch.targets import Launcher, Require, Say, Target

if TYPE_CHECKING:
    from launch.own_command import Command

POLL_S = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A run that somebody wants: a new one of `job` or of an own `command`, or `resume`, a run that has been.

    framework: of a job that runs on several; None: its first one. processes_per_host: as
    `launch.plan.ranks_of_job` takes it. A resumed run keeps both. runtime, container_access: as
    `launch.plan.choose_container` takes them. track: the trackers that it is mirrored to. max_usd: what it may cost
    in all its attempts; None: as it was, if it is resumed. run_id: of a new run; None: one is made up. sweep: what
    run.json has of the sweep that it is a member of. restarts, queue, wait_s: of pods, as
    `backends.pods.pod_launcher.PodLauncher` takes them; None: as the run began, or the default. submitted: the run as
    it was when it was submitted; job, command and arguments are then not read.
    """

    job: str
    framework: str | None = None
    processes_per_host: str | None = None
    command: Command | None = None
    arguments: tuple[str, ...]
    name: str | None
    resume: Run | None
    hang_floor_s: float = plans.HANG_FLOOR_S
    heartbeat_limit_s: float = plans.HEARTBEAT_LIMIT_S
    runtime: str | None = None
    container_access: str | None = None
    track: tuple[str, ...] = ()
    run_id: str | None = None
    sweep: Mapping[str, Any] | None = None
    submitted: Submitted | None = None
    max_usd: float | None = None
    restarts: int | None = None
    queue: str | None = None
    wait_s: float | None = None


def is_in_use(error: Exception) -> bool:
    """Whether a run could not be started because somebody else is at work on its hosts."""
    errors = error.errors if isinstance(error, HostsError) else ()
    return isinstance(error, AtWorkError) or (bool(errors) and all(each.is_in_use for each in errors))


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

    hold: as `launch.targets.Backend.hold`; None: the backend's. now_s: a clock in Unix seconds, which those of the
    hosts are compared with.

    Raises:
        RequestError: the request cannot be carried out; nothing was started.
        HostsError: hosts failed the preflight (nothing was started) or a start (all was stopped again).
        LaunchFailed: the processes did not form a group; all was stopped again.
    """
    planned = work_out(request, target)
    plan, directory, run_id = planned.plan, planned.directory, planned.plan.run_id
    target = plan.target
    if planned.needs_environment:
        target.make_environment(plan.framework, say)
    only = only_launch_of(run_id) if request.resume else contextlib.nullcontext()
    with only, (hold or target.backend.hold)() as require, _unless_superseded(run_id):
        attempt, before = _next_attempt(request.resume, target)
        plan = dataclasses.replace(plan, attempt=attempt)
        for line in (*filter(None, [planned.note]), *left_out_lines(planned.bundles)):
            say(line)
        if plan.budget is not None:
            say(plan.budget.text)
        began_s = time.monotonic()
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
            of_launcher=planned.launcher.record,
        )
        directory.remove(run_directory.RESULT)
        # Also where run.json names the same: a launcher that was killed between the two has left others.
        for name, bundle in zip((run_directory.CODE, run_directory.FOLDER), planned.bundles, strict=False):
            directory.write_text(name, bundle.text)
        directory.write_json(run_directory.RUN, described)
        require()
        run = Run(directory=directory, described=described, result=None, heartbeats=())
        _start_and_join(plan, planned.launcher, run, say)
        # Of a command of the user's own nobody knows whether its processes form a group.
        what = "all joined" if plan.command is None else "the command runs on all hosts"
        say(f"{what} after {time.monotonic() - began_s:.1f} s")
    return _read(directory.unfenced())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A request worked out, before any host was asked.

    bundles: what the hosts need, our code first. note: what to say of them. needs_environment: whether the framework's
    environment has to be made where it is missing. processes_per_host: as it was asked for when the run began.
    """

    plan: Plan
    launcher: Launcher
    config: Any
    bundles: tuple[Bundle, ...]
    directory: RunDirectory
    note: str | None = None
    needs_environment: bool = False
    processes_per_host: str | None = None


def work_out(request: Request, target: Target) -> Planned:
    """Check a request and return its plan; nothing is asked of the hosts.

    Raises:
        RequestError: it cannot be carried out.
    """
    resume = request.resume
    command = _own_command(request)
    framework, asked = request.framework, request.processes_per_host
    if resume is not None:
        framework, asked = resume.described.get("stack"), resume.described.get("processes_per_host")
    job = request.submitted or command or jobs.find(request.job, framework)
    base = job.config_of(resume.run_id, resume.described["config"]) if resume else None
    config = job.parse(request.arguments, base=base)
    if isinstance(job, Job):
        config = _with_exports(job, config, target)
    runs.check_name(target.runs, request.name, resume.run_id if resume else None)
    if command is None:
        per_host = plans.ranks_of_job(job.framework, target, asked)
    else:
        per_host = plans.processes_per_host(command.config.processes_per_host, target, job.framework)
    _check(request, job, config, target, per_host)
    cwd = _cwd(request, target)
    launcher = target.backend.launcher(target, request)
    box = _container(request, job, config, target, cwd)
    python = command.config.python if command else target.python if target.python_is_given else None
    needs_environment = python is None and box is None
    python = python or target.interpreter(job.framework, in_container=box is not None)
    code = request.submitted.bundles[0] if request.submitted else jobs.bundle(jobs.CHECKOUT)
    bundles, note = [code], None
    if command is not None:
        folder, note = command.folder_again(resume) if resume else (command.folder(), None)
        bundles.append(folder)
    now = datetime.datetime.now(datetime.UTC)
    run_id = resume.run_id if resume else request.run_id or runs.new_run_id(job.name, now, random.Random())
    directory = resume.directory if resume else target.runs.directory(run_id)
    plan = Plan(
        target=target if command else dataclasses.replace(target, python=python),
        run_id=run_id,
        attempt=resume.attempt + 1 if resume else 0,
        job=job.name,
        framework=job.framework,
        arguments=tuple(job.words(config)),
        run_dir=directory.url,
        cwd=cwd,
        bundle_sha256=bundles[0].sha256,
        hang_floor_s=request.hang_floor_s,
        heartbeat_limit_s=request.heartbeat_limit_s,
        container=box,
        ranks_per_host=per_host,
        budget=costs.budget(request.max_usd, target.slice, resume),
        command=command.planned(target, bundles[1], python, in_container=box is not None)
        if command
        else None,
    )
    return Planned(
        plan=launcher.placed(plan),
        launcher=launcher,
        config=config,
        bundles=tuple(bundles),
        directory=directory,
        note=note,
        needs_environment=needs_environment,
        processes_per_host=asked,
    )


def _with_exports(job: Job, config: Any, target: Target) -> Any:
    """The options with the export's path where one that takes a model names a run."""
    found = {
        name: runs.export_of(target.runs, value)
        for name in getattr(job.config_module(), "FROM_RUNS", ())
        if (value := getattr(config, name)) is not None
    }
    return dataclasses.replace(config, **{name: path for name, path in found.items() if path is not None})


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


def _own_command(request: Request) -> Command | None:
    given, resume = request.submitted, request.resume
    config = given.options if given else resume.described["config"] if resume else None
    job = given.name if given else resume.described["job"] if resume else request.job
    if config is None or job != run_directory.OWN_COMMAND:
        return request.command
    from launch import own_command  # jobs do without

    return own_command.of_run(config, given.bundles[1] if given else None)


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
        raise LaunchFailed(_finalized(directory, error.outcome, str(error))) from None
    except KeyboardInterrupt:
        stop_all()
        ended = _finalized(directory, "stopped", "interrupted")
        raise LaunchFailed(ended, is_interrupted=True) from None
    except BaseException:
        stop_all()
        raise


def _finalized(directory: RunDirectory, outcome: str, error: str) -> Run:
    """Put the end of an attempt on record as that attempt; return the run for whoever goes on with it."""
    run = finalize(_read(directory), outcome, error)
    return dataclasses.replace(run, directory=directory.unfenced())


def _container(
    request: Request, job: Job | Command | Submitted, config: Any, target: Target, cwd: str
) -> plans.Container | None:
    """Choose what the processes run in; on this machine with the files that the job's options name."""
    before = request.resume.described if request.resume else None
    box = plans.choose_container(target, job.framework, request.runtime, before, request.container_access)
    if box is None or not target.capabilities.shares_files or job.name == run_directory.OWN_COMMAND:
        return box
    return plans.container_with_files(box, dataclasses.asdict(config), cwd)


def _check(
    request: Request, job: Job | Command | Submitted, config: Any, target: Target, per_host: int
) -> None:
    if part := target.part_of_tpu:
        raise RequestError(part)
    has_rank_a_device = job.framework in plans.RANK_A_CHIP
    devices = per_host * len(target.hosts) if has_rank_a_device else target.devices
    problems = job.problems(config, devices=devices)
    problems += [f"{asked}: {why}" for url, asked in _urls_of(config) if (why := unreadable(url))]
    if not problems:
        unread = _unread_buckets(config, target)
        if unread and all(error.is_outage for error in unread):
            raise Unreachable("\n".join(map(str, unread)))
        problems = [str(error) for error in unread]
    if not problems and target.capabilities.shares_files and isinstance(job, Job):
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


def _urls_of(config: Any) -> list[tuple[str, str]]:
    """Return the URLs among the options, each with its option."""
    return [
        (value, f"--{name.replace('_', '-')} {value}")
        for name, value in dataclasses.asdict(config).items()
        if isinstance(value, str) and is_url(value)
    ]


def _unread_buckets(config: Any, target: Target) -> list[HostError]:
    """Return why the bucket of the runs cannot be read, and those in options where the hosts have this machine's
    rights."""
    wanted = [(target.runs_url, target.runs_url)] if is_url(target.runs_url) else []
    wanted += _urls_of(config) if target.capabilities.shares_files else []
    if not wanted:
        return []

    def problem(url: str, asked: str) -> HostError | None:
        try:
            remote_files.reach(url, asked, one_object=url != target.runs_url)
        except HostError as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        return [found for found in pool.map(problem, *zip(*wanted, strict=True)) if found]


def _data_problems(request: Request, job: Job, config: Any, target: Target) -> list[str]:
    """Check the data from the directory in which the run is carried out, which is a resumed run's own."""
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
    if request.submitted:
        return request.submitted.cwd
    return os.getcwd() if target.capabilities.shares_files else plans.HOME


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
    now = target.state_of(fresh)
    if now in run_directory.ACTIVE:
        raise AtWorkError(f"--resume {fresh.run_id}: the run is {now}; `fab stop {fresh.run_id}` stops it")
    if now == "done":
        raise RequestError(f"--resume {fresh.run_id}: the run is done, there is nothing left to resume")
    # A failed attempt's agents still end its processes and write its result, which must not meet the next one's.
    deadline = time.monotonic() + run_directory.FINISHING_LIMIT_S
    while any(entry["supervised"] for entry in target.backend.status([fresh]).of(fresh).processes):
        if time.monotonic() > deadline:
            raise AtWorkError(
                f"--resume {fresh.run_id}: its processes are still ending; try again in a moment"
            )
        time.sleep(POLL_S)
    *earlier, latest = fresh.described["attempts"]
    ended = {**latest, "outcome": now, "wall_s": fresh.wall_s}
    before = {**fresh.described, "attempts": [*earlier, ended]}
    return max(fresh.attempt, newest_taken) + 1, before


@contextlib.contextmanager
def only_launch_of(run_id: str) -> Iterator[None]:
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

    outcome: what the run's is: failed, or that somebody stopped it meanwhile.
    """

    def __init__(self, message: str, outcome: str = "failed") -> None:
        super().__init__(message)
        self.outcome = outcome


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
    reasons = [f"{host}: {_reason(answer)}" for host, answer in by_host.items() if _has_failed(answer)]
    if reasons:
        raise NotJoined(f"a process failed before all had joined: {'; '.join(reasons)}")
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
