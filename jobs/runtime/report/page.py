"""The HTML page of a report, which loads nothing; readers of JSON fields that may be missing or of the wrong kind."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
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


LONGEST_TEXT = 500


def escape(value: object, longest: int = LONGEST_TEXT) -> str:
    """The value as text that is safe anywhere in the markup, cut to `longest` characters."""
    shown = text(value)
    return html.escape(shown if len(shown) <= longest else f"{shown[: longest - 1]}…")


def page(title: str, body: str) -> str:
    """The whole page around `body`, which is markup; `title` is text.

    Its policy lets the browser load nothing, show pictures that are in the page, and run this one script, so that even
    markup that slipped through escaping could do nothing. What UTF-8 cannot hold (half a surrogate pair) becomes a
    question mark.
    """
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body>{body}\n<script>{script}</script></body></html>\n"
    )
    return text.encode("utf-8", errors="replace").decode()
