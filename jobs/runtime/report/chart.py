"""One chart as inline SVG: a pure function from curves to markup, without a plotting library.

The curves live in an inner SVG that stretches to whatever width the page has; ticks, labels and dots are
placed in per cent around it and keep their size, so that a chart reads on a phone, a wide screen and paper.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.runtime.report.axis import Axis, step_axis, value_axis

Point = tuple[float, float]
"""(step, value); a value that is not finite is a gap in the curve."""

GRID_WIDTH = 6000
GRID_HEIGHT = 2000
"""The curves' coordinates are whole numbers on this grid: finer than a screen, shorter than decimals."""

_MOST_DOTS = 60
_FEW_POINTS = 8
_MOST_MARKS = 20


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve; its points are in rising order of steps."""

    label: str
    kind: Literal["raw", "smooth", "eval"]
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Level:
    """A dashed horizontal line with its label, such as a baseline."""

    label: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at a step where something happened to the run, such as a resume."""

    label: str
    step: float


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What to draw; `buckets` is how many columns a curve is thinned to, about one a pixel."""

    title: str
    unit: str
    series: Sequence[Series]
    level: Level | None = None
    marks: Sequence[Mark] = ()
    from_zero: bool = True
    buckets: int = 600


def draw(chart: Chart) -> str:
    """The chart as a <figure>; one without a single finite value says so in words."""
    points = [point for series in chart.series for point in series.points]
    finite = [value for _, value in points if math.isfinite(value)]
    if not points:
        return _figure(chart, "", "<p>nothing recorded yet</p>")
    if not finite:
        return _figure(chart, "", f"<p>none of the {len(points):,} values is a finite number</p>")
    steps = [step for step, _ in points]
    x = step_axis(min(steps), max(steps))
    level = [chart.level.value] if chart.level else []
    y = value_axis(finite + level, from_zero=chart.from_zero)
    ends = f' data-x="{x.low!r} {x.high!r}" data-y="{y.low!r} {y.high!r}"{" data-log" if y.log else ""}'
    inner = f'viewBox="0 0 {GRID_WIDTH} {GRID_HEIGHT}" preserveAspectRatio="none" width="100%" height="100%"'
    svg = "".join(
        (
            f'<svg role="img" aria-label="{html.escape(_in_words(chart))}">',
            _axes(x, y),
            *(_mark(mark, x, len(chart.marks)) for mark in chart.marks[-_MOST_MARKS:]),
            f"<svg {inner}>{''.join(_curve(series, x, y, chart.buckets) for series in chart.series)}</svg>",
            *(_dots(series, x, y) for series in chart.series),
            _level(chart.level, y) if chart.level else "",
            "</svg>",
        )
    )
    return _figure(chart, ends, svg)


def thin(points: Sequence[Point], buckets: int, place: Callable[[float], float]) -> list[Point]:
    """At most three points a bucket of the x axis: the lowest, the highest and, if there is one, a gap.

    A mean would hide the one step that went wrong; the two extremes keep every spike at its full height.
    `place` says how far along the axis a step lies, from 0 to 1.
    """
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(min(buckets - 1, int(place(point[0]) * buckets)), []).append(point)
    kept: list[Point] = []
    for column in columns.values():
        finite = [point for point in column if math.isfinite(point[1])]
        if finite:
            lowest, highest = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
            kept.extend(sorted({lowest, highest}))
        if len(finite) < len(column):
            kept.append(next((step, math.nan) for step, value in column if not math.isfinite(value)))
    return kept


def _axes(x: Axis, y: Axis) -> str:
    levels = [(_percent(1 - y.part(tick)), label) for tick, label in zip(y.ticks, y.labels(), strict=True)]
    steps = [(_percent(x.part(tick)), label) for tick, label in zip(x.ticks, x.labels(), strict=True)]
    return "".join(
        (
            '<g class="grid">',
            *(f'<line x1="0" x2="100%" y1="{at}" y2="{at}"/>' for at, _ in levels),
            '</g><g class="y" transform="translate(-8,4)">',
            *(f'<text x="0" y="{at}">{label}</text>' for at, label in levels),
            '</g><g class="x" transform="translate(0,18)">',
            *(f'<text x="{at}" y="100%">{label}</text>' for at, label in steps),
            '</g><g class="ticks">',
            *(f'<svg x="{at}" y="100%" overflow="visible"><path d="M0,0V4"/></svg>' for at, _ in steps),
            '</g><g class="axis"><text x="100%" y="100%" dy="34">step</text>',
            '<line x1="0" x2="100%" y1="100%" y2="100%"/></g>',
        )
    )


def _curve(series: Series, x: Axis, y: Axis, buckets: int) -> str:
    drawn: list[str] = []
    gaps: list[str] = []
    pen_down = False
    points = thin(series.points, buckets, x.part)
    for index, (step, value) in enumerate(points):
        across = round(x.part(step) * GRID_WIDTH)
        if not math.isfinite(value):
            gaps.append(f"M{across},{GRID_HEIGHT}V{GRID_HEIGHT - 120}")
            pen_down = False
            continue
        place = f"{across},{round((1 - y.part(value)) * GRID_HEIGHT)}"
        drawn.append(f"{'L' if pen_down else 'M'}{place}")
        alone = not pen_down and (index + 1 == len(points) or not math.isfinite(points[index + 1][1]))
        if alone:
            # A path of one point is invisible; a line from it to itself has round ends and shows as a dot.
            drawn.append(f"L{place}")
        pen_down = True
    curve = f'<path class="{series.kind}" data-label="{html.escape(series.label)}" d="{"".join(drawn)}"/>'
    return f'{curve}<path class="gap" d="{"".join(gaps)}"/>' if gaps else curve


def _dots(series: Series, x: Axis, y: Axis) -> str:
    """A dot at each measurement that stands for itself: evaluations, and points too few to make a curve."""
    points = [point for point in series.points if math.isfinite(point[1])]
    if len(points) > (_MOST_DOTS if series.kind == "eval" else _FEW_POINTS):
        return ""
    circles = (
        f'<circle cx="{_percent(x.part(step))}" cy="{_percent(1 - y.part(value))}" r="3.2"/>'
        for step, value in points
    )
    return f'<g class="dots {series.kind}">{"".join(circles)}</g>'


def _level(level: Level, y: Axis) -> str:
    at = _percent(1 - y.part(level.value))
    return (
        f'<g class="level"><line x1="0" x2="100%" y1="{at}" y2="{at}"/>'
        f'<text x="100%" y="{at}" dy="-6">{html.escape(level.label)}</text></g>'
    )


def _mark(mark: Mark, x: Axis, of: int) -> str:
    at = _percent(x.part(mark.step))
    aside = 'dx="-4" class="left"' if x.part(mark.step) > 0.75 else 'dx="4"'
    label = f'<text x="{at}" y="0" {aside} dy="10">{html.escape(mark.label)}</text>' if of <= 4 else ""
    return f'<g class="mark"><line x1="{at}" x2="{at}" y1="0" y2="100%"/>{label}</g>'


def _figure(chart: Chart, ends: str, body: str) -> str:
    keys: list[tuple[str, str]] = [(series.kind, series.label) for series in chart.series]
    if len(keys) == 1:
        keys = []  # the title says it
    gaps = len({step for series in chart.series for step, value in series.points if not math.isfinite(value)})
    if gaps and ends:
        keys.append(("gap", f"not a finite number ({gaps:,})"))
    legend = "".join(f'<span class="key {kind}">{html.escape(label)}</span>' for kind, label in keys)
    unit = f"{chart.unit}, log scale" if " data-log" in ends else chart.unit
    return (
        f"<figure{ends}><figcaption><b>{html.escape(chart.title)}</b> <i>{html.escape(unit)}</i>{legend}"
        f'</figcaption><div class="plot{"" if ends else " empty"}">{body}</div></figure>'
    )


def _in_words(chart: Chart) -> str:
    last = []
    for series in chart.series:
        finite = [point for point in series.points if math.isfinite(point[1])]
        if finite:
            last.append(f"{series.label} {finite[-1][1]:.4g} at step {finite[-1][0]:,.0f}")
    return f"{chart.title}, {chart.unit}: {'; '.join(last)}"


def _percent(part: float) -> str:
    return f"{100 * part:.2f}%"
