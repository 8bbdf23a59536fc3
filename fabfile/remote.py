"""The tasks that reach into hosts: commands, files, shells, notebooks."""

from __future__ import annotations

import os
import sys
from typing import Any

from fabfile import options
from fabfile.options import WHERE
from fabfile.terminal import reported, task, whole


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
    from launch.commands import execute

    argv = execute.argv_of(options.after_dashes(c), command)
    timeout_s = whole("--timeout", timeout, least=1)
    return execute.run(options.target(stack, slice, hosts), argv, grouped=group, timeout_s=timeout_s)


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
    from launch.commands import copies

    return copies.put(options.target(stack, slice, hosts), source, target, force=force)


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
    from launch.commands import copies

    return copies.get(options.target(stack, slice, hosts), source, target, force=force)


@task(help={"host": "which host, by index (default: the first)", **WHERE})
@reported
def ssh(c: Any, host: str = "", stack: str = "", slice: str = "", hosts: str = "") -> int:
    """Open a shell on a host."""
    from launch.commands import shells

    index = whole("--host", host, least=0)
    argv = shells.command(options.target(stack, slice, hosts), index)
    sys.stdout.flush()
    # In place of this process, so that the terminal, its signals and its size are ssh's own.
    os.execvp(argv[0], argv)


@task(help={**WHERE, "write": "write it to ~/.ssh, where ssh and VS Code find it"})
@reported
def ssh_config(c: Any, stack: str = "", slice: str = "", hosts: str = "", write: bool = False) -> int:
    """Print a configuration of the hosts for ssh and VS Code."""
    from launch.commands import shells

    return shells.show_config(options.target(stack, slice, hosts), write=write)


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
    from launch.commands import notebook

    return notebook.serve(options.target(stack, slice, hosts, python=python), module, browser=browser)
