"""Measures what sampling a host costs: processor seconds at its start and for each sample, and memory.

The sampler runs beside a process that sleeps, with a file that is full already, and samples more often than in a run.

python -m bench.sampler [--samples 100] [--every-s 0.3]"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from contracts.process import ProcessEnvironment
from contracts.run_directory import RunDirectory, host_samples
from jobs.runtime.host_samples import MOST_POINTS, HostSamples, read
from jobs.runtime.sampler import INTERVAL, INTERVAL_S

PARENT = """
import os, time
from contracts import process
from jobs.runtime import sampler
sampler.start(process.read(os.environ))
time.sleep(1e6)
"""


def full(directory: RunDirectory) -> None:
    """Write a file of an earlier attempt that has as many points as there can be."""
    names = ("cpu_pct", "memory_mib", "run_memory_mib", "disk_free_mib", "duty_pct", "hbm_mib", "sent_mib_s")
    found = HostSamples(host=0, interval_s=INTERVAL_S)
    for index in range(MOST_POINTS - 1):
        found = found.added(1e9 + index, dict.fromkeys(names, 1234.5 + index), capacity={})
    directory.write_json(host_samples(0), vars(found))


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.sampler", description=__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--every-s", type=float, default=0.3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as scratch:
        directory = RunDirectory(scratch)
        full(directory)
        environment = ProcessEnvironment(
            run_id="bench", run_dir=scratch, job="bench", framework="jax", attempt=1, num_processes=1, process_id=0,
            coordinator="127.0.0.1:1", platform="cpu", cache_dir=scratch, local_devices=None, peak_flops_per_s=None,
            control_dir=scratch,
        )  # fmt: skip
        told = {**os.environ, **environment.variables(), INTERVAL: str(options.every_s)}
        parent = subprocess.Popen([sys.executable, "-c", PARENT], env=told, cwd=Path(__file__).parents[1])
        try:
            while not (children := psutil.Process(parent.pid).children()):
                time.sleep(0.01)
            (sampler,) = children
            spent_s: list[float] = []
            times: set[float] = set()
            while len(times) <= options.samples:
                found = read(directory.read_json(host_samples(0)))
                if (
                    found is not None
                    and found.latest["time"] > 1e9 + MOST_POINTS
                    and found.latest["time"] not in times
                ):
                    times.add(found.latest["time"])
                    cpu = sampler.cpu_times()
                    spent_s.append(cpu.user + cpu.system)
                time.sleep(options.every_s / 10)
            memory_mib = sampler.memory_info().rss / 2**20
        finally:
            parent.kill()
            parent.wait()
    each_s = (spent_s[-1] - spent_s[0]) / (len(spent_s) - 1)
    print("| | |\n|---|---:|")
    print(f"| processor time up to the first sample | {spent_s[0]:.2f} s |")
    print(f"| processor time of each further one | {1000 * each_s:.1f} ms |")
    print(f"| of a core, with a sample every {INTERVAL_S:g} s | {100 * each_s / INTERVAL_S:.3f} % |")
    print(f"| memory | {memory_mib:.0f} MiB |")
    print(f"| processes on the machine | {len(psutil.pids())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
