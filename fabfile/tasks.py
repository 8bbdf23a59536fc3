"""The tasks about runs, jobs, images and the rehearsal; those that prepare and use hosts are in `host_tasks`."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import DONE, RequestError
from fabfile import options
from fabfile.options import ACCESS, RUNTIME, SLICES, WHERE, reported, task, whole

if TYPE_CHECKING:
    from keeper.commands import HandOver
    from launch.launch import Request
    from launch.runs import Run
    from launch.targets import Target

RUN_HELP = 'a run of `fab runs`: its id, the beginning or end of it, its --name, or "latest"'

JSON = "print one JSON object, for programs"
RUNS = "where runs are kept (default: where `fab train` keeps them)"


TRAIN = {
    "job": "the job to train (see `fab jobs`)",
    "args": 'the job\'s own options in one word ("--steps 2000 --model small"), instead of after --',
    **WHERE,
    "platform": "cpu, gpu or tpu",
    "python": "the interpreter on the hosts",
    "runtime": RUNTIME,
    "container_access": ACCESS,
    "workdir": "the folder of a command of your own, which comes after --",
    "framework": "whose environment or image it runs in (default: the job's first; of a command jax)",
    "processes_per_host": "how many processes a host starts, or per-chip (default: 1; PyTorch jobs: per-chip)",
    "send": "a file of your folder that is sent although it may hold a secret; may be given several times",
    "progress": "your command hangs when this file no longer grows: log, or a file (default: never)",
    "runs": "where runs are kept: a path that every host sees, or a URL such as gs://…",
    "track": "mirror the run to mlflow, wandb, or both with a comma between (default: $TPU_STACK_TRACK)",
    "name": "a name of your own for the run",
    "max_usd": "stop the run when all its attempts have cost so much at list prices; it can be resumed",
    "max_restarts": "how often the run is started again after it was lost, failed or hung (default: 0; of pods: 10)",
    "hang_limit": "stop a run as hung after 20 usual step times without a step, and at least so many seconds",
    "heartbeat_limit": "also stop a run as hung after so many seconds without a heartbeat",
}
"""The options of `fab train` that describe a run: those of `fab submit` and `fab sweep` too."""


def asked_for(
    c: Any,
    *,
    job: str,
    args: str,
    python: str,
    runtime: str,
    container_access: str,
    workdir: str,
    framework: str,
    processes_per_host: str,
    progress: str,
    name: str,
    hang_limit: str,
    heartbeat_limit: str,
    send: Sequence[str] | None = None,
    max_usd: str = "",
    resume: str = "",
    queue: str = "",
    wait: str = "",
) -> Request:
    """Return the run that the options ask for. Raises RequestError: they contradict each other."""
    from console import follow
    from launch import costs
    from launch.launch import Request

    words = follow.words(args, options.after_dashes(c))
    given = {"framework": framework, "processes_per_host": processes_per_host, "progress": progress}
    command = None
    if not job and not resume and (workdir or (words and not words[0].startswith("-"))):
        from launch import own_command

        command = own_command.asked_for(words, workdir=workdir, python=python, send=send or (), **given)
        words = []
    else:
        options_of_command = {f"--{name.replace('_', '-')}": text for name, text in given.items()}
        _refuse_what_is_fixed(
            job, resume, {"--workdir": workdir, "--send": " ".join(send or ()), **options_of_command}
        )
    return Request(
        job=job,
        command=command,
        framework=framework or None,
        processes_per_host=processes_per_host or None,
        arguments=tuple(words),
        name=name or None,
        resume=None,
        hang_floor_s=float(whole("--hang-limit", hang_limit, least=1) or 0),
        heartbeat_limit_s=float(whole("--heartbeat-limit", heartbeat_limit, least=10) or 0),
        runtime=runtime or None,
        container_access=container_access or None,
        max_usd=costs.amount("--max-usd", max_usd),
        queue=queue or None,
        wait_s=None if (wait_s := whole("--wait", wait, least=1)) is None else float(wait_s),
    )


def prints_help(asked: Request) -> bool:
    """Print the options of a job where the words after `--` ask for them; return whether they do."""
    from console import status as status_command

    if not {"-h", "--help"} & {*asked.arguments}:
        return False
    status_command.list_jobs(asked.job or None)
    return True


def _refuse_what_is_fixed(job: str, resume: str, given: Mapping[str, str]) -> None:
    """Refuse options of a command of the user's own, where the run is a job's or is resumed.

    given: those options as they are typed, with their values; "": not given.

    Raises:
        RequestError: with every such option.
    """
    names = [name for name, value in given.items() if value and (resume or name in OF_A_COMMAND)]
    if not names:
        return
    if resume:
        why = f"--resume {resume} goes on as that run began; leave {'it' if len(names) == 1 else 'them'} out"
    elif job:
        why = f"only for a command of your own, and --job {job} brings its own; leave one of the two out"
    else:
        why = "only for a command of your own; name its folder with --workdir, and the command after --"
    raise RequestError(f"{' and '.join(f'{name} {given[name]}' for name in names)}: {why}")


OF_A_COMMAND = ("--workdir", "--progress", "--send")

KEEP = {
    "keep_attempts": "how often the keeper may resume the run (default: 20)",
    "keep_hours": "for how many hours from now the keeper brings the run back (default: no end)",
}


@task(
    help={
        **TRAIN,
        "resume": "resume " + RUN_HELP,
        "dry_run": "print what would be sent and started, and what it costs; start nothing",
        "detach": "return when the run has started",
        "queue": "in a cluster: the queue of Kueue that admits the run",
        "wait": "in a cluster: seconds that all pods may take to be placed (default: 900; in a queue 12 hours)",
        "keep": "hand the run over to the stack's keeper, which resumes it after a loss",
        **KEEP,
    },
    iterable=["send"],
)
@reported
def train(
    c: Any,
    job: str = "",
    args: str = "",
    resume: str = "",
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    platform: str = "",
    python: str = "",
    runtime: str = "",
    container_access: str = "",
    workdir: str = "",
    framework: str = "",
    processes_per_host: str = "",
    progress: str = "",
    dry_run: bool = False,
    runs: str = "",
    track: str = "",
    name: str = "",
    max_usd: str = "",
    max_restarts: str = "",
    hang_limit: str = "120",
    heartbeat_limit: str = "300",
    detach: bool = False,
    queue: str = "",
    wait: str = "",
    keep: bool = False,
    keep_attempts: str = "",
    keep_hours: str = "",
    send: Sequence[str] | None = None,
) -> int:
    """Train a job or your own script, and follow the run.

    The job's own options come after --, as in: fab train --job flax_mlm -- --steps 2000
    `fab jobs` lists them. Your own command: fab train --workdir ~/my-project -- python train.py
    """
    from console import follow as training

    asked = asked_for(
        c,
        job=job,
        args=args,
        python=python,
        runtime=runtime,
        container_access=container_access,
        workdir=workdir,
        framework=framework,
        processes_per_host=processes_per_host,
        progress=progress,
        send=send,
        name=name,
        hang_limit=hang_limit,
        heartbeat_limit=heartbeat_limit,
        max_usd=max_usd,
        resume=resume,
        queue=queue,
        wait=wait,
    )
    if prints_help(asked):
        return DONE
    python = "" if asked.command else python  # of an own command it is among what it says itself
    hand_over = None
    if keep:
        if max_restarts not in ("", "0"):
            raise RequestError(
                "--keep --max-restarts: the keeper restarts a run that it keeps; leave one of the two out"
            )
        hand_over = _hand_over(keep_attempts, keep_hours)
    elif limit := (keep_attempts and f"--keep-attempts {keep_attempts}") or (
        keep_hours and f"--keep-hours {keep_hours}"
    ):
        raise RequestError(f"{limit}: is for a run that a keeper keeps; add --keep, or leave it out")

    def open_target(like: Run | None) -> Target:
        return options.target(stack, slice, hosts, platform=platform, python=python, runs=runs, like=like)

    return training.train(
        open_target,
        asked,
        resume=resume or None,
        detach=detach,
        restarts=whole("--max-restarts", max_restarts, least=0),
        track=track,
        dry_run=dry_run,
        hand_over=hand_over,
    )


def _hand_over(attempts: str, hours: str) -> HandOver:
    from keeper.commands import HandOver

    return HandOver(
        attempts=whole("--keep-attempts", attempts, least=1), hours=whole("--keep-hours", hours, least=1)
    )


@task(positional=["run"], help={"run": RUN_HELP, **KEEP, **SLICES, "runs": RUNS})
@reported
def keep(
    c: Any,
    run: str,
    keep_attempts: str = "",
    keep_hours: str = "",
    stack: str = "",
    slice: str = "",
    runs: str = "",
) -> int:
    """Let the stack's keeper resume a run after a loss."""
    from keeper import commands

    def on(name: str) -> Target:
        return options.target(stack, slice or name, runs=runs)

    target = options.any_target(stack, slice, runs=runs)
    return commands.keep(target, on, run, _hand_over(keep_attempts, keep_hours))


@task(positional=["run"], help={"run": RUN_HELP, "stack": options.STACK, "runs": RUNS})
@reported
def unkeep(c: Any, run: str, stack: str = "", runs: str = "") -> int:
    """Keep a run no more; if it runs, it goes on."""
    from keeper import commands, store

    return commands.unkeep(store.documents_for(options.wanted(stack, runs=runs)), run)


@task(
    positional=["action"],
    help={
        "action": "status: what it did and will do; run: a pass now, from here; install: put it on the gateway",
        "every": "with `run`: a pass every so many seconds, until Ctrl-C",
        "here": "with `install`: put it on this machine, as a timer of this user",
        "stack": options.STACK,
        "runs": RUNS,
    },
)
@reported
def keeper(
    c: Any,
    action: str,
    every: str = "",
    here: bool = False,
    stack: str = "",
    runs: str = "",
) -> int:
    """Show what the keeper does, carry out a pass, or install it."""
    from keeper import commands, install, store
    from keeper.__main__ import watch

    if action == "install":
        return install.install(options.inventory(stack), on_this_machine=here)
    if action not in ("status", "run"):
        raise RequestError(f'"{action}" is none of status, run, install')
    documents = store.documents_for(options.wanted(stack, runs=runs))
    if action == "status":
        return commands.status(documents)
    every_s = float(whole("--every", every, least=1) or 0)
    return watch(documents, functools.partial(print, flush=True), every_s=every_s)


@task(
    positional=["run"],
    help={"run": RUN_HELP, **WHERE, "runs": RUNS, "detach": "return when the run has started"},
)
@reported
def recover(
    c: Any,
    run: str,
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    runs: str = "",
    detach: bool = False,
) -> int:
    """Restore the slice of a run, then resume the run."""
    from console import follow as training

    def open_target(like: Run | None) -> Target:
        return options.target(stack, slice, hosts, runs=runs, like=like)

    return training.go_on(open_target, run, detach=detach)


@task(
    help={
        "run": RUN_HELP + " (default: all that are active, else the latest)",
        "json": JSON,
        **WHERE,
        "runs": RUNS,
    }
)
@reported
def status(
    c: Any,
    run: str = "",
    json: bool = False,
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    runs: str = "",
) -> int:
    """Show what a run is doing, host by host."""
    from console import status as status_command

    return status_command.status(options.target(stack, slice, hosts, runs=runs), run or None, as_json=json)


@task(
    help={
        "run": RUN_HELP,
        "host": "one host's log, by index (default: all hosts)",
        "follow": "continue to print until the run ends",
        "lines": "how many of the last lines to print first (0: all)",
        **SLICES,
        "runs": RUNS,
    }
)
@reported
def logs(
    c: Any,
    run: str = "latest",
    host: str = "",
    follow: bool = False,
    lines: str = "40",
    stack: str = "",
    slice: str = "",
    runs: str = "",
) -> int:
    """Print the logs of all hosts, or one."""
    from console import status as status_command

    return status_command.logs(
        options.target(stack, slice, runs=runs),
        run,
        host=whole("--host", host, least=0),
        keep_on=follow,
        lines=whole("--lines", lines, least=0) or 0,
    )


@task(
    help={
        "run": RUN_HELP + " (default: the one that is active)",
        "grace": "seconds for saving a checkpoint before the processes are killed",
        **SLICES,
        "runs": RUNS,
    }
)
@reported
def stop(c: Any, run: str = "", grace: str = "120", stack: str = "", slice: str = "", runs: str = "") -> int:
    """Write a checkpoint of a run, then stop it."""
    from console import status as status_command

    target = options.target(stack, slice, runs=runs)

    def by_keeper(run_id: str) -> bool:
        from keeper import commands  # most stacks have none

        return commands.stop(target, run_id)

    grace_s = float(whole("--grace", grace, least=0) or 0)
    return status_command.stop(target, run or None, grace_s=grace_s, by_keeper=by_keeper)


@task(
    help={
        "all": "every run (default: the latest 20)",
        "json": JSON,
        **SLICES,
        "runs": RUNS,
    }
)
@reported
def runs(
    c: Any, all: bool = False, json: bool = False, stack: str = "", slice: str = "", runs: str = ""
) -> int:
    """List the runs: state, step, metrics, age."""
    from console import status as status_command

    target = options.target(stack, slice, runs=runs)
    return status_command.list_runs(target, limit=None if all else 20, as_json=json)


@task(
    positional=[],
    help={"sweep": "a sweep of `fab sweep`, over its seeds", "json": JSON, **SLICES, "runs": RUNS},
)
@reported
def compare(
    c: Any, sweep: str = "", json: bool = False, stack: str = "", slice: str = "", runs: str = ""
) -> int:
    """Compare runs, or a sweep: the settings, what was measured."""
    from console import status as status_command

    wanted = options.after_dashes(c)
    if not sweep:
        return status_command.compare(options.target(stack, slice, runs=runs), wanted, as_json=json)
    if wanted:
        raise RequestError(f"--sweep {sweep}: compares all its runs; leave {' '.join(wanted)} out")
    from keeper import queue_commands

    return queue_commands.compare(options.any_target(stack, slice, runs=runs), sweep, as_json=json)


@task(
    help={
        "port": "the port on 127.0.0.1; 0: any that is free (default: 8760)",
        "stack": options.STACK + "; several as local,dev",
        "slice": options.SLICES["slice"],
        "runs": RUNS + "; several as FOLDER,gs://…",
    },
    positional=[],
)
@reported
def dashboard(c: Any, port: str = "8760", stack: str = "", slice: str = "", runs: str = "") -> int:
    """Show runs in a browser: curves, hosts, logs, settings."""
    from console.dashboard import server

    number = options.port(port) or 0
    targets = [
        options.target(one_stack, slice, runs=one_place)
        for one_stack in stack.split(",")
        for one_place in runs.split(",")
    ]
    return server.serve(targets, port=number)


@task(
    positional=["run"],
    help={
        "run": RUN_HELP + "; latest:JOB: the latest of a job that is done",
        "to": "a folder of this machine, or a URL such as gs://…",
        "force": "replace an export that is there",
        **SLICES,
        "runs": RUNS,
    },
)
@reported
def export(
    c: Any, run: str, to: str = "", force: bool = False, stack: str = "", slice: str = "", runs: str = ""
) -> int:
    """Copy a run's model, with a model card for the Hugging Face Hub."""
    from console import export

    if not to:
        raise RequestError("--to: say where to, a folder or a URL such as gs://…")
    return export.export(options.target(stack, slice, runs=runs), run, to, force=force)


@task(
    positional=["run"],
    help={
        "run": RUN_HELP,
        "to": "mlflow, wandb, or both with a comma between (default: those of `fab train --track`)",
        "limit": "seconds to try a tracker that is away, once the run has ended (default: 60)",
        **SLICES,
        "runs": RUNS,
    },
)
@reported
def track(
    c: Any, run: str, to: str = "", limit: str = "60", stack: str = "", slice: str = "", runs: str = ""
) -> int:
    """Mirror a run to MLflow or Weights & Biases."""
    from console import track as tracking

    limit_s = float(whole("--limit", limit, least=0) or 0)
    return tracking.track(options.target(stack, slice, runs=runs), run, to, limit_s=limit_s)


@task(help={"test": "send a message to each channel"}, positional=[])
@reported
def notify(c: Any, test: bool = False) -> int:
    """Say to which channels a run's end is sent."""
    from console import notify

    return notify.command(test=test)


YES = "ask nothing"


@task(positional=["run"], help={"run": RUN_HELP, "yes": YES, **SLICES, "runs": RUNS})
@reported
def rm(c: Any, run: str, yes: bool = False, stack: str = "", slice: str = "", runs: str = "") -> int:
    """Remove a run."""
    from console import removal
    from keeper import commands

    target = options.target(stack, slice, runs=runs)
    return removal.remove(target, run, yes=yes, resumed_by=commands.resumed_by(target))


@task(help={"keep": "how many runs to keep (default: 20)", "yes": YES, **SLICES, "runs": RUNS}, positional=[])
@reported
def prune(
    c: Any, keep: str = "20", yes: bool = False, stack: str = "", slice: str = "", runs: str = ""
) -> int:
    """Remove all runs but the newest."""
    from console import removal
    from keeper import commands

    count, target = whole("--keep", keep, least=0) or 0, options.target(stack, slice, runs=runs)
    return removal.prune(target, keep=count, yes=yes, resumed_by=commands.resumed_by(target))


@task(
    positional=["run"],
    help={
        "run": RUN_HELP + "; latest:JOB: the latest of a job that is done",
        "second": "the second text of a pair, or what the questions are about (@FILE: the text of a file)",
        "json": JSON,
        **SLICES,
        "runs": RUNS,
    },
)
@reported
def predict(
    c: Any, run: str, second: str = "", json: bool = False, stack: str = "", slice: str = "", runs: str = ""
) -> int:
    """Let a run's model answer: texts, pairs, questions or pictures.

    An INPUT is a text, a question, or the path of a picture; @FILE: each line of a file is an input. For example:
    fab predict latest "The <mask> of the list."
    """
    from console import predict

    return predict.predict(
        options.target(stack, slice, runs=runs),
        run,
        options.after_dashes(c),
        second=second or None,
        as_json=json,
    )


@task(
    positional=["run"],
    help={
        "run": RUN_HELP + "; latest:JOB: the latest of a job that is done; a server that runs: leads to it",
        "address": "where to listen on this machine (default: 127.0.0.1; others need the token that is made)",
        "port": "the port on this machine (default: 8000; 0: a free one)",
        "token_file": "a file with the token that requests have to name (default: none on 127.0.0.1)",
        "image": "in the framework's image, with Docker",
        "detach": "return when the server has started",
        **SLICES,
        "hosts": "which host, by index (default: the first)",
        "platform": "cpu, gpu or tpu",
        "python": "the interpreter on the host",
        "runs": RUNS,
    },
)
@reported
def serve(
    c: Any,
    run: str,
    address: str = "",
    port: str = "",
    token_file: str = "",
    image: bool = False,
    detach: bool = False,
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    platform: str = "",
    python: str = "",
    runs: str = "",
) -> int:
    """Answer with a run's model over HTTP, until Ctrl-C.

    On a stack, it runs on one host and is reached through a tunnel. The server's own options come after --.
    """
    from console import serve

    if {"-h", "--help"} & {*options.after_dashes(c)}:
        from console import status as status_command
        from launch import jobs

        return status_command.list_jobs(jobs.SERVER)
    wanted = options.wanted(stack, slice, hosts, platform=platform, python=python, runs=runs)
    one = "1" if wanted.stack == "local" else "0"
    target = options.target(stack, slice, hosts or one, platform=platform, python=python, runs=runs)
    if len(target.hosts) > 1:
        raise RequestError(f"--hosts {hosts}: a server is one process on one host; name one")
    asked = serve.Options(
        address=address or None,
        port=options.port(port),
        token_file=token_file or None,
        in_image=image,
        detach=detach,
        words=options.after_dashes(c),
    )
    return serve.serve(target, run, asked)


@task(help={"job": "only this one, with all its options"}, positional=[])
@reported
def jobs(c: Any, job: str = "") -> int:
    """List the jobs, or a job's options."""
    from console import status as status_command

    return status_command.list_jobs(job or None)


@task(
    help={
        "zone": "only types in this zone, at its prices",
        "generation": "v2, v3, v4, v5e, v5p or v6e",
        "max_chips": "the largest number of chips (default: 64)",
        "grant": "only types that the grant in this configuration file covers, such as Pulumi.dev.yaml",
    },
    positional=[],
)
@reported
def accelerators(c: Any, zone: str = "", generation: str = "", max_chips: str = "", grant: str = "") -> int:
    """List the TPU types: hosts, chips, memory, zones, prices."""
    from console.accelerators import list_accelerators, list_granted

    if grant:
        return list_granted(Path(grant), zone=zone or None, generation=generation or None)
    return list_accelerators(
        zone=zone or None,
        generation=generation or None,
        max_chips=whole("--max-chips", max_chips, least=1),
    )


@task(
    help={
        "stack": SLICES["stack"],
        "days": "how far back (default: 30)",
        "json": "for programs: every hour that is known",
    },
    positional=[],
)
@reported
def capacity(c: Any, stack: str = "", days: str = "", json: bool = False) -> int:
    """Show which zones had capacity for the stack's slices, and when."""
    from keeper import commands
    from launch.output import terminal

    days_back = whole("--days", days, least=1) or commands.DAYS
    return commands.capacity(terminal(), options.wanted(stack), days=days_back, as_json=json)


@task(
    help={
        "stack": SLICES["stack"],
        "remove": "remove those of the stack that neither Pulumi nor the inventory knows of",
        "yes": YES,
    },
    positional=[],
)
@reported
def zombies(c: Any, stack: str = "", remove: bool = False, yes: bool = False) -> int:
    """List all TPUs of the project, and those left over."""
    from keeper.reclaim import command

    return command(options.wanted(stack), remove=remove, yes=yes)


PLATFORM = "tpu, or cpu for rehearsals and this machine"


@task(
    help={
        "framework": "frameworks, as jax,pytorch (default: all of images/)",
        "platform": f"{PLATFORM} (default: tpu)",
        "update_base": "first update the base's digest in images/base.txt",
        "stack": "the old name of --framework",
    }
)
@reported
def build(
    c: Any, framework: str = "", platform: str = "tpu", update_base: bool = False, stack: str = ""
) -> int:
    """Build the missing images of images/, and test them."""
    if stack:
        raise RequestError(
            f"--stack: a stack is a Pulumi stack, and images are built for frameworks; fab build --framework {stack} "
            f"(make images FRAMEWORK={stack})"
        )
    from images import build as building

    return building.build(framework=framework, platform=platform, update_base=update_base, environ=os.environ)


@task(
    help={
        "framework": "frameworks, as jax,pytorch (default: all that are built)",
        "stack": "the Pulumi stack whose repository it is, or rehearsal (default: $TPU_STACK)",
        "platform": f"{PLATFORM} (default: tpu)",
        "image": "the old name of --framework",
    }
)
@reported
def push(c: Any, framework: str = "", stack: str = "", platform: str = "tpu", image: str = "") -> int:
    """Push images to a stack's repository, by digest."""
    if image:
        raise RequestError(f"--image: images are named by their framework; fab push --framework {image}")
    from images import push as pushing

    chosen = stack or os.environ.get("TPU_STACK") or "local"
    if chosen == options.REHEARSAL:
        options.target(chosen)  # its environment has the `pulumi` that knows it
    return pushing.push(stack=chosen, framework=framework, platform=platform, environ=os.environ)


@task(help={"stack": options.STACK, "prune": "remove old images from this machine"})
@reported
def images(c: Any, stack: str = "", prune: bool = False) -> int:
    """List images, here and on a stack, and the runs that used them."""
    from images import local_images

    if prune:
        return local_images.prune(environ=os.environ)
    target = options.target(stack)
    references = target.inventory.images if target.capabilities.is_billed else None
    return local_images.show(folder=target.runs, references=references, environ=os.environ)


ACTIONS = (
    "up, down, status, env, acts; or an act such as kill, cut, preempt (`fab rehearsal acts` lists them)"
)


@task(
    positional=["action"],
    help={
        "action": ACTIONS,
        "hosts": "how many hosts `up` makes (default: 2)",
        "docker": "with `up`: hosts with Docker, and an image registry",
        "kubernetes": "with `up`: a cluster of real Kubernetes, and its nodes as the slice",
        "slices": "with `--kubernetes`: the hosts as so many slices, and JobSet's controller",
        "queue": "with `--kubernetes`: Kueue, and a queue of this name",
        "keeper": "with `up`: a gateway with a keeper",
        "host": 'the target of a fault: a host\'s index or name, or "share"',
        "amount": "the amount of a fault: seconds or milliseconds",
        "zone": "where chips run out, of a slice with several zones",
        "for_good": "a host that is killed is not started again",
    },
)
@reported
def rehearsal(
    c: Any,
    action: str,
    hosts: str = "2",
    docker: bool = False,
    kubernetes: bool = False,
    slices: str = "1",
    queue: str = "",
    keeper: bool = False,
    host: str = "",
    amount: str = "",
    zone: str = "",
    for_good: bool = False,
) -> int:
    """Run a simulated cloud on this machine, and inject faults."""
    from rehearsal.daemon.cli import Typed, UpRequest, carry_out
    from rehearsal.machines.host_image import Kind
    from rehearsal.state import RehearsalError

    count = whole("--hosts", hosts, least=1) or 0
    if kubernetes and (docker or keeper):
        raise RequestError("--kubernetes: a cluster needs no --docker, and has no keeper; leave them out")
    several = whole("--slices", slices, least=1) or 1
    if not kubernetes and (several > 1 or queue):
        raise RequestError(
            "--slices, --queue: a rehearsal on hosts has one slice and no queue; add --kubernetes"
        )
    kind: Kind = "kubernetes" if kubernetes else "docker" if docker else "plain"
    typed = Typed(
        action=action,
        wanted=UpRequest(hosts=count, kind=kind, keeper=keeper, slices=several, queue=queue),
        host=host,
        amount=amount,
        zone=zone,
        for_good=for_good,
    )
    try:
        carry_out(typed, os.environ, lambda line: print(line, flush=True))
    except RehearsalError as error:
        raise RequestError(str(error)) from None
    return 0
