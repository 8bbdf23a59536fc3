"""report.html: a run on one page, from its directory only: what came out, how it got there, what it ran on.

The page is read long after the run, by people who were not there, and of runs that went wrong in ways nobody
foresaw. So whatever is missing or of the wrong kind is left out or shown as it is; it never stops the page.
"""

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from contracts.durations import spoken
from contracts.run_costs import cost
from contracts.run_directory import RESULT, RUN, SAMPLES, SETTINGS, RunDirectory, heartbeat, host_samples, log
from contracts.run_records import Unread, without_retaken
from jobs.runtime.bucket_files import files_of
from jobs.runtime.host_samples import HostSamples, findings, read
from jobs.runtime.metric_definitions import NO_METRICS, Metrics, of_run
from jobs.runtime.report.chart import capitalised, charts, curve, draw, host_charts
from jobs.runtime.report.page import Json, escape, mapping, moment, number, page, rows, text
from jobs.runtime.report.samples import samples

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
    samples_file: str | None = None,
    hosts: Sequence[HostSamples] = (),
    unread: Sequence[str] = (),
) -> str:
    """Make the page from run.json, the lines of metrics.jsonl, result.json (None before the end) and the heartbeats.

    The end of `log_tail`, the failed host's log, is shown; `run` may have `versions` (name → version) and `settings`
    (the options as they were decided). samples_file: the text of samples.json; None where there is none.
    hosts: what their samplers have read. unread: what could not be read.
    """
    result = result or {}
    metrics, retaken = without_retaken(metrics, len(rows(run.get("attempts"))))
    latest = _latest(result, metrics)
    first, *others = (draw(chart) for chart in charts(run, metrics, latest))
    of_hosts = "".join(draw(chart) for chart in host_charts(hosts))
    body = "".join(
        (
            _header(run, metrics, result, heartbeats, latest),
            _tiles(run, metrics, result, latest),
            _failure(run, result, heartbeats, log_tail),
            _warnings(result, heartbeats),
            _unread(unread),
            _findings(hosts, metrics),
            "<h2>Curves</h2>",
            *(f"<p>{escape(each)}</p>" for each in retaken),
            f'<div class="wide">{first}</div><div class="small">{"".join(others)}</div>',
            samples(samples_file),
            f'<h2>Hosts</h2><div class="small">{of_hosts}</div>' if of_hosts else "",
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
    unread = Unread()
    run, settings, result = directory.read_objects([RUN, SETTINGS, RESULT], unread)
    if run is None:
        raise FileNotFoundError(
            f"{directory.path(RUN)}: there is no such file, or it holds no JSON object; a run's directory "
            "has one from before its start; give the directory of a run"
        )
    run = {**run, "settings": settings or {}}
    attempts = rows(run.get("attempts"))
    processes = [number(attempt.get("processes")) or 0.0 for attempt in attempts]
    hosts = min(4096, int(max([len(rows(run.get("hosts"))), *processes])))
    beats = directory.read_objects([heartbeat(index) for index in range(hosts)], unread)
    heartbeats = [beat for beat in beats if beat is not None]
    failed = _failed_host(result or {}, heartbeats)
    attempt = number((result or {}).get("attempt"))
    if attempt is None:
        attempt = float(max(0, len(attempts) - 1))
    texts: list[str | None] = []
    for name in (log(int(attempt), failed) if failed is not None else None, SAMPLES):
        try:
            texts.append(None if name is None else directory.read_text(name))
        except OSError as error:
            unread.add(f"{name}: {error.strerror or error}")
            texts.append(None)
    written, samples_file = texts
    metrics, _ = directory.read_new_metrics(0, unread)
    sampled = read_hosts(directory, hosts, unread)
    log_tail = (written or "").splitlines()
    return render(run, metrics, result, heartbeats, log_tail, samples_file, sampled, unread.texts())


def read_hosts(directory: RunDirectory, count: int, unread: Unread | None = None) -> list[HostSamples]:
    """What the samplers of a run's hosts have read, of those that have. unread: is told what cannot be read."""
    found = directory.read_objects([host_samples(index) for index in range(count)], unread)
    return [host for each in found if (host := read(each)) is not None]


def _header(
    run: Json,
    metrics: Sequence[Json],
    result: Json,
    heartbeats: Sequence[Json],
    latest: Mapping[str, float],
) -> str:
    outcome = text(result.get("outcome") or "no result yet")
    colour, meaning = OUTCOMES.get(outcome, ("plain", ""))
    if outcome == "stopped" and result.get("reason"):
        meaning = f"The run was stopped because {text(result['reason'])}."
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
        "Wall time": None
        if (wall_s := number(result.get("wall_s"))) is None or wall_s < 0
        else spoken(wall_s),
        "Steps": None if steps is None else f"{steps:,.0f}{of}",
        "Outliers": f"{outliers:,.0f} <small>steps</small>" if outliers else None,
        "Cost": spent(run, number(result.get("wall_s"))),
        "Hosts": str(len(rows(run.get("hosts"))) or "") or None,
    }
    values |= {name: value for name, value in own.items() if value}
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in list(values.items())[:_MOST_TILES]
    )
    return f'<dl class="tiles">{tiles}</dl>' if tiles else ""


def spent(run: Json, wall_s: float | None) -> str | None:
    """What all attempts cost, the last of which took `wall_s`; None where it is not known."""
    found = cost(rows(run.get("attempts")), wall_s)
    if found is None:
        return None
    told, unit, rest = found.text().partition(" (" if found.text().startswith("free") else " USD")
    return f"{told}{unit.rstrip(' (')} <small>{rest.strip(' )')}</small>"


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


def _unread(unread: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(each)}</li>" for each in unread[:_MOST_WARNINGS])
    return f"<h2>What could not be read</h2><ul>{items}</ul>" if items else ""


def _findings(hosts: Sequence[HostSamples], metrics: Sequence[Json]) -> str:
    items = "".join(f"<li>{escape(capitalised(each.text))}</li>" for each in findings(hosts, metrics))
    return f"<h2>What holds it up</h2><ul>{items}</ul>" if items else ""


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


MEANINGS = {
    "start": "joining, reading the data, compiling, the first step",
    "compute": "handing steps to the devices and waiting for their results",
    "input_wait": "making a batch while the devices had nothing to do",
    "evaluation": "evaluations on the way and at the end",
    "checkpoint": "held up by a checkpoint; most of it is written beside the steps",
    "logging": "writing metrics",
    "profile": "writing a trace",
    "finish": "what follows the last step: the export, a last look",
}
"""What each part of jobs.runtime.metrics is, in a few words."""


def time_split(result: Json) -> str:
    """The parts in order of their size, with their shares; nothing where the run has not told them."""
    parts = {
        name: seconds
        for name, value in mapping(result.get("time_s")).items()
        if (seconds := number(value)) is not None and seconds >= 0
    }
    total_s = sum(parts.values())
    if not total_s:
        return ""
    lines = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{seconds:,.1f} s</td><td>{seconds / total_s:.1%}</td>"
        f"<td>{escape(MEANINGS.get(name, ''))}</td></tr>"
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1])[:_MOST_ROWS]
    )
    return (
        '<h2>Where the time went</h2><div class="scroll"><table>'
        f"<tr><th>part</th><th>time</th><th>share</th><th>what it is</th></tr>{lines}</table></div>"
    )


_MOST_FILLINGS = 20
_MOST_GUESSES = 5


def fillings(result: Json) -> str:
    """One row a sentence: the true word marked in its text, beside it the guesses with their probabilities."""
    lines = [_filling(each) for each in rows(result.get("fillings"))[:_MOST_FILLINGS]]
    if not lines:
        return ""
    told = "Held-out sentences with the marked word hidden, and what the model would write in its place."
    table = f"<table><tr><th>text</th><th>guesses</th></tr>{''.join(lines)}</table>"
    return f'<h2>What it has learned</h2><p>{told}</p><div class="scroll">{table}</div>'


def quoted(token: str) -> str:
    """A prediction as people read it: a comma, a dash, a blank or nothing stands between quotation marks."""
    return token if any(character.isalnum() for character in token) else f"“{token}”"


def _filling(each: Json) -> str:
    truth, guesses = text(each.get("truth", "")), each.get("guesses")
    pairs = (
        [pair for pair in guesses if isinstance(pair, list) and len(pair) == 2]
        if isinstance(guesses, list)
        else []
    )
    shown = " · ".join(
        f"{'<b>' if text(word) == truth else ''}{escape(quoted(text(word)))}{'</b>' if text(word) == truth else ''} "
        f"{100 * share:.0f} %"
        for word, value in pairs[:_MOST_GUESSES]
        if (share := number(value)) is not None
    )
    before, after = (escape(each.get(side, "")) for side in ("before", "after"))
    return f"<tr><td>{before} <mark>{escape(truth)}</mark>{after}</td><td>{shown}</td></tr>"


_MOST_ROWS = 64
_LONGEST_CELL = 200
_MOST_OPTIONS = 200


def facts(run: Json) -> str:
    """What run.json says of the job, its code and its options."""
    code, versions = mapping(run.get("code")), mapping(run.get("versions"))
    commit = text(code.get("git_commit") or "")
    args = run.get("args")
    if isinstance(args, list | tuple):
        args = shlex.join(text(arg) for arg in args) or "none"
    values = {
        "Job": run.get("job"),
        "Arguments": args,
        "Run": run.get("run_id"),
        "Created": run.get("created"),
        "Target": run.get("target"),
        "Slice": slice_name(run),
        "Platform": run.get("platform"),
        "Framework stack": run.get("stack"),
        "Runtime": run.get("runtime"),
        "Image": run.get("image"),
        "Code bundle": code.get("bundle"),
        "Commit": commit + (" with local changes" if code.get("git_dirty") else "") or None,
        "Versions": ", ".join(f"{name} {text(value)}" for name, value in versions.items()) or None,
        "Started in": run.get("cwd"),
    }
    shown = [(name, value) for name, value in values.items() if value is not None]
    terms = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in shown)
    config = list({**mapping(run.get("config")), **mapping(run.get("settings"))}.items())
    options = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape('none' if value is None else value)}</dd></div>"
        for name, value in config[:_MOST_OPTIONS]
    )
    return (
        f'<h2>What ran</h2><dl class="facts">{terms}</dl>'
        f"{f'<h3>Options</h3><dl class="options">{options}</dl>' if options else ''}"
    )


def attempts_table(run: Json, result: Json) -> str:
    """One row an attempt; the last one has the outcome of the result until run.json has it."""
    table = []
    for attempt in rows(run.get("attempts")):
        outcome = attempt.get("outcome")
        if outcome is None and result and attempt.get("attempt") == result.get("attempt"):
            outcome = result.get("outcome")
        cells = [attempt.get(key) for key in ("attempt", "started", "processes", "coordinator")]
        table.append([*cells, outcome])
    return _table("Attempts", ("attempt", "started", "processes", "coordinator", "outcome"), table)


def hosts_table(run: Json, heartbeats: Sequence[Json]) -> str:
    """One row a host, with the last heartbeat of its process."""
    beats = {beat.get("rank"): beat for beat in heartbeats if isinstance(beat.get("rank"), int)}
    hosts = dict(enumerate(rows(run.get("hosts"))))
    table = []
    for rank in sorted({*hosts, *(rank for rank in beats if isinstance(rank, int))}):
        host, beat = hosts.get(rank, {}), beats.get(rank, {})
        seen = moment(beat.get("time"))
        cells = [rank, host.get("name"), host.get("address"), beat.get("state"), beat.get("step")]
        table.append([*cells, seen and f"{seen:%Y-%m-%d %H:%M:%S} UTC", beat.get("message")])
    head = ("host", "name", "address", "last state", "step", "last heartbeat", "message")
    return _table("Hosts", head, table)


def _table(title: str, head: Sequence[str], table: Sequence[Sequence[object]]) -> str:
    if not table:
        return ""
    used = [column for column in range(len(head)) if any(row[column] is not None for row in table)]
    lines = "".join(
        f"<tr>{''.join(f'<td>{_cell(row[column])}</td>' for column in used)}</tr>"
        for row in table[:_MOST_ROWS]
    )
    more = f"<p>and {len(table) - _MOST_ROWS} more in run.json</p>" if len(table) > _MOST_ROWS else ""
    top = "".join(f"<th>{head[column]}</th>" for column in used)
    return f'<h2>{title}</h2><div class="scroll"><table><tr>{top}</tr>{lines}</table></div>{more}'


def slice_name(run: Json) -> str | None:
    """The slice's name with its accelerator type; None where run.json has neither."""
    place = mapping(run.get("slice"))
    names = dict.fromkeys(text(place[key]) for key in ("name", "accelerator_type") if place.get(key))
    return " · ".join(names) or None


def host_name(run: Json, rank: int) -> str:
    """Host `rank` in words, with its name and address where run.json has them."""
    hosts = rows(run.get("hosts"))
    host = hosts[rank] if rank < len(hosts) else {}
    known = ", ".join(text(host[key]) for key in ("name", "address") if host.get(key))
    return f"Host {rank} ({known})" if known else f"Host {rank}"


def _cell(value: object) -> str:
    return "—" if value is None else escape(value, longest=_LONGEST_CELL)
