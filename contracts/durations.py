"""Durations as people read them: 3 h 5 min in a sentence, 1:49 on a display."""

from __future__ import annotations

MINUTE_S = 60
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S
UNITS = ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min"), (1, "s"))


def spoken(length_s: float, units: int = 2) -> str:
    """A duration in a sentence: 42 s, 12 min 5 s, 3 h 5 min, 2 d. units: the most units, the largest first."""
    left_s = round(max(0.0, length_s))
    parts = []
    for unit_s, name in UNITS:
        count, left_s = divmod(left_s, unit_s)
        if count:
            parts.append(f"{count:,} {name}")
    return " ".join(parts[:units]) or "0 s"


def clock(length_s: float) -> str:
    """On a display: 0:07, 12:30, 3:05:00."""
    minutes, second = divmod(round(max(0.0, length_s)), MINUTE_S)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
