"""`fab ssh`: a shell on a host, or in the process of a run where hosts are there only as long as it is."""

from __future__ import annotations

import sys

from console import status as status_command
from contracts.errors import RequestError
from launch import runs
from launch.targets import Target


def open_shell(target: Target, host: int | None, run_name: str | None) -> int:
    """Join this terminal to a shell; return its exit code. host: None is the first. wanted: the run, where hosts end
    with one; None: the active one.

    Raises:
        RequestError: there is no such host or run, or this is no terminal.
        HostError: the host cannot be reached, or does not run.
    """
    if target.capabilities.hosts_outlive_runs:
        if run_name is not None:
            raise RequestError(
                f"{run_name}: a shell of a run is for pods, and these hosts have shells whatever runs; name one with "
                "--host, such as --host 0"
            )
        return target.require("ssh").backend.open_shell(target, host, None)
    if not sys.stdin.isatty():
        raise RequestError("fab ssh: a shell in a pod needs a terminal")
    run = runs.find(target.runs, run_name) if run_name else status_command.only_active(target)
    if host is not None and host >= run.processes:
        raise RequestError(f"--host {host}: {run.run_id} has the hosts 0 to {run.processes - 1}")
    return target.backend.open_shell(target, host, run.run_id)
