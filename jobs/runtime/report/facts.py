"""The lower half of a run's report: what ran, with which options, in which attempts and on which hosts."""

import shlex
from collections.abc import Sequence

from jobs.runtime.report.fields import Json, mapping, moment, rows, text
from jobs.runtime.report.page import escape

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
