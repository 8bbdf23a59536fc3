"""Durations as people write and read them: 1h30m in a configuration, 3 h 5 min in a sentence, 1:49 on a display."""

from __future__ import annotations

import re
from collections.abc import Sequence

MINUTE_S = 60
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S

DURATION = re.compile(r"(?:([0-9]{1,7})d)?(?:([0-9]{1,7})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,7})s)?")
UNITS_S = (DAY_S, HOUR_S, MINUTE_S, 1)


def wrong(text: str) -> str | None:
    """Return what is wrong with a text that should be a duration, if anything is."""
    if not text or DURATION.fullmatch(text) is None:
        return "is not a duration; write one such as 90s, 30m, 6h, 2d or 1h30m"
    return None


def seconds(text: str) -> int:
    """1h30m → 5400.

    Raises:
        ValueError: the text is no duration.
    """
    match = DURATION.fullmatch(text)
    if match is None or not text:
        raise ValueError(f'"{text}" is not a duration')
    counts = (int(count or 0) for count in match.groups())
    return sum(count * unit_s for count, unit_s in zip(counts, UNITS_S, strict=True))


def spelled(length_s: int) -> str:
    """5400 → 1h30m, the shortest that `seconds` reads back."""
    return "".join(f"{count}{letter}" for count, letter in _parts(length_s, "dhms")) or "0s"


def spoken(length_s: float, units: int = 2) -> str:
    """In a sentence: 42 s, 12 min 5 s, 3 h 5 min, 2 d. units: at most so many of them, the largest first."""
    told = _parts(round(max(0.0, length_s)), ("d", "h", "min", "s"))[:units]
    return " ".join(f"{count:,} {unit}" for count, unit in told) or "0 s"


def clock(length_s: float) -> str:
    """On a display: 0:07, 12:30, 3:05:00."""
    minutes, second = divmod(round(max(0.0, length_s)), MINUTE_S)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _parts(length_s: int, names: Sequence[str]) -> list[tuple[int, str]]:
    """The count of each unit, the largest first, without those that are 0."""
    found = []
    for unit_s, name in zip(UNITS_S, names, strict=True):
        count, length_s = divmod(length_s, unit_s)
        if count:
            found.append((count, name))
    return found
