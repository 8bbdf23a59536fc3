"""Measures the time from the command to the first step: once with an empty cache, then with what that has left there.

Seconds of the clock, and of the processor that process 0 has used by then; medians of the warm runs. Each row is what
the process's heartbeat says it is at. On a busy machine the processor's seconds are worth more than the clock's.

python -m bench.first_step [--runs 3] [--job flax_mlm] [--args "--steps 20"]"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LOOK_PAUSE_S = 0.02
LIMIT_S = 900.0
STARTED, STEPPING = "the command", "stepping"
FIRST_STEP = "first step done"

type Times = dict[str, tuple[float, float]]
"""What is begun: seconds since the command, and processor seconds of process 0 by then."""


def beats(runs: Path, command: subprocess.Popen[bytes]) -> Iterator[Mapping[str, Any]]:
    """The heartbeats of process 0 of the only run in `runs`, until the command has ended."""
    while command.poll() is None:
        for path in runs.glob("*/heartbeats/host-0.json"):
            yield json.loads(path.read_bytes())
        time.sleep(LOOK_PAUSE_S)


def processor_s(pid: int) -> float:
    """Seconds of a processor that a process has used, in all its threads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(job: str, arguments: str, folder: Path, cache: Path) -> Times:
    """Run the command once, as in a shell that lets Python keep bytecode; returns when each thing was begun."""
    environ = {**os.environ, "TPU_STACK_RUNS": str(folder), "XDG_CACHE_HOME": str(cache)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    fab = str(Path(sys.executable).with_name("fab"))
    began_s, times = time.time(), {STARTED: (0.0, 0.0)}
    with (folder.parent / "output.txt").open("wb") as output:
        command = subprocess.Popen(
            [fab, "train", "--job", job, "--args", arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        for beat in beats(folder, command):
            is_stepping = beat["step"] > 0 or beat["state"] == STEPPING
            phase = FIRST_STEP if is_stepping else (beat["message"] or beat["state"]).partition(" (")[0]
            if FIRST_STEP not in times and phase not in times:
                times[phase] = (time.time() - began_s, processor_s(beat["pid"]))
            if time.time() - began_s > LIMIT_S:
                command.terminate()
    times["the command has ended"] = (time.time() - began_s, float("nan"))
    if command.wait() or FIRST_STEP not in times:
        raise SystemExit(
            (folder.parent / "output.txt").read_text() + f"\nfab train ended with {command.returncode}"
        )
    return times


def table(runs: Sequence[Times]) -> str:
    """The median of each thing that all runs have done, in the order of the last run."""
    lines = ["| what begins | seconds after the command | processor s of process 0 |", "|---|---:|---:|"]
    for phase in runs[-1]:
        if all(phase in times for times in runs):
            wall_s, cpu_s = (statistics.median(times[phase][column] for times in runs) for column in (0, 1))
            lines.append(f"| {phase} | {wall_s:.1f} | {'' if cpu_s != cpu_s else f'{cpu_s:.1f}'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Prints the two tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.first_step", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="with a warm cache")
    parser.add_argument("--job", default="flax_mlm")
    parser.add_argument("--args", default="--steps 20", help="options of the job")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as scratch:
        taken = []
        for number in range(options.runs + 1):
            folder = Path(scratch) / str(number) / "runs"
            folder.mkdir(parents=True)
            taken.append(start(options.job, options.args, folder, Path(scratch) / "cache"))
            print(f"{number}: first step after {taken[-1][FIRST_STEP][0]:.1f} s", file=sys.stderr, flush=True)
    print(
        f'`fab train --job {options.job} --args "{options.args}"`\n\nWith an empty cache:\n\n{table(taken[:1])}'
    )
    if options.runs:
        print(f"\nAgain, {options.runs} times, medians:\n\n{table(taken[1:])}")


if __name__ == "__main__":
    main(sys.argv[1:])
