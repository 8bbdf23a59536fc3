"""Durations as a user writes them: 90s, 30m, 6h, 2d, 1h30m. Pure."""

from __future__ import annotations

import re

MINUTE_S = 60
HOUR_S = 60 * MINUTE_S
DAY_S = 24 * HOUR_S

DURATION = re.compile(r"(?:([0-9]{1,7})d)?(?:([0-9]{1,7})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,7})s)?")
UNITS_S = (DAY_S, HOUR_S, MINUTE_S, 1)


def wrong(text: str) -> str | None:
    """What is wrong with a text that should be a duration, if anything is."""
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
    parts = []
    for unit_s, letter in zip(UNITS_S, "dhms", strict=True):
        count, length_s = divmod(length_s, unit_s)
        if count:
            parts.append(f"{count}{letter}")
    return "".join(parts) or "0s"
