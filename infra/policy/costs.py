"""A cost an hour and a day at list prices, line by line, and as text. Pure.

The project is billed for everything but the chips that a grant covers: the grant is for TPUs alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

HOURS_PER_DAY = 24
NOT_KNOWN = "not known"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostLine:
    """usd_per_hour: of the whole quantity; None where no list price is known."""

    what: str
    quantity: str
    usd_per_hour: float | None
    covered_by_grant: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """What is billed by an amount that only the use of the stack decides."""

    what: str
    usd: float
    per: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """`assumptions`: what has to be known to read the figures rightly."""

    lines: tuple[CostLine, ...]
    rates: tuple[Rate, ...]
    assumptions: tuple[str, ...]

    @property
    def usd_per_hour(self) -> float:
        """Billed, as far as prices are known; without `rates`."""
        return _total(line for line in self.lines if not line.covered_by_grant)

    @property
    def usd_per_day(self) -> float:
        return self.usd_per_hour * HOURS_PER_DAY

    @property
    def covered_usd_per_hour(self) -> float:
        """What the grant saves, at list prices."""
        return _total(line for line in self.lines if line.covered_by_grant)

    @property
    def covered_usd_per_day(self) -> float:
        return self.covered_usd_per_hour * HOURS_PER_DAY

    @property
    def not_known(self) -> tuple[str, ...]:
        """What is billed at a price that is not known."""
        return tuple(
            line.what for line in self.lines if line.usd_per_hour is None and not line.covered_by_grant
        )


def table(cost: Cost) -> str:
    """Aligned columns for a terminal below a title: each line, both totals, the rates and what was assumed."""
    billed = ("billed", "", cost.usd_per_hour, cost.usd_per_day, "")
    covered = ("covered by the grant", "", cost.covered_usd_per_hour, cost.covered_usd_per_day, "")
    rows = [("what", "quantity", "USD/hour", "USD/day", "")]
    rows += [
        (line.what, line.quantity, *_money(line.usd_per_hour), "grant" if line.covered_by_grant else "")
        for line in cost.lines
    ]
    for what, quantity, hour, day, mark in (billed, *([covered] if _has_covered(cost) else [])):
        rows.append((what, quantity, f"{hour:,.3f}", f"{day:,.2f}", mark))
    below = [f"and {rate.what} by use: {_rate(rate.usd)} USD per {rate.per}" for rate in cost.rates]
    if cost.not_known:
        below.insert(0, f"and at prices that are not known: {'; '.join(cost.not_known)}")
    return "\n".join(["Cost at list prices:", *_aligned(rows), *below, *cost.assumptions])


def _has_covered(cost: Cost) -> bool:
    return any(line.covered_by_grant for line in cost.lines)


def _money(usd_per_hour: float | None) -> tuple[str, str]:
    if usd_per_hour is None:
        return NOT_KNOWN, NOT_KNOWN
    return f"{usd_per_hour:,.3f}", f"{usd_per_hour * HOURS_PER_DAY:,.2f}"


def _rate(usd: float) -> str:
    return f"{usd:.3f}"


def _aligned(rows: list[tuple[str, str, str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join(
            (
                row[0].ljust(widths[0]),
                row[1].ljust(widths[1]),
                row[2].rjust(widths[2]),
                row[3].rjust(widths[3]),
                row[4],
            )
        ).rstrip()
        for row in rows
    ]


def _total(lines: Iterable[CostLine]) -> float:
    # The exact sum, so that the order of the slices does not change the last digit.
    return math.fsum(line.usd_per_hour for line in lines if line.usd_per_hour is not None)
