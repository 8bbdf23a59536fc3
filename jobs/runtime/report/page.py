"""The HTML page of a report, and values as it shows them."""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.runtime.monitoring.metric_definitions import finite

Json = Mapping[str, Any]

Section = dict[str, Any]
"""A part of the page, as static/run_page.js draws it."""

STATIC = Path(__file__).parent / "static"
LICENCE = "uPlot.LICENSE"
STYLES = ("uPlot.min.css", "runs.css")
SCRIPTS = ("uPlot.iife.min.js", "charts.js", "run_page.js", "report.js")

LONGEST_TEXT = 500
MOST_ROWS = 64
_LARGEST = 1e100
_SMALLEST = 1e-100


def number(value: object) -> float | None:
    """The value as a finite float; None for null, text, a boolean and whatever no run can have measured.

    Beyond 1e100 the arithmetic of an axis would overflow, and no loss, rate or time is that large.
    """
    figure = finite(value, _LARGEST)
    return figure if figure is None else float(figure) if abs(figure) >= _SMALLEST else 0.0


def text(value: object) -> str:
    """The value for people: text as it is, anything else as JSON would write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def clip(value: object, longest: int = LONGEST_TEXT) -> str:
    """The value as text, cut to `longest` characters."""
    shown = text(value)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def quoted(token: str) -> str:
    """A prediction as people read it: a comma, a dash, a blank or nothing stands between quotation marks."""
    return token if any(character.isalnum() for character in token) else f"“{token}”"


def table(
    title: str, head: Sequence[str], lines: Sequence[Sequence[object]], *, note: str = ""
) -> list[Section]:
    """A section of one table, without the columns that no row has; nothing where there are no rows."""
    if not lines:
        return []
    used = [column for column in range(len(head)) if any(line[column] is not None for line in lines)]
    if len(lines) > MOST_ROWS:
        note = f"{note} The first {MOST_ROWS} of {len(lines):,}.".strip()
    return [
        {
            "title": title,
            "kind": "table",
            "note": note,
            "head": [head[column] for column in used],
            "rows": [[line[column] for column in used] for line in lines[:MOST_ROWS]],
        }
    ]


def page(title: str, content: Json) -> str:
    """The whole page, which loads nothing: style, scripts and `content` are in it. Nothing of `content` is markup: the
    scripts put it into text nodes. The page's policy lets the browser run these scripts only."""
    style = "\n".join(_file(name) for name in STYLES)
    scripts = [_file(name) for name in SCRIPTS]
    # No "<", so that it cannot end its element; ASCII, so that half of a surrogate pair can be in it.
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    hashes = " ".join(map(_hash, scripts))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {hashes}; img-src data:; base-uri 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<!-- uPlot, which draws the charts:\n{_file(LICENCE)}-->\n"
        f"<title>{html.escape(title.encode(errors='replace').decode())}</title>"
        f"<style>{style}</style></head>\n"
        "<body><main></main><noscript>This page needs JavaScript for its tables and curves.</noscript>\n"
        f'<script type="application/json" id="content">{data}</script>\n'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _file(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
