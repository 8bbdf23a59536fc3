"""The tasks that prepare hosts, try whether they compute together, and look for what is wrong."""

from __future__ import annotations

import os
from typing import Any

from fabfile import options
from fabfile.options import ACCESS, RUNTIME, WHERE
from fabfile.terminal import reported, task


@task(
    help={
        **WHERE,
        "comforts": "install zsh, byobu and mosh as well",
        "python": "the interpreter on the hosts, instead of one that deploy installs",
        "runtime": RUNTIME,
    }
)
@reported
def deploy(
    c: Any,
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    python: str = "",
    runtime: str = "",
    comforts: bool = False,
) -> int:
    """Prepare every host for runs, and report changes."""
    from launch.deploy import deploy as deployment

    target = options.target(stack, slice, hosts, python=python)
    return deployment.deploy(target, with_comforts=comforts, runtime=runtime or None)


@task(
    help={
        "framework": "the framework whose devices and collectives are tested: jax",
        **WHERE,
        "platform": "cpu, gpu or tpu",
        "python": "the interpreter on the hosts",
        "runtime": RUNTIME,
        "container_access": ACCESS,
    }
)
@reported
def verify(
    c: Any,
    framework: str = "jax",
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    platform: str = "",
    python: str = "",
    runtime: str = "",
    container_access: str = "",
) -> int:
    """Test on all hosts: devices, a matmul, an all-reduce."""
    from launch.commands import verify as verification

    target = options.target(stack, slice, hosts, platform=platform, python=python)
    return verification.verify(target, framework, runtime or None, container_access or None)


@task(
    help={
        **WHERE,
        "json": "print every finding as JSON",
        "first_day": "print facts that only real hosts can provide, for a bug report",
    }
)
@reported
def doctor(
    c: Any, stack: str = "", slice: str = "", hosts: str = "", json: bool = False, first_day: bool = False
) -> int:
    """Look for all problems, and print their remedies."""
    from launch.doctor import doctor as visit

    if first_day:
        return visit.first_day(options.target(stack, slice, hosts))
    return visit.doctor(
        lambda: options.target(stack, slice, hosts),
        wants_stack=(stack or os.environ.get("TPU_STACK") or "local") != "local",
        as_json=json,
    )


@task(
    help={
        "host": "which hosts, such as 0 or 0-3,5",
        "stack": options.STACK,
        "slice": options.SLICE,
        "instance": "the name of the host's VM, if it has published none",
        "fingerprint": "the fingerprint SHA256:…, already compared; replaces the question",
    },
    positional=[],
)
@reported
def trust(
    c: Any, host: str, stack: str = "", slice: str = "", instance: str = "", fingerprint: str = ""
) -> int:
    """Show a host's SSH key, ask, and store it beside the inventory."""
    from launch import targets
    from launch.commands import trust as trusting

    wanted = options.wanted(stack, slice)
    return trusting.trust(
        targets.resolve(wanted),
        targets.keys_file(wanted),
        hosts=host,
        instance=instance or None,
        fingerprint=fingerprint or None,
    )
