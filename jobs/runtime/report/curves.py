"""The curves of one run: metrics.jsonl, read on where it was left, and thinned to what a chart can show.

The dashboard thins 100,000 points a metric for every look at a running run, hence NumPy.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts import run_records
from contracts.files import Piece
from contracts.run_records import Unread
from jobs.runtime.monitoring.host_samples import COLUMNS, HostSamples
from jobs.runtime.monitoring.metric_definitions import Metric, Metrics

Floats = npt.NDArray[np.float64]
Read = Callable[[int, int], Piece | None]
"""Reads a piece of metrics.jsonl: from an offset on, so many bytes at most."""

PIECE_BYTES = 4 * 2**20
MOST_METRICS = 200
LARGEST = 1e100
"""Beyond it the arithmetic of an axis overflows, and nothing that is measured is that large."""
MARK_BYTES = 64
"""What stands before the offset is read again: where it is other than before, so is the file."""
FEWEST_TO_SMOOTH = 12
MOST_HOSTS_DRAWN = 64
LONGEST_GAP_S = 120.0
DERIVED = (
    Metric(name="step_s", title="time per step", unit="s"),
    Metric(name="input_wait_s", title="input wait per step", unit="s"),
    Metric(name="mfu", title="model FLOPs utilisation", unit="%"),
)
"""What lines of every job may have, and no job declares."""


class History:
    """The points of metrics.jsonl so far. Safe to use from several threads.

    A point is a row (a line's step and time) and a value; nan where the line says null, or no finite number.
    """

    def __init__(self, read: Read) -> None:
        self._read, self._lock = read, threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._offset, self._rest, self._mark = 0, b"", b""
        self._steps, self._times = array("d"), array("d")
        self._points: dict[str, tuple[array[int], array[float]]] = {}
        self._unread = Unread()
        self._without_step = 0
        self._error: str | None = None
        self.is_complete = False

    def read_on(self, limit_s: float) -> None:
        """Read what is new, for about so long; `is_complete` tells whether that was all. A torn line waits."""
        with self._lock:
            deadline = time.monotonic() + limit_s
            while True:
                before = len(self._mark)
                piece = self._read(self._offset - before, PIECE_BYTES + before)
                self._error = piece.error if piece else None
                if piece is None or piece.error:
                    if piece is None:
                        self._begin_anew()
                    self.is_complete = True
                    return
                if not piece.data.startswith(self._mark) or piece.size < self._offset:
                    self._begin_anew()
                    continue
                # Behind what is no UTF-8, a host's text is not as long as the file's bytes.
                self._offset = piece.next_offset
                self._take(piece.data[before:])
                self._mark = piece.data[-MARK_BYTES:] if piece.data.isascii() else b""
                self.is_complete = self._offset >= piece.size or len(piece.data) == before
                if self.is_complete or time.monotonic() > deadline:
                    return

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if run_records.is_whole(self._rest):
            lines, self._rest = [*lines, self._rest], b""
        self.add(run_records.metrics(lines, self._unread))

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines of metrics, as `run_records.metrics` reads them."""
        for line in lines:
            step, time_s = line.get("step"), line.get("time")
            if step is None:
                self._without_step += 1
                continue
            row = len(self._steps)
            self._steps.append(step)
            self._times.append(math.nan if time_s is None else time_s)
            for name, value in line.items():
                if name in ("step", "time"):
                    continue
                if name not in self._points and len(self._points) == MOST_METRICS:
                    continue
                rows, values = self._points.setdefault(name, (array("l"), array("d")))
                rows.append(row)
                values.append(value if value is not None and -LARGEST < value < LARGEST else math.nan)

    @property
    def problems(self) -> list[str]:
        """What could not be read."""
        count = self._without_step
        return [
            *([f"metrics.jsonl: {self._error}"] if self._error else []),
            *self._unread.texts(),
            *([f"metrics.jsonl: lines without a step, left out: {count:,}"] if count else []),
            *(
                [f"metrics.jsonl: {MOST_METRICS} metrics are shown"]
                if len(self._points) == MOST_METRICS
                else []
            ),
        ]

    def curves(
        self,
        metrics: Metrics,
        axis: str,
        points: int,
        span: tuple[float, float] | None = None,
        attempts: int = 1,
        *,
        baselines: Mapping[str, float] | None = None,
        starts_s: Sequence[float] = (),
    ) -> dict[str, Any]:
        """The curves of all metrics as the page draws them, each of about `points` points.

        axis: step, time (seconds since the first line) or units (what the job's rate counts, such as tokens).
        span: the part of the axis that is drawn. attempts: how many the run has had. baselines: the values of the
        metrics that others are compared with. starts_s: Unix seconds when each attempt after the first started; it is
        marked at its first line.
        """
        with self._lock:
            steps, times = np.array(self._steps), np.array(self._times)
            held = {name: (np.array(rows), np.array(values)) for name, (rows, values) in self._points.items()}
        retaken: list[float] = []
        for name, (rows, values) in held.items():
            old = _retaken(steps[rows], attempts)
            held[name] = rows[~old], values[~old]
            retaken += steps[rows[old]].tolist()
        rate = next(
            (metric for metric in metrics.metrics if metric.unit.endswith("/s") and metric.name in held), None
        )
        names = {"step": "step"}
        if np.isfinite(times).any():
            names["time"] = "time"
        if rate is not None and "step_s" in held:
            names["units"] = rate.unit[:-2]
        axis = axis if axis in names else "step"
        along = steps
        if axis == "time":
            along = _forward(times)
        elif axis == "units" and rate is not None:
            along = _units(steps, held[rate.name], held["step_s"])
        derived = [metric for metric in DERIVED if metric.name in held]
        series = [
            _curve(
                metric,
                along[held[metric.name][0]],
                held[metric.name][1] * _scale(metrics, metric),
                points,
                span,
            )
            | {"level": _level(metrics, metric, baselines or {})}
            for metric in [*metrics.ordered(held), *derived]
        ]
        marks = [
            [float(along[int(np.argmax(times >= start_s))]), f"attempt {attempt}"]
            for attempt, start_s in enumerate(starts_s, 1)
            if (times >= start_s).any()
        ]
        return {
            "axis": axis,
            "axes": names,
            "lines": len(steps),
            "is_complete": self.is_complete,
            "series": [metric for metric in series if metric["x"]],
            "marks": marks,
            "problems": [*self.problems, *run_records.retaken_message(retaken)],
        }


def _retaken(steps: Floats, attempts: int) -> npt.NDArray[np.bool_]:
    """Which points of a curve were measured again later: see `run_records.without_retaken`."""
    if attempts > 1:
        later = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)
        return np.asarray(steps >= later)
    is_old = np.ones(len(steps), np.bool_)
    _, last = np.unique(steps[::-1], return_index=True)
    is_old[len(steps) - 1 - last] = False
    return is_old


def host_curves(
    hosts: Sequence[HostSamples], *, columns: Iterable[str] = COLUMNS, problems: Sequence[str] = ()
) -> dict[str, Any]:
    """What the samplers of hosts have read, as `History.curves` has a run's: a chart of each column, a line of each
    host. The time between two attempts is left out."""
    passed_s, at_s, before_s = 0.0, {}, math.nan
    longest_gap_s = max([LONGEST_GAP_S, *(3 * host.interval_s for host in hosts)])
    for time_s in sorted({time_s for host in hosts for time_s in host.recorded("time")}):
        passed_s += time_s - before_s if time_s - before_s <= longest_gap_s else 0.0
        at_s[time_s], before_s = passed_s, time_s

    def values(host: HostSamples, name: str) -> list[float | None]:
        scale = 1024 if COLUMNS[name].unit == "MiB" else 1
        return [None if value is None else value / scale for value in host.points[name]]

    def level(host: HostSamples, name: str) -> dict[str, Any] | None:
        capacity = host.capacity.get(name, 0.0) / 1024
        return {"title": f"{capacity:.1f} GiB", "value": capacity} if capacity else None

    series = [
        {
            "name": name,
            "chart": name,
            "heading": COLUMNS[name].title,
            "title": f"host {host.host}",
            "unit": "GiB" if COLUMNS[name].unit == "MiB" else COLUMNS[name].unit,
            "x": [at_s[time_s] for time_s in host.recorded("time")],
            "y": values(host, name),
            "smooth": None,
            "gaps": 0,
            "level": level(host, name) if index == 0 else None,
        }
        for name in columns
        for index, host in enumerate(hosts[:MOST_HOSTS_DRAWN])
        if name not in redundant_columns(host.points) and host.recorded(name)
    ]
    return {
        "axis": "time",
        "axes": {"time": "time"},
        "lines": max((len(host.points["time"]) for host in hosts), default=0),
        "is_complete": True,
        "series": series,
        "marks": [],
        "problems": list(problems),
    }


def redundant_columns(values: Mapping[str, Any]) -> set[str]:
    """Columns of a host's samples that repeat others: the step, and / where the run directory is on the same disk."""
    is_one_disk = values.get("root_free_mib") == values.get("disk_free_mib")
    return {"step", "root_free_mib"} if is_one_disk else {"step"}


def _level(metrics: Metrics, metric: Metric, baselines: Mapping[str, float]) -> dict[str, Any] | None:
    """The metric's baseline, to the scale of its chart."""
    name = metric.baseline or ""
    if name not in baselines:
        return None
    value = baselines[name] * _scale(metrics, metric)
    return {"title": f"{metrics.get(name).title} {value:.4g}", "value": value}


def _scale(metrics: Metrics, metric: Metric) -> float:
    """100 where the metric is drawn in a chart of per cent."""
    chart = metric if metric.chart is None else metrics.get(metric.chart)
    return 100.0 if chart.unit.startswith("%") else 1.0


def _forward(times: Floats) -> Floats:
    """Seconds since the first; a clock that was set back stands still."""
    finite_times = np.where(np.isfinite(times), times, -np.inf)
    forward: Floats = np.maximum.accumulate(finite_times)
    since: Floats = np.maximum(forward - times[np.isfinite(times)][0], 0.0)
    return since


def _units(steps: Floats, rate: tuple[Any, Floats], step_s: tuple[Any, Floats]) -> Floats:
    """How much was done up to each row: what a step does is its rate times its seconds."""
    a_step = np.zeros(len(steps))
    shared, rate_rows, step_rows = np.intersect1d(rate[0], step_s[0], return_indices=True)
    a_step[shared] = np.nan_to_num(rate[1][rate_rows] * step_s[1][step_rows])
    if not len(shared):
        return steps
    # A row without a rate, such as an evaluation's, is where the row with one before it is.
    taken = np.diff(np.maximum.accumulate(steps[shared]), prepend=0.0)
    done: Floats = np.cumsum(a_step[shared] * taken)
    return np.interp(np.arange(len(steps)), shared, done)


def _curve(
    metric: Metric, x: Floats, y: Floats, points: int, span: tuple[float, float] | None
) -> dict[str, Any]:
    order = np.argsort(x, kind="stable") if len(x) and (np.diff(x) < 0).any() else slice(None)
    x, y = x[order], y[order]
    begin, end = 0, len(x)
    if span is not None:  # with one point more on each side, so that the line goes on to the edge
        begin = max(0, int(np.searchsorted(x, span[0])) - 1)
        end = int(np.searchsorted(x, span[1], "right")) + 1
    indices = thin(y[begin:end], points) + begin
    course = None if metric.is_evaluation else smooth(y, indices)
    return {
        "name": metric.name,
        "title": metric.title,
        "unit": metric.unit,
        "chart": metric.chart or metric.name,
        "x": _numbers(x[indices]),
        "y": _numbers(y[indices]),
        "smooth": None if course is None else _numbers(course),
        "gaps": int(np.isnan(y).sum()),
    }


def thin(y: Floats, points: int) -> npt.NDArray[np.intp]:
    """The indices of about `points` values: of each part of the curve its lowest, its highest and a gap, if there is
    one; and its two ends. A mean would hide the one step that went wrong."""
    count = len(y)
    if count <= points:
        return np.arange(count)
    width = math.ceil(count / max(1, points // 2))
    parts = math.ceil(count / width)
    flat = np.full(parts * width, np.nan)
    flat[:count] = y
    padded = flat.reshape(parts, width)
    gaps, first = np.isnan(padded), np.arange(parts) * width
    candidates = [
        np.where(gaps, np.inf, padded).argmin(axis=1) + first,
        np.where(gaps, -np.inf, padded).argmax(axis=1) + first,
        (gaps.argmax(axis=1) + first)[gaps.any(axis=1)],
        np.array([0, count - 1]),
    ]
    indices = np.unique(np.concatenate(candidates))
    return indices[indices < count]


def smooth(y: Floats, at: npt.NDArray[np.intp]) -> Floats | None:
    """The mean around some values, gaps left out; None where the curve is too short, or is smooth already."""
    if len(y) < FEWEST_TO_SMOOTH:
        return None
    finite = np.isfinite(y)
    rises = np.diff(y[finite]) > 0
    if np.count_nonzero(rises[1:] != rises[:-1]) < len(y) / 10:
        return None
    reach = max(2, len(y) // 60)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    # As far to the left as to the right, or the ends would lean to what is inside.
    near = np.minimum(reach, np.minimum(at, len(y) - 1 - at))
    low, high = at - near, at + near + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        course: Floats = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return course


def _numbers(values: Floats) -> list[float | None]:
    """For JSON: six digits, a gap null, whole numbers without a point."""
    return [
        None
        if value != value
        else int(value)
        if value.is_integer() and abs(value) < 1e15
        else float(f"{value:.6g}")
        for value in values.tolist()
    ]
