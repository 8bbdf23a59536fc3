"""Sweeps: a family of runs that differ in some options, and what came of them side by side."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from console import overview
from contracts.durations import spoken
from contracts.errors import RequestError
from jobs.runtime.monitoring.metric_definitions import Metric
from launch import jobs, runs
from launch.control import control_documents
from launch.control.store import Store
from launch.output import printable, say, table, terminal
from launch.request.run_request import Request
from launch.runs import Run
from launch.targets import Target

SEED = "seed"
MOST_MEMBERS = 1000

Member = Mapping[str, str]
"""What a run of a sweep has for each option of its grid."""


def members(grid: Sequence[str], seeds: int | None) -> list[Member]:
    """Return the options of each member: every combination of the grid's values, with every seed.

    grid: as it is typed, "learning-rate=1e-4,3e-4" for each option. seeds: how many, from 0 on; None: no option --seed.

    Raises:
        RequestError: an option has no values, or is there twice, or these are too many runs.
    """
    axes: dict[str, list[str]] = {}
    for text in grid:
        name, equals, listed = text.partition("=")
        name = name.strip().removeprefix("--").replace("_", "-")
        values = [value.strip() for value in listed.split(",")]
        if not (name and equals and all(values)):
            raise RequestError(
                f"--grid {text}: write it as OPTION=VALUE,VALUE, such as learning-rate=1e-4,3e-4"
            )
        if name in axes or len({*values}) < len(values):
            raise RequestError(f"--grid {text}: has an option or a value twice; name each once")
        axes[name] = values
    if seeds is not None and SEED in axes:
        raise RequestError(f"--seeds {seeds}: --grid names the seeds already; leave one of them out")
    count = math.prod(map(len, axes.values())) * (1 if seeds is None else seeds)
    if count > MOST_MEMBERS:
        raise RequestError(f"--grid: makes {count} runs, and a sweep has at most {MOST_MEMBERS}")
    if seeds is not None:
        axes[SEED] = [str(seed) for seed in range(seeds)]
    if not axes:
        raise RequestError(
            "--grid: say what the runs differ in, such as --grid learning-rate=1e-4,3e-4, or --seeds 3"
        )
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def requests(template: Request, name: str, grid: Sequence[Member]) -> Iterator[Request]:
    """Yield the request of each member. The options of an own command are added to its words.

    Raises:
        RequestError: an option of the grid is given for all members too.
    """
    own_words = template.command.config.words if template.command else template.arguments
    option_names = {word.partition("=")[0] for word in own_words}
    if twice := [option for option in grid[0] if f"--{option}" in option_names]:
        raise RequestError(f"--{twice[0]}: is an option of the grid; leave it out after --")
    switches = () if template.command else jobs.find(template.job, template.framework).options()
    for index, member in enumerate(grid, start=1):
        more = tuple(
            word for option, value in member.items() for word in _option_arguments(option, value, switches)
        )
        command = template.command and dataclasses.replace(
            template.command, config=dataclasses.replace(template.command.config, words=(*own_words, *more))
        )
        yield dataclasses.replace(
            template,
            command=command,
            arguments=template.arguments if command else (*own_words, *more),
            name=f"{name}-{index}",
            sweep={"name": name, "options": dict(member)},
        )


def _option_arguments(option: str, value: str, switches: Sequence[str]) -> tuple[str, ...]:
    if f"--no-{option}" in switches and value in ("true", "false"):
        return (f"--{option}" if value == "true" else f"--no-{option}",)
    return f"--{option}", value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Members of a sweep that differ in their seed alone.

    options: of the grid. values: the headline metric of each run that is done. states: how many members are in which.
    wall_s: of each run that is done. best: the run with the best value.
    """

    options: Member
    values: tuple[float, ...]
    states: Mapping[str, int]
    wall_s: tuple[float, ...]
    best: str | None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None of fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberResult:
    """What is known of one member."""

    options: Member
    state: str
    overview: Mapping[str, Any] | None = None
    reason: str | None = None


def rows(results: Sequence[MemberResult], metric: Metric | None) -> list[Row]:
    """Return the members by their options, the best first; those that have no value last."""
    lower = -1 if metric is not None and metric.better == "higher" else 1
    groups: dict[tuple[tuple[str, str], ...], list[MemberResult]] = {}
    for member in results:
        key = tuple((name, value) for name, value in member.options.items() if name != SEED)
        groups.setdefault(key, []).append(member)
    listed = []
    for key, group in groups.items():
        done = [member.overview for member in group if member.overview is not None and member.state == "done"]
        measured = [run for run in done if metric is not None and metric.name in run["metrics"]]
        assert metric is not None or not measured
        ranked = sorted(measured, key=lambda run: lower * run["metrics"][metric.name]) if metric else []
        listed.append(
            Row(
                options=dict(key),
                values=tuple(run["metrics"][metric.name] for run in ranked) if metric else (),
                states={
                    state: sum(member.state == state for member in group)
                    for state in sorted({member.state for member in group})
                },
                wall_s=tuple(run["wall_s"] for run in done if run["wall_s"] is not None),
                best=ranked[0]["run"] if ranked else None,
            )
        )
    return sorted(listed, key=lambda row: (row.mean is None, lower * (row.mean or 0.0)))


def compare(target: Target, store: Store, name: str, *, as_json: bool) -> int:
    """Print what came of a sweep: a line for each combination, over its seeds.

    Raises:
        RequestError: there is no such sweep.
    """
    listing = runs.survey(target.runs)
    started = [run for run in reversed(listing.runs) if sweep_record(run).get("name") == name]
    submitted = [
        run
        for run in store.read().runs.values()
        if run.submission is not None and run.submission.sweep == name
    ]
    if not started and not submitted:
        raise RequestError(
            f"--sweep {name}: there is none, in {target.runs_url} or in the queue; `fab queue --all`"
        )
    look = target.backend.status(started)
    results = [_run_result(run, runs.state_by(run, look)) for run in started]
    started_ids = {run.run_id for run in started}
    results += [_waiting_result(run) for run in submitted if run.run_id not in started_ids]
    metric = next((run.metrics.get(run.metrics.headline) for run in started if run.metrics.headline), None)
    compared = rows(results, metric)
    if as_json:
        json_rows = [
            {**dataclasses.asdict(row), "mean": row.mean, "deviation": row.deviation} for row in compared
        ]
        overviews = [result.overview for result in results if result.overview]
        content = {"sweep": name, "metric": metric and metric.name, "rows": json_rows, "runs": overviews}
        print(json.dumps(content))
        return 0
    console = terminal()
    console.print(_table(compared, metric))
    failures = [
        f"{' '.join(f'{k}={v}' for k, v in result.options.items())} {result.state}: {result.reason}"
        for result in results
        if result.reason
    ]
    for line in (*runs.cannot_be_read(listing.unreadable), *failures):
        say(console)(printable(line))
    return 0


def _table(compared: Sequence[Row], metric: Metric | None) -> Table:
    options = list(dict.fromkeys(option for row in compared for option in row.options))
    drawn = table(*options, "runs", metric.title if metric else "measured", "wall time", "best run")
    for index, row in enumerate(compared):
        drawn.add_row(
            *(printable(row.options.get(option, "-")) for option in options),
            ", ".join(f"{count} {state}" for state, count in row.states.items()),
            _figure(row, metric) + ("  best" if index == 0 and row.values and len(compared) > 1 else ""),
            spoken(statistics.fmean(row.wall_s)) if row.wall_s else "-",
            row.best or "-",
        )
    return drawn


def _figure(row: Row, metric: Metric | None) -> str:
    if metric is None or row.mean is None:
        return "-"
    scale = 100 if metric.unit.startswith("%") else 1
    return metric.text(row.mean) + (f" ± {scale * row.deviation:.2g}" if row.deviation is not None else "")


def sweep_record(run: Run) -> Mapping[str, Any]:
    return run.described.get("sweep") or {}


def _run_result(run: Run, state: str) -> MemberResult:
    summary = overview.overview(run, state)  # type: ignore[arg-type]
    reason = summary["error"] if state not in ("done", "starting", "running", "saving") else None
    return MemberResult(options=sweep_record(run)["options"], state=state, overview=summary, reason=reason)


def _waiting_result(run: control_documents.Run) -> MemberResult:
    assert run.submission is not None
    options = run.submission.request["sweep"]["options"]
    state = run.end.outcome if run.end is not None else "waiting"
    return MemberResult(options=options, state=state, reason=run.reason or None)
