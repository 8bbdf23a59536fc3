"""The tasks that train: `fab train`, and what starts a run again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from contracts.errors import DONE, RequestError
from contracts.host_interface import HANG_FLOOR_S, HEARTBEAT_LIMIT_S, STOP_GRACE_S
from fabfile.command import task
from fabfile.command_options import (
    argument,
    flag,
    group,
    long,
    option,
    options,
    positionals,
    repeatable,
    seconds,
    trackers,
    usd,
    whole_number,
)
from fabfile.selector import JSON, RUN, Selector

if TYPE_CHECKING:
    from keeper.keep_commands import HandOver
    from launch.request.run_request import Command, Request

RUNTIME = "bare, or docker: in the framework's image (default: docker where the stack has one)"
ACCESS = "a container's access to its host: devices (only the TPU's nodes), or privileged"


@options
class Training:
    """A run that is wanted: the options of `fab train`, `fab submit` and `fab sweep`."""

    job: str | None = option("the job to train (see `fab jobs`)")
    args: str = option(
        'the job\'s own options in one word ("--steps 2000 --model small"), instead of after --', default=""
    )
    selector: Selector = group(Selector, "stack", "slice", "hosts", "platform", "python")
    runtime: str | None = option(RUNTIME)
    container_access: str | None = option(ACCESS)
    workdir: str | None = option("the folder of a command of your own, which comes after --")
    framework: str | None = option(
        "whose environment or image it runs in (default: the job's first; of a command jax)"
    )
    processes_per_host: str | None = option(
        "how many processes a host starts, or per-chip (default: 1; PyTorch jobs: per-chip)"
    )
    progress: str | None = option(
        "your command hangs when this file no longer grows: log, or a file (default: never)"
    )
    runs: str | None = option("where runs are kept: a path that every host sees, or a URL such as gs://…")
    track: tuple[str, ...] | None = option(
        "mirror the run to mlflow, wandb, or both with a comma between (default: $TPU_STACK_TRACK)", trackers
    )
    name: str | None = option("a name of your own for the run")
    max_usd: float | None = option(
        "stop the run when all its attempts have cost so much at list prices; it can be resumed", usd
    )
    max_restarts: int | None = option(
        "how often the run is started again after it was lost, failed or hung (default: 0; of pods: 10)",
        whole_number(0),
    )
    hang_limit: float = option(
        "stop a run as hung after 20 usual step times without a step, and at least so many seconds",
        seconds(1),
        default=HANG_FLOOR_S,
    )
    heartbeat_limit: float = option(
        "also stop a run as hung after so many seconds without a heartbeat",
        seconds(10),
        default=HEARTBEAT_LIMIT_S,
    )
    send: tuple[str, ...] = repeatable(
        "a file of your folder that is sent although it may hold a secret; may be given several times"
    )
    env: tuple[str, ...] = repeatable(
        "NAME=VALUE, or NAME for its value in this shell: a variable of the run's processes; may be given several times"
    )
    env_file: tuple[str, ...] = repeatable("a file of such lines; may be given several times")
    secret: tuple[str, ...] = repeatable(
        "NAME, a variable of this shell, or NAME=sm://PROJECT/SECRET: a variable of the run whose value nothing shows"
    )
    secret_file: tuple[str, ...] = repeatable(
        "a file of lines NAME=VALUE that are secrets; may be given several times"
    )
    no_install: bool = flag("do not install what your folder or script says that it needs")
    from_source: tuple[str, ...] = repeatable(
        "a package of those that has no wheel, and may be built on this machine; may be given several times"
    )
    positionals: tuple[str, ...] = positionals("[-- OPTIONS OF THE JOB]", owner="job")

    def request(
        self, *, resume: str | None = None, queue: str | None = None, wait_s: float | None = None
    ) -> Request:
        """Return the run that the options ask for. Raises RequestError: they contradict each other."""
        from console import follow
        from launch.request import run_environment
        from launch.request.run_request import Request

        arguments, command = follow.job_arguments(self.args, self.positionals), None
        is_option = not arguments or arguments[0].startswith("-")
        if not self.job and not resume and (self.workdir or not is_option):
            arguments, command = [], self._command(arguments)
        else:
            self._refuse_what_is_fixed(resume)
        return Request(
            job=self.job or "",
            command=command,
            framework=self.framework,
            processes_per_host=self.processes_per_host,
            arguments=tuple(arguments),
            name=self.name,
            resume=None,
            hang_floor_s=self.hang_limit,
            heartbeat_limit_s=self.heartbeat_limit,
            runtime=self.runtime,
            container_access=self.container_access,
            max_usd=self.max_usd,
            queue=queue,
            wait_s=wait_s,
            env={
                **(command.env if command else {}),
                **run_environment.read(self.env, self.env_file, os.environ),
            },
            secrets=run_environment.read_secrets(self.secret, self.secret_file, os.environ),
        )

    def place(self, request: Request) -> Selector:
        """Return where it is to run. The interpreter of an own command is the command's, and not the target's."""
        python = None if request.command else self.selector.python
        return dataclasses.replace(self.selector, python=python, runs=self.runs)

    def _command(self, arguments: Sequence[str]) -> Command:
        from launch.request.run_request import command_from_options

        return command_from_options(
            arguments,
            workdir=self.workdir or "",
            framework=self.framework or "",
            processes_per_host=self.processes_per_host or "",
            progress=self.progress or "",
            python=self.selector.python or "",
            send=self.send,
            installs=not self.no_install,
            from_source=self.from_source,
        )

    def _refuse_what_is_fixed(self, resume: str | None) -> None:
        """Refuse the options of a command of the user's own, where the run is a job's or is resumed.

        Raises:
            RequestError: with every such option.
        """
        command_options = {
            "--workdir": self.workdir,
            "--send": " ".join(self.send),
            "--progress": self.progress,
            "--from-source": " ".join(self.from_source),
            "--no-install": self.no_install,
        }
        new_run_options = {"--framework": self.framework, "--processes-per-host": self.processes_per_host}
        fixed = {**command_options, **(new_run_options if resume else {})}
        refused = [name if value is True else f"{name} {value}" for name, value in fixed.items() if value]
        if not refused:
            return
        if resume:
            reason = f"--resume {resume} goes on as that run began; leave {'it' if len(refused) == 1 else 'them'} out"
        elif self.job:
            reason = f"only for a command of your own, and --job {self.job} brings its own; leave one of the two out"
        else:
            reason = (
                "only for a command of your own; name its folder with --workdir, and the command after --"
            )
        raise RequestError(f"{' and '.join(refused)}: {reason}")


@options
class KeepLimits:
    """How long the keeper keeps a run."""

    keep_attempts: int | None = option(
        "how often the keeper may resume the run (default: 20)", whole_number(1)
    )
    keep_hours: int | None = option(
        "for how many hours from now the keeper brings the run back (default: no end)", whole_number(1)
    )

    def hand_over(self) -> HandOver:
        from keeper.keep_commands import HandOver

        return HandOver(attempts=self.keep_attempts, hours=self.keep_hours)


@options
class Train:
    resume: str | None = option("resume " + RUN)
    dry_run: bool = flag("print what would be sent and started, and what it costs; start nothing")
    run: Training = group(Training)
    detach: bool = flag("return when the run has started")
    queue: str | None = option("in a cluster: the queue of Kueue that admits the run")
    wait: float | None = option(
        "in a cluster: seconds that all pods may take to be placed (default: 900; in a queue 12 hours)",
        seconds(1),
    )
    keep: bool = flag("hand the run over to the stack's keeper, which resumes it after a loss")
    limits: KeepLimits = group(KeepLimits)

    def hand_over(self) -> HandOver | None:
        """Return who keeps the run. Raises RequestError: the options about that contradict each other."""
        if self.keep and self.run.max_restarts:
            raise RequestError(
                "--keep --max-restarts: the keeper restarts a run that it keeps; leave one of the two out"
            )
        if self.keep:
            return self.limits.hand_over()
        for name, value in dataclasses.asdict(self.limits).items():
            if value is not None:
                raise RequestError(
                    f"{long(name)} {value}: is for a run that a keeper keeps; add --keep, or leave it out"
                )
        return None


@task(
    "fab train --job flax_mlm -- --steps 2000",
    "fab train --workdir ~/my-project -- python train.py",
    "fab train examples/jax/train.py",
    outlives_signals=True,
)
def train(args: Train) -> int:
    """Train a job or your own script, and follow the run.

    The job's own options come after --; `fab jobs --job JOB` lists them. A command of your own comes after -- too.
    """
    from console import follow

    request = args.run.request(resume=args.resume, queue=args.queue, wait_s=args.wait)
    if prints_help(request):
        return DONE
    return follow.train(
        args.run.place(request).target,
        request,
        resume=args.resume,
        detach=args.detach,
        restarts=args.run.max_restarts,
        track=args.run.track,
        dry_run=args.dry_run,
        hand_over=args.hand_over(),
    )


def prints_help(request: Request) -> bool:
    """Print the options of a job where the words after `--` ask for them; return whether they do."""
    from console import status as status_command

    if not {"-h", "--help"} & {*request.arguments}:
        return False
    status_command.list_jobs(request.job or None)
    return True


@options
class Jobs:
    job: str | None = option("only this one, with all its options")


@task("fab jobs --job flax_mlm")
def jobs(args: Jobs) -> int:
    """List the jobs, or a job's options."""
    from console import status as status_command

    return status_command.list_jobs(args.job)


@options
class Status:
    run: str | None = argument(RUN + " (default: all that are active, else the latest)", default=None)
    json: bool = flag(JSON)
    selector: Selector = group(Selector, "stack", "slice", "hosts", "runs")


@task("fab status latest")
def status(args: Status) -> int:
    """Show what a run is doing, host by host."""
    from console import status as status_command

    return status_command.status(args.selector.target(), args.run, as_json=args.json)


@options
class Logs:
    run: str = argument(RUN, default="latest")
    host: int | None = option("one host's log, by index (default: all hosts)", whole_number(0))
    follow: bool = flag("continue to print until the run ends")
    lines: int = option("how many of the last lines to print first (0: all)", whole_number(0), default=40)
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab logs latest --host 0 --follow")
def logs(args: Logs) -> int:
    """Print the logs of all hosts, or one."""
    from console import logs

    return logs.logs(args.selector.target(), args.run, host=args.host, follow=args.follow, lines=args.lines)


@options
class Stop:
    run: str | None = argument(RUN + " (default: the one that is active)", default=None)
    grace: float = option(
        "seconds for saving a checkpoint before the processes are killed", seconds(0), default=STOP_GRACE_S
    )
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab stop latest --grace 60")
def stop(args: Stop) -> int:
    """Write a checkpoint of a run, then stop it."""
    from console import status as status_command

    target = args.selector.target()

    def by_keeper(run_id: str) -> bool:
        from keeper import keep_commands  # most stacks have none

        return keep_commands.stop(target, run_id)

    return status_command.stop(target, args.run, grace_s=args.grace, by_keeper=by_keeper)
