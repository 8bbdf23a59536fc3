"""`fab ssh`: a shell on a host, or in the place of a run's process."""

from __future__ import annotations

import sys

from console import status as status_command
from console.live import active_run
from contracts.errors import RequestError
from launch.targets import Target


def open_shell(target: Target, host: int | None, run_name: str | None) -> int:
    """Join this terminal to a shell; return its exit code.

    host: of the slice, or of the run; None: the first. run_name: None: a shell of the host, or where hosts end with a
    run, of the one that is active.

    Raises:
        RequestError: there is no such host or run, or this is no terminal.
        HostError: the host cannot be reached, or the run does not run there.
    """
    if run_name is None and target.capabilities.hosts_outlive_runs:
        return target.require("ssh").backend.open_shell(target, host, None)
    if not target.capabilities.hosts_outlive_runs and not sys.stdin.isatty():
        raise RequestError("fab ssh: a shell in a pod needs a terminal")
    run = active_run(target, run_name) if run_name else status_command.only_active(target)
    if host is not None and host >= run.processes:
        raise RequestError(f"--host {host}: {run.run_id} has the hosts 0 to {run.processes - 1}")
    return target.backend.open_shell(target, host, run)
