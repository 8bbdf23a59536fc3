"""Contract 2, the process environment: what a job's process is told, written and read here and nowhere else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal, cast, get_args

from contracts.errors import RequestError

Platform = Literal["cpu", "gpu", "tpu"]
PLATFORMS: tuple[Platform, ...] = get_args(Platform)
PORT = re.compile(r"[1-9][0-9]{0,4}")
LAST_PORT = 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """The RUN_* variables of one process.

    run_dir: an absolute path or a URL such as gs://bucket/runs/ID.
    num_processes, process_id: of ranks, counted through the hosts. A host has `ranks_per_host` of them, and this one is
    its `local_rank`.
    coordinator: host:port of process 0, where the group forms.
    local_devices: devices this process has, where the platform lets one choose (cpu); None elsewhere.
    peak_flops_per_s: what all the run's devices together can do in bfloat16; None where nobody has said.
    control_dir: a directory on this host that the agent shares with the process; None when run by hand.
    shared_cache: the URL of a cache that all hosts share, where what is on their own disks is lost with them; or None.
    """

    run_id: str
    run_dir: str
    job: str
    framework: str
    attempt: int
    num_processes: int
    process_id: int
    coordinator: str
    platform: Platform
    cache_dir: str
    local_devices: int | None
    peak_flops_per_s: int | None
    control_dir: str | None
    local_rank: int = 0
    ranks_per_host: int = 1
    shared_cache: str | None = None

    def variables(self) -> dict[str, str]:
        """The environment variables that `read` reads back; those that are None are left out."""
        values = {
            "RUN_ID": self.run_id,
            "RUN_DIR": self.run_dir,
            "RUN_JOB": self.job,
            "RUN_FRAMEWORK": self.framework,
            "RUN_ATTEMPT": self.attempt,
            "RUN_NUM_PROCESSES": self.num_processes,
            "RUN_PROCESS_ID": self.process_id,
            "RUN_COORDINATOR": self.coordinator,
            "RUN_PLATFORM": self.platform,
            "RUN_CACHE_DIR": self.cache_dir,
            "RUN_LOCAL_DEVICES": self.local_devices,
            "RUN_PEAK_FLOPS_PER_S": self.peak_flops_per_s,
            "RUN_CONTROL_DIR": self.control_dir,
            "RUN_SHARED_CACHE": self.shared_cache,
        }
        if self.ranks_per_host > 1:
            values |= {"RUN_LOCAL_RANK": self.local_rank, "RUN_RANKS_PER_HOST": self.ranks_per_host}
        return {name: str(value) for name, value in values.items() if value is not None}

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that writes what the run writes once."""
        return self.process_id == 0

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return self.process_id // self.ranks_per_host

    @property
    def hosts(self) -> int:
        return self.num_processes // self.ranks_per_host


def read(environ: Mapping[str, str]) -> ProcessEnvironment:
    """The process environment out of `environ`, where RUN_STACK is the old name of RUN_FRAMEWORK.

    Raises:
        RequestError: listing every RUN_* variable that is missing or has a value it cannot have.
    """
    mistakes: list[str] = []

    def text(name: str) -> str:
        value = environ.get(name, "")
        if not value:
            mistakes.append(f"{name} is not set")
        return value

    def integer(name: str, minimum: int) -> int:
        value = text(name)
        if value and (not value.isascii() or not value.isdigit() or int(value) < minimum):
            mistakes.append(f'{name}: "{value}" is not a whole number of at least {minimum}')
        return int(value) if value.isascii() and value.isdigit() else minimum

    def optional(name: str) -> int | None:
        return integer(name, 1) if environ.get(name) else None

    platform = text("RUN_PLATFORM")
    if platform and platform not in PLATFORMS:
        mistakes.append(f'RUN_PLATFORM: "{platform}" is not a platform; choose one of {", ".join(PLATFORMS)}')
    result = ProcessEnvironment(
        run_id=text("RUN_ID"),
        run_dir=text("RUN_DIR"),
        job=text("RUN_JOB"),
        framework=environ.get("RUN_FRAMEWORK") or environ.get("RUN_STACK") or text("RUN_FRAMEWORK"),
        attempt=integer("RUN_ATTEMPT", 0),
        num_processes=integer("RUN_NUM_PROCESSES", 1),
        process_id=integer("RUN_PROCESS_ID", 0),
        coordinator=text("RUN_COORDINATOR"),
        platform=cast(Platform, platform),
        cache_dir=text("RUN_CACHE_DIR"),
        local_devices=optional("RUN_LOCAL_DEVICES"),
        peak_flops_per_s=optional("RUN_PEAK_FLOPS_PER_S"),
        control_dir=environ.get("RUN_CONTROL_DIR") or None,
        local_rank=integer("RUN_LOCAL_RANK", 0) if environ.get("RUN_LOCAL_RANK") else 0,
        ranks_per_host=optional("RUN_RANKS_PER_HOST") or 1,
        shared_cache=environ.get("RUN_SHARED_CACHE") or None,
    )
    if result.process_id >= result.num_processes:
        mistakes.append(
            f"RUN_PROCESS_ID: {result.process_id} must be below RUN_NUM_PROCESSES ({result.num_processes})"
        )
    per_host = result.ranks_per_host
    if result.num_processes % per_host or result.local_rank != result.process_id % per_host:
        mistakes.append(
            f"RUN_RANKS_PER_HOST: with {per_host} ranks a host, RUN_NUM_PROCESSES ({result.num_processes}) must be a "
            f"multiple of it, and RUN_LOCAL_RANK ({result.local_rank}) RUN_PROCESS_ID ({result.process_id}) modulo it"
        )
    host, _, port = result.coordinator.rpartition(":")
    if result.coordinator and not (host and PORT.fullmatch(port) and int(port) <= LAST_PORT):
        mistakes.append(f'RUN_COORDINATOR: "{result.coordinator}" is not host:port')
    if mistakes:
        raise RequestError(
            "the process environment is not complete (`fab train` sets it): " + "; ".join(mistakes)
        )
    return result
