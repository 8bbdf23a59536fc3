"""Measures flax_mlm's training step beside RoBERTa's of `transformers`, in Flax and in PyTorch: one machine, the same
weights, data, hidden tokens and optimizer. They step in turn, so that whatever else the machine does meets all of them.

Each is a process that has compiled its step and then takes as many as it is told. Wall: the median over the rounds.
Before each turn a program takes a step that is not measured, for it has waited (`Program.wake`).
(a) is Flax's RobertaForMaskedLM, (b) PyTorch at its best: bfloat16 by autocast, compiled, fused AdamW, SDPA.
CPU: processor time of all threads, the least of the rounds; on a machine with other work it says more.
MFU: the model's operations over what this machine's own matrix product (1,024, of the same dtype) does,
measured in turn too.
Memory is what is resident: `imported` once the frameworks are loaded and nothing else, `compiling` the peak until the
first step is done, `stepping` the peak after that; the step itself adds `stepping` less `imported`, what compiling left
with it.
The peers get their masked tokens ready made; ours hides them within its step.

python -m bench.mlm [--cases small long base] [--rounds 8] [--steps 2] [--dropout 0.1] [--dtype float32 bfloat16]"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.peers import (
    CASES,
    FLAX,
    PYTORCH_BFLOAT16,
    Program,
    added_bytes,
    case_config,
    compile_all,
    ours_and_peers,
    prepare,
    running,
)

LETTERS = {FLAX: "(a) ", PYTORCH_BFLOAT16: "(b) "}


def table(programs: Sequence[Program], facts: dict[str, Any]) -> str:
    """Of one case; the ratios are to (a) the Flax peer and (b) PyTorch at its best."""
    first = next(program for program in programs if program.name == FLAX)
    best = [statistics.median(program.wall_s) for program in programs if program.name == PYTORCH_BFLOAT16]
    machine = machine_rates(programs)
    lines = [
        (
            "| program | tokens/s | times (a) | times (b) | CPU s a step | times (a) | MFU "
            "| imported GiB | compiling | stepping | the step adds | last loss |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for program in programs:
        wall_s, cpu_s = statistics.median(program.wall_s), min(program.cpu_s)
        mfu = share(facts["flops"] / wall_s, machine[program_dtype(program)])
        lines.append(
            f"| {LETTERS.get(program.name, '')}{program.name} | {facts['tokens'] / wall_s:,.0f} "
            f"| {statistics.median(first.wall_s) / wall_s:.2f} | {f'{best[0] / wall_s:.2f}' if best else '–'} "
            f"| {cpu_s:.3f} | {min(first.cpu_s) / cpu_s:.2f} | {mfu} "
            f"| {memory(program.last)} | {program.last['loss']:.4f} |"
        )
    return "\n".join(lines)


def machine_rates(programs: Sequence[Program]) -> dict[str, float]:
    """Operations per second of this machine's own product, for each dtype; 0 where none measured it."""
    by_name: dict[str, float] = {}
    for program in programs:
        by_name[program_dtype(program)] = max(
            program.machine_flops_per_s, by_name.get(program_dtype(program), 0.0)
        )
    return by_name


def program_dtype(program: Program) -> str:
    """What its products are of; those of a program that does not say are of float32."""
    return str(program.last.get("dtype", "float32"))


def share(flops_per_s: float, machine_flops_per_s: float) -> str:
    """MFU; a dash where no product of that kind was measured."""
    return f"{flops_per_s / machine_flops_per_s:.0%}" if machine_flops_per_s else "–"


def memory(measured: dict[str, Any]) -> str:
    """The four cells about memory, in GiB; a dash where the system does not say."""
    sizes = [measured[name] for name in ("imported_bytes", "compiling_peak_bytes", "stepping_peak_bytes")]
    return " | ".join(
        "–" if cell is None else f"{cell / 2**30:.2f}" for cell in (*sizes, added_bytes(measured))
    )


def compare(case: str, options: argparse.Namespace) -> None:
    """One table."""
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as name:
        facts = prepare(Path(name), case_config(case, dropout=options.dropout))
        with running(ours_and_peers(Path(name), options.dtype)) as programs:
            compile_all(programs)
            for _ in range(options.rounds):
                for program in programs:
                    program.multiply()
                    program.wake()
                    program.turn(options.steps)
            print(
                f"\n{case}: {CASES[case]}, dropout {options.dropout}\n\n{table(programs, facts)}", flush=True
            )
            for dtype, rate in machine_rates(programs).items():
                print(f"The machine's own product of {dtype}: {rate / 1e9:,.0f} GFLOP/s", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Prints a table for each case."""
    parser = argparse.ArgumentParser(prog="python -m bench.mlm", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["small", "long", "base"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of a program's turn")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="ours, once for each")
    options = parser.parse_args(arguments)
    for case in options.cases:
        compare(case, options)


if __name__ == "__main__":
    main(sys.argv[1:])
