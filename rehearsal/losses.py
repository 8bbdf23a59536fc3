"""The losses of two runs, step by step: whether one is the other's, accidents or not. Reads metrics.jsonl, no more."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

# Of a loss, where it is not equal to the last digit: another order of sums on another number of hosts.
TOLERANCE = 1e-5
SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """lines: for a person, the last one in words."""

    equal: bool
    lines: tuple[str, ...]


def read(metrics: Path) -> dict[int, float]:
    """Step → loss. A step that was computed twice, before and after an accident, counts as it was last."""
    found = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "loss" in entry:
            found[int(entry["step"])] = float(entry["loss"])
    return found


def compare(wanted: Mapping[int, float], found: Mapping[int, float], *, steps: int) -> Comparison:
    """Whether both are the same curve, all the way to the last step."""
    common = sorted(wanted.keys() & found.keys())
    apart = {step: abs(wanted[step] - found[step]) / max(abs(wanted[step]), 1e-12) for step in common}
    whole = wanted.keys() == found.keys() and bool(common) and common[-1] == steps
    # max() would pass over what is no number.
    worst = max(apart.values(), default=math.inf) if all(map(math.isfinite, apart.values())) else math.inf
    shown = common[:: max(1, len(common) // SHOWN)]
    table = ["   step  undisturbed    disturbed"]
    table += [f"{step:7d} {wanted[step]:12.6f} {found[step]:12.6f}" for step in shown]
    if not whole:
        one = ", ".join(map(str, sorted(wanted.keys() ^ found.keys())[:SHOWN])) or "none"
        words = f"not the same steps: {len(wanted)} and {len(found)} were logged, {steps} wanted; only in one: {one}"
    elif worst == 0:
        words = f"all {len(common)} losses are equal to the last digit"
    else:
        words = (
            f"{len(common)} losses, apart by at most {worst:.1e} of their value ({TOLERANCE:.0e} is allowed)"
        )
    return Comparison(equal=whole and worst <= TOLERANCE, lines=(*table, words))
