"""What a run has cost so far, from its run.json alone: hours of attempts at the price that held when each began.

List prices come into run.json as an attempt's `price`, {"usd_per_hour": of its whole slice, "billed_usd_per_hour": less
what a grant covers, null where that is not known}; null where there is no list price. What is not known is None, never
zero.
"""

from __future__ import annotations

import calendar
import time

from contracts.run_records import MOMENT as MOMENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

HOUR_S = 3600.0
LARGEST = 1e15
"""How run.json writes when an attempt started, in UTC."""


class Cost:
    """usd: at list prices. billed_usd: less what a grant covers; None where that is not known."""

    def __init__(self, usd: float, billed_usd: float | None) -> None:
        self.usd, self.billed_usd = usd, billed_usd

    def text(self, unit: str = "") -> str:
        """The cost as a person reads it. unit: what follows an amount, such as " an hour"."""
        listed = f"{self.usd:,.2f} USD{unit}"
        if self.billed_usd is None:
            return f"{listed} at list prices, less what a grant covers"
        if self.billed_usd >= self.usd:
            return f"{listed} at list prices"
        if self.billed_usd <= 0:
            return f"free by the grant ({listed} at list prices)"
        return f"{self.billed_usd:,.2f} USD{unit} at list prices, {self.usd - self.billed_usd:,.2f} more by the grant"


def cost(attempts: Sequence[Any], last_wall_s: float | None) -> Cost | None:
    """The cost of all attempts, the last of which took `last_wall_s` so far; None if a price or a time is not known."""
    usd, billed_usd = 0.0, 0.0
    is_billed_known = bool(attempts)
    for index, attempt in enumerate(attempts):
        record = attempt if isinstance(attempt, dict) else {}
        price = record.get("price")
        price = price if isinstance(price, dict) else {}
        wall_s = last_wall_s if index == len(attempts) - 1 else number(record.get("wall_s"))
        an_hour = number(price.get("usd_per_hour"))
        if an_hour is None or wall_s is None:
            return None
        billed = number(price.get("billed_usd_per_hour"))
        is_billed_known = is_billed_known and billed is not None
        usd += an_hour * wall_s / HOUR_S
        billed_usd += (billed or 0.0) * wall_s / HOUR_S
    return Cost(usd, billed_usd if is_billed_known else None) if attempts else None


def number(value: object) -> float | None:
    """The value, if it is a number of at least 0 that a price or a time can be."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= LARGEST else None  # type: ignore[arg-type, operator]


def wall_s(attempt: Any, result: Any, heartbeats: Sequence[Any]) -> float | None:
    """The duration of one attempt: from its result, else until its last heartbeat or until it was ended; None if it is
    not known."""
    record = result or {}
    recorded_s = number(record.get("wall_s"))
    seen_s = [beat["time"] for beat in heartbeats if "time" in beat] or [record.get("time")]
    known_s = [at_s for moment in seen_s if (at_s := number(moment)) is not None]
    if recorded_s is not None or not known_s:
        return recorded_s
    return max(0.0, max(known_s) - calendar.timegm(time.strptime(attempt["started"], MOMENT)))
