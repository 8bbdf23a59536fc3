"""The tasks that start runs on a target and look after them, and those that say what there is to choose from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fabric import task

from fabfile.terminal import reported, whole

RUN_HELP = 'a run: its id, the beginning or end of it, its --name, or "latest"'


@task(
    help={
        "job": "what to train (see `fab jobs`)",
        "args": 'the job\'s own options, in one string: "--steps 2000 --model small"',
        "resume": "go on with " + RUN_HELP,
        "hosts": "how many hosts (default on this machine: 2 processes)",
        "platform": "cpu, gpu or tpu",
        "target": "where to run: local is this machine",
        "name": "a name of your own for the run",
        "detach": "return when the run has started",
    }
)
@reported
def train(
    c: Any,
    job: str = "",
    args: str = "",
    resume: str = "",
    hosts: str = "",
    platform: str = "",
    target: str = "local",
    name: str = "",
    detach: bool = False,
) -> int:
    """Train a job on all hosts, and follow it."""
    from launch import console

    return console.train(
        job=job or None,
        arguments=args or None,
        resume=resume or None,
        hosts=whole("--hosts", hosts, least=1),
        platform=platform or None,
        target=target,
        name=name or None,
        detach=detach,
    )


@task(help={"run": RUN_HELP + " (default: all that are active, else the latest)"})
@reported
def status(c: Any, run: str = "") -> int:
    """Show what a run is doing, host by host."""
    from launch import console

    return console.status(run or None)


@task(
    help={
        "run": RUN_HELP,
        "host": "one host's log, by index (default: all hosts)",
        "follow": "go on printing until the run ends",
        "lines": "how many of the last lines to begin with (0: all)",
    }
)
@reported
def logs(c: Any, run: str = "latest", host: str = "", follow: bool = False, lines: str = "40") -> int:
    """Print the logs of all hosts, or one."""
    from launch import console

    return console.logs(
        run,
        host=whole("--host", host, least=0),
        keep_on=follow,
        lines=whole("--lines", lines, least=0) or 0,
    )


@task(
    help={
        "run": RUN_HELP + " (default: the one that is active)",
        "grace": "seconds to save a checkpoint in before the processes are killed",
    }
)
@reported
def stop(c: Any, run: str = "", grace: str = "120") -> int:
    """Stop a run; it saves a checkpoint first."""
    from launch import console

    return console.stop(run or None, grace_s=float(whole("--grace", grace, least=0) or 0))


@task(help={"all": "every run (default: the latest 20)"})
@reported
def runs(c: Any, all: bool = False) -> int:
    """List the runs: state, step, loss, age."""
    from launch import console

    return console.list_runs(limit=None if all else 20)


@task(help={"job": "only this one, with all its options"}, positional=[])
@reported
def jobs(c: Any, job: str = "") -> int:
    """List what can be trained, with each job's options."""
    from launch import console

    return console.list_jobs(job or None)


@task(
    help={
        "zone": "only what is listed there, at its prices",
        "generation": "v2, v3, v4, v5e, v5p or v6e",
        "max_chips": "up to this size (default: 64 chips)",
        "grant": "only what the grant in this configuration covers, such as Pulumi.dev.yaml",
    },
    positional=[],
)
@reported
def accelerators(c: Any, zone: str = "", generation: str = "", max_chips: str = "", grant: str = "") -> int:
    """List the TPU types: hosts, chips, memory, zones, prices."""
    from launch.accelerators import list_accelerators
    from launch.grants import list_granted

    if grant:
        return list_granted(Path(grant), zone=zone or None, generation=generation or None)
    return list_accelerators(
        zone=zone or None,
        generation=generation or None,
        max_chips=whole("--max-chips", max_chips, least=1),
    )
