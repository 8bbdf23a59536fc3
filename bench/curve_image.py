"""A few curves as an SVG file that stands alone, for the docs: it follows the reader's light or dark mode."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from jobs.runtime.report.axis import step_axis, value_axis

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 56, 48
COLOURS = ("#2f6fdb", "#d9622b", "#2f9e62", "#8a56c9")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#444}.grid{stroke:#8884;stroke-width:1}"
    "path{fill:none;stroke-width:2.2;stroke-linejoin:round}.title{font-weight:600}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}}"
)

Point = tuple[float, float]


def image(title: str, across: str, curves: Mapping[str, Sequence[Point]]) -> str:
    """SVG markup; `across` names the x axis, the title says what goes up."""
    assert 0 < len(curves) <= len(COLOURS), f"{len(curves)} curves: 1 to {len(COLOURS)} have a colour"
    points = [point for curve in curves.values() for point in curve]
    x = step_axis(0.0, max(at for at, _ in points))
    y = value_axis([value for _, value in points], from_zero=False)

    def place(at: float, value: float) -> tuple[str, str]:
        across_px = LEFT + x.part(at) * (WIDTH - LEFT - RIGHT)
        return f"{across_px:.1f}", f"{HEIGHT - BOTTOM - y.part(value) * (HEIGHT - TOP - BOTTOM):.1f}"

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="20">{html.escape(title)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{html.escape(across)}</text>',
    ]
    for tick, label in zip(y.ticks, y.labels(), strict=True):
        at = place(x.low, tick)[1]
        drawn.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{at}" dy="4" text-anchor="end">{label}</text>')
    for tick, label in zip(x.ticks, x.labels(), strict=True):
        at = place(tick, y.low)[0]
        drawn.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for index, ((name, curve), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        line = "L".join(",".join(place(*point)) for point in curve)
        drawn.append(f'<path stroke="{colour}" d="M{line}"/>')
        key = LEFT + index * (WIDTH - LEFT - RIGHT) / len(curves)
        drawn.append(f'<rect x="{key:.0f}" y="32" width="14" height="4" fill="{colour}"/>')
        drawn.append(f'<text x="{key + 20:.0f}" y="38">{html.escape(name)}</text>')
    return "".join([*drawn, "</svg>\n"])
