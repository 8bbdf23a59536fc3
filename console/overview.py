"""Runs as data: what `--json` prints of them, and what tells several of them apart."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from contracts import run_directory
from contracts.durations import spoken
from contracts.run_directory import State
from contracts.run_records import Unread
from jobs.runtime.monitoring import host_samples
from jobs.runtime.monitoring.host_samples import Finding, HostSamples
from jobs.runtime.monitoring.metric_definitions import COMMON_FIELDS, NO_METRICS, Metric, finite
from launch import pricing, runs
from launch.runs import Look, Run

ABOUT = (
    "job",
    "state",
    "framework",
    "platform",
    "hosts",
    "processes",
    "code",
    "started",
    "wall time",
    "goodput",
    "cost",
)
"""What is said of each run in a comparison before its settings and metrics."""


def overview(run: Run, state: State, progress: tuple[int, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """One run as `fab runs --json` prints it. progress: as `runs.progress` has it, where it is known already.

    metrics: the final value of each metric once the run has a result, until then the latest one; values that are not
    finite are left out. headline: the metric that says how good a run of this job is, None where it is not known yet.
    Times are in UTC, as in ISO 8601. cost_usd: so far, at list prices; billed_usd: of that, what no grant covers;
    None where it is not known. wall_s: of all attempts, once the latest one has a result. goodput: the share of the
    time of all attempts that became progress that lasted, where that is known, and the seconds of each category of
    `contracts.goodput`.
    """
    step, latest = progress or runs.progress(run)
    measured = values(run, latest)
    headline = run.metrics.get(run.metrics.headline)
    result, cost = run.current_result() or {}, pricing.run_cost(run)
    spent = run.goodput
    return {
        "run": run.run_id,
        "name": run.described.get("name"),
        "job": run.what,
        "framework": run.described.get("stack"),
        "state": state,
        "step": step,
        "total_steps": run.total_steps,
        "attempt": run.attempt,
        "created": run.described["created"],
        "started": run.latest_attempt["started"],
        "platform": run.described.get("platform"),
        "target": run.described.get("target"),
        "hosts": run.machines,
        "processes": run.processes,
        "git_commit": (run.described.get("code") or {}).get("git_commit"),
        "directory": run.directory.url,
        "headline": {
            "name": headline.name,
            "value": measured[headline.name],
            "text": headline.text(measured[headline.name]),
        }
        if headline.name in measured
        else None,
        "metrics": measured,
        "wall_s": run.total_wall_s if result else None,
        "goodput": {"share": spent.share, "text": spent.text(), "seconds": spent.seconds} if spent else None,
        "cost_usd": cost.usd if cost else None,
        "billed_usd": cost.billed_usd if cost else None,
        "cost": cost.text() if cost else None,
        "max_usd": finite(run.described.get("max_usd")),
        "error": result.get("error"),
        "reason": result.get("reason"),
        "problems": list(run.problems),
    }


def values(run: Run, latest: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a run by name: those of its result, else the `latest` ones of metrics.jsonl."""
    everything = {**latest, **(run.current_result() or {})}
    return {
        name: value
        for name, number in everything.items()
        if name not in NO_METRICS | COMMON_FIELDS and (value := finite(number)) is not None
    }


def samples(run: Run, unread: Unread | None = None) -> list[HostSamples | None]:
    """What each host's sampler has read; None where it has read nothing yet. unread: is told what cannot be read."""
    names = [run_directory.host_samples(index) for index in range(run.processes)]
    return [host_samples.read(content) for content in run.directory.read_objects(names, unread)]


def findings(
    run: Run,
    state: State,
    sampled: Sequence[HostSamples | None],
    lines: Sequence[Mapping[str, Any]] | None = None,
) -> list[Finding]:
    """What is wrong with a run's input, devices and memory: of the last minutes while it is active.

    lines: the last ones of metrics.jsonl, where they have been read.
    """
    if lines is None:
        lines, _ = run.directory.read_new_metrics(-runs.METRICS_TAIL_BYTES)
    recent_s = time.time() - host_samples.RECENT_S if state in run_directory.ACTIVE else 0.0
    present = [host for host in sampled if host is not None]
    return host_samples.findings(present, lines, since_s=max(run.started_s, recent_s))


def hosts(run: Run, look: Look, sampled: Sequence[HostSamples | None] = ()) -> list[dict[str, Any]]:
    """Each process of the latest attempt: what its agent, its heartbeat and its host's sampler say.

    What is not known is None. sampled: the last values of `jobs.runtime.monitoring.host_samples.COLUMNS`, while
    they are fresh.
    """
    entries = {process["process_id"]: process for process in look.processes}
    silent, are_pods = {error.host for error in look.errors}, run.begins_again
    if are_pods and silent:  # their cluster answers for all of them
        silent = {host["name"] for host in run.described["hosts"]}
    unlisted = "ended" if are_pods else "gone"  # pods end with their run
    rows = []
    for host, beat in zip(run.described["hosts"], run.current(), strict=False):
        entry, beat = entries.get(host["index"], {}), beat or {}
        own = next((samples for samples in sampled if samples and samples.host == host["index"]), None)
        rows.append(
            {
                "host": host["name"],
                "process": entry.get("state", "no answer" if host["name"] in silent else unlisted),
                "pid": entry.get("pid"),
                "state": beat.get("state"),
                "step": beat.get("step"),
                "heartbeat_age_s": round(time.time() - beat["time"], 1) if beat else None,
                "message": beat.get("message") or (entry.get("reason") if are_pods else None),
                "samples": None if own is None else dict(own.fresh(time.time())) or None,
                "capacity": None if own is None else dict(own.capacity),
            }
        )
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What one line of a comparison says of each run, in the runs' order; None where a run does not have it.

    best: the index of the best of them, where one way is better and they differ. metric: what a line of metrics is of.
    """

    name: str
    values: tuple[Any, ...]
    best: int | None = None
    metric: Metric | None = None

    def texts(self) -> list[str]:
        """The values as a comparison shows them."""
        if self.name == "wall time":
            return ["-" if value is None else spoken(value) for value in self.values]
        return [cell(value, self.metric) for value in self.values]


def cell(value: Any, metric: Metric | None = None) -> str:
    """A value as text; "-" where there is none."""
    if value is None:
        return "-"
    if metric is not None:
        return metric.text(value)
    return value if isinstance(value, str) else json.dumps(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs side by side. settings: only those that differ. metrics: the headline first."""

    about: tuple[Row, ...]
    settings: tuple[Row, ...]
    metrics: tuple[Row, ...]


def compare(runs_compared: Sequence[Run], overviews: Sequence[Mapping[str, Any]]) -> Comparison:
    """Put runs side by side. overviews: of `overview`, in the same order."""
    about, settings = [_about(item) for item in overviews], [run_settings(run) for run in runs_compared]
    names = dict.fromkeys(name for item in settings for name in item)
    rows = [Row(name=name, values=tuple(item.get(name) for item in settings)) for name in names]
    measured: list[Mapping[str, float]] = [item["metrics"] for item in overviews]
    definitions = {
        metric.name: metric
        for run, metrics in zip(runs_compared, measured, strict=True)
        for metric in run.metrics.ordered(metrics)
    }
    return Comparison(
        about=tuple(Row(name=name, values=tuple(item[name] for item in about)) for name in ABOUT),
        settings=tuple(row for row in rows if any(value != row.values[0] for value in row.values)),
        metrics=tuple(
            _ranked(metric, tuple(metrics.get(name) for metrics in measured))
            for name, metric in definitions.items()
        ),
    )


def _about(overview: Mapping[str, Any]) -> dict[str, Any]:
    commit = overview["git_commit"]
    spent = overview["goodput"]
    return {
        **overview,
        "code": commit and commit[:12],
        "wall time": overview["wall_s"],
        "goodput": spent and spent["text"],
    }


def run_settings(run: Run) -> dict[str, Any]:
    """A run's options as they were decided, or as they were given where it has not come so far."""
    decided = run.settings or {}
    if run.is_own_command:
        return {"command": " ".join(map(str, run.described["args"])), **decided}
    return {**(run.described.get("config") or {}), **decided}


def _ranked(metric: Metric, values: tuple[float | None, ...]) -> Row:
    measured, best = [value for value in values if value is not None], None
    if metric.better is not None and len({*measured}) > 1:
        best = values.index((min if metric.better == "lower" else max)(measured))
    return Row(name=metric.name, values=values, best=best, metric=metric)
