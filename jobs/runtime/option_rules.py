"""Rules that the options of several jobs must satisfy, and what is said where they do not. Imports nothing heavy."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from contracts.errors import RequestError


class Range(NamedTuple):
    """least, most: both included. rule: what is said behind "must"."""

    least: float
    most: float
    rule: str


def at_least(least: int) -> Range:
    return Range(least, math.inf, f"be at least {least}")


def between(least: float, most: float) -> Range:
    return Range(least, most, f"be between {least} and {most}")


ABOVE_0 = Range(math.ulp(0.0), math.inf, "be above 0")
ABOVE_0_AND_FINITE = Range(math.ulp(0.0), sys.float_info.max, "be above 0 and finite")
NOT_NEGATIVE = Range(0.0, sys.float_info.max, "not be negative and must be finite")
FINITE = Range(-sys.float_info.max, sys.float_info.max, "be finite")


def outside(config: Any, ranges: Mapping[str, Range]) -> list[str]:
    """What is said of each option of `config` that is given and lies outside its range."""
    return [
        f"--{name.replace('_', '-')} {value}: must {rule}"
        for name, (least, most, rule) in ranges.items()
        if (value := getattr(config, name)) is not None and not least <= value <= most
    ]


def profile_problems(config: Any) -> list[str]:
    """What is wrong with --profile, where the run's number of steps is given."""
    if config.profile is None or config.steps is None:
        return []
    from jobs.runtime.profile import read_steps  # few runs are profiled

    try:
        read_steps(config.profile, steps=config.steps)
    except RequestError as error:
        return [str(error)]
    return []


def batch_problems(batch_size: int, devices: int, parts: int = 1) -> list[str]:
    """What is said of a batch that devices, each in so many parts, cannot share evenly."""
    share = devices * parts
    below = batch_size // share * share
    if batch_size == below:
        return []
    in_parts = f" in {parts} parts each" if parts > 1 else ""
    fitting = " or ".join(str(size) for size in (below, below + share) if size)
    said = (
        f"--batch-size {batch_size}: is shared out over {devices} devices{in_parts}, so it must be a multiple of "
        f"{share}; choose {fitting}"
    )
    return [said]
