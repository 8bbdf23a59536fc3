"""From a request to processes on every host: checked, planned, preflight, staged, started, joined; or stopped again.

Each phase is one question to every host, asked of all at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from contracts import run_directory
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.files import is_url
from contracts.run_directory import RunDirectory
from jobs.runtime.cache import user_cache_dir
from launch import costs, environments, jobs, runs
from launch import plan as plans
from launch.hosts import STOP_NOW_S, Agent, HostError, HostsError, all_or_error, ask_all, stop_processes
from launch.jobs import Bundle, Job, Submitted
from launch.plan import Plan
from launch.run_record import finalize, run_record
from launch.runs import Run
from launch.targets import Target

if TYPE_CHECKING:
    from launch.kubernetes import Options
    from launch.own_command import Command

Say = Callable[[str], None]
POLL_S = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A run that somebody wants: a new one of `job` or of an own `command`, or `resume`, a run that has been.

    framework: of a job that runs on several; None: its first one. processes_per_host: as
    `launch.plan.ranks_of_job` takes it. A resumed run keeps both. runtime, container_access: as
    `launch.plan.choose_container` takes them. track: the trackers that it is mirrored to. max_usd: what it may cost
    in all its attempts; None: as it was, if it is resumed. run_id: of a new run; None: one is made up. sweep: what
    run.json has of the sweep that it is a member of. restarts, queue, wait_s: of pods, as `launch.kubernetes.Options`
    and `launch.pods.ClusterRuns.start` take them; None: as the run began, or the default. submitted: the run as it was
    when it was submitted; job, command and arguments are then not read.
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


class AtWorkError(RequestError):
    """The run is at work, or somebody else is starting it."""


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


def launch(request: Request, target: Target, say: Say, *, now_s: Callable[[], float] = time.time) -> Run:
    """Start the run on all hosts of the target, and return when every process has joined the group.

    now_s: a clock in Unix seconds, which those of the hosts are compared with.

    Raises:
        RequestError: the request cannot be carried out; nothing was started.
        HostsError: hosts failed the preflight (nothing was started) or a start (all was stopped again).
        LaunchFailed: the processes did not form a group; all was stopped again.
    """
    planned = work_out(request, target)
    plan, directory, run_id = planned.plan, planned.directory, planned.plan.run_id
    target = plan.target
    if planned.needs_environment:
        environments.ensure(plan.framework, say)
    with only_launch_of(run_id) if request.resume else contextlib.nullcontext(), target.alone():
        plan = dataclasses.replace(plan, attempt=_next_attempt(request.resume, target))
        before = directory.read_json(run_directory.RUN) if request.resume else None
        if planned.note is not None:
            say(planned.note)
        if plan.budget is not None:
            say(plan.budget.text)
        began_s = time.monotonic()
        try:
            plan = prepare(plan, planned.bundles, target, say, now_s, planned.pods)
        except BaseException:
            _remove_if_empty(plan, target)
            raise
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
            pods=planned.pods,
        )
        directory.remove(run_directory.RESULT)
        code, *folders = planned.bundles
        if target.is_local or target.inventory.keeper is not None:
            directory.write_text(run_directory.CODE, code.text)
        for folder in folders:
            if before is None or before["code"]["folder"] != folder.sha256:
                directory.write_text(run_directory.FOLDER, folder.text)
        directory.write_json(run_directory.RUN, described)
        begin = functools.partial(start, plan, target.agents)
        if target.cluster is not None and planned.pods is not None:
            begin = functools.partial(target.cluster.start, plan, planned.pods, say, wait_s=request.wait_s)
        _start_and_join(plan, target, directory, say, begin)
        say(f"all joined after {time.monotonic() - began_s:.1f} s")
    return _read(directory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A request worked out, before any host was asked.

    bundles: what the hosts need, our code first. note: what to say of them. needs_environment: whether the framework's
    environment on this machine has to be there. processes_per_host: as it was asked for when the run began.
    pods: of a run in a cluster, how it is made there.
    """

    plan: Plan
    config: Any
    bundles: tuple[Bundle, ...]
    directory: RunDirectory
    note: str | None = None
    needs_environment: bool = False
    processes_per_host: str | None = None
    pods: Options | None = None


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
    box = _container(request, job, config, target, cwd)
    if target.cluster is not None and box is None:
        raise RequestError(_NO_IMAGE.format(framework=job.framework, stack=target.name))
    python = command.config.python if command else target.python if target.python_is_given else None
    needs_environment = python is None and box is None and target.is_local
    python = python or environments.interpreter(target, job.framework, in_container=box is not None)
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
    options = _of_pods(request, target)
    if target.cluster is not None:
        from launch import kubernetes  # few runs are in a cluster

        plan = kubernetes.placed(plan)
        agents = target.cluster.agents_called([host.name for host in plan.target.hosts])
        plan = dataclasses.replace(plan, target=dataclasses.replace(plan.target, agents=agents))
    return Planned(
        plan=plan,
        config=config,
        bundles=tuple(bundles),
        directory=directory,
        note=note,
        needs_environment=needs_environment,
        processes_per_host=asked,
        pods=options,
    )


_NO_IMAGE = (
    "--runtime bare: pods run images, and the stack {stack} has none of {framework}, or this leaves it out; "
    "`fab build --framework {framework}`, `fab push --stack {stack} --framework {framework}`, then `pulumi up`"
)


def _of_pods(request: Request, target: Target) -> Options | None:
    """Return how a run is made in a cluster; None where its hosts are machines.

    Raises:
        RequestError: it asks machines for what only a cluster has.
    """
    if target.cluster is None:
        if request.queue is not None or request.wait_s is not None:
            raise RequestError(
                f"--queue, --wait: the slice {target.slice.name} is no node pool of a cluster; leave them out"
            )
        return None
    from launch.kubernetes import Options  # few runs are in a cluster

    before = (request.resume.described.get("pods") or {}) if request.resume else {}
    asked = {"restarts": request.restarts, "queue": request.queue}
    return Options(**{**before, **{name: value for name, value in asked.items() if value is not None}})


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


def prepare(
    plan: Plan,
    bundles: Sequence[Bundle],
    target: Target,
    say: Say,
    now_s: Callable[[], float],
    pods: Options | None = None,
) -> Plan:
    """Preflight every host, send the code and pull the image; return the plan with what the preflight found.

    pods: in a cluster, which pulls images itself, how the run is made there.

    Raises:
        HostsError: a host is not ready; nothing has been started.
        RequestError, HostError: the cluster would not take the run; nothing has been started.
    """
    if target.cluster is not None and pods is not None:
        if plan.attempt:
            target.cluster.clear(plan.run_id)
        target.cluster.check(plan, pods)
        sent = target.cluster.put(plan, bundles)
        say(
            f"{target.cluster.connection.name} takes the run, its code {'was put' if sent else 'is'} in the bucket"
        )
        return plan
    facts = preflight(plan, target.agents, now_s)
    code, *folders = bundles
    sent = stage(code, target.agents, facts)
    sent += sum(stage_if_missing(folder, target.agents) for folder in folders)
    pull(plan, target.agents, facts, say)
    name = " and ".join(["code " + code.sha256[:12], *("folder " + folder.sha256[:12] for folder in folders)])
    is_there = "are there" if folders else "is there"
    say(f"preflight passed on {_named(target)}, {name} {'sent' if sent else is_there}")
    return plans.settled(plan, facts, token=secrets.token_hex(16))


def _start_and_join(
    plan: Plan, target: Target, directory: RunDirectory, say: Say, begin: Callable[[], None]
) -> None:
    """Start every process and wait until all have joined; otherwise stop all, and write the reason to result.json.

    begin: starts them, or none.

    Raises:
        HostsError: a process could not be started.
        LaunchFailed: the processes did not form a group, or somebody interrupted.
    """

    def stop_all() -> None:
        answers = stop_processes(target.agents, plan.run_id, plan.attempt, grace_s=STOP_NOW_S)
        error = next((answer for answer in answers if isinstance(answer, HostError)), None)
        if target.cluster is not None and error is not None:  # which would start it again and again
            say(f"{error}; it may go on: `fab stop --run {plan.run_id}`")

    try:
        begin()
        attempt = f", attempt {plan.attempt}" if plan.attempt else ""
        say(f"started {plan.run_id}{attempt} in {directory.url}")
        join(plan, target.agents)
    except (HostsError, HostError, RequestError) as error:  # what had been started has been stopped again
        finalize(_read(directory), "failed", str(error))
        raise
    except NotJoined as error:
        _settle(directory)
        stop_all()
        if error.outcome == "failed" and (hint := plans.container_hint(plan.container, target.platform)):
            say(hint)
        raise LaunchFailed(finalize(_read(directory), error.outcome, str(error))) from None
    except KeyboardInterrupt:
        stop_all()
        ended = finalize(_read(directory), "stopped", "interrupted")
        raise LaunchFailed(ended, is_interrupted=True) from None
    except BaseException:
        stop_all()
        raise


MOST_NAMED = 4
REMOVE_LIMIT_S = 10.0


def _named(target: Target) -> str:
    names = [host.name for host in target.hosts]
    shown = ", ".join(names[:MOST_NAMED]) + (", …" if len(names) > MOST_NAMED else "")
    return f"{len(names)} host{'s' * (len(names) > 1)} ({shown})"


def _remove_if_empty(plan: Plan, target: Target) -> None:
    """Remove the empty run directory that a preflight made to see whether it can be made."""
    if target.runs_on_share:
        # Of all hosts: any of them may be the one that does not answer, and what went wrong is being told already.
        requests = [{"path": plan.run_dir}] * len(target.agents)
        ask_all(target.agents, "remove", requests, timeout_s=REMOVE_LIMIT_S)


def _container(
    request: Request, job: Job | Command | Submitted, config: Any, target: Target, cwd: str
) -> plans.Container | None:
    """Choose what the processes run in; on this machine with the files that the job's options name."""
    before = request.resume.described if request.resume else None
    box = plans.choose_container(
        target, job.framework, request.runtime, plans.built_here, before, request.container_access
    )
    if box is None or not target.is_local or job.name == run_directory.OWN_COMMAND:
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
    if not problems:
        problems = _bucket_problems(config, target)
    if not problems and target.is_local and isinstance(job, Job):
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
    """Check the bucket of the runs and, on this machine, those in options; a stack's hosts have their own rights."""
    wanted = [(target.runs_url, target.runs_url)]
    options = dataclasses.asdict(config).items() if target.is_local else ()
    wanted += [
        (value, f"--{name.replace('_', '-')} {value}") for name, value in options if isinstance(value, str)
    ]
    wanted = [(place, asked) for place, asked in wanted if is_url(place)]
    if not wanted:
        return []
    from launch import remote_files

    def problem(url: str, asked: str) -> str | None:
        try:
            remote_files.reach(url, asked, one_object=url != target.runs_url)
        except HostError as error:
            return str(error)
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
    return os.getcwd() if target.is_local else plans.HOME


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


def _next_attempt(resume: Run | None, target: Target) -> int:
    if resume is None:
        return 0
    fresh = runs.read(resume.directory) or resume
    agents = target.find_agents(fresh.described)
    now = runs.state_now(agents, fresh)
    if now in run_directory.ACTIVE:
        raise AtWorkError(
            f"--resume {fresh.run_id}: the run is {now}; `fab stop --run {fresh.run_id}` stops it"
        )
    if now == "done":
        raise RequestError(f"--resume {fresh.run_id}: the run is done, there is nothing left to resume")
    # A failed attempt's agents still end its processes and write its result, which must not meet the next one's.
    deadline = time.monotonic() + run_directory.FINISHING_LIMIT_S
    while any(entry["supervised"] for entry in runs.look(agents, fresh).processes):
        if time.monotonic() > deadline:
            raise AtWorkError(
                f"--resume {fresh.run_id}: its processes are still ending; try again in a moment"
            )
        time.sleep(POLL_S)
    _record_end(fresh, now)
    return fresh.attempt + 1


def _record_end(run: Run, outcome: str) -> None:
    """Write to run.json how the latest attempt ended, and how long it took; the next one overwrites result.json."""
    run.described["attempts"][-1] |= {"outcome": outcome, "wall_s": run.wall_s}
    run.directory.write_json(run_directory.RUN, run.described)


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


JOIN_LIMIT_S = {"cpu": 180.0, "gpu": 180.0, "tpu": 600.0}
"""By platform, from the start until all are in the group: the first start of a TPU's runtime takes minutes."""
PULL_ATTEMPTS = 5
PULL_LIMIT_S = 3600.0
"""Gigabytes on every host of a large slice, with the pauses between attempts."""


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


IN_USE = ("device", "lockfile", "leftovers")
"""Checks that fail of a host that is at work, which is no fault of the host."""


def preflight(
    plan: Plan, agents: Sequence[Agent], now_s: Callable[[], float] = time.time
) -> list[dict[str, Any]]:
    """Ask every host whether the run can start there; return the facts of each.

    Raises:
        HostsError: listing every failed check of every host; nothing has been started.
    """
    requests = [plans.preflight(plan, index, now_s=now_s()) for index in range(plan.processes)]
    answers = ask_all(agents, "preflight", requests)
    errors: list[HostError] = []
    for agent, answer in zip(agents, answers, strict=True):
        if isinstance(answer, HostError):
            errors.append(answer)
            continue
        errors += [
            HostError(
                host=agent.host,
                reason=check["message"],
                remedy=check["remedy"] or "",
                is_in_use=check["name"] in IN_USE,
            )
            for check in answer["checks"]
            if not check["ok"]
        ]
    if errors:
        raise HostsError("preflight failed, nothing was started:", errors)
    return [answer["facts"] for answer in answers if not isinstance(answer, HostError)]


def stage(bundle: Bundle, agents: Sequence[Agent], facts: Sequence[dict[str, Any]]) -> int:
    """Send the code to the hosts that do not have it yet; return how many these are.

    Raises:
        HostsError: it could not be unpacked somewhere; nothing has been started.
    """
    missing = [agent for agent, known in zip(agents, facts, strict=True) if not known["bundle_present"]]
    return _send(bundle, missing)


def stage_if_missing(bundle: Bundle, agents: Sequence[Agent]) -> int:
    """Send a folder to the hosts that do not have it; return how many these are.

    Raises:
        HostsError: as of `stage`.
    """
    answers = ask_all(agents, "stage", [{"sha256": bundle.sha256}] * len(agents))
    there = all_or_error("the folder could not be sent:", answers)
    return _send(bundle, [agent for agent, it in zip(agents, there, strict=True) if not it["present"]])


def _send(bundle: Bundle, missing: Sequence[Agent]) -> int:
    # Hosts that share one directory (the local target's) need it once.
    missing = list({(agent.root, agent.link): agent for agent in missing}.values())
    request = {"sha256": bundle.sha256, "archive_base64": bundle.text}
    all_or_error("the code could not be sent:", ask_all(missing, "stage", [request] * len(missing)))
    return len(missing)


def pull(
    plan: Plan, agents: Sequence[Agent], facts: Sequence[Mapping[str, Any]], say: Callable[[str], None]
) -> None:
    """Fetch the image where it is missing; each host does so for itself, all at once.

    Raises:
        HostsError: it could not be had somewhere; nothing has been started.
    """
    if plan.container is None:
        return
    missing = {
        (agent.root, agent.link): (agent, known["image_needs_bytes"])
        for agent, known in zip(agents, facts, strict=True)
        if not known["image_present"]
    }
    if not missing:
        return
    image = plan.container.image
    requests = [
        {"image": image, "attempts": PULL_ATTEMPTS, "min_free_bytes": needs, "limit_s": PULL_LIMIT_S}
        for _, needs in missing.values()
    ]
    say(f"pulling {image} on {len(missing)} of {len(agents)} hosts …")
    began_s = time.monotonic()
    answers = ask_all([agent for agent, _ in missing.values()], "pull", requests, timeout_s=PULL_LIMIT_S + 60)
    all_or_error("the image could not be had everywhere, nothing was started:", answers)
    say(f"the image is there after {spoken(time.monotonic() - began_s)}")


def start(plan: Plan, agents: Sequence[Agent]) -> None:
    """Start every process, all at once.

    Raises:
        HostsError: some could not be started; those that were have been stopped again.
    """
    answers = ask_all(agents, "start", [plans.start(plan, index) for index in range(plan.processes)])
    if any(isinstance(answer, HostError) for answer in answers):
        stop_processes(agents, plan.run_id, plan.attempt, grace_s=STOP_NOW_S)
        all_or_error("the run could not be started everywhere, so it was stopped again:", answers)


def join(plan: Plan, agents: Sequence[Agent], *, limit_s: float | None = None) -> None:
    """Wait until every process has entered the group. Whoever started them stops them where this raises.

    limit_s: None is JOIN_LIMIT_S of the platform.

    Each host waits for its own process and answers once: watching them costs one journey, however long it takes.

    Raises:
        NotJoined: one failed, or the time ran out: the message says who is missing.
    """
    limit_s = JOIN_LIMIT_S[plan.target.platform] if limit_s is None else limit_s
    requests = [{**plan.process(index), "limit_s": limit_s} for index in range(plan.processes)]
    answers = ask_all(agents, "join", requests, timeout_s=limit_s + AGENTS_LIMIT_S + 30)
    silent = [str(answer) for answer in answers if isinstance(answer, HostError)]
    if silent:
        raise NotJoined("; ".join(silent))
    answered = [answer for answer in answers if not isinstance(answer, HostError)]
    told = {agent.host: answer["state"] for agent, answer in zip(agents, answered, strict=True)}
    for outcome in ("stopped", "preempted"):
        hosts = [host for host, state in told.items() if state == outcome]
        if hosts:
            raise NotJoined(f"{', '.join(hosts)} left before all had joined: told to stop", outcome)
    if any(_has_failed(answer) for answer in answered):
        raise NotJoined("a process failed before all had joined")
    missing = [
        agent.host for agent, answer in zip(agents, answered, strict=True) if answer["state"] == "starting"
    ]
    if missing:
        raise NotJoined(f"{', '.join(missing)} did not join within {spoken(limit_s)}")


def _has_failed(answer: Mapping[str, Any]) -> bool:
    ended = answer["process"]["state"] not in ("starting", "running")
    return answer["state"] == "failed" or (ended and answer["state"] != "done")
