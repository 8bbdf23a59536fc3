"""Declarations of a job's metrics: their titles, units, which way is better, which one is the headline.

A job's package declares them as METRICS, the launcher writes them into run.json, and the readers of a run find them
there. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Better = Literal["lower", "higher"]

COMMON_FIELDS = frozenset({"step", "time", "step_s", "input_wait_s", "mfu", "outliers"})
"""Fields of a line of metrics that mean the same in every job."""
NO_METRICS = frozenset(
    {
        "steps",
        "wall_s",
        "failed_host",
        "exit_code",
        "attempt",
        "time",
        "outliers",
        "skipped_updates",
        "best_step",
        "exported_step",
    }
)
"""Numbers of result.json that are no metrics of the job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One number, by its name in metrics.jsonl or result.json.

    unit: follows the number; one that begins with % makes a share of 0 to 1 per cent. better: the direction that is
    better, if any. baseline: the metric that it is compared with. is_evaluation: it comes from evaluations. is_detail:
    it is for the report only. chart: the metric in whose chart it is drawn; None: it has its own.
    """

    name: str
    title: str
    unit: str = ""
    better: Better | None = None
    baseline: str | None = None
    is_evaluation: bool = False
    is_detail: bool = False
    chart: str | None = None

    def text(self, value: float) -> str:
        """The value with its unit: 3.210 nats, 43.2% of the masked tokens, 19,043 tokens/s."""
        if self.unit.startswith("%"):
            return f"{100 * value:.1f}{self.unit}"
        return f"{short(value)} {self.unit}".rstrip()

    def named(self, value: float) -> str:
        """The same behind its title, or without one where a rate's unit says what it is."""
        return self.text(value) if self.unit.endswith("/s") else f"{self.title} {self.text(value)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
    """A job's metrics. headline: the one that says how good a run is. progress: those that are shown while it runs."""

    headline: str
    metrics: tuple[Metric, ...]
    progress: tuple[str, ...] = ()

    def get(self, name: str) -> Metric:
        """The metric; one that is not declared has its name as title."""
        return next(
            (metric for metric in self.metrics if metric.name == name),
            Metric(name=name, title=name.replace("_", " ")),
        )

    def baselines(self) -> set[str]:
        return {metric.baseline for metric in self.metrics if metric.baseline is not None}

    def ordered(self, names: Iterable[str]) -> list[Metric]:
        """The metrics of `names` but baselines: the headline, the declared ones in order, then others."""
        left = [name for name in names if name not in COMMON_FIELDS and name not in self.baselines()]
        order = [self.headline, *(metric.name for metric in self.metrics)]
        return [self.get(name) for name in dict.fromkeys([*order, *left]) if name in left]

    def compared(self, metric: Metric, values: Mapping[str, Any]) -> str:
        """The metric's value, with its distance from its baseline if `values` has that too."""
        value, baseline = values[metric.name], finite(values.get(metric.baseline or ""))
        if baseline is None:
            return metric.text(value)
        side, reference = "below" if value < baseline else "above", self.get(metric.baseline or "")
        is_share = metric.unit.startswith("%")
        distance = f"{100 * abs(baseline - value):.1f} points" if is_share else short(abs(baseline - value))
        reference_text = f"{100 * baseline:.1f}%" if is_share else short(baseline)
        return f"{metric.text(value)}, {distance} {side} the {reference.title} of {reference_text}"


UNDECLARED = Metrics(
    headline="loss", progress=("loss",), metrics=(Metric(name="loss", title="loss", better="lower"),)
)
"""Of a job that declares nothing."""


def as_json(metrics: Metrics) -> dict[str, Any]:
    """The declarations as run.json holds them."""
    return dataclasses.asdict(metrics)


def of_run(described: Mapping[str, Any]) -> Metrics:
    """The declarations in run.json; UNDECLARED where there are none, or none that can be understood."""
    declared = described.get("metric_definitions")
    try:
        fields = {field.name for field in dataclasses.fields(Metric)}
        metrics = tuple(
            Metric(**{name: value for name, value in entry.items() if name in fields})
            for entry in declared["metrics"]  # type: ignore[index]
        )
        for metric in metrics:
            _check(metric)
        headline, progress = str(declared["headline"]), tuple(map(str, declared["progress"]))  # type: ignore[index]
        return Metrics(headline=headline, metrics=metrics, progress=progress)
    except (TypeError, KeyError, AttributeError, ValueError):
        return UNDECLARED


def _check(metric: Metric) -> None:
    texts = (metric.name, metric.title, metric.unit, metric.baseline or "", metric.chart or "")
    if not all(isinstance(text, str) for text in texts) or metric.better not in ("lower", "higher", None):
        raise ValueError


def finite(value: object, largest: float = sys.float_info.max) -> float | None:
    """The value if it is a number, of `largest` size at most; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= largest else None


def short(value: float) -> str:
    """A number for people, with as many digits as say something: 0.000123, 3.210, 41.3, 19,043."""
    size = abs(value)
    if size >= 1e9 or 0 < size < 0.001:
        return f"{value:.3g}"
    if size >= 1000 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 20 else f"{value:.3f}"
