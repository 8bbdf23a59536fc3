"""A run that somebody asks for, of a job or of a command of the user's own: checked, and worked out into its plan."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import datetime
import os
import random
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts import run_directory
from contracts.aliases import Say
from contracts.errors import RequestError, Unreachable
from contracts.files import is_url
from contracts.host_interface import HANG_FLOOR_S, HEARTBEAT_LIMIT_S
from contracts.run_directory import CODE, FOLDER, OWN_COMMAND, RunDirectory
from jobs.runtime.monitoring.metric_definitions import UNDECLARED, Metrics
from jobs.runtime.storage.bucket_files import unreadable
from launch import jobs, pricing, remote_files, runs
from launch import plan as plans
from launch.code import dependencies, precompiled, requirement_files
from launch.code.bundles import FAB_IGNORE, Bundle, archive, bundle_folder, is_secret, named_in
from launch.code.precompiled import Note, Step
from launch.code.requirement_files import Source
from launch.hosts import HostError
from launch.jobs import Job, Submitted, image_frameworks
from launch.request import run_environment
from launch.request.framework_launchers import Unwrapped, unwrap
from launch.runs import Run
from launch.targets import (
    Container,
    Launcher,
    OwnCommand,
    Plan,
    PodOptions,
    Secret,
    Target,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A run that somebody wants: a new one of `job` or of an own `command`, or `resume`, a run that has been.

    framework: of a job that runs on several; None: its first one. processes_per_host: as
    `launch.plan.ranks_of_job` takes it. A resumed run keeps both. runtime, container_access: as
    `launch.plan.choose_container` takes them. track: the trackers that it is mirrored to. max_usd: what it may cost
    in all its attempts; None: as it was, if it is resumed. run_id: of a new run; None: one is made up. sweep: what
    run.json has of the sweep that it is a member of. restarts, queue, wait_s: of pods, as
    `backends.pods.pod_launcher.PodLauncher` takes them; None: as the run began, or the default. submitted: the run as
    it was when it was submitted; job, command and arguments are then not read. precompiled: the note of its step, where
    another machine has compiled it; None: as this machine has it. env: the user's own variables; a resumed run has
    those that it began with, and these. secrets: the same of what only the run's ranks may show. overruled: what
    `launch.launching.stop_asked` returned when somebody asked for the run to be resumed; a later stop ends it.
    """

    job: str
    framework: str | None = None
    processes_per_host: str | None = None
    command: Command | None = None
    arguments: tuple[str, ...]
    name: str | None
    resume: Run | None
    hang_floor_s: float = HANG_FLOOR_S
    heartbeat_limit_s: float = HEARTBEAT_LIMIT_S
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
    precompiled: Note | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: Mapping[str, Secret] = dataclasses.field(default_factory=dict)
    overruled: Mapping[str, Any] | None = None


def resuming(run: Run, overruled: Mapping[str, Any] | None = None) -> Request:
    """Return the request that resumes a run as it began. overruled: as `Request` has it."""
    return Request(
        job=run.described["job"],
        arguments=(),
        name=None,
        track=tuple(run.described.get("track", ())),
        resume=run,
        overruled=overruled,
        hang_floor_s=float(run.described.get("hang_limit_s", HANG_FLOOR_S)),
        heartbeat_limit_s=float(run.described.get("heartbeat_limit_s", HEARTBEAT_LIMIT_S)),
    )


def as_it_was(run: Run) -> Submitted | None:
    """Return a run with the code and folder of its latest attempt; None where its directory does not have them."""
    code = run.described["code"]
    bundles = [Bundle.from_text(run.directory.read_text(CODE), code["bundle"])]
    bundles += [runs.stored_folder(run)] if "folder" in code else []
    complete = tuple(bundle for bundle in bundles if bundle is not None)
    if len(complete) < len(bundles):
        return None
    if sha256 := (run.described["config"].get("packages") or {}).get("sha256"):
        packages = stored_packages(run, sha256)
        if packages is None:
            return None
        complete += (packages,)
    return Submitted(
        name=run.described["job"],
        framework=run.described["stack"],
        options=run.described["config"],
        arguments=tuple(run.described["args"]),
        metric_definitions=run.described["metric_definitions"],
        code={name: code[name] for name in ("git_commit", "git_dirty")},
        cwd=run.described["cwd"],
        bundles=complete,
    )


def stored_packages(run: Run, sha256: str) -> Bundle | None:
    """Return the packages that a run has, from this machine or from beside the run; None where neither has them."""
    if (bundle := dependencies.bundle_here(sha256)) is not None:
        return bundle
    (content,) = run.directory.files.read([run_directory.packages(run.directory.url, sha256)])
    return Bundle.from_text(content.decode() if content else None, sha256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A request worked out, before any host was asked.

    bundles: what the hosts need: our code, the folder of a command, its packages. notes: what to say of them.
    needs_environment: whether the framework's environment has to be made where it is missing. processes_per_host: as it
    was asked for when the run began. step: what can be compiled beforehand of it. precompiled: the note of its program,
    which the code has with it.
    """

    plan: Plan
    launcher: Launcher
    config: Any
    bundles: tuple[Bundle, ...]
    directory: RunDirectory
    notes: tuple[str, ...] = ()
    needs_environment: bool = False
    processes_per_host: str | None = None
    step: Step | None = None
    precompiled: Note | None = None


def work_out(request: Request, target: Target, say: Say = lambda _: None) -> Planned:
    """Check a request and return its plan; nothing is asked of the hosts. say: of what takes long.

    Raises:
        RequestError: it cannot be carried out.
    """
    resume = request.resume
    command = _own_command(request)
    before: Mapping[str, Any] = {} if resume is None else resume.described
    framework, requested_processes = request.framework, request.processes_per_host
    if resume is not None:
        framework, requested_processes = before.get("stack"), before.get("processes_per_host")
    job = request.submitted or command or jobs.find(request.job, framework)
    config = _config(request, job, target)
    runs.check_name(target.runs, request.name, resume.run_id if resume else None)
    per_host = _processes_per_host(job, command, target, requested_processes)
    _check(request, job, config, target, per_host)
    cwd = _cwd(request, target)
    options = PodOptions(restarts=request.restarts, queue=request.queue, wait_s=request.wait_s)
    launcher = target.backend.launcher(target, options, resume)
    box = _container(request, job, config, target, cwd)
    python, needs_environment = _interpreter(target, command, job.framework, in_container=box is not None)
    code = request.submitted.bundles[0] if request.submitted else jobs.bundle(jobs.CHECKOUT)
    arguments = tuple(job.arguments(config)) if isinstance(job, Job) else job.arguments
    step = Step.on(target, job.name, arguments, code) if command is None and job.framework == "jax" else None
    compiled = _compiled(request, target, step)
    bundles, notes = _code(code, compiled)
    if command is not None:
        command, own_bundles, own_notes = _own_bundles(
            command, target, resume, say, in_container=box is not None
        )
        config, bundles, notes = command.config, [*bundles, *own_bundles], [*notes, *own_notes]
    run_id, directory = _place(request, target, job.name)
    plan = Plan(
        target=target if command else dataclasses.replace(target, python=python),
        run_id=run_id,
        attempt=resume.attempt + 1 if resume else 0,
        job=job.name,
        framework=job.framework,
        arguments=arguments,
        run_dir=directory.url,
        cwd=cwd,
        bundle_sha256=bundles[0].sha256,
        hang_floor_s=request.hang_floor_s,
        heartbeat_limit_s=request.heartbeat_limit_s,
        container=box,
        ranks_per_host=per_host,
        budget=pricing.budget(request.max_usd, target.slice, resume),
        command=command.planned(target, bundles[1], python, in_container=box is not None)
        if command
        else None,
        env={**before.get("env", {}), **request.env},
        secrets=run_environment.secrets_again(before.get("secrets", {}), request.secrets, os.environ),
    )
    run_environment.check(plan)
    return Planned(
        plan=launcher.placed(plan),
        launcher=launcher,
        config=config,
        bundles=tuple(bundles),
        directory=directory,
        notes=tuple(filter(None, notes)),
        needs_environment=needs_environment,
        processes_per_host=requested_processes,
        step=step,
        precompiled=compiled,
    )


def _interpreter(
    target: Target, command: Command | None, framework: str, *, in_container: bool
) -> tuple[str, bool]:
    """Return the interpreter of a run, and whether this machine has to make its environment first."""
    python = command.config.python if command else target.python if target.python_is_given else None
    if python is not None:
        return python, False
    return target.interpreter(framework, in_container=in_container), not in_container


def _place(request: Request, target: Target, job_name: str) -> tuple[str, RunDirectory]:
    """Return the id of a run and its directory: a resumed run keeps both."""
    if request.resume is not None:
        return request.resume.run_id, request.resume.directory
    now = datetime.datetime.now(datetime.UTC)
    run_id = request.run_id or runs.new_run_id(job_name, now, random.Random())
    return run_id, target.runs.directory(run_id)


def _code(code: Bundle, compiled: Note | None) -> tuple[list[Bundle], list[str | None]]:
    """Return the bundles of our code, with the note of a compiled step if there is one, and what to say of them."""
    if compiled is None:
        return [code], []
    line = f"the training step was compiled beforehand: {compiled['url']}"
    return [precompiled.add_to_code(code, compiled)], [line]


def _own_bundles(
    command: Command, target: Target, resume: Run | None, say: Say, *, in_container: bool
) -> tuple[Command, list[Bundle], list[str | None]]:
    """Return the command with its packages on record, its folder and packages as bundles, and what to say of them."""
    folder, note = command.folder_again(resume) if resume else (command.folder(), command.note)
    command, packages, line = command.with_packages(target, resume, say, in_container=in_container)
    notes = [note, line, command.note if resume else None]
    return command, [folder, *([packages] if packages else [])], notes


def _processes_per_host(
    job: Job | Command | Submitted, command: Command | None, target: Target, requested: str | None
) -> int:
    if command is None:
        return plans.ranks_of_job(job.framework, target, requested)
    return plans.processes_per_host(command.config.processes_per_host or "1", target, job.framework)


def _compiled(request: Request, target: Target, step: Step | None) -> Note | None:
    """Return the note of the program that was compiled of a step; None where there is none, or no bucket for it."""
    bucket = target.inventory.storage.bucket_url
    if step is None or bucket is None:
        return None
    note = request.precompiled or precompiled.find(step)
    return None if note is None else precompiled.with_url(note, bucket)


def _config(request: Request, job: Job | Command | Submitted, target: Target) -> Any:
    """Return the options of the run. Raises RequestError: they cannot be read, or a resumed run cannot have them."""
    resume = request.resume
    if isinstance(job, Job):
        base = job.stored_config(resume.run_id, resume.described["config"]) if resume else None
        return _with_exports(job, job.parse(request.arguments, base=base), target)
    return job.config


def _with_exports(job: Job, config: Any, target: Target) -> Any:
    """The options with the export's path where one that takes a model names a run."""
    exports = {
        name: runs.find_export(target.runs, value)
        for name in getattr(job.config_module(), "FROM_RUNS", ())
        if (value := getattr(config, name)) is not None
    }
    return dataclasses.replace(config, **{name: path for name, path in exports.items() if path is not None})


def _own_command(request: Request) -> Command | None:
    submitted, resume = request.submitted, request.resume
    config = submitted.options if submitted else resume.described["config"] if resume else None
    job = submitted.name if submitted else resume.described["job"] if resume else request.job
    if config is None or job != run_directory.OWN_COMMAND:
        return request.command
    command = recorded_command(config, submitted.bundles[1:] if submitted else ())
    return command.with_words(request.arguments) if resume else command


def _container(
    request: Request, job: Job | Command | Submitted, config: Any, target: Target, cwd: str
) -> Container | None:
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
    problems = job.problems(config, devices=devices) if isinstance(job, Job) else []
    problems += [f"{option}: {reason}" for url, option in _urls_of(config) if (reason := unreadable(url))]
    if not problems:
        unread = _unread_buckets(config, target)
        if unread and all(error.is_outage for error in unread):
            raise Unreachable("\n".join(map(str, unread)))
        problems = [str(error) for error in unread]
    if not problems and target.capabilities.shares_files and isinstance(job, Job):
        problems = _data_problems(request, job, config, target)
    if request.resume is not None and isinstance(job, Job):
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
    places = [(target.runs_url, target.runs_url)] if is_url(target.runs_url) else []
    places += _urls_of(config) if target.capabilities.shares_files else []
    if not places:
        return []

    def problem(url: str, option: str) -> HostError | None:
        try:
            remote_files.reach(url, option, one_object=url != target.runs_url)
        except HostError as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        return [found for found in pool.map(problem, *zip(*places, strict=True)) if found]


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


# --- a command of the user's own ------------------------------------------------------------------------------------

LOG = "log"
PYTHONS = ("python", "python3")
PIPS = ("pip", "pip3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A user's command as run.json records it.

    words: the command. workdir: its folder on the launching machine. processes_per_host: a number, or "per-chip"; None:
    one, which gets no rank where it is the only process. progress: LOG, or a file in the folder or elsewhere on the
    hosts whose growth is progress; None: no hang detection. python: the interpreter on the hosts that "python" stands
    for; None: the framework's. send: names and patterns of files to send although they may hold secrets or git ignores
    them. installs: whether the requirements of the folder or the script are installed. from_source: packages that may
    be built from source. packages: the installed ones, as `launch.code.dependencies.Packages.record`. is_script_alone:
    only the script itself is sent.
    """

    words: tuple[str, ...]
    workdir: str
    framework: str
    processes_per_host: str | None = None
    progress: str | None = None
    python: str | None = None
    send: tuple[str, ...] = ()
    installs: bool = True
    from_source: tuple[str, ...] = ()
    packages: Mapping[str, Any] | None = None
    is_script_alone: bool = False

    @property
    def script(self) -> str | None:
        """The Python script of the folder that the words start, if they start one."""
        if self.words[0] not in PYTHONS:
            return None
        name = next((word for word in self.words[1:] if not word.startswith("-")), "")
        return name if name.endswith(".py") and not name.startswith("/") else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """In the place of a `launch.jobs.Job` where a run is an own command."""

    config: Config
    name: str = OWN_COMMAND
    metrics: Metrics = UNDECLARED
    kept: tuple[Bundle, ...] = ()
    """Its folder as it was submitted, whatever it holds by now, and its packages, if it has any."""
    source: Source | None = None
    """What says which packages it needs, where they are still to be resolved."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the launcher that it was typed with would have set."""
    note: str | None = None

    @property
    def framework(self) -> str:
        return self.config.framework

    def folder(self) -> Bundle:
        """Return the command's folder as it is sent.

        Raises:
            RequestError: there is no such folder, or it is too large.
        """
        if self.kept:
            return self.kept[0]
        workdir, script = Path(self.config.workdir), self.config.script
        if not self.config.is_script_alone or script is None:
            return bundle_folder(workdir, self.config.send)
        content = (workdir / script).read_bytes()
        if is_secret(script, content):
            raise RequestError(f"{workdir / script}: may hold a secret, and is sent to hosts; take it out")
        return archive({script: content})

    def with_packages(
        self, target: Target, run: Run | None, say: Say, *, in_container: bool
    ) -> tuple[Command, Bundle | None, str | None]:
        """Return the command with what is recorded of its packages, these, and what to say of them.

        run: the one that is resumed, whose packages stay.

        Raises:
            RequestError: as of `launch.code.dependencies.ensure`; or they are no longer to be had.
        """
        packages = self.config.packages
        interpreter = dependencies.interpreter_on(
            is_here=target.capabilities.shares_files, in_container=in_container
        )
        if packages is None and self.source is not None:
            framework = dependencies.framework_on(self.framework, target.platform, in_container=in_container)
            made = dependencies.ensure(
                self.source, framework, interpreter, self.config.from_source, os.environ, say
            )
            config = dataclasses.replace(self.config, packages=made.record)
            return dataclasses.replace(self, config=config), made.bundle, made.line
        if packages is None or packages["sha256"] is None:
            return self, None, None
        if packages["python"] != interpreter.version:
            raise RequestError(
                f"{packages['source']}: its packages are for Python {packages['python']}, and the hosts have "
                f"{interpreter.version} now; start a new run"
            )
        kept = next(iter(self.kept[1:]), None)
        if kept is None and run is not None:
            kept = stored_packages(run, packages["sha256"])
        if kept is None:
            raise RequestError(
                f"{packages['source']}: the packages of the run ({packages['sha256'][:12]}) are neither on this "
                "machine nor beside the run any more; start a new run"
            )
        return self, kept, None

    def folder_again(self, run: Run) -> tuple[Bundle, str | None]:
        """Return the folder that a resumed run is sent, and what to say of it.

        As it is now, so that what failed can be mended. Where this machine does not have it: as it was last sent.

        Raises:
            RequestError: as of `folder`; or the run directory does not have it either.
        """
        if self.kept:
            return self.kept[0], None
        before, workdir = run.described["code"]["folder"], self.config.workdir
        if Path(workdir, (self.config.is_script_alone and self.config.script) or ".").exists():
            now = self.folder()
            changed = f"{workdir} has changed: its files replace those of the copies on the hosts"
            return now, None if now.sha256 == before else changed
        kept = runs.stored_folder(run)
        if kept is None:
            raise RequestError(
                f"--resume {run.run_id}: {workdir} is not there, and {run.directory.path(FOLDER)} does not have it; "
                "make the folder again, or start a new run"
            )
        note = f"{workdir} is not there: the command goes on with the folder as it was last sent"
        return kept, note

    def planned(self, target: Target, folder: Bundle, python: str, *, in_container: bool) -> OwnCommand:
        """Return what the plan says of it. python: the framework's interpreter on the hosts.

        Raises:
            RequestError: the folder lacks what the words name.
        """
        if mistakes := problems(self.config, folder, target, python, in_container=in_container):
            raise RequestError("\n".join(mistakes))
        return OwnCommand(
            folder_sha256=folder.sha256,
            python=python,
            progress=self.config.progress,
            has_layer=self.config.python is None,
            packages_sha256=(self.config.packages or {}).get("sha256"),
            is_ranked=self.config.processes_per_host is not None,
            folder_is_large=folder.is_large,
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.config.words

    def with_words(self, arguments: Sequence[str]) -> Command:
        """Return the command of a resumed run with the arguments that it is given now, if there are any."""
        if not arguments or tuple(arguments) == self.config.words:
            return self
        unwrapped = unwrap(arguments)
        config = dataclasses.replace(
            self.config, words=tuple(arguments if unwrapped is None else unwrapped.arguments)
        )
        note = (
            f"the command is {shlex.join(config.words)} from now on, and was {shlex.join(self.config.words)}"
        )
        return dataclasses.replace(self, config=config, note=note)


def recorded_command(config: Mapping[str, Any], kept: Sequence[Bundle] = ()) -> Command:
    """Return the command of a run whose run.json has this `config`."""
    lists = {name: tuple(config.get(name, ())) for name in ("words", "send", "from_source")}
    return Command(config=Config(**{**config, **lists}), kept=tuple(kept))


def command_from_options(
    arguments: Sequence[str],
    *,
    workdir: str,
    framework: str,
    processes_per_host: str,
    progress: str,
    python: str,
    send: Sequence[str] = (),
    installs: bool = True,
    from_source: Sequence[str] = (),
) -> Command:
    """Return the command that the options of `fab train` describe; an empty string stands for an absent option.

    A script without a folder is the whole project, and declares its own requirements.

    Raises:
        RequestError: a word or a folder is missing, or there is no such framework.
    """
    frameworks = image_frameworks()
    if framework and framework not in frameworks:
        raise RequestError(
            f'--framework: "{framework}" is not a framework; choose one of {", ".join(frameworks)}'
        )
    if not arguments:
        raise RequestError(
            f"--workdir {workdir}: say what to run there, as in: fab train --workdir {workdir} -- python …"
        )
    if is_script_alone := not workdir and arguments[0].endswith(".py"):
        arguments, workdir = _script_alone(arguments, send)
    folder = _command_folder(arguments, workdir)
    unwrapped, note = unwrap(arguments), None
    if unwrapped is not None:
        arguments, framework = unwrapped.arguments, framework or "pytorch"
        processes_per_host = _launcher_processes(unwrapped, processes_per_host)
        command_line = shlex.join(arguments)
        note = f"{unwrapped.launcher}: its ranks are started as {command_line}, {processes_per_host} on each host"
    config = Config(
        words=tuple(arguments),
        workdir=str(folder),
        framework=framework,
        processes_per_host=processes_per_host or None,
        progress=progress or None,
        python=python or None,
        send=named_in(folder, send),
        installs=installs and not python,
        from_source=tuple(from_source),
        is_script_alone=is_script_alone,
    )
    source = requirement_files.find(folder, config.script) if config.installs else None
    if is_script_alone and config.installs and (source is None or not source.is_script):
        raise RequestError(
            f"{arguments[1]}: does not say what it needs (PEP 723); name the folder that it needs: fab train --workdir "
            f"{shlex.quote(str(folder))} -- {shlex.join(arguments)}"
        )
    framework = framework or (source and requirement_files.required_framework(source)) or ""
    if not framework and config.script is not None:
        framework = requirement_files.imported_framework(folder / config.script) or ""
    return Command(
        config=dataclasses.replace(config, framework=framework or "jax"),
        env={} if unwrapped is None else unwrapped.env,
        note=note,
        source=source,
    )


def _command_folder(arguments: Sequence[str], workdir: str) -> Path:
    if not workdir:
        raise RequestError(
            f"-- {shlex.join(arguments)}: say in which folder it runs with --workdir, or name a --job"
        )
    folder = Path(workdir).expanduser().absolute()
    if not folder.is_dir():
        raise RequestError(
            f"--workdir {workdir}: is a file; name its folder, and the file after --"
            if folder.is_file()
            else f"--workdir {workdir}: there is no such folder"
        )
    return folder


def _launcher_processes(unwrapped: Unwrapped, option: str) -> str:
    """Return the processes per host that the command's own launcher and --processes-per-host name."""
    launcher_count = unwrapped.processes_per_host
    if launcher_count and option and launcher_count != option:
        raise RequestError(
            f"--processes-per-host {option}: {unwrapped.launcher} says {launcher_count}; leave one out"
        )
    return option or launcher_count or "1"


def _script_alone(arguments: Sequence[str], send: Sequence[str]) -> tuple[list[str], str]:
    """Return the command that runs a script, and the script's folder. Raises RequestError: there is no such script."""
    script = Path(arguments[0]).expanduser().absolute()
    if not script.is_file():
        raise RequestError(f"{arguments[0]}: there is no such script here")
    if send:
        raise RequestError(
            f"--send {send[0]}: a script by itself is all that is sent; name its folder with --workdir, as in: "
            f"--workdir {shlex.quote(str(script.parent))} -- python {shlex.join([script.name, *arguments[1:]])}"
        )
    return ["python", script.name, *arguments[1:]], str(script.parent)


def problems(config: Config, folder: Bundle, target: Target, python: str, *, in_container: bool) -> list[str]:
    """Return what is wrong with the command, as far as this machine can know. python: the interpreter on the hosts."""
    program = config.words[0]
    mistakes = []
    if program in PYTHONS:
        mistakes += _missing(config.script, config, folder) if config.script is not None else []
    elif "/" in program and not program.startswith("/"):
        mistakes += _missing(program, config, folder)
        there = Path(config.workdir) / program
        if not mistakes and there.exists() and not os.access(there, os.X_OK):
            mistakes.append(
                f"-- {program}: may not be executed; `chmod +x` it, or name its interpreter before it"
            )
    elif target.capabilities.shares_files and not in_container:
        path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])
        is_made = os.path.exists(python)  # a framework's environment is made later
        if is_made and program not in PIPS and shutil.which(program, path=path) is None:
            mistakes.append(_no_program(config))
    return mistakes


OF_A_SHELL = ("cd", "export", "source", "set", "ulimit")


def _no_program(config: Config) -> str:
    """Return why the first word starts nothing: a script without its interpreter, or a whole line in quotes."""
    program, *arguments = config.words
    if program.startswith("-"):
        example = f"python train.py {program}"
        return f"-- {program}: is an option, and no program; write the program before it, as in: -- {example}"
    if (Path(config.workdir) / program).is_file():
        interpreter = "python " if program.endswith(".py") else "./"
        return f"-- {program}: is a file of the folder, and no program; write {interpreter}{shlex.join(config.words)}"
    if "=" in program or program in OF_A_SHELL:
        return f"-- {program}: is for a shell; write -- sh -c {shlex.quote(shlex.join(config.words))}"
    if not arguments and " " in program.strip():
        return f"-- {program}: is one word; write it without the quotes: -- {program.strip()}"
    return f"-- {program}: there is no such program on this machine"


def _missing(name: str, config: Config, folder: Bundle) -> list[str]:
    if str(Path(name)) in folder.names:
        return []
    place = Path(name)
    for parent in (place, *place.parents):
        if reason := folder.left_out.get(str(parent)):
            return [f"-- {name}: {parent} is not sent ({reason})"]
    if (Path(config.workdir) / name).exists():
        by_us = any(str(place) == title or name.startswith(title) for title in folder.fab_ignored)
        ignores = f"{FAB_IGNORE} names it" if by_us else "git ignores it there"
        return [f"-- {name}: is in {config.workdir}, but {ignores}, so it is not sent; add --send {name}"]
    return [f"-- {name}: there is no such file in {config.workdir}"]
