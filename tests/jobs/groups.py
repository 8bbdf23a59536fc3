"""Runs and groups for tests that compute in another framework's environment: see test_in_environments.py."""

import os
from pathlib import Path
from typing import Any

from contracts.process_environment import ProcessEnvironment
from jobs.runtime.monitoring.heartbeat import Heartbeat
from jobs.runtime.process import Run, fenced_directory
from tests.servers import free_port


class Alone:
    """The group of a single process."""

    def rank(self) -> int:
        return 0

    def all_processes(self, condition: bool) -> bool:
        return condition


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def environment_of(job: str, framework: str, run_dir: Path | str, **changed: Any) -> ProcessEnvironment:
    fields: dict[str, Any] = {
        "run_id": f"{job}-20261122-200000-abcd",
        "run_dir": str(run_dir),
        "job": job,
        "framework": framework,
        "attempt": 0,
        "num_processes": 1,
        "process_id": 0,
        "coordinator": "127.0.0.1:1",
        "platform": "cpu",
        "cache_dir": f"{run_dir}/cache",
        "local_devices": None,
        "peak_flops_per_s": None,
        "control_dir": None,
    }
    return ProcessEnvironment(**{**fields, **changed})


def run_in(environment: ProcessEnvironment) -> Run:
    """A run of one process, in the directory that the environment names."""
    directory = fenced_directory(environment)
    return Run(environment=environment, directory=directory, heartbeat=Heartbeat(directory, environment))


def variables_of(environments: list[ProcessEnvironment]) -> list[dict[str, str]]:
    """The whole environments of processes that share these two cores."""
    return [
        {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", **environment.variables()}
        for environment in environments
    ]
