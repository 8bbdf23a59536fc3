"""The curves of a run: from the lines of metrics.jsonl to the charts of its report. Pure functions."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from jobs.runtime.metric_definitions import Metric, Metrics, of_run
from jobs.runtime.report.chart import Chart, Level, Mark, Point, Series
from jobs.runtime.report.fields import Json, moment, number, rows

_FEWEST_TO_SMOOTH = 12
_MOST_SMOOTHED = 300
_WIDEST_HALF = 2000
_MOST_CHARTS = 20


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
        level = next((_level(definitions, metric, baselines) for metric in inside if metric.baseline), None)
        series = [each for metric in inside for each in _series(metric, metrics)]
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


def _is_drawn(metric: Metric, definitions: Metrics, metrics: Sequence[Json]) -> bool:
    """What is declared, and whatever else has numbers."""
    return metric in definitions.metrics or any(number(line.get(metric.name)) is not None for line in metrics)


def _series(metric: Metric, metrics: Sequence[Json]) -> list[Series]:
    points, scale = curve(metrics, metric.name), 100.0 if metric.unit.startswith("%") else 1.0
    scaled = [(step, scale * value) for step, value in points]
    if metric.is_evaluation:
        return [Series(label=metric.title, kind="eval", points=scaled)] if scaled else []
    return _noisy(metric.title, scaled)


def _level(definitions: Metrics, metric: Metric, baselines: Mapping[str, float]) -> Level | None:
    baseline = metric.baseline or ""
    if baseline not in baselines:
        return None
    return Level(
        label=f"{definitions.get(baseline).title} {baselines[baseline]:.4g}", value=baselines[baseline]
    )


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
