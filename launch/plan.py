"""What each host is told, worked out before anything is done: pure, so that it can be read and compared in tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from jobs.runtime import run_directory

MIN_FREE_BYTES = 512 * 2**20
"""Least free space on a host's disks before a run is started: room for checkpoints, logs and the data cache."""
MAX_CLOCK_OFFSET_S = 5.0

MODULES_OF_STACK = {
    "jax": ("jax", "flax", "optax", "orbax.checkpoint", "tokenizers", "safetensors", "tyro", "tensorboard"),
}
"""What the job's interpreter must be able to import, by stack; looked for, not loaded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One attempt of a run on the hosts of a slice, one process on each."""

    run_id: str
    attempt: int
    job: str
    stack: str
    arguments: tuple[str, ...]
    platform: str
    run_dir: str
    cache_dir: str
    cwd: str
    python: str
    agent_root: str
    bundle_sha256: str
    coordinator_host: str
    coordinator_port: int
    local_devices: int | None
    cpus: tuple[tuple[int, ...] | None, ...]

    @property
    def processes(self) -> int:
        return len(self.cpus)

    @property
    def coordinator(self) -> str:
        return f"{self.coordinator_host}:{self.coordinator_port}"

    def process(self, process_id: int) -> dict[str, Any]:
        """The keys that name one process of this attempt to its agent."""
        return {"run_id": self.run_id, "attempt": self.attempt, "process_id": process_id}


def preflight(plan: Plan, process_id: int, *, now_s: float) -> dict[str, Any]:
    """The agent's preflight request for one host; only the coordinator's host needs the port."""
    return {
        "python": plan.python,
        "modules": list(MODULES_OF_STACK[plan.stack]),
        "platform": plan.platform,
        "run_dir": _local_path(plan.run_dir),
        "cache_dir": plan.cache_dir,
        "min_free_bytes": MIN_FREE_BYTES,
        "port": plan.coordinator_port if process_id == 0 else None,
        "time": now_s,
        "max_clock_offset_s": MAX_CLOCK_OFFSET_S,
        "bundle": plan.bundle_sha256,
    }


def start(plan: Plan, process_id: int) -> dict[str, Any]:
    """The agent's start request for one process."""
    log = run_directory.log(plan.attempt, process_id)
    here = _local_path(plan.run_dir)
    return {
        **plan.process(process_id),
        # -P: the code is the bundle's, not whatever lies in the working directory.
        "argv": [plan.python, "-P", "-u", "-m", f"jobs.{plan.job}", *plan.arguments],
        "env": environment(plan, process_id),
        "cwd": plan.cwd,
        "log_path": f"{here}/{log}" if here else f"{plan.agent_root}/runs/{plan.run_id}/{log}",
        "run_dir": here,
        "num_processes": plan.processes,
        "cpus": list(cpus) if (cpus := plan.cpus[process_id]) is not None else None,
    }


def environment(plan: Plan, process_id: int) -> dict[str, str]:
    """Contract 2 for one process, and where Python finds the code."""
    return {
        "RUN_ID": plan.run_id,
        "RUN_DIR": plan.run_dir,
        "RUN_JOB": plan.job,
        "RUN_STACK": plan.stack,
        "RUN_ATTEMPT": str(plan.attempt),
        "RUN_NUM_PROCESSES": str(plan.processes),
        "RUN_PROCESS_ID": str(process_id),
        "RUN_COORDINATOR": plan.coordinator,
        "RUN_PLATFORM": plan.platform,
        "RUN_CACHE_DIR": plan.cache_dir,
        **({"RUN_LOCAL_DEVICES": str(plan.local_devices)} if plan.local_devices is not None else {}),
        "PYTHONPATH": f"{plan.agent_root}/bundles/{plan.bundle_sha256}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _local_path(run_dir: str) -> str | None:
    """The run directory where it is a path on the host; None where it is in a bucket."""
    return None if "://" in run_dir else run_dir
