"""The curves of a run as charts of inline SVG: pure functions, without a plotting library.

The curves live in an inner SVG that stretches to whatever width the page has; ticks, labels and dots are
placed in per cent around it and keep their size, so that a chart reads on a phone, a wide screen and paper.
"""

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jobs.runtime.host_samples import COLUMNS, HostSamples
from jobs.runtime.metric_definitions import Metric, Metrics, of_run
from jobs.runtime.report.page import Json, moment, number, rows

Point = tuple[float, float]
"""(step, value); a value that is not finite is a gap in the curve."""

_FEWEST_TO_SMOOTH = 12
_MOST_SMOOTHED = 300
_WIDEST_HALF = 2000
_MOST_CHARTS = 20
_FLATTENING_RATIO = 30.0
_NARROWEST_SPAN = 1e-90


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Two ends, the ticks between them, and whether equal distances are equal ratios."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def part(self, value: float) -> float:
        """How far along the axis a value lies, from 0 to 1; what lies beyond an end is drawn at that end."""
        low, high = self.low, self.high
        if self.log:
            if value <= 0.0:
                return 0.0
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def labels(self) -> list[str]:
        """The ticks' values as short as they can be read and still differ: 0.5, 1,200, 120k, 3M, 1e-5."""
        if self.log or len(self.ticks) < 2:
            return [_label(tick, largest=abs(tick), apart=abs(tick)) for tick in self.ticks]
        largest, apart = max(map(abs, self.ticks)), self.ticks[1] - self.ticks[0]
        return [_label(tick, largest=largest, apart=apart) for tick in self.ticks]


def value_axis(values: Sequence[float], *, from_zero: bool) -> Axis:
    """The y axis over at least one finite value, its ends on round numbers."""
    low, high = min(values), max(values)
    if low > 0.0 and high > _FLATTENING_RATIO * statistics.median(values):
        # On a linear axis one such value would press the rest of the curve flat against the bottom.
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = tuple(10.0**power for power in range(first, last + 1, math.ceil((last - first) / 6)))
        return Axis(low=10.0**first, high=10.0**last, ticks=ticks, log=True)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    low, high = _apart(low, high)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(low=first * step, high=last * step, ticks=tuple(k * step for k in range(first, last + 1)))


def step_axis(low: float, high: float) -> Axis:
    """The x axis from the first step to the last, from 0 where the first is near it."""
    if 0.0 <= low <= 0.1 * high:
        low = 0.0
    low, high = _apart(low, high)
    step = max(1.0, _round_step((high - low) / 7))
    ticks = tuple(k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1))
    return Axis(low=low, high=high, ticks=ticks)


def _apart(low: float, high: float) -> tuple[float, float]:
    """The same ends, or wider ones where they are so near each other that no tick fits between them."""
    if high - low > max(1e-9 * max(abs(low), abs(high)), _NARROWEST_SPAN):
        return low, high
    margin = 0.1 * max(abs(low), abs(high)) or 1.0
    return low - margin, high + margin


def _round_step(rough: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def _label(value: float, *, largest: float, apart: float) -> str:
    if value == 0.0:
        return "0"
    if largest >= 1e15 or largest < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
    limit, suffix = next((unit for unit in units if largest >= unit[0]), (1.0, ""))
    unit = 1e3 if suffix == "k" else limit
    decimals = max(0, -math.floor(math.log10(apart / unit) + 1e-9))
    return f"{value / unit:,.{decimals}f}{suffix}"


GRID_WIDTH = 6000
GRID_HEIGHT = 2000
"""The curves' coordinates are whole numbers on this grid: finer than a screen, shorter than decimals."""

_MOST_DOTS = 60
_FEW_POINTS = 8
_MOST_MARKS = 20


@dataclass(frozen=True, kw_only=True)
class Series:
    """A curve; its points are in rising order of steps. kind: one of _OF_HOSTS for a host's."""

    label: str
    kind: str
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
    """What to draw; `buckets` is how many columns a curve is thinned to, about one a pixel. across: what x counts."""

    title: str
    unit: str
    series: Sequence[Series]
    level: Level | None = None
    marks: Sequence[Mark] = ()
    from_zero: bool = True
    buckets: int = 600
    across: str = "step"


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
    ends = f' data-x="{x.low!r} {x.high!r}" data-y="{y.low!r} {y.high!r}" data-across="{chart.across}"'
    ends += " data-log" if y.log else ""
    inner = f'viewBox="0 0 {GRID_WIDTH} {GRID_HEIGHT}" preserveAspectRatio="none" width="100%" height="100%"'
    svg = "".join(
        (
            f'<svg role="img" aria-label="{html.escape(_in_words(chart))}">',
            _axes(x, y, chart.across),
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


def _axes(x: Axis, y: Axis, across: str) -> str:
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
            '</g><g class="axis"><text x="100%" y="100%" dy="34">' + across + "</text>",
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
            last.append(f"{series.label} {finite[-1][1]:.4g} at {chart.across} {finite[-1][0]:,.0f}")
    return f"{chart.title}, {chart.unit}: {'; '.join(last)}"


def _percent(part: float) -> str:
    return f"{100 * part:.2f}%"


def curve(metrics: Iterable[Json], key: str) -> list[Point]:
    """`key` by step, in rising order; of two lines with one step the later counts, as after a resume.

    A line without the key has no point; a value that is no finite number is a gap.
    """
    found: dict[float, float] = {}
    for line in metrics:
        step = number(line.get("step"))
        if step is not None and key in line:
            value = number(line[key])
            found[step] = math.nan if value is None else value
    return sorted(found.items())


def input_wait(metrics: Iterable[Json]) -> list[Point]:
    """How much of each step was spent waiting for data, in per cent, by step."""

    def share(line: Json) -> float | None:
        wait_s, step_s = number(line["input_wait_s"]), number(line["step_s"])
        return 100.0 * wait_s / step_s if wait_s is not None and step_s else None

    timed = [line for line in metrics if "input_wait_s" in line and "step_s" in line]
    return curve([{"step": line.get("step"), "share": share(line)} for line in timed], "share")


def smooth(points: Sequence[Point]) -> list[Point]:
    """The course of a noisy curve: running medians, so that no spike bends it, then their running means."""
    finite = [point for point in points if math.isfinite(point[1])]
    every = max(1, math.ceil(len(finite) / _MOST_SMOOTHED))
    half = min(_WIDEST_HALF, max(1, len(finite) // 40))
    medians = _running(finite, half, every, statistics.median)
    return _running(medians, max(1, half // every // 2), 1, statistics.fmean)


def charts(run: Json, metrics: Sequence[Json], baselines: Mapping[str, float]) -> list[Chart]:
    """The headline's chart, then the smaller ones beside it, of what was recorded. baselines: by metric."""
    definitions, marks = of_run(run), resumes(run, metrics)
    recorded = dict.fromkeys(name for line in metrics for name in line if isinstance(name, str))
    told = [metric for metric in definitions.told(recorded) if _is_drawn(metric, definitions, metrics)]
    headline = definitions.get(definitions.headline)
    first = headline.chart or headline.name
    names = dict.fromkeys([first, *(metric.chart or metric.name for metric in told)])
    found = []
    for name in list(names)[:_MOST_CHARTS]:
        main = definitions.get(name)
        inside = [main, *(metric for metric in told if metric.chart == name and metric.name != name)]
        scale = 100.0 if main.unit.startswith("%") else 1.0  # one for all that is in a chart
        level = next(
            (_baseline(definitions, metric, baselines, scale) for metric in inside if metric.baseline), None
        )
        series = [each for metric in inside for each in _series(metric, metrics, scale)]
        hint = f"{main.better} is better" if main.better and name == first else ""
        chart = Chart(
            title=capitalised(main.title),
            unit=" · ".join(text for text in (main.unit, hint) if text),
            series=series,
            level=level,
            marks=marks,
            from_zero=name != first,
            buckets=600 if name == first else 250,
        )
        if name == first or any(each.points for each in series):
            found.append(chart)
    waits = _noisy("share", input_wait(metrics))
    if waits[0].points:
        waiting = Chart(title="Input wait", unit="% of the step", series=waits, marks=marks, buckets=250)
        found.insert(min(3, len(found)), waiting)
    return found


_OF_HOSTS = tuple(f"host h{number}" for number in range(8))
_LONGEST_GAP_S = 120.0


def host_charts(hosts: Sequence[HostSamples]) -> list[Chart]:
    """What the first hosts and their devices did over time; the time between two attempts is left out."""
    passed, at, before = 0.0, {}, math.nan
    for time in sorted({time for host in hosts for time in host.known("time")}):
        gap_s = time - before
        passed += gap_s if gap_s <= max(_LONGEST_GAP_S, 3 * max(host.interval_s for host in hosts)) else 0.0
        at[time], before = passed, time
    unit, unit_s = ("hour", 3600.0) if passed > 10_800 else ("minute", 60.0)
    found = []
    for name in ("cpu_pct", "memory_mib", "duty_pct", "tensorcore_pct", "hbm_mib"):
        column, scale = COLUMNS[name], 1024 if COLUMNS[name].unit == "MiB" else 1
        series = []
        for kind, host in zip(_OF_HOSTS, hosts, strict=False):
            values = zip(host.points["time"], host.points.get(name, ()), strict=False)
            points = [
                (at[time] / unit_s, value / scale) for time, value in values if time and value is not None
            ]
            series += [Series(label=f"host {host.host}", kind=kind, points=points)] if points else []
        most = max((host.capacity.get(name, 0.0) for host in hosts), default=0.0) / scale
        if series:
            chart = Chart(
                title=capitalised(column.title),
                unit="GiB" if scale > 1 else column.unit,
                series=series,
                level=Level(label=f"{most:.1f} GiB", value=most) if most else None,
                buckets=250,
                across=unit,
            )
            found.append(chart)
    return found


def _is_drawn(metric: Metric, definitions: Metrics, metrics: Sequence[Json]) -> bool:
    """What is declared, and whatever else has numbers."""
    return metric in definitions.metrics or any(number(line.get(metric.name)) is not None for line in metrics)


def _series(metric: Metric, metrics: Sequence[Json], scale: float) -> list[Series]:
    scaled = [(step, scale * value) for step, value in curve(metrics, metric.name)]
    if metric.is_evaluation:
        return [Series(label=metric.title, kind="eval", points=scaled)] if scaled else []
    return _noisy(metric.title, scaled)


def _baseline(
    definitions: Metrics, metric: Metric, baselines: Mapping[str, float], scale: float
) -> Level | None:
    baseline = metric.baseline or ""
    if baseline not in baselines:
        return None
    value = scale * baselines[baseline]
    return Level(label=f"{definitions.get(baseline).title} {value:.4g}", value=value)


def capitalised(title: str) -> str:
    return title[:1].upper() + title[1:]


def resumes(run: Json, metrics: Iterable[Json]) -> list[Mark]:
    """Where each attempt after the first goes on: the first line written after that attempt started."""
    timed = [(moment(line.get("time")), number(line.get("step"))) for line in metrics]
    marks = []
    for attempt in rows(run.get("attempts"))[1:]:
        started = moment(attempt.get("started"))
        steps = [step for time, step in timed if started and time and time >= started and step is not None]
        if steps:
            marks.append(Mark(label=f"attempt {attempt.get('attempt')}", step=steps[0]))
    return marks


def _noisy(label: str, points: Sequence[Point]) -> list[Series]:
    """A curve with its smoothed course over it; a few points are their own course."""
    if len(points) < _FEWEST_TO_SMOOTH:
        return [Series(label=label, kind="smooth", points=points)]
    return [
        Series(label=label, kind="raw", points=points),
        Series(label=f"{label}, smoothed", kind="smooth", points=smooth(points)),
    ]


def _running(
    points: Sequence[Point], half: int, every: int, middle: Callable[[Sequence[float]], float]
) -> list[Point]:
    """The `middle` of the values around every `every`-th point; the window narrows towards the ends."""
    values = [value for _, value in points]
    last = len(points) - 1
    chosen = sorted({*range(0, len(points), every), last}) if points else []
    smoothed = []
    for index in chosen:
        reach = max(half // 4, min(half, index, last - index))
        smoothed.append((points[index][0], middle(values[max(0, index - reach) : index + reach + 1])))
    return smoothed
