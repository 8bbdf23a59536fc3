"""Measures a preview of the stack: the real engine, the stand-in for gcp, 1 slice and 50.

The very first preview of the process also loads pulumi_gcp; `time make preview` measures a whole command.

python -m bench.preview [--runs 3] [--slices 1 50]"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rehearsal.engine import ROOT, Engine, Program
from rehearsal.simulated_cloud import SimulatedCloud
from tools import pulumi_cli
from tools.pulumi_cli import PulumiCli

ZONE = "us-central1-a"


def configuration(slices: int) -> dict[str, object]:
    """A stack with so many small slices."""
    slice_keys = {"accelerator": "v5litepod-4", "capacity": "spot", "zone": ZONE}
    return {
        "gcp:project": "my-project",
        "tpu-stack:slices": [{"name": f"slice-{number}", **slice_keys} for number in range(slices)],
    }


def previews(cli: PulumiCli, program: Program, slices: int, runs: int) -> tuple[float, list[float], int]:
    """Seconds that preparing the engine took, seconds of each preview, and the resources in it."""
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as folder, SimulatedCloud() as api:
        start = time.perf_counter()
        with Engine(
            folder=Path(folder) / "engine",
            cli=cli,
            program=program,
            tpu_url=api.url,
            project_file=ROOT / "Pulumi.yaml",
        ) as engine:
            engine.configure(configuration(slices))
            prepared_s = time.perf_counter() - start
            taken = []
            for _ in range(runs):
                start = time.perf_counter()
                report = engine.preview()
                taken.append(time.perf_counter() - start)
                if not report.ok:
                    raise SystemExit(f"the preview failed:\n{report.text}")
            return prepared_s, taken, sum(report.changes.values())


def main(arguments: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.preview", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 50])
    options = parser.parse_args(arguments)
    cli = pulumi_cli.find_or_build(os.environ, lambda line: print(line, file=sys.stderr, flush=True))
    start = time.perf_counter()
    from infra.pulumi_program import declare

    print(f"Pulumi {cli.version}; importing the program {time.perf_counter() - start:.1f} s; seconds:\n")
    print("| slices | resources | preparing the engine | first preview | median of the others |")
    print("|---:|---:|---:|---:|---:|")
    for slices in options.slices:
        prepared_s, (first, *later), resources = previews(cli, declare, slices, options.runs)
        later_s = f"{statistics.median(later):.1f}" if later else ""
        print(f"| {slices} | {resources} | {prepared_s:.1f} | {first:.1f} | {later_s} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
