"""What each improvement of flax_mlm's training step brings: the step without it, in turn with the step as it is.

A few variants at a time, each a process that has compiled its step; all hidden tokens, data and weights are the same.
Wall: the median over the rounds; CPU: the least of them; ratios are to the step as it is in the same group. `adds`
is the peak of resident memory while stepping less what is resident once the frameworks are loaded. A variant that
computes the same must come to the same first loss: the bench stops where one does not.

python -m bench.mlm_parts [--cases small long base] [--variants "one-hot cross-entropy" ...] [--rounds 6]
    [--turn-s 1] [--group 3] [--dtype bfloat16] [--options '{"remat": true}' ...]"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.mlm_peers.case import CASES, config_of, prepare
from bench.program import Command, Program, added_bytes, ours, running
from bench.variants import VARIANTS, all_of_them, of_case

AS_IS, ALL = "as it is", "without all of them"
SAME_FIRST_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
"""How far apart, relatively, first losses may be that differ by rounding alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. Ratios are to the step as it is."""

    name: str
    wall_s: float
    cpu_s: float
    wall_ratio: float
    cpu_ratio: float
    added_bytes: int | None
    first_loss: float
    loss: float


def rows(programs: Sequence[Program]) -> list[Row]:
    """Of one group, whose first program is the step as it is."""
    first = programs[0]
    found = []
    for program in programs:
        wall_s, cpu_s = statistics.median(program.wall_s), min(program.cpu_s)
        found.append(
            Row(
                name=program.name,
                wall_s=wall_s,
                cpu_s=cpu_s,
                wall_ratio=wall_s / statistics.median(first.wall_s),
                cpu_ratio=cpu_s / min(first.cpu_s),
                added_bytes=added_bytes(program.last),
                first_loss=program.first_loss,
                loss=program.last["loss"],
            )
        )
    return found


def table(found: Sequence[Row]) -> str:
    """As Markdown; the step as it is stands there once for each group."""
    lines = [
        "| without | ms a step | times as it is | CPU ms a step | times as it is | adds GiB | first loss | last loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        added = "–" if row.added_bytes is None else f"{row.added_bytes / 2**30:.2f}"
        lines.append(
            f"| {row.name} | {1e3 * row.wall_s:.1f} | {row.wall_ratio:.2f} | {1e3 * row.cpu_s:.1f} "
            f"| {row.cpu_ratio:.2f} | {added} | {row.first_loss:.5f} | {row.loss:.4f} |"
        )
    return "\n".join(lines)


def unlike(found: Sequence[Row], same_loss: Mapping[str, bool], within: float) -> list[str]:
    """What differs from the first row though it computes the same, and what is no number at all."""
    wanted = found[0].first_loss
    return [
        f"{row.name}: the first loss is {row.first_loss} and as it is {wanted}"
        for row in found
        if not math.isfinite(row.loss)
        or (same_loss.get(row.name, False) and not math.isclose(row.first_loss, wanted, rel_tol=within))
    ]


def groups(names: Sequence[str], size: int) -> Iterator[list[str]]:
    """So many variants at a time, so that their memory is there."""
    for first in range(0, len(names), size):
        yield list(names[first : first + size])


def steps_of(turn_s: float, step_s: float) -> int:
    """So many steps as fill a turn, and one at least."""
    return max(1, round(turn_s / step_s))


def commands(
    names: Sequence[str], case: str, folder: Path, environ: Mapping[str, str], *, dtype: str
) -> dict[str, Command]:
    """The step as it is, then each variant; a name that is JSON is a variant given as options."""
    as_is = {"dtype": dtype}
    found = {AS_IS: ours(folder, environ, options=as_is)}
    for name in names:
        if name.startswith("{"):
            found[name] = ours(folder, environ, options=as_is | json.loads(name))
            continue
        without = all_of_them(case) if name == ALL else [name]
        options: dict[str, Any] = dict(as_is)
        told = dict(environ)
        for each in without:
            options |= VARIANTS[each].options
            told |= VARIANTS[each].environ
        found[name] = ours(folder, told, options=options, without=without)
    return found


def measure(case: str, names: Sequence[str], asked: argparse.Namespace) -> list[Row]:
    """The rows of all groups of one case."""
    found: list[Row] = []
    same_loss = {name: VARIANTS[name].same_loss for name in names if name in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="tpu-stack-bench-") as name:
        prepare(Path(name), config_of(case, dropout=asked.dropout))
        for group in groups(names, asked.group):
            with running(commands(group, case, Path(name), dict(os.environ), dtype=asked.dtype)) as programs:
                for program in programs:
                    program.compile()
                # The others take them too, so that all have taken as many when they are compared.
                step_s = [program.trial(2) for program in programs]
                steps = steps_of(asked.turn_s, step_s[0])
                for _ in range(asked.rounds):
                    for program in programs:
                        program.wake()
                        program.turn(steps)
                in_group = rows(programs)
            wrong = unlike(in_group, same_loss, SAME_FIRST_LOSS[asked.dtype])
            if wrong:
                raise SystemExit("; ".join(wrong))
            print(f"{case}: {', '.join(group)}: done", file=sys.stderr, flush=True)
            found += in_group
    return found


def main(arguments: Sequence[str]) -> None:
    """Prints a table for each case."""
    parser = argparse.ArgumentParser(prog="python -m bench.mlm_parts", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["small", "long", "base"])
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, ALL], help="default: all of them")
    parser.add_argument("--options", nargs="*", default=[], help="of flax_mlm as JSON, a variant each")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turn-s", type=float, default=1.0)
    parser.add_argument("--group", type=int, default=3, help="variants that are in memory at once")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=list(SAME_FIRST_LOSS), default="float32")
    asked = parser.parse_args(arguments)
    for case in asked.cases:
        names = [name for name in asked.variants or [*VARIANTS, ALL] if name == ALL or name in of_case(case)]
        found = measure(case, [*names, *asked.options], asked)
        print(
            f"\n{case}: {CASES[case]}, dropout {asked.dropout}, {asked.dtype}\n\n{table(found)}", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
