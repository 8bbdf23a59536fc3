"""The tasks about hosts: preparing and testing them, commands, files, shells and notebooks on them."""

from __future__ import annotations

import os
from typing import Any

from fabfile import options
from fabfile.options import ACCESS, RUNTIME, SLICES, WHERE, reported, task, whole


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
    from backends.vm import deploy as deployment

    target = options.target(stack, slice, hosts, python=python).require("deploy")
    return deployment.deploy(target, with_comforts=comforts, runtime=runtime or None)


@task(
    help={
        "framework": "the framework whose devices and collectives are tested: jax, pytorch, …",
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
    from console.hosts import verify as verification

    target = options.target(stack, slice, hosts, platform=platform, python=python)
    return verification.verify(target.require("verify"), framework, runtime or None, container_access or None)


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
    from console.doctor import doctor as visit

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
        **SLICES,
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
    from backends.targets import keys_file, resolve
    from console.hosts import trust as trusting

    wanted = options.wanted(stack, slice)
    return trusting.trust(
        resolve(wanted).require("trust"),
        keys_file(wanted),
        hosts=host,
        instance=instance or None,
        fingerprint=fingerprint or None,
    )


@task(
    help={
        "command": "a line for the hosts' sh, instead of words after --",
        **WHERE,
        "group": "print at the end, and print equal output of several hosts once",
        "timeout": "seconds after which the command is ended (default: none)",
    }
)
@reported
def run(
    c: Any,
    command: str = "",
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    group: bool = False,
    timeout: str = "",
) -> int:
    """Run a command on all hosts: `fab run -- COMMAND …`."""
    from console.hosts import execute

    argv = execute.argv_of(options.after_dashes(c), command)
    timeout_s = whole("--timeout", timeout, least=1)
    target = options.target(stack, slice, hosts).require("run")
    return execute.run(target, argv, grouped=group, timeout_s=timeout_s)


@task(
    help={
        "source": "a file or folder of this machine",
        "target": "the path on the hosts; an existing folder receives the copy, otherwise the copy gets this name",
        **WHERE,
        "force": "replace an existing folder",
    }
)
@reported
def put(
    c: Any, source: str, target: str, stack: str = "", slice: str = "", hosts: str = "", force: bool = False
) -> int:
    """Copy a file or folder to all hosts."""
    from console.hosts import copies

    return copies.put(options.target(stack, slice, hosts).require("put"), source, target, force=force)


@task(
    help={
        "source": "a file or folder of the hosts",
        "target": "the path on this machine; several hosts each get a folder with their index in it",
        **WHERE,
        "force": "replace an existing folder",
    }
)
@reported
def get(
    c: Any, source: str, target: str, stack: str = "", slice: str = "", hosts: str = "", force: bool = False
) -> int:
    """Copy a file or folder from all hosts."""
    from console.hosts import copies

    return copies.get(options.target(stack, slice, hosts).require("get"), source, target, force=force)


@task(
    help={
        "host": "which host, by index (default: the first)",
        **WHERE,
        "run": "in a cluster: the run whose pod it is (default: the one that is active)",
    }
)
@reported
def ssh(c: Any, host: str = "", stack: str = "", slice: str = "", hosts: str = "", run: str = "") -> int:
    """Open a shell on a host."""
    from console.hosts import shells

    index = whole("--host", host, least=0)
    return shells.open_shell(options.target(stack, slice, hosts), index, run or None)


@task(help={**WHERE, "write": "write it to ~/.ssh, where ssh and VS Code find it"})
@reported
def ssh_config(c: Any, stack: str = "", slice: str = "", hosts: str = "", write: bool = False) -> int:
    """Print a configuration of the hosts for ssh and VS Code."""
    from backends.vm import ssh_config as configuration

    return configuration.show_config(options.target(stack, slice, hosts).require("ssh-config"), write=write)


@task(
    help={
        **WHERE,
        "module": "the server's Python module",
        "python": "the interpreter on the host",
        "browser": "open the notebooks in a browser on this machine",
    }
)
@reported
def jupyter(
    c: Any,
    stack: str = "",
    slice: str = "",
    hosts: str = "",
    module: str = "jupyterlab",
    python: str = "",
    browser: bool = False,
) -> int:
    """Serve notebooks from the first host, for this machine only."""
    from console.hosts import notebook

    target = options.target(stack, slice, hosts, python=python).require("jupyter")
    return notebook.serve(target, module, browser=browser)
