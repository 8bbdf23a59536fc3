"""flax_mlm's training step beside RoBERTa's of `transformers`, in Flax and in PyTorch: one machine, the same weights,
data, hidden tokens and optimizer. They step in turn, so that whatever else the machine does meets all of them.

Each is a process that has compiled its step and then takes as many as it is told. Wall: the median over the rounds.
CPU: processor time of all threads, the least of the rounds; on a machine with other work it says more.
MFU: the model's operations over what this machine's own matrix product (1,024, float32) does, measured in turn too.
The peers get their masked tokens ready made; ours hides them within its step.

python -m bench.mlm [--cases small long base] [--rounds 8] [--steps 2] [--dropout 0.1] [--dtype float32 bfloat16]"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import peers
from bench.mlm_peers.case import CASES, prepare

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().with_name("mlm_peers")
PEERS = {
    "FlaxRobertaForMaskedLM": ("flax", "flax_step.py"),
    "PyTorch, compiled": ("pytorch", "torch_step.py"),
}


@dataclasses.dataclass
class Program:
    """One of those that step in turn, and what was measured of it."""

    name: str
    process: subprocess.Popen[str]
    wall_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    last: dict[str, float] = dataclasses.field(default_factory=dict)

    def turn(self, steps: int) -> None:
        """Let it take so many steps; 0: only until it is ready."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        self.last = json.loads(line)
        if steps:
            self.wall_s.append(self.last["wall_s"])
            self.cpu_s.append(self.last["cpu_s"])


def start(folder: Path, dtypes: Sequence[str], environ: dict[str, str]) -> list[Program]:
    """All programs, each once it is ready: they do not compile at the same time."""
    commands = {
        f"flax_mlm, {dtype}": (
            [sys.executable, "-m", "bench.mlm_peers.ours_step", str(folder), dtype],
            environ,
        )
        for dtype in dtypes
    }
    for name, (peer, script) in PEERS.items():
        command = [str(peers.python_of(peer)), "-s", str(PROGRAMS / script), str(folder)]
        commands[name] = (command, peers.environment(environ))
    programs = []
    for name, (command, environment) in commands.items():
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        programs.append(Program(name, process))
        programs[-1].turn(0)
        print(f"{name} is ready", file=sys.stderr, flush=True)
    return programs


def table(programs: Sequence[Program], facts: dict[str, Any]) -> str:
    """Of one case; the ratios are to the first peer."""
    peer = next(program for program in programs if program.name in PEERS)
    machine = max(program.last.get("machine_flops_per_s", 0.0) for program in programs)
    lines = [
        "| program | tokens/s | times (a) | CPU s a step | times (a) | MFU | peak GiB | loss after as many steps |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for program in programs:
        wall_s, cpu_s = statistics.median(program.wall_s), min(program.cpu_s)
        lines.append(
            f"| {program.name} | {facts['tokens'] / wall_s:,.0f} | {statistics.median(peer.wall_s) / wall_s:.2f} "
            f"| {cpu_s:.3f} | {min(peer.cpu_s) / cpu_s:.2f} | {facts['flops'] / wall_s / machine:.0%} "
            f"| {program.last['peak_bytes'] / 2**30:.2f} | {program.last['loss']:.4f} |"
        )
    return "\n".join(lines)


def compare(case: str, options: argparse.Namespace) -> None:
    """One table."""
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as name:
        facts = prepare(Path(name), case, options.dropout)
        programs = start(Path(name), options.dtype, dict(os.environ))
        try:
            for _ in range(options.rounds):
                for program in programs:
                    program.turn(options.steps)
            print(
                f"\n{case}: {CASES[case]}, dropout {options.dropout}\n\n{table(programs, facts)}", flush=True
            )
        finally:
            for program in programs:
                program.process.kill()
                program.process.wait()


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
