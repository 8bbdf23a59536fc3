"""Fields of a JSON object that may be missing or of the wrong kind: read as they should be, or as nothing."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Json = Mapping[str, Any]

_LARGEST = 1e100
_SMALLEST = 1e-100


def number(value: object) -> float | None:
    """The value as a finite float; None for null, text, a boolean and whatever no run can have measured.

    Beyond 1e100 the arithmetic of an axis would overflow, and no loss, rate or time is that large.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    if not abs(as_float) <= _LARGEST:
        return None
    return as_float if abs(as_float) >= _SMALLEST else 0.0


def moment(value: object) -> datetime | None:
    """The instant that unix seconds or an ISO 8601 text name, in UTC; None where they name none."""
    seconds = number(value)
    try:
        if seconds is not None:
            return datetime.fromtimestamp(seconds, UTC)
        parsed = datetime.fromisoformat(value) if isinstance(value, str) else None
        return parsed and parsed.replace(tzinfo=parsed.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        return None


def rows(value: object) -> list[Json]:
    """The objects of a list; nothing where it is no list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list | tuple) else []


def mapping(value: object) -> Json:
    """The object; an empty one where it is none."""
    return value if isinstance(value, Mapping) else {}


def text(value: object) -> str:
    """The value for people: text as it is, anything else as JSON would write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
