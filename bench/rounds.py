"""Programs that are run by turns: each turn is a process of its own, a round has a turn of each, and what counts is the
median of the rounds."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]

type Measured = dict[str, float]
type Turn = Callable[[], Measured]


def run_job(
    job: str, framework: str, options: Mapping[str, object], folder: Path
) -> tuple[list[dict[str, Any]], Measured]:
    """Train a job in one process on this machine's CPU, as docs/jobs.md runs one by hand, with an empty folder for it.

    Returns: the lines of its metrics, and what `ask` measures of any process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables_text = (
        f"ID=bench DIR={folder} CACHE_DIR={folder / 'cache'} JOB={job} FRAMEWORK={framework} PLATFORM=cpu ATTEMPT=0 "
        f"NUM_PROCESSES=1 PROCESS_ID=0 COORDINATOR=127.0.0.1:{port}"
    )
    variables = dict(f"RUN_{entry}".split("=", 1) for entry in variables_text.split())
    arguments = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    _, measured = _run(framework, [f"jobs.{job}", *arguments], variables)
    return RunDirectory(str(folder)).read_metrics(), measured


def ask(module: str, framework: str, arguments: Sequence[object]) -> Measured:
    """What a module of ours prints as its last line, JSON, in a framework's environment; and its peak memory."""
    printed, measured = _run(framework, [module, *map(str, arguments)], {})
    answer: Measured = json.loads(printed.splitlines()[-1])
    return answer | measured


def _run(framework: str, arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[str, Measured]:
    from backends.local import environments  # what a turn runs in has not all that launching needs
    from launch.plan import tunables_on_cpu

    environments.ensure(framework, lambda text: print(text, file=sys.stderr, flush=True))
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **tunables_on_cpu(framework),  # as `fab train` sets it, here for all
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **variables,
    }
    command = [str(environments.environment_python(framework)), "-P", "-m", *arguments]
    process = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        printed = output.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)}: ended with {process.returncode}\n{printed[-2000:]}")
    return printed, {"peak_mib": usage.ru_maxrss / 1024}


def rate(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a rate over lines of metrics, which are of equally many steps each."""
    return float(statistics.harmonic_mean([line[name] for line in lines]))


def compare(
    ours: Mapping[str, Turn],
    theirs: Mapping[str, Turn],
    *,
    rounds: int,
    columns: Mapping[str, tuple[str, str]],
) -> None:
    """Give each program `rounds` turns; print the medians of what they measured, and how our best rate compares.

    Args:
        columns: title and format of what is measured, "rate" first; what a program does not measure stays empty.
    """
    measurements: dict[str, list[Measured]] = {name: [] for name in (*ours, *theirs)}
    for _ in range(rounds):
        for name, turn in {**ours, **theirs}.items():
            measurements[name].append(turn())
            print(
                f"{name}: {measurements[name][-1]['rate']:.1f} {columns['rate'][0]}",
                file=sys.stderr,
                flush=True,
            )
    medians = {
        name: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        for name, turns in measurements.items()
    }
    ours_best = max(medians[name]["rate"] for name in ours)
    print("| program | " + " | ".join(title for title, _ in columns.values()) + " | our best is |")
    print("|---" * (len(columns) + 2) + "|")
    for name, median in medians.items():
        cells = [format(median[key], spec) if key in median else "" for key, (_, spec) in columns.items()]
        times = "" if name in ours else f"{ours_best / median['rate']:.2f} times that"
        print(f"| {name} | " + " | ".join(cells) + f" | {times} |")
