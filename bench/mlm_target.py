"""Training on a real corpus at equal time: flax_mlm beside FlaxRobertaForMaskedLM with its script's own step.

Both begin from the same weights and are evaluated on the same held-out text with the same tokens hidden. Each plans
as many steps as fit in its minutes by the time of its first ones, so that both learning rates come to 0 at the end.
They step in turns of some seconds, so that whatever else the machine does meets both; only stepping counts as time.

Ours has flax_mlm's defaults for the size; the peer hides 15 %, drops 10 %, does not clip and computes in float32, as
its script does, with the batch, peak and schedule of ours (the script's own are for 8 devices and a larger model).
The corpus: Debian's package python3-doc, say; --data takes what flax_mlm's takes.

python -m bench.mlm_target [--data /usr/share/doc/python3.11/html/_sources] [--minutes 7] [--model small] [--length 128]
    [--turn-s 5] [--evaluate-every-s 30] [--peer-learning-rate RATE] [--peer-batch-size 32] [--out FOLDER]"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.curve_image import image
from bench.mlm_peers.case import NO_CLIP, prepare
from bench.program import FLAX, Command, Program, compile_all, ours, peer, running
from jobs.flax_mlm.config import Config

OURS = "flax_mlm"
HELD_OUT = 256
TRIED_STEPS, TRIED_TURNS = 4, 3
SAME_BEGINNING_NATS = 1e-3
"""How far apart the evaluations of the same weights may be before the first step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Of a program's curve: the time that it has spent stepping, and what it has come to."""

    stepping_s: float
    steps: int
    eval_loss: float


def planned_steps(budget_s: float, step_s: Sequence[float]) -> int:
    """The steps that fit in a budget by the median of what steps have taken."""
    return max(2, round(budget_s / statistics.median(step_s)))


def next_turn(taken: int, planned: int, turn_s: float, step_s: float) -> int:
    """The steps of the next turn, which ends with the plan; 0 when it is done."""
    return min(planned - taken, max(1, round(turn_s / step_s)))


def first_to(curve: Sequence[Point], loss: float) -> float | None:
    """The stepping time at which a curve first is at `loss` or below, on the line between its points."""
    for before, after in itertools.pairwise(curve):
        if after.eval_loss <= loss:
            share = (before.eval_loss - loss) / (before.eval_loss - after.eval_loss)
            return before.stepping_s + max(0.0, share) * (after.stepping_s - before.stepping_s)
    return None


def table(curves: dict[str, list[Point]]) -> str:
    """Evaluations beside each other in the order in which they came, then what they say."""
    names = list(curves)
    lines = [
        "".join(f"| {name}: stepping s | steps | eval loss " for name in names) + "|",
        "|" + "---:|" * 3 * len(names),
    ]
    for index in range(max(map(len, curves.values()))):
        cells = ""
        for curve in curves.values():
            point = curve[index] if index < len(curve) else None
            cells += (
                "| | | "
                if point is None
                else f"| {point.stepping_s:.1f} | {point.steps:,} | {point.eval_loss:.4f} "
            )
        lines.append(cells + "|")
    first, second = names
    ends = {name: curve[-1] for name, curve in curves.items()}
    words = ", ".join(
        f"{name} {end.eval_loss:.4f} after {end.stepping_s:.0f} s" for name, end in ends.items()
    )
    reached_s = first_to(curves[first], ends[second].eval_loss)
    if reached_s is not None:
        words += f"; {first} is at {second}'s last loss after {reached_s:.0f} s"
    return "\n".join(lines) + f"\n\n{words}"


def configurations(asked: argparse.Namespace) -> dict[str, Config]:
    """Of ours and of the peer, the steps still to be planned."""
    common = {"data": asked.data, "model": asked.model, "sequence_length": asked.length}
    our = Config(**common)
    theirs = dataclasses.replace(
        our,
        mask_share=0.15,
        dropout=0.1,
        clip_norm=NO_CLIP,
        dtype="float32",
        batch_size=asked.peer_batch_size or our.batch_size,
        learning_rate=asked.peer_learning_rate or our.peak_learning_rate,
    )
    return {OURS: our, FLAX: theirs}


def commands(configs: dict[str, Config], folder: Path, batches: dict[str, int]) -> dict[str, Command]:
    """Both programs, what they read written into a folder each; their first weights are the same."""
    found = {}
    for name, config in configs.items():
        its = folder / name
        its.mkdir(parents=True)
        prepare(its, config, batches=batches[name], held_out=HELD_OUT, init_seed=config.seed)
        environ = dict(os.environ)
        found[name] = ours(its, environ) if name == OURS else peer(name, its, environ)
    return found


def tried(programs: Sequence[Program]) -> dict[str, float]:
    """The time of a step of each, the median of some turns."""
    for _ in range(TRIED_TURNS):
        for program in programs:
            program.turn(TRIED_STEPS)
    return {program.name: statistics.median(program.wall_s) for program in programs}


def train(
    programs: Sequence[Program], planned: dict[str, int], asked: argparse.Namespace
) -> dict[str, list[Point]]:
    """The curves. The first step, which compiles, is a step that takes no time."""
    curves: dict[str, list[Point]] = {}
    for program in programs:
        curves[program.name] = [Point(stepping_s=0.0, steps=0, eval_loss=program.evaluate())]
    began = [curve[0].eval_loss for curve in curves.values()]
    if max(began) - min(began) > SAME_BEGINNING_NATS:
        raise SystemExit(
            f"the same weights are evaluated to {began}: the programs do not hide the same tokens"
        )
    compile_all(programs)
    taken = {program.name: 1 for program in programs}
    stepping_s = {program.name: 0.0 for program in programs}
    while any(taken[name] < planned[name] for name in taken):
        for program in programs:
            name = program.name
            step_s = program.wall_s[-1] if program.wall_s else asked.minutes * 60 / planned[name]
            steps = next_turn(taken[name], planned[name], asked.turn_s, step_s)
            if not steps:
                continue
            program.turn(steps)
            taken[name] += steps
            stepping_s[name] += steps * program.wall_s[-1]
            due = stepping_s[name] - curves[name][-1].stepping_s >= asked.evaluate_every_s
            if due or taken[name] == planned[name]:
                loss = program.evaluate()
                curves[name].append(Point(stepping_s=stepping_s[name], steps=taken[name], eval_loss=loss))
                print(f"{name}: {stepping_s[name]:.0f} s, {loss:.4f} nats", file=sys.stderr, flush=True)
    return curves


def compare(asked: argparse.Namespace) -> dict[str, Any]:
    """Try, plan, train; returns what target.json holds."""
    configs = configurations(asked)
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as folder:
        few = dict.fromkeys(configs, TRIED_STEPS)
        with running(commands(configs, Path(folder, "tried"), few)) as programs:
            compile_all(programs)
            step_s = tried(programs)
        planned = {name: planned_steps(60 * asked.minutes, [step_s[name]]) for name in configs}
        configs = {name: dataclasses.replace(each, steps=planned[name]) for name, each in configs.items()}
        print(f"planned: {planned}", file=sys.stderr, flush=True)
        with running(commands(configs, Path(folder, "trained"), planned)) as programs:
            curves = train(programs, planned, asked)
    return {
        "configurations": {name: dataclasses.asdict(config) for name, config in configs.items()},
        "curves": {name: [dataclasses.asdict(point) for point in curve] for name, curve in curves.items()},
    }


def main(arguments: Sequence[str]) -> None:
    """Prints a table; writes target.json and target.svg where --out says."""
    parser = argparse.ArgumentParser(prog="python -m bench.mlm_target", description=__doc__)
    parser.add_argument("--data", default="/usr/share/doc/python3.11/html/_sources")
    parser.add_argument("--minutes", type=float, default=7.0, help="of stepping, for each of the two")
    parser.add_argument("--model", choices=["tiny", "small", "base"], default="small")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--turn-s", type=float, default=5.0)
    parser.add_argument("--evaluate-every-s", type=float, default=30.0)
    parser.add_argument("--peer-learning-rate", type=float, help="default: that of ours")
    parser.add_argument("--peer-batch-size", type=int, help="default: that of ours")
    parser.add_argument("--out", type=Path, help="a folder for target.json and target.svg")
    asked = parser.parse_args(arguments)
    found = compare(asked)
    curves = {name: [Point(**point) for point in curve] for name, curve in found["curves"].items()}
    print(
        f"\n{asked.model}, {asked.length} tokens, {asked.minutes:g} min each\n\n{table(curves)}", flush=True
    )
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "target.json").write_text(json.dumps(found, indent=1) + "\n")
        # The first evaluations would press the rest of the curves together.
        drawn = {
            name: [(point.stepping_s, point.eval_loss) for point in curve[1:]]
            for name, curve in curves.items()
        }
        svg = image("Evaluation loss, nats", "seconds of stepping", drawn)
        (asked.out / "target.svg").write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
