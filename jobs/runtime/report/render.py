"""report.html: a run on one page, from its directory only: what came out, how it got there, what it ran on.

It is the page that the dashboard shows of a run, with its content in it. The content is made here: sections that
static/run_page.js draws. A section has a title and a kind (list, table, facts, matrix, pictures, log, failure); a cell
is a text, or a list of texts and [text, style] pairs.

What is missing is left out. Known fields have the kinds that `contracts.run_records` has checked.
"""

import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from contracts import goodput, run_records
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.goodput import cost
from contracts.run_directory import RESULT, RUN, SAMPLES, SETTINGS, RunDirectory, heartbeat, host_samples, log
from contracts.run_records import Unread, without_retaken
from jobs.runtime.monitoring.host_samples import HostSamples, findings, read
from jobs.runtime.monitoring.metric_definitions import NO_METRICS, Metrics, of_run
from jobs.runtime.report.curves import History, host_curves
from jobs.runtime.report.page import (
    Json,
    Section,
    clip,
    number,
    page,
    quoted,
    table,
    text,
)
from jobs.runtime.report.samples import samples
from jobs.runtime.storage.bucket_files import files_of

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
_LONGEST_UNIT = 8
_MOST_WARNINGS = 50
_LONGEST_CELL = 200
_MOST_OPTIONS = 200
_MOST_FILLINGS = 20
_MOST_GUESSES = 5
_MOST_POINTS = 600
_ALL_POINTS = 16_000
"""Of all curves: some 400 KB."""
_MOST_HOSTS_DRAWN = 8
_HOST_COLUMNS = ("cpu_pct", "memory_mib", "duty_pct", "tensorcore_pct", "hbm_mib")


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
    written = metrics
    metrics, _ = without_retaken(written, len(_attempts(run)))
    latest = _latest(result, metrics)
    content = {
        **_header(run, metrics, result, heartbeats, latest),
        "tiles": _tiles(run, metrics, result, latest),
        "before": [
            *_failure(run, result, heartbeats, log_tail),
            *_list("Warnings", _warnings(result, heartbeats)),
            *_list("What could not be read", unread),
            *_list("What holds it up", [capitalised(finding.text) for finding in findings(hosts, metrics)]),
        ],
        "curves": _curves(run, written, latest),
        "samples": samples(samples_file),
        "hosts": host_curves(hosts[:_MOST_HOSTS_DRAWN], columns=_HOST_COLUMNS),
        "after": [*about(run, result, heartbeats), *_options(run), *_hoststable(run, heartbeats)],
    }
    outcome = text(result.get("outcome") or "no result yet")
    return page(f"{_title(run)}: {outcome}", content)


def about(run: Json, result: Json, heartbeats: Sequence[Json | None]) -> list[Section]:
    """Sections about a run: where its time went, what a language model has learned, what ran, its attempts."""
    return [
        *_goodput(run, result, heartbeats),
        *_fillings(result),
        *_facts(run),
        *_attempts_table(run, result),
    ]


def read_and_render(
    run_dir: str, *, result: Json | None = None, ended: Json | None = None, hosts: int | None = None
) -> str:
    """The page of the run in this directory, a path or a URL.

    result, ended, hosts: where a process makes it at its end: the content of result.json, what all heartbeats will say,
    and the number of hosts; run.json may be missing then, as in a run by hand.

    Raises:
        FileNotFoundError: there is no run.json, so this is no run's directory.
        RequestError: it is none that this version can go by.
    """
    directory, unread = RunDirectory(run_dir, files_of(run_dir)), Unread()
    run, settings, written_result = directory.read_objects([RUN, SETTINGS, RESULT], unread)
    mistake = None if run is None else run_records.mistake(run, None)
    if result is not None and (run is None or mistake is not None):
        run = {"run_id": run_dir.rpartition("/")[2], "hosts": [], "attempts": []}
    elif run is None:
        raise FileNotFoundError(
            f"{directory.path(RUN)}: there is no such file, or it holds no JSON object; a run's directory "
            "has one from before its start; give the directory of a run"
        )
    elif mistake is not None:
        raise RequestError(mistake)
    run = {**run, "settings": settings or {}}
    result, problem = (result, None) if result else run_records.result(written_result or {}, RESULT)
    if hosts is None:
        hosts = max(len(run["hosts"]), *(attempt["processes"] for attempt in run["attempts"]))
    names = [heartbeat(index) for index in range(hosts)]
    beats = zip(names, directory.read_objects(names, unread), strict=True)
    checked = [run_records.heartbeat(beat, name) for name, beat in beats if beat is not None]
    heartbeats = [{**beat, **(ended or {})} for beat, _ in checked if beat is not None]
    for wrong in (problem, *(wrong for _, wrong in checked)):
        if wrong is not None:
            unread.add(wrong)
    failed = _failed_host(result, heartbeats)
    attempt = result.get("attempt", len(run["attempts"]) - 1)
    texts: list[str | None] = []
    for name in (log(attempt, failed) if failed is not None else None, SAMPLES):
        try:
            texts.append(None if name is None else directory.read_text(name))
        except OSError as error:
            unread.add(f"{name}: {error.strerror or error}")
            texts.append(None)
    written, samples_file = texts
    metrics, _ = directory.read_new_metrics(0, unread)
    documents = directory.read_objects([host_samples(index) for index in range(hosts)], unread)
    sampled = [host for document in documents if (host := read(document)) is not None]
    log_tail = (written or "").splitlines()
    return render(run, metrics, result, heartbeats, log_tail, samples_file, sampled, unread.texts())


def _curves(run: Json, metrics: Sequence[Json], latest: Mapping[str, float]) -> Json:
    """Axis to curves, each of so many points that all together stay small."""
    history = History(lambda _offset, _limit: None)
    history.add({name: number(value) for name, value in line.items()} for line in metrics)
    definitions, attempts = of_run(run), _attempts(run)
    starts_s = [run_records.parse_time(attempt["started"]) for attempt in attempts[1:]]

    def curves_along(axis: str, points: int) -> dict[str, Any]:
        return history.curves(
            definitions,
            axis,
            points,
            attempts=len(attempts),
            baselines=latest,
            starts_s=starts_s,
        ) | {"is_complete": True}

    first = curves_along("step", 10)
    points = _ALL_POINTS // max(1, len(first["series"]) * len(first["axes"]))
    return {axis: curves_along(axis, max(20, min(_MOST_POINTS, points))) for axis in first["axes"]}


def _header(
    run: Json,
    metrics: Sequence[Json],
    result: Json,
    heartbeats: Sequence[Json],
    latest: Mapping[str, float],
) -> dict[str, Any]:
    outcome = text(result.get("outcome") or "no result yet")
    _, meaning = OUTCOMES.get(outcome, ("plain", ""))
    if outcome == "stopped" and result.get("reason"):
        meaning = f"The run was stopped because {text(result['reason'])}."
    if not result and heartbeats:
        states = Counter(text(beat.get("state")) for beat in heartbeats)
        meaning = f"Hosts when this was made: {', '.join(f'{n} {state}' for state, n in states.items())}."
    place = (run.get("job"), slice_name(run), run.get("platform"))
    return {
        "about": " · ".join(clip(part) for part in place if part is not None),
        "title": clip(_title(run)),
        "id": clip(run["run_id"]) if run.get("name") and run.get("run_id") else None,
        "outcome": clip(outcome),
        "meaning": clip(meaning),
        "headline": _headline(of_run(run), metrics, latest),
    }


def _headline(definitions: Metrics, metrics: Sequence[Json], latest: Mapping[str, float]) -> str:
    headline = definitions.get(definitions.headline)
    if headline.name in latest:
        at = "" if headline.is_evaluation else _at(headline.name, metrics)
        return f"{capitalised(headline.title)} {definitions.compared(headline, latest)}{at}"
    for name in definitions.progress:
        if name in latest:
            metric = definitions.get(name)
            value = f"{metric.text(latest[name])}{_at(name, metrics)}"
            return f"{capitalised(metric.title)} {value}; no {headline.title} recorded"
    return f"No {headline.title} recorded yet."


def _points(metrics: Sequence[Json], name: str) -> list[tuple[float, float]]:
    """The finite values of a metric by step, in rising order; of two with one step the later."""
    values = {number(line.get("step")): number(line.get(name)) for line in metrics if name in line}
    return sorted((step, value) for step, value in values.items() if step is not None and value is not None)


def _at(name: str, metrics: Sequence[Json]) -> str:
    points = _points(metrics, name)
    return f" at step {points[-1][0]:,.0f}" if points else ""


def capitalised(title: str) -> str:
    return title[:1].upper() + title[1:]


Tile = tuple[str, str, str]
"""Name, value and what stands small behind it."""


def _tiles(run: Json, metrics: Sequence[Json], result: Json, latest: Mapping[str, float]) -> list[Tile]:
    definitions = of_run(run)
    shown = [name for name in latest if number(result.get(name)) is not None and name not in NO_METRICS]
    shown += [metric.name for metric in definitions.metrics if metric.is_evaluation and metric.name in latest]
    shown += [name for name in definitions.progress if name in latest]
    tiles: list[Tile] = [
        (capitalised(metric.title), *_in_two(metric.text(latest[metric.name])))
        for metric in definitions.ordered(dict.fromkeys(shown))
        if metric.name != definitions.headline
    ]
    tiles += _best(definitions, metrics, latest)
    if utilisations := [value for line in metrics if (value := number(line.get("mfu"))) is not None]:
        tiles.append(("MFU", f"{100 * statistics.median(utilisations):.1f} %", ""))
    wall_s = result.get("wall_s")
    if wall_s is not None:
        total_s = goodput.total_wall_s(_attempts(run), wall_s)
        duration = (spoken(wall_s), "in the last attempt") if total_s is None else (spoken(total_s), "")
        tiles.append(("Wall time", *duration))
    steps = result.get("steps")
    if steps is None:
        steps = max((line["step"] for line in metrics if "step" in line), default=None)
    total = number((run.get("config") or {}).get("steps"))
    if steps is not None:
        total_text = f"of {total:,.0f}" if total is not None and total != steps else ""
        tiles.append(("Steps", f"{steps:,.0f}", total_text))
    if outliers := number(result.get("outliers")):
        tiles.append(("Outliers", f"{outliers:,.0f}", "steps"))
    if costs := spent(run, wall_s):
        tiles.append(("Cost", *costs))
    if hosts := len(run.get("hosts") or ()):
        tiles.append(("Hosts", str(hosts), ""))
    return tiles[:_MOST_TILES]


def _in_two(value: str) -> tuple[str, str]:
    """A value, and a unit of many words, such as "of the masked tokens"."""
    first, _, unit = value.partition(" ")
    return (first, unit) if len(unit) > _LONGEST_UNIT else (value, "")


def spent(run: Json, wall_s: float | None) -> tuple[str, str] | None:
    """What all attempts cost, the last of which took `wall_s`, and by which prices; None where it is not known."""
    costs = cost(_attempts(run), wall_s)
    if costs is None:
        return None
    amount, unit, prices = costs.text().partition(" (" if costs.text().startswith("free") else " USD")
    return f"{amount}{unit.rstrip(' (')}", prices.strip(" )")


def _best(definitions: Metrics, metrics: Sequence[Json], latest: Mapping[str, float]) -> list[Tile]:
    """The headline's best value of those on the way, where it is not the last one."""
    headline = definitions.get(definitions.headline)
    points = _points(metrics, headline.name)
    if headline.better is None or not headline.is_evaluation or not points:
        return []
    choose = min if headline.better == "lower" else max
    step, value = choose(points, key=lambda point: point[1])
    if value == latest.get(headline.name) or step == points[-1][0]:
        return []
    return [(f"Best {headline.title}", headline.text(value), f"at step {step:,.0f}")]


def _list(title: str, texts: Sequence[str]) -> list[Section]:
    items = [clip(item) for item in texts[:_MOST_WARNINGS]]
    return [{"title": title, "kind": "list", "items": items}] if items else []


def _warnings(result: Json, heartbeats: Sequence[Json]) -> list[str]:
    """The warnings of the run's processes."""
    lists = [result.get("warnings"), *(beat.get("warnings") for beat in heartbeats)]
    return list(dict.fromkeys(warning for warnings in lists for warning in warnings or ()))


def _failure(run: Json, result: Json, heartbeats: Sequence[Json], log_tail: Sequence[str]) -> list[Section]:
    outcome = result.get("outcome")
    failed = _failed_host(result, heartbeats)
    sections: list[Section] = []
    if outcome != "done" and (outcome in ("failed", "hung") or failed is not None or result.get("error")):
        messages = [b.get("message") for b in heartbeats if b.get("state") == "failed" and b.get("message")]
        error = result.get("error") or (messages[0] if messages else None)
        sections.append(
            {
                "title": "What went wrong",
                "kind": "failure",
                "note": clip(f"{host_name(run, failed)} failed first.") if failed is not None else "",
                "text": clip(error, _LONGEST_ERROR) if error else "No error was recorded.",
            }
        )
        if log_tail:
            lines = "\n".join(clip(line) for line in log_tail[-_LOG_LINES:])
            sections.append({"title": "The last lines of its log", "kind": "log", "text": lines})
    if result and outcome != "done" and run.get("run_id"):
        command = f"fab train --resume {shlex.quote(text(run['run_id']))}"
        sections.append({"title": "To go on from the last checkpoint", "kind": "log", "text": clip(command)})
    return sections


def _failed_host(result: Json, heartbeats: Sequence[Json]) -> int | None:
    """The host that the result names, else the first with a heartbeat of failure."""
    ranks = (beat.get("rank") for beat in heartbeats if beat.get("state") == "failed")
    return next((host for host in (result.get("failed_host"), *ranks) if host is not None), None)


def _title(run: Json) -> str:
    return text(run.get("name") or run.get("run_id") or "a run without a name")


def _latest(result: Json, metrics: Sequence[Json]) -> dict[str, float]:
    """Of each number its final value: what the result says, else the last finite value on a metrics line."""
    fields = [item for line in [*metrics, result] for item in line.items()]
    return {name: figure for name, value in fields if (figure := number(value)) is not None}


def _goodput(run: Json, result: Json, heartbeats: Sequence[Json | None]) -> list[Section]:
    """The categories of a run's time by size, with their shares."""
    measured = goodput.run_goodput(run, result, heartbeats)
    if measured is None or not measured.is_known:
        return []
    lines = [
        [goodput.title(name), spoken(seconds), f"{seconds / measured.total_s:.1%}", goodput.MEANINGS[name]]
        for name, seconds in sorted(measured.seconds.items(), key=lambda item: -item[1])
    ]
    attempts = len(_attempts(run))
    note = f"Goodput {measured.share_text()}"
    note += f" in {attempts} attempts." if attempts > 1 else "."
    return table("Where the time went", ("category", "time", "share", "what it is"), lines, note=note)


def _fillings(result: Json) -> list[Section]:
    """One row a sentence: the true word marked in its text, beside it the guesses with their probabilities."""
    lines = [_filling(filling) for filling in (result.get("fillings") or ())[:_MOST_FILLINGS]]
    note = "Held-out sentences with the marked word hidden, and what the model would write in its place."
    return table("What it has learned", ("text", "guesses"), lines, note=note)


def _filling(filling: Json) -> list[object]:
    truth: str = filling["truth"]
    shown: list[object] = []
    for word, share in filling["guesses"][:_MOST_GUESSES]:
        name = clip(quoted(word))
        separator = " · " if shown else ""
        shown += [separator, [name, "strong"] if word == truth else name, f" {100 * share:.0f} %"]
    before, after = (clip(filling[side]) for side in ("before", "after"))
    return [[f"{before} ", [clip(truth), "mark"], after], shown]


def _facts(run: Json) -> list[Section]:
    """What run.json says of the job and its code."""
    code, versions = run.get("code") or {}, run.get("versions") or {}
    commit = code.get("git_commit") or ""
    values = {
        "Job": run.get("job"),
        "Arguments": shlex.join(map(text, run["args"])) or "none" if "args" in run else None,
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
    items = [[name, clip(value)] for name, value in values.items() if value is not None]
    return [{"title": "What ran", "kind": "facts", "items": items}]


def _options(run: Json) -> list[Section]:
    config = list({**(run.get("config") or {}), **(run.get("settings") or {})}.items())
    items = [[clip(name), clip("none" if value is None else value)] for name, value in config[:_MOST_OPTIONS]]
    return [{"title": "Options", "kind": "facts", "items": items}] if items else []


def _attempts_table(run: Json, result: Json) -> list[Section]:
    """One row an attempt; the last one has the outcome of the result until run.json has it."""
    lines = []
    for attempt in _attempts(run):
        outcome = attempt.get("outcome")
        if outcome is None and result and attempt.get("attempt") == result.get("attempt"):
            outcome = result.get("outcome")
        cells = [attempt.get(key) for key in ("attempt", "started", "processes", "coordinator")]
        lines.append([*map(_cell, cells), _cell(outcome)])
    return table("Attempts", ("attempt", "started", "processes", "coordinator", "outcome"), lines)


def _hoststable(run: Json, heartbeats: Sequence[Json]) -> list[Section]:
    """One row a host, with the last heartbeat of its process."""
    beats = {beat["rank"]: beat for beat in heartbeats if beat.get("rank") is not None}
    hosts = dict(enumerate(run.get("hosts") or ()))
    lines = []
    for rank in sorted({*hosts, *beats}):
        host, beat = hosts.get(rank, {}), beats.get(rank, {})
        time = datetime.fromtimestamp(beat["time"], UTC) if "time" in beat else None
        cells = [rank, host.get("name"), host.get("address"), beat.get("state"), beat.get("step")]
        cells += [time and f"{time:%Y-%m-%d %H:%M:%S} UTC", beat.get("message")]
        lines.append([*map(_cell, cells)])
    head = ("host", "name", "address", "last state", "step", "last heartbeat", "message")
    return table("Hosts", head, lines)


def _cell(value: object) -> str | None:
    return None if value is None else clip(value, _LONGEST_CELL)


def _attempts(run: Json) -> Sequence[Json]:
    return run.get("attempts") or []


def slice_name(run: Json) -> str | None:
    """The slice's name with its accelerator type; None where run.json has neither."""
    place = run.get("slice") or {}
    names = dict.fromkeys(text(place[key]) for key in ("name", "accelerator_type") if place.get(key))
    return " · ".join(names) or None


def host_name(run: Json, rank: int) -> str:
    """Host `rank` in words, with its name and address where run.json has them."""
    hosts = run.get("hosts") or []
    host = hosts[rank] if rank < len(hosts) else {}
    details = ", ".join(text(host[key]) for key in ("name", "address") if host.get(key))
    return f"Host {rank} ({details})" if details else f"Host {rank}"
