"""The curves of a run: from the lines of metrics.jsonl to the charts of its report. Pure functions."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from jobs.runtime.report.chart import Chart, Level, Mark, Point, Series
from jobs.runtime.report.fields import Json, moment, number, rows

_FEWEST_TO_SMOOTH = 12
_MOST_SMOOTHED = 300
_WIDEST_HALF = 2000


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


def charts(run: Json, metrics: Sequence[Json], baseline: float | None) -> list[Chart]:
    """The loss, then the smaller charts beside it, of what was recorded."""
    marks = resumes(run, metrics)
    training, evaluation = _noisy("training", curve(metrics, "loss")), curve(metrics, "eval_loss")
    loss = Chart(
        title="Loss",
        unit="nats",
        series=training
        + ([Series(label="evaluation", kind="eval", points=evaluation)] if evaluation else []),
        level=None if baseline is None else Level(label=f"unigram baseline {baseline:.4g}", value=baseline),
        marks=marks,
        from_zero=False,
    )
    small = [
        ("Throughput", "tokens/s", _noisy("rate", curve(metrics, "tokens_per_s"))),
        ("Learning rate", "", [Series(label="rate", kind="smooth", points=curve(metrics, "learning_rate"))]),
        ("Input wait", "% of the step", _noisy("share", input_wait(metrics))),
        ("Gradient norm", "", _noisy("norm", curve(metrics, "grad_norm"))),
    ]
    return [loss] + [
        Chart(title=title, unit=unit, series=series, marks=marks, buckets=250)
        for title, unit, series in small
        if series[0].points
    ]


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
