"""Compares what flax_mlm and RoBERTa of `transformers`, in Flax and in PyTorch, learn from as many steps.

For each seed other weights, data, hidden tokens and dropout, the same in all programs but for the dropout. After the
last step the same held-out tokens are guessed. No time is measured: run it beside whatever you like.

python -m bench.mlm_loss [--case small] [--seeds 3] [--steps 200] [--dropout 0.1] [--dtype float32 bfloat16]"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.peers import CASES, FLAX, case_config, compile_all, ours_and_peers, prepare, running

HELD_OUT = 256
TURN_STEPS = 10
"""A program answers after so many, soon enough on a busy machine too."""


def table(losses: Mapping[str, Sequence[float]], reference: str) -> str:
    """losses: for each program one for each seed. The last columns compare with the reference, seed by seed."""
    lines = [
        "| program | evaluation loss, mean of the seeds | ± | less (a)'s, seed by seed | ± |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, results in losses.items():
        less = [
            loss - reference_loss for loss, reference_loss in zip(results, losses[reference], strict=True)
        ]
        lines.append(
            f"| {name} | {statistics.fmean(results):.4f} | {spread(results):.4f} "
            f"| {statistics.fmean(less):+.4f} | {spread(less):.4f} |"
        )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> float:
    """The standard deviation that a sample stands for; of one value there is none."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def trained(seed: int, options: argparse.Namespace) -> dict[str, float]:
    """The evaluation loss of each program after its steps, all from one seed."""
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as name:
        config = case_config(options.case, dropout=options.dropout, seed=seed, steps=options.steps)
        prepare(Path(name), config, batches=options.steps, held_out=HELD_OUT)
        results = {}
        with running(ours_and_peers(Path(name), options.dtype)) as programs:
            compile_all(programs)
            for program in programs:
                # The first one is taken.
                for step in range(1, options.steps, TURN_STEPS):
                    program.turn(min(TURN_STEPS, options.steps - step))
                results[program.name] = program.evaluate()
                print(f"seed {seed}: {program.name} {results[program.name]:.4f}", file=sys.stderr, flush=True)
        return results


def main(arguments: Sequence[str]) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.mlm_loss", description=__doc__)
    parser.add_argument("--case", choices=list(CASES), default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="ours, once for each")
    options = parser.parse_args(arguments)
    results = [trained(seed, options) for seed in range(options.seeds)]
    losses = {name: [result[name] for result in results] for name in results[0]}
    print(
        f"\n{options.case}: {CASES[options.case]}, dropout {options.dropout}, {options.steps} steps, ", end=""
    )
    print(f"{options.seeds} seeds\n\n{table(losses, FLAX)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
