"""report.html: a run on one page, from its directory alone: what came out, how it got there, what it ran on.

The page is read long after the run, by people who were not there, and of runs that went wrong in ways nobody
foresaw. So whatever is missing or of the wrong kind is left out or shown as it is; it never stops the page.
"""

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from contracts.run_directory import RESULT, RUN, SETTINGS, RunDirectory, heartbeat, log
from jobs.runtime.bucket_files import files_of
from jobs.runtime.metric_definitions import NO_METRICS, Metrics, of_run
from jobs.runtime.report.chart import draw
from jobs.runtime.report.curves import capitalised, charts, curve
from jobs.runtime.report.facts import attempts_table, facts, host_name, hosts_table, slice_name
from jobs.runtime.report.fields import Json, mapping, number, rows, text
from jobs.runtime.report.fillings import fillings
from jobs.runtime.report.page import escape, page
from jobs.runtime.report.time_split import time_split

OUTCOMES = {
    "done": ("good", "The job ran to its end."),
    "failed": ("bad", "The job ended with an error."),
    "stopped": ("warn", "The run was stopped on request before its last step."),
    "preempted": ("warn", "The machines were taken back before the last step."),
    "hung": ("bad", "The run made no progress within the time limit and was ended."),
}
"""Outcome → its colour and what it means."""

_LOG_LINES = 40
_LONGEST_ERROR = 5000
_MOST_TILES = 24
_MOST_WARNINGS = 50


def render(
    run: Json,
    metrics: Sequence[Json],
    result: Json | None,
    heartbeats: Sequence[Json],
    log_tail: Sequence[str] = (),
) -> str:
    """The page, from run.json, the lines of metrics.jsonl, result.json (None before the end), the heartbeats.

    The end of `log_tail`, the failed host's log, is shown; `run` may have `versions` (name → version) and `settings`
    (the options as they were decided).
    """
    result = result or {}
    latest = _latest(result, metrics)
    first, *others = (draw(chart) for chart in charts(run, metrics, latest))
    body = "".join(
        (
            _header(run, metrics, result, heartbeats, latest),
            _tiles(run, metrics, result, latest),
            _failure(run, result, heartbeats, log_tail),
            _warnings(result, heartbeats),
            f'<h2>Curves</h2><div class="wide">{first}</div><div class="small">{"".join(others)}</div>',
            time_split(result),
            fillings(result),
            facts(run),
            attempts_table(run, result),
            hosts_table(run, heartbeats),
        )
    )
    outcome = text(result.get("outcome") or "no result yet")
    return page(f"{_title(run)}: {outcome}", f"<main>{body}</main>")


def read_and_render(run_dir: str | Path) -> str:
    """The page of the run in this directory (a path, or a URL such as gs://… as text).

    Raises:
        FileNotFoundError: there is no run.json, so this is no run's directory.
    """
    directory = RunDirectory(str(run_dir), files_of(str(run_dir)))
    run = directory.read_json(RUN)
    if run is None:
        raise FileNotFoundError(
            f"{directory.path(RUN)}: there is no such file, or it holds no JSON object; a run's directory "
            "has one from before its start; give the directory of a run"
        )
    run = {**run, "settings": directory.read_json(SETTINGS) or {}}
    result = directory.read_json(RESULT)
    attempts = rows(run.get("attempts"))
    processes = [number(attempt.get("processes")) or 0.0 for attempt in attempts]
    hosts = min(4096, int(max([len(rows(run.get("hosts"))), *processes])))
    heartbeats = [beat for i in range(hosts) if (beat := directory.read_json(heartbeat(i))) is not None]
    failed = _failed_host(result or {}, heartbeats)
    attempt = number((result or {}).get("attempt"))
    if attempt is None:
        attempt = float(max(0, len(attempts) - 1))
    written = directory.read_text(log(int(attempt), failed)) if failed is not None else None
    return render(run, directory.read_metrics(), result, heartbeats, (written or "").splitlines())


def _header(
    run: Json,
    metrics: Sequence[Json],
    result: Json,
    heartbeats: Sequence[Json],
    latest: Mapping[str, float],
) -> str:
    outcome = text(result.get("outcome") or "no result yet")
    colour, meaning = OUTCOMES.get(outcome, ("plain", ""))
    if not result and heartbeats:
        states = Counter(text(beat.get("state")) for beat in heartbeats)
        meaning = f"Hosts when this was made: {', '.join(f'{n} {state}' for state, n in states.items())}."
    where = " · ".join(
        text(part) for part in (run.get("job"), slice_name(run), run.get("platform")) if part is not None
    )
    name = f"<p>{escape(run['run_id'])}</p>" if run.get("name") and run.get("run_id") else ""
    return (
        f"<header><p>{escape(where)}</p><h1>{escape(_title(run))}</h1>{name}"
        f'<p class="lede">{_headline(of_run(run), metrics, latest)}</p>'
        f'<p class="end"><span class="outcome {colour}">{escape(outcome)}</span>{escape(meaning)}</p>'
        "</header>"
    )


def _headline(definitions: Metrics, metrics: Sequence[Json], latest: Mapping[str, float]) -> str:
    headline = definitions.get(definitions.headline)
    if headline.name in latest:
        told, rest = _halves(definitions.compared(headline, latest))
        at = "" if headline.is_evaluation else _at(headline.name, metrics)
        return f"{escape(capitalised(headline.title))} <b>{escape(told)}</b>{escape(rest)}{at}"
    for name in definitions.progress:
        if name in latest:
            metric = definitions.get(name)
            title, value = escape(capitalised(metric.title)), escape(metric.text(latest[name]))
            return f"{title} <b>{value}</b>{_at(name, metrics)}; no {escape(headline.title)} recorded"
    return f"No {escape(headline.title)} recorded yet."


def _halves(compared: str) -> tuple[str, str]:
    value, comma, rest = compared.partition(", ")
    return value, comma + rest


def _at(name: str, metrics: Sequence[Json]) -> str:
    points = [point for point in curve(metrics, name) if math.isfinite(point[1])]
    return f" at step {points[-1][0]:,.0f}" if points else ""


def _tiles(run: Json, metrics: Sequence[Json], result: Json, latest: Mapping[str, float]) -> str:
    definitions = of_run(run)
    shown = [name for name in latest if number(result.get(name)) is not None and name not in NO_METRICS]
    shown += [metric.name for metric in definitions.metrics if metric.is_evaluation and metric.name in latest]
    shown += [name for name in definitions.progress if name in latest]
    values = {
        escape(capitalised(metric.title)): escape(metric.text(latest[metric.name]))
        for metric in definitions.told(dict.fromkeys(shown))
        if metric.name != definitions.headline
    }
    values |= _best(definitions, metrics, latest)
    utilisations = _finite(metrics, "mfu")
    steps = number(result.get("steps"))
    if steps is None:
        steps = max(
            (step for line in metrics if (step := number(line.get("step"))) is not None), default=None
        )
    wanted = number(mapping(run.get("config")).get("steps"))
    of = f" <small>of {wanted:,.0f}</small>" if wanted is not None and wanted != steps else ""
    outliers = number(result.get("outliers"))
    own = {
        "MFU": f"{100 * statistics.median(utilisations):.1f} %" if utilisations else None,
        "Wall time": _duration(number(result.get("wall_s"))),
        "Steps": None if steps is None else f"{steps:,.0f}{of}",
        "Outliers": f"{outliers:,.0f} <small>steps</small>" if outliers else None,
        "Hosts": str(len(rows(run.get("hosts"))) or "") or None,
    }
    values |= {name: value for name, value in own.items() if value}
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in list(values.items())[:_MOST_TILES]
    )
    return f'<dl class="tiles">{tiles}</dl>' if tiles else ""


def _best(definitions: Metrics, metrics: Sequence[Json], latest: Mapping[str, float]) -> dict[str, str]:
    """The headline's best value of those on the way, where it is not the last one."""
    headline = definitions.get(definitions.headline)
    points = [point for point in curve(metrics, headline.name) if math.isfinite(point[1])]
    if headline.better is None or not headline.is_evaluation or not points:
        return {}
    choose = min if headline.better == "lower" else max
    step, value = choose(points, key=lambda point: point[1])
    if value == latest.get(headline.name) or step == points[-1][0]:
        return {}
    at = f"<small>at step {step:,.0f}</small>"
    return {f"Best {escape(headline.title)}": f"{escape(headline.text(value))} {at}"}


def _warnings(result: Json, heartbeats: Sequence[Json]) -> str:
    """What the run's processes have warned of: it went on all the same."""
    said = [result.get("warnings"), *(beat.get("warnings") for beat in heartbeats)]
    found = dict.fromkeys(text(each) for some in said if isinstance(some, list | tuple) for each in some)
    items = "".join(f"<li>{escape(each)}</li>" for each in list(found)[:_MOST_WARNINGS])
    return f"<h2>Warnings</h2><ul>{items}</ul>" if items else ""


def _failure(run: Json, result: Json, heartbeats: Sequence[Json], log_tail: Sequence[str]) -> str:
    outcome = result.get("outcome")
    failed = _failed_host(result, heartbeats)
    parts = []
    if outcome != "done" and (outcome in ("failed", "hung") or failed is not None or result.get("error")):
        who = f"{host_name(run, failed)} failed first." if failed is not None else ""
        said = [b.get("message") for b in heartbeats if b.get("state") == "failed" and b.get("message")]
        error = result.get("error") or (said[0] if said else None)
        parts = [
            "<h2>What went wrong</h2>",
            f"<p>{escape(who)}</p>" if who else "",
            f"<pre>{escape(error, longest=_LONGEST_ERROR)}</pre>"
            if error
            else "<p>No error was recorded.</p>",
        ]
        if log_tail:
            lines = "\n".join(escape(line) for line in log_tail[-_LOG_LINES:])
            parts.append(f"<h3>The last lines of its log</h3><pre>{lines}</pre>")
    if result and outcome != "done" and run.get("run_id"):
        command = f"fab train --resume {shlex.quote(text(run['run_id']))}"
        parts.append(f"<h3>To go on from the last checkpoint</h3><pre>{escape(command)}</pre>")
    return f'<section class="failure">{"".join(parts)}</section>' if parts else ""


def _failed_host(result: Json, heartbeats: Sequence[Json]) -> int | None:
    """The host that the result names; without one, the first whose heartbeat says so."""
    said = [beat.get("rank") for beat in heartbeats if beat.get("state") == "failed"]
    named = (number(value) for value in (result.get("failed_host"), *said))
    return next((int(host) for host in named if host is not None and host >= 0), None)


def _title(run: Json) -> str:
    return text(run.get("name") or run.get("run_id") or "a run without a name")


def _latest(result: Json, metrics: Sequence[Json]) -> dict[str, float]:
    """Of each number its final value: what the result says, else the last finite value on a metrics line."""
    fields = [item for line in [*metrics, result] for item in line.items()]
    return {name: known for name, value in fields if (known := number(value)) is not None}


def _finite(metrics: Sequence[Json], key: str) -> list[float]:
    return [value for line in metrics if (value := number(line.get(key))) is not None]


def _duration(seconds: float | None) -> str | None:
    if seconds is None or seconds < 0:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours:,} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
