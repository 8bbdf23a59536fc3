"""A program that steps in turn with others, as a process that is asked (`mlm_peers/turns.py` is its side of it)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import peers
from launch.plan import ON_CPU

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().with_name("mlm_peers")
ANSWER_LIMIT_S = 600.0
FLAX, PYTORCH, PYTORCH_BFLOAT16 = "FlaxRobertaForMaskedLM", "PyTorch, float32", "PyTorch, bfloat16"
PEERS = {
    FLAX: ("flax", "flax_step.py"),
    PYTORCH: ("pytorch", "torch_step.py", "--dtype", "float32"),
    PYTORCH_BFLOAT16: ("pytorch", "torch_step.py", "--dtype", "bfloat16"),
}
"""By name: whose environment (bench/locks), which program, and what it is told. The last is PyTorch at its best."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""Arguments and environment of a process."""


@dataclasses.dataclass(kw_only=True)
class Program:
    """One of those that step in turn, and what was measured of it; seconds are of one step, one entry a turn."""

    name: str
    process: subprocess.Popen[str]
    limit_s: float = ANSWER_LIMIT_S
    first_loss: float = float("nan")
    wall_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    machine_flops_per_s: float = 0.0

    def compile(self) -> None:
        """Let it take its first step; returns when it is ready for timed ones."""
        self.first_loss = self._ask({"do": "compile"})["loss"]

    def turn(self, steps: int) -> None:
        """Let it take so many steps."""
        measured = self._ask({"do": "step", "steps": steps})
        self.wall_s.append(measured["wall_s"])
        self.cpu_s.append(measured["cpu_s"])
        self.last = measured

    def wake(self) -> None:
        """Let it take a step that is not measured: from a program that waits for its turn the system may take memory,
        and hand it over again in the next step. One that trains does not meet that."""
        self._ask({"do": "step", "steps": 1})

    def multiply(self) -> None:
        """Let it measure what the machine's own product comes to, in its dtype; the best of all is kept."""
        measured = self._ask({"do": "multiply"})["machine_flops_per_s"]
        self.machine_flops_per_s = max(self.machine_flops_per_s, measured or 0.0)

    def evaluate(self) -> float:
        """The mean cross-entropy in nats over the held-out tokens."""
        return float(self._ask({"do": "evaluate"})["eval_loss"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        too_late = threading.Event()

        def end() -> None:
            too_late.set()
            self.process.kill()

        timer = threading.Timer(self.limit_s, end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the empty answer below says more
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            how = f"ended with {self.process.wait()}"
            if too_late.is_set():
                how = f"did not answer within {self.limit_s:g} s"
            raise SystemExit(f"{self.name} {how}, asked {json.dumps(request)}; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running(commands: Mapping[str, Command]) -> Iterator[list[Program]]:
    """A program for each name, ended at the end."""
    programs: list[Program] = []
    try:
        for name, (command, environ) in commands.items():
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            programs.append(Program(name=name, process=process))
        yield programs
    finally:
        for program in programs:
            program.process.kill()
            program.process.communicate()


def ours(
    folder: Path,
    environ: Mapping[str, str],
    options: Mapping[str, Any],
) -> Command:
    """flax_mlm's own step in a job's environment, with some options changed."""
    module = [sys.executable, "-m", "bench.mlm_peers.ours_step", str(folder)]
    return [*module, "--options", json.dumps(options)], {**ON_CPU, **environ}


def peer(name: str, folder: Path, environ: Mapping[str, str]) -> Command:
    """One of PEERS, in its own environment."""
    lock, script, *options = PEERS[name]
    command = [str(peers.python_of(lock)), "-s", str(PROGRAMS / script), str(folder), *options]
    return command, peers.environment(dict(environ))


def ours_and_peers(folder: Path, dtypes: Sequence[str]) -> dict[str, Command]:
    """flax_mlm's step once for each of `dtypes`, then all of PEERS."""
    environ = dict(os.environ)
    commands = {f"flax_mlm, {dtype}": ours(folder, environ, {"dtype": dtype}) for dtype in dtypes}
    return commands | {name: peer(name, folder, environ) for name in PEERS}


def added_bytes(measured: Mapping[str, Any]) -> int | None:
    """What stepping adds to what was resident once the frameworks were loaded; None where the system does not say."""
    imported, stepping = measured["imported_bytes"], measured["stepping_peak_bytes"]
    return None if imported is None or stepping is None else stepping - imported


def compile_all(programs: Sequence[Program]) -> None:
    """One after another, so that they do not compile at the same time."""
    for program in programs:
        program.compile()
        print(f"{program.name} is ready", file=sys.stderr, flush=True)
