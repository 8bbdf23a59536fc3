"""report.html: a run on one page, from its directory alone: what came out, how it got there, what it ran on.

The page is read long after the run, by people who were not there, and of runs that went wrong in ways nobody
foresaw. So whatever is missing or of the wrong kind is left out or shown as it is; it never stops the page.
"""

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jobs.runtime.report.chart import draw
from jobs.runtime.report.curves import charts, curve
from jobs.runtime.report.facts import attempts_table, facts, host_name, hosts_table, slice_name
from jobs.runtime.report.fields import Json, mapping, number, rows, text
from jobs.runtime.report.fillings import fillings
from jobs.runtime.report.page import escape, page
from jobs.runtime.report.time_split import time_split
from jobs.runtime.run_directory import RESULT, RUN, RunDirectory, heartbeat, log

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


def render(
    run: Json,
    metrics: Sequence[Json],
    result: Json | None,
    heartbeats: Sequence[Json],
    log_tail: Sequence[str] = (),
) -> str:
    """The page, from run.json, the lines of metrics.jsonl, result.json (None before the end), the heartbeats.

    The end of `log_tail`, the failed host's log, is shown; `run` may have `versions` (name → version).
    """
    result = result or {}
    baseline = _latest("unigram_entropy", result, metrics)
    loss, *others = (draw(chart) for chart in charts(run, metrics, baseline))
    body = "".join(
        (
            _header(run, metrics, result, heartbeats, baseline),
            _tiles(run, metrics, result),
            _failure(run, result, heartbeats, log_tail),
            f'<h2>Curves</h2><div class="wide">{loss}</div><div class="small">{"".join(others)}</div>',
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
    directory = RunDirectory(str(run_dir))
    run = directory.read_json(RUN)
    if run is None:
        raise FileNotFoundError(
            f"{directory.path(RUN)}: there is no such file, or it holds no JSON object; a run's directory "
            "has one from before its start; give the directory of a run"
        )
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
    run: Json, metrics: Sequence[Json], result: Json, heartbeats: Sequence[Json], baseline: float | None
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
        f'<p class="lede">{_headline(metrics, result, baseline)}</p>'
        f'<p class="end"><span class="outcome {colour}">{escape(outcome)}</span>{escape(meaning)}</p>'
        "</header>"
    )


def _headline(metrics: Sequence[Json], result: Json, baseline: float | None) -> str:
    loss = _latest("eval_loss", result, metrics)
    if loss is None:
        training = [point for point in curve(metrics, "loss") if math.isfinite(point[1])]
        if not training:
            return "No loss recorded yet."
        step, value = training[-1]
        return f"Training loss <b>{_short(value)} nats</b> at step {step:,.0f}; no evaluation recorded"
    if baseline is None:
        return f"Evaluation loss <b>{_short(loss)} nats</b>"
    side = "below" if loss <= baseline else "above"
    return (
        f"Evaluation loss <b>{_short(loss)} nats</b>, {_short(abs(baseline - loss))} {side} "
        f"the unigram baseline of {_short(baseline)}"
    )


def _tiles(run: Json, metrics: Sequence[Json], result: Json) -> str:
    accuracy, steps = _latest("eval_accuracy", result, metrics), number(result.get("steps"))
    perplexity = number(result.get("pseudo_perplexity"))
    rates, utilisations = _finite(metrics, "tokens_per_s"), _finite(metrics, "mfu")
    rate = number(result.get("tokens_per_s"))
    if rate is None and rates:
        rate = statistics.median(rates)
    if steps is None:
        steps = max(
            (step for line in metrics if (step := number(line.get("step"))) is not None), default=None
        )
    wanted = number(mapping(run.get("config")).get("steps"))
    of = f" <small>of {wanted:,.0f}</small>" if wanted is not None and wanted != steps else ""
    values = {
        "Masked accuracy": None if accuracy is None else f"{100 * accuracy:.1f} %",
        "Pseudo-perplexity": None if perplexity is None else f"{perplexity:,.1f}",
        "Tokens/s": None if rate is None else f"{rate:,.0f}",
        "MFU": f"{100 * statistics.median(utilisations):.1f} %" if utilisations else None,
        "Wall time": _duration(number(result.get("wall_s"))),
        "Steps": None if steps is None else f"{steps:,.0f}{of}",
        "Hosts": str(len(rows(run.get("hosts"))) or "") or None,
    }
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in values.items() if value)
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


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


def _latest(key: str, result: Json, metrics: Sequence[Json]) -> float | None:
    """A final metric: what the result says, else the last finite value on a metrics line."""
    said = number(result.get(key))
    return said if said is not None else next(reversed(_finite(metrics, key)), None)


def _finite(metrics: Sequence[Json], key: str) -> list[float]:
    return [value for line in metrics if (value := number(line.get(key))) is not None]


def _short(value: float) -> str:
    return f"{value:.2f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"


def _duration(seconds: float | None) -> str | None:
    if seconds is None or seconds < 0:
        return None
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours:,} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
