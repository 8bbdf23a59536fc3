"""The axes of a chart: where a value lies between two ends, and round numbers for ticks. Pure arithmetic."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FLATTENING_RATIO = 30.0
_NARROWEST_SPAN = 1e-90


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Two ends, the ticks between them, and whether equal distances are equal ratios."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def part(self, value: float) -> float:
        """How far along the axis a value lies, from 0 to 1; what lies beyond an end is drawn at that end."""
        low, high = self.low, self.high
        if self.log:
            if value <= 0.0:
                return 0.0
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def labels(self) -> list[str]:
        """The ticks' values as short as they can be read and still differ: 0.5, 1,200, 120k, 3M, 1e-5."""
        if self.log or len(self.ticks) < 2:
            return [_label(tick, largest=abs(tick), apart=abs(tick)) for tick in self.ticks]
        largest, apart = max(map(abs, self.ticks)), self.ticks[1] - self.ticks[0]
        return [_label(tick, largest=largest, apart=apart) for tick in self.ticks]


def value_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    """The y axis over at least one finite value, its ends on round numbers."""
    low, high = min(values), max(values)
    if low > 0.0 and high > _FLATTENING_RATIO * statistics.median(values):
        # On a linear axis one such value would press the rest of the curve flat against the bottom.
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = tuple(10.0**power for power in range(first, last + 1, math.ceil((last - first) / 6)))
        return Axis(low=10.0**first, high=10.0**last, ticks=ticks, log=True)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    low, high = _apart(low, high)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(low=first * step, high=last * step, ticks=tuple(k * step for k in range(first, last + 1)))


def step_axis(low: float, high: float) -> Axis:
    """The x axis from the first step to the last, from 0 where the first is near it."""
    if 0.0 <= low <= 0.1 * high:
        low = 0.0
    low, high = _apart(low, high)
    step = max(1.0, _round_step((high - low) / 7))
    ticks = tuple(k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low=low, high=high, ticks=ticks)


def _apart(low: float, high: float) -> tuple[float, float]:
    """The same ends, or wider ones where they are so near each other that no tick fits between them."""
    if high - low > max(1e-9 * max(abs(low), abs(high)), _NARROWEST_SPAN):
        return low, high
    margin = 0.1 * max(abs(low), abs(high)) or 1.0
    return low - margin, high + margin


def _round_step(rough: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def _label(value: float, *, largest: float, apart: float) -> str:
    if value == 0.0:
        return "0"
    if largest >= 1e15 or largest < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
    limit, suffix = next((unit for unit in units if largest >= unit[0]), (1.0, ""))
    unit = 1e3 if suffix == "k" else limit
    decimals = max(0, -math.floor(math.log10(apart / unit) + 1e-9))
    return f"{value / unit:,.{decimals}f}{suffix}"
