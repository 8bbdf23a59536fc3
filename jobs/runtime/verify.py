"""What `fab verify` computes, whatever the framework: a matmul on each device of a host, an all-reduce over all hosts.

`python -m jobs.runtime.verify` on every host, as a run's process is started. The framework's part is the module
`verify` in its own folder, with three functions:

    facts()                            platform, device_kind, local_devices, devices, processes, process_index
    matmuls(size, repeats, platform)   on each device of this process a matrix of ones, multiplied so often by one of
                                       1/size: ones again, exactly, as long as size is a power of two
    all_reduce(width)                  the sum over all devices of all hosts of so many numbers each, d + 1 of device d

Each process writes its results to `verify/rank-<i>.json` in the run directory; the caller judges.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from contracts.process_environment import Platform
from jobs.runtime import process

PACKAGES = (
    *("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "torch", "torch_tpu", "torch_xla"),
    *("transformers", "tensorflow-tpu", "tf-keras", "numpy"),
)
MATMUL_SIZE: dict[Platform, int] = {"cpu": 512, "gpu": 8192, "tpu": 8192}
ALL_REDUCE_MIB: dict[Platform, int] = {"cpu": 1, "gpu": 64, "tpu": 64}
TIMES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of what is computed; None: those that suit the platform."""

    matmul_size: int | None = None
    """Rows of the square matrices; a power of two, so that the result is exact."""
    matmul_repeats: int = 20
    """Products that follow upon one another before the clock is read."""
    all_reduce_mib: int | None = None
    """What each device brings to the sum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Something that is computed again and again, by the device of that name.

    compute: begins and waits for the result, which it returns. is_right: of such a result.
    """

    device: str
    compute: Callable[[], Any]
    is_right: Callable[[Any], bool]

    def measured(self) -> tuple[bool, float]:
        """Whether it is right, and the seconds that it takes."""
        is_right = self.is_right(self.compute())  # compiles as well
        took_s = []
        for _ in range(TIMES):
            began_s = time.perf_counter()
            self.compute()
            took_s.append(time.perf_counter() - began_s)
        return is_right, statistics.median(took_s)


def verify(run: process.Run, config: Config) -> Mapping[str, int]:
    """Check everything and write what was found; a wrong result raises no error here."""
    platform_name = run.environment.platform
    framework = process.framework_module(run.environment, "verify")
    run.prepare("devices")
    report: dict[str, Any] = {
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "versions": versions(),
        **framework.facts(),
    }
    run.prepare("matmul")
    size, repeats = config.matmul_size or MATMUL_SIZE[platform_name], config.matmul_repeats
    report["matmuls"] = []
    for work in framework.matmuls(size, repeats, platform_name):
        is_right, took_s = work.measured()
        rate = 2 * size**3 * repeats / took_s
        report["matmuls"].append({"device": work.device, "is_right": is_right, "flops_per_s": rate})
    run.prepare("all-reduce")
    mib = config.all_reduce_mib or ALL_REDUCE_MIB[platform_name]
    is_right, took_s = framework.all_reduce(mib * 2**20 // 4).measured()
    report["all_reduce"] = {"is_right": is_right, "mib": mib, "took_s": took_s}
    # Every process comes out of the last sum at the same moment, so that this tells the clocks apart.
    report["clock_s"] = time.time()
    run.directory.write_json(f"verify/rank-{run.environment.process_id}.json", report)
    return {"steps": 0}


def versions() -> dict[str, str]:
    """Versions that have to be the same on all hosts."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


if __name__ == "__main__":
    # The module as the frameworks' parts import it, and not this one: they make its `Work`.
    verification = importlib.import_module("jobs.runtime.verify")
    process.main(verification.Config, verification.verify)
