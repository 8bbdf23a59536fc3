"""Programs that are run by turns: each turn is a process of its own, a round has a turn of each, and what counts is the
median of the rounds.

A module of such programs gives `main` its options, our programs and those that they are compared with. Ours are jobs
(`run_job`); the others are functions of the module, each called in a process of the framework's environment.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from contracts.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]

type Measured = dict[str, float]
type Turn = Callable[[argparse.Namespace, Path], Measured]
"""What is measured of a program, by the options of the command, with a folder for all of its rounds."""

RUN = "run-"
"""How the folders of jobs begin."""
PREPARE = "prepare"
"""The turn before all others, where there is something to make."""


def main(
    parser: argparse.ArgumentParser,
    *,
    module: str,
    framework: str,
    ours: Mapping[str, Turn],
    theirs: Mapping[str, Turn],
    columns: Mapping[str, tuple[str, str]],
    prepare: Turn | None = None,
) -> None:
    """Carry out a module's command: print the table, or take the one turn that this process was started for.

    Args:
        framework: of the environment in which `theirs` and `prepare` are called.
        columns: title and format of what is measured, "rate" first; what a program does not measure stays empty.
    """
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=[*ours, *theirs], help="these programs (default: all)")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn == PREPARE and prepare is not None:
        print(json.dumps(prepare(options, options.folder)))
    elif options.turn is not None:
        print(json.dumps(theirs[options.turn](options, options.folder)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            arguments = [*sys.argv[1:], "--folder", folder, "--turn"]
            if prepare is not None:
                ask(module, framework, [*arguments, PREPARE])
            turns: dict[str, Callable[[], Measured]] = {
                **{name: functools.partial(turn, options, Path(folder)) for name, turn in ours.items()},
                **{name: functools.partial(ask, module, framework, [*arguments, name]) for name in theirs},
            }
            chosen = {name: turn for name, turn in turns.items() if name in (options.only or turns)}
            print(" ".join([module, *sys.argv[1:]]))
            compare(chosen, ours=ours.keys(), rounds=options.rounds, columns=columns)


def run_job(
    job: str, framework: str, options: Mapping[str, object], parent: Path
) -> tuple[list[dict[str, Any]], Measured]:
    """Train a job in one process on this machine's CPU, as docs/jobs.md runs one by hand, in a new folder in `parent`.

    Returns: the lines of its metrics, and what `ask` measures of any process.
    """
    folder = Path(tempfile.mkdtemp(prefix=RUN, dir=parent))
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
    turns: Mapping[str, Callable[[], Measured]],
    *,
    ours: Collection[str],
    rounds: int,
    columns: Mapping[str, tuple[str, str]],
) -> None:
    """Give each program `rounds` turns; print the medians of what they measured, and how our best rate compares."""
    measurements: dict[str, list[Measured]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            measurements[name].append(turn())
            rate_now = f"{measurements[name][-1]['rate']:.1f} {columns['rate'][0]}"
            print(f"{name}: {rate_now}", file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(turn[key] for turn in measured) for key in measured[0]}
        for name, measured in measurements.items()
    }
    ours_best = max((median["rate"] for name, median in medians.items() if name in ours), default=0.0)
    print("| program | " + " | ".join(title for title, _ in columns.values()) + " | our best is |")
    print("|---" * (len(columns) + 2) + "|")
    for name, median in medians.items():
        cells = [format(median[key], spec) if key in median else "" for key, (_, spec) in columns.items()]
        is_compared = ours_best and name not in ours
        times = f"{ours_best / median['rate']:.2f} times that" if is_compared else ""
        print(f"| {name} | " + " | ".join(cells) + f" | {times} |")
