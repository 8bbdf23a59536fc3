"""The frame of a report: one HTML page that loads nothing, for screens light and dark and for paper; and fields of JSON
objects that may be missing or of the wrong kind, read as they should be, or as nothing."""

import base64
import hashlib
import html
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


LONGEST_TEXT = 500

_STYLE = """
:root { color-scheme: light dark;
  --paper: #fff; --panel: #f6f7f9; --ink: #1b1f24; --faint: #5c6570; --rule: #dfe3e8;
  --raw: #a9c0ea; --smooth: #1f55c4; --eval: #c2410c; --level: #5c6570; --gap: #c81e1e;
  --good: #12703f; --bad: #b91c1c; --warn: #92560a }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --panel: #1d2126; --ink: #e7eaee; --faint: #9aa4b0; --rule: #323840;
  --raw: #3f5b8f; --smooth: #84aeff; --eval: #ff9a5c; --level: #9aa4b0; --gap: #ff7b72;
  --good: #56d48f; --bad: #ff8078; --warn: #f0b45a } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1040px; padding: 28px 20px 48px; background: var(--paper);
  color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; -webkit-text-size-adjust: 100% }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 }
h2 { font-size: 1.1rem; margin: 36px 0 10px; padding-top: 16px; border-top: 1px solid var(--rule) }
h3 { font-size: .95rem; margin: 22px 0 6px }
header p { margin: 2px 0; color: var(--faint) }
header p.end { margin: 12px 0 0 }
header p.lede { color: var(--ink); font-size: 1.15rem; margin: 14px 0 0 }
.lede b { font-size: 1.75rem; font-weight: 650; letter-spacing: -.01em }
.outcome { display: inline-block; border: 1.5px solid; border-radius: 99px; padding: 1px 12px;
  font-weight: 600;
  margin: 0 8px 0 0 }
.good { color: var(--good) } .bad { color: var(--bad) } .warn { color: var(--warn) } .plain {
  color: var(--faint) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px;
  margin: 18px 0 0 }
.tiles div { background: var(--panel); border-radius: 8px; padding: 9px 13px }
.tiles dt { color: var(--faint); font-size: .82rem } .tiles dd { margin: 0; font-size: 1.2rem;
  font-weight: 600 }
.tiles small { font-weight: 400; font-size: .85rem; color: var(--faint) }
pre { background: var(--panel); border-radius: 8px; padding: 12px 14px; white-space: pre-wrap;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.failure { border-left: 4px solid var(--bad); padding: 2px 0 2px 16px; margin: 24px 0 0 }
.failure h2 { border: 0; margin: 0 0 6px; padding: 0 }
figure { margin: 26px 0 0; break-inside: avoid; min-width: 0 }
figcaption { line-height: 1.7 } figcaption i { color: var(--faint); font-style: normal }
.key { display: inline-block; margin-left: 16px; font-size: .85rem; color: var(--faint) }
.key::before { content: ""; display: inline-block; width: 18px; height: 0; margin-right: 6px;
  vertical-align: .28em;
  border-top: 2.5px solid }
.key.raw::before { color: var(--raw) } .key.smooth::before { color: var(--smooth) }
.key.eval::before { color: var(--eval) } .key.gap::before { color: var(--gap); width: 0; height: 9px;
  border: 0; border-left: 2.5px solid; vertical-align: -.05em }
.plot { position: relative; height: 210px; margin: 8px 18px 40px 56px; touch-action: pan-y }
.wide .plot { height: 330px }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr));
  column-gap: 28px }
.plot.empty, .wide .plot.empty { display: grid; place-items: center; height: 84px; margin: 8px 0 0;
  background: var(--panel); border-radius: 8px; color: var(--faint) }
svg { display: block; width: 100%; height: 100%; overflow: visible }
svg text { font-size: 12px; fill: var(--faint) }
.y text, .axis text, .level text, .mark .left { text-anchor: end }
.x text { text-anchor: middle } line, .ticks path { stroke: var(--rule) } .axis line { stroke: var(--faint) }
path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round }
path.raw { stroke: var(--raw); stroke-width: 1 }
path.smooth { stroke: var(--smooth); stroke-width: 2.2 } path.eval { stroke: var(--eval); stroke-width: 1.8 }
path.gap { stroke: var(--gap); stroke-width: 1.6; stroke-linecap: butt }
.dots circle { fill: var(--smooth); stroke: var(--paper); stroke-width: 1 } .dots.eval circle {
  fill: var(--eval) }
.level line { stroke: var(--level); stroke-width: 1.5; stroke-dasharray: 6 5 }
.level text { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round }
.mark line { stroke: var(--warn); stroke-dasharray: 2 4 } .mark text { fill: var(--warn) }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--faint); pointer-events: none }
.tip { position: absolute; top: 4px; z-index: 1; background: var(--paper); border: 1px solid var(--rule);
  border-radius: 6px; padding: 4px 9px; font-size: 12.5px; white-space: pre; pointer-events: none;
  box-shadow: 0 2px 8px #0003 }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 3px 20px; margin: 0 }
.facts dt { color: var(--faint) } .facts dd { margin: 0; min-width: 0 }
.options { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 0 28px;
  margin: 0 }
.options div { display: flex; justify-content: space-between; gap: 14px;
  border-bottom: 1px solid var(--rule) }
.options dt { color: var(--faint) } .options dd { margin: 0; text-align: right }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .92rem;
  overflow-wrap: normal }
th, td { text-align: left; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--rule);
  vertical-align: top }
th { color: var(--faint); font-weight: 500; white-space: nowrap }
@media (max-width: 520px) { body { padding: 18px 14px 32px } .plot { margin-left: 46px; margin-right: 14px }
  .wide .plot { height: 260px } .facts { grid-template-columns: 1fr; gap: 0 } .facts dd { margin-bottom: 7px }
  .key { margin: 0 14px 0 0 } figcaption i::after { content: "\\A"; white-space: pre } }
@media print { :root { --paper: #fff; --panel: #f3f4f6; --ink: #000; --faint: #444; --rule: #ccc;
  --raw: #a9c0ea;
  --smooth: #1f55c4; --eval: #c2410c; --level: #444; --gap: #c81e1e; --good: #12703f; --bad: #b91c1c;
  --warn: #92560a } body { padding: 0; max-width: none; font-size: 11pt; print-color-adjust: exact;
  -webkit-print-color-adjust: exact } h2, h3 { break-after: avoid }
  .tiles { grid-template-columns: repeat(6, 1fr) } .wide .plot { height: 280px }
  .small { grid-template-columns: 1fr 1fr } .tip, .cursor { display: none } }
"""

# The values under the pointer are read back from the curves themselves: nothing is in the page twice.
_SCRIPT = """
for (const figure of document.querySelectorAll("figure[data-x]")) {
  const plot = figure.querySelector(".plot"), view = plot.querySelector("svg[viewBox]").viewBox.baseVal;
  const [x0, x1] = figure.dataset.x.split(" ").map(Number);
  const [y0, y1] = figure.dataset.y.split(" ").map(Number);
  const log = "log" in figure.dataset, step = x => x0 + (x1 - x0) * x / view.width;
  const value = y => { const part = 1 - y / view.height;
    return log ? y0 * (y1 / y0) ** part : y0 + (y1 - y0) * part };
  const curves = [...figure.querySelectorAll("path[data-label]")].map(path => [path.dataset.label,
    [...path.getAttribute("d").matchAll(/(\\d+),(\\d+)/g)].map(point => [+point[1], +point[2]])]);
  const tip = plot.appendChild(document.createElement("div"));
  const cursor = plot.appendChild(document.createElement("div"));
  tip.className = "tip"; cursor.className = "cursor"; tip.hidden = cursor.hidden = true;
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * view.width;
    const near = curves.filter(curve => curve[1].length).map(([label, points]) => [label,
      points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)]);
    if (!near.length) return;
    tip.textContent = near.map(([label, [x, y]]) => label + " " +
      value(y).toLocaleString("en", { maximumSignificantDigits: 4 }) + " at step " +
      Math.round(step(x)).toLocaleString("en")).join("\\n");
    const part = Math.min(1, Math.max(0, at / view.width));
    cursor.style.left = 100 * part + "%"; tip.hidden = cursor.hidden = false;
    tip.style.left = part < .5 ? "calc(" + 100 * part + "% + 10px)" : "auto";
    tip.style.right = part < .5 ? "auto" : "calc(" + 100 * (1 - part) + "% + 10px)";
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = cursor.hidden = true });
}
"""


def escape(value: object, longest: int = LONGEST_TEXT) -> str:
    """The value as text that is safe anywhere in the markup, cut to `longest` characters."""
    shown = text(value)
    return html.escape(shown if len(shown) <= longest else f"{shown[: longest - 1]}…")


def page(title: str, body: str) -> str:
    """The whole page around `body`, which is markup; `title` is text.

    Its policy lets the browser load nothing and run this one script, so that even markup that slipped through
    escaping could do nothing. What UTF-8 cannot hold (half a surrogate pair) becomes a question mark.
    """
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>{body}\n<script>{_SCRIPT}</script></body></html>\n"
    )
    return text.encode("utf-8", errors="replace").decode()
