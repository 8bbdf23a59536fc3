"""`fab status`, `logs`, `runs`, `costs`, `compare`, `stop`, `jobs`: a function each, which returns its exit code."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from console import follow, overview
from console.summary import summary
from contracts import run_directory
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.goodput import Cost
from contracts.run_directory import State
from contracts.run_records import Unread
from jobs.runtime.monitoring.host_samples import COLUMNS, HostSamples
from launch import jobs as job_index
from launch import launching, pricing, runs
from launch.hosts import HostError
from launch.launching import finalize
from launch.output import printable, say, table, terminal
from launch.runs import Run
from launch.targets import Target

if TYPE_CHECKING:
    from infra.documents.deleted_slices import DeletedSlice

HOST_BEFORE = re.compile(r"^host \d+: ")
"""Begins a result's reason: the host that failed first."""
NO_RUNS = "no runs yet in {}; `make train` or `fab train --job flax_mlm` starts one"


def status(target: Target, name: str | None, *, as_json: bool = False) -> int:
    """Print a table of the hosts of each active run, or of the run asked for."""
    console = terminal()
    unreadable: Mapping[str, str] = {}
    if name:
        chosen = [runs.find(target.runs, name)]
        look = target.backend.status(chosen).for_run(chosen[0])
    else:
        listing = runs.survey(target.runs)
        chosen, unreadable = listing.runs, listing.unreadable
        look = target.backend.status(chosen)
    if not chosen and not as_json:
        _tell_none(console, target, unreadable)
        return 0
    states = {run.run_id: runs.state_by(run, look) for run in chosen}
    for index, run in enumerate(chosen):
        # A cluster forgets its pods in time, and keeps those that wait in vain.
        if states[run.run_id] == "lost" and (index == 0 or look.for_run(run).begins_again):
            chosen[index], states[run.run_id] = follow.concluded(run, "lost", target)
    if name is None:
        chosen = [run for run in chosen if states[run.run_id] in run_directory.ACTIVE] or chosen[:1]
    chosen = [follow.with_agents_beats(run, look) for run in chosen]
    if as_json:
        return _print_json([_status(run, states[run.run_id], look) for run in chosen], look, unreadable)
    for run in chosen:
        _print_run(console, run, states[run.run_id], look.for_run(run))
    for line in (
        *pricing.stack_costs(target.inventory.slices, time.time()),
        *runs.cannot_be_read(unreadable),
    ):
        say(console)(printable(line))
    _tell_silent(console, look)
    return 0


def _print_run(console: Console, run: Run, state: State, look: runs.Look) -> None:
    """Print a line about a run, tables of its hosts, and what is wrong with it."""
    tell = say(console)
    unread = Unread(*run.problems)
    step, latest = runs.progress(run, unread)
    figure = runs.figure(run, latest)
    tell(
        f"{run.run_id}  {state}  step {step}/{run.total_steps or '?'}"
        + (f"  {printable(figure)}" if figure else "")
        + f"  attempt {run.attempt}  {runs.age(run)} old"
        + (f"  {cost.text()}" if (cost := pricing.run_cost(run)) else "")
    )
    if (spent := run.goodput) and spent.share is None and run.is_own_command:
        tell("goodput not known: the command writes no steps to $RUN_DIR/metrics.jsonl (docs/scripts.md)")
    elif spent and spent.is_known:
        tell(f"goodput {spent.text()}")
    sampled = overview.samples(run, unread)
    console.print(_hosts_table(run, look, state))
    if state in run_directory.ACTIVE:
        for drawn in _samples_tables(run, sampled):
            console.print(drawn)
    for warning in follow.warnings(run):
        tell(f"warning: {printable(warning)}")
    for finding in overview.findings(run, state, sampled):
        tell(finding.text)
    for problem in unread.texts():
        tell(printable(problem))
    if state not in (*run_directory.ACTIVE, "done"):
        for line in summary(run, state)[1:]:
            tell(line)


def _status(run: Run, state: State, look: runs.Look) -> dict[str, Any]:
    unread = Unread(*run.problems)
    progress, sampled = runs.progress(run, unread), overview.samples(run, unread)
    return {
        **overview.overview(run, state, progress),
        "problems": unread.texts(),
        "host_states": overview.hosts(run, look.for_run(run), sampled),
        "warnings": follow.warnings(run),
        "findings": [dataclasses.asdict(finding) for finding in overview.findings(run, state, sampled)],
    }


def _samples_tables(run: Run, sampled: Sequence[HostSamples | None]) -> Iterator[Table]:
    """What the hosts do now, then what their devices do: a column for each value that some host has."""
    latest = {samples.host: samples.fresh(time.time()) for samples in sampled if samples is not None}
    present = {name for values in latest.values() for name in values}
    if all(values.get("root_free_mib") == values.get("disk_free_mib") for values in latest.values()):
        present.discard("root_free_mib")  # the run directory is on the disk of /
    for device_columns in (False, True):
        names = [
            name
            for name, column in COLUMNS.items()
            if name in present and name != "step" and column.is_device == device_columns
        ]
        drawn = table("host", *(COLUMNS[name].title for name in names))
        for host, samples in zip(run.described["hosts"], sampled, strict=False):
            if samples is not None:
                values = latest[samples.host]
                drawn.add_row(
                    printable(host["name"]),
                    *(samples.text(n, values[n]) if n in values else "" for n in names),
                )
        if names:
            yield drawn


def _hosts_table(run: Run, look: runs.Look, state: State) -> Table:
    """What each host says; of a run that failed without the reason, which stands once below the table."""
    error = str((run.current_result() or {}).get("error") or "") if state in ("failed", "hung") else ""
    reason = printable(HOST_BEFORE.sub("", error.partition("\n")[0]))
    drawn = table("host", "process", "state", "step", "heartbeat", "says")
    for host in overview.hosts(run, look):
        age_s = host["heartbeat_age_s"]
        drawn.add_row(
            printable(host["host"]),
            host["process"] + (f" (pid {host['pid']})" if host["pid"] else ""),
            printable(host["state"] or ""),
            "" if host["step"] is None else str(host["step"]),
            "none" if age_s is None else f"{spoken(age_s)} ago",
            _without(reason, printable(host["message"] or "")),
        )
    return drawn


def _without(reason: str, message: str) -> str:
    """Return what a host says without the reason of the run's end, or without the details of that."""
    if reason and message == reason:
        return "see below"
    details = reason.partition(": ")[2]
    for repeated in (reason, details):
        message = message.replace(f": {repeated}", "") if repeated else message
    return message


def list_runs(target: Target, *, limit: int | None, as_json: bool = False) -> int:
    """Print a table of runs, the newest first."""
    console = terminal()
    listing = runs.survey(target.runs)
    everything = listing.runs
    if not everything and not as_json:
        _tell_none(console, target, listing.unreadable)
        return 0
    shown = everything[:limit]
    look = target.backend.status(shown)
    if as_json:
        overviews = [overview.overview(run, runs.state_by(run, look)) for run in shown]
        return _print_json(overviews, look, listing.unreadable)
    cost = {run.run_id: run_cost for run in shown if (run_cost := pricing.run_cost(run))}
    headings = ("run", "name", "job", "state", "step", "measured", *(["cost"] if cost else []), "age")
    drawn = table(*headings, right=("step", "cost", "age"))
    drawn.columns[0].no_wrap = drawn.columns[-1].no_wrap = True  # half an id names no run
    problems: list[str] = []
    for run in shown:
        unread = Unread()
        step, latest = runs.progress(run, unread)
        first, *more = (*run.problems, *([] if latest else unread.texts()), "")
        if first:
            problems.append(f"{run.run_id}: {first}" + (f" (and {len(more) - 1} more)" if more[1:] else ""))
        drawn.add_row(
            run.run_id,
            printable(run.described.get("name") or ""),
            printable(run.what),
            runs.state_by(run, look),
            f"{step}/{run.total_steps or '?'}",
            printable(runs.figure(run, latest)),
            *([_usd(cost.get(run.run_id))] if cost else []),
            runs.age(run),
        )
    console.print(drawn)
    if cost:
        say(console)(f"these runs: {pricing.total([*cost.values()]).text()}")
    for line in (*problems[: runs.MOST_UNREADABLE], *runs.cannot_be_read(listing.unreadable)):
        say(console)(printable(line))
    _tell_silent(console, look)
    if limit is not None and len(everything) > limit:
        say(console)(f"{len(everything) - limit} older ones: `fab runs --all`")
    return 0


def _usd(cost: Cost | None) -> str:
    """In a column: what is billed, or "grant"; with a question mark where that is not known."""
    if cost is None:
        return ""
    if cost.billed_usd is None:
        return f"{cost.usd:,.2f} USD?"
    return "grant" if cost.billed_usd <= 0 < cost.usd else f"{cost.billed_usd:,.2f} USD"


def costs_by_month(targets: Sequence[Target], *, as_json: bool) -> int:
    """Print what the slices of stacks did in each month: how much of it became progress, and what all of it cost."""
    console = terminal()
    listings = [(target, runs.survey(target.runs)) for target in targets]
    months = [
        (target.name, month)
        for target, listing in listings
        for month in pricing.by_month(
            listing.runs, target.inventory.slices, _deleted_slices(target), time.time()
        )
    ]
    unreadable = {run_id: reason for _, listing in listings for run_id, reason in listing.unreadable.items()}
    if as_json:
        rows = [{"stack": stack, **_month(month)} for stack, month in months]
        print(json.dumps({"months": rows, "unreadable": unreadable}))
        return 0
    if not months and not unreadable:
        say(console)(printable(NO_RUNS.format(", ".join(target.runs.url for target in targets))))
    if months:
        drawn = table("stack", "month", "runs", "goodput", "the rest", "cost", right=("runs", "cost"))
        for stack, month in months:
            usd = _usd(month.cost)
            drawn.add_row(
                printable(stack),
                month.month,
                str(len(month.runs)),
                month.goodput.share_text(),
                month.goodput.badput_text(),
                f"at least {usd}" if usd and not month.is_cost_complete else usd,
            )
        console.print(drawn)
    for line in runs.cannot_be_read(unreadable):
        say(console)(printable(line))
    return 0


def _deleted_slices(target: Target) -> Sequence[DeletedSlice]:
    """Without them, the time of a slice that is gone ends with its last run."""
    try:
        return pricing.deleted_slices(target.inventory)
    except RequestError as error:
        print(printable(f"{target.name}: when slices were deleted is not known: {error}"), file=sys.stderr)
        return ()


def _month(month: pricing.Month) -> dict[str, Any]:
    return {
        "month": month.month,
        "runs": sorted(month.runs),
        "slice_s": month.goodput.total_s,
        "goodput": month.goodput.share,
        "seconds": month.goodput.seconds,
        "cost_usd": month.cost.usd if month.cost else None,
        "billed_usd": month.cost.billed_usd if month.cost else None,
        "is_cost_complete": month.is_cost_complete,
    }


def compare(target: Target, names: Sequence[str], *, as_json: bool) -> int:
    """Print several runs side by side: what differs in their settings, and what they measured.

    Raises:
        RequestError: fewer than two runs are named, or one is named twice, or is not there.
    """
    selected = [runs.find(target.runs, name) for name in names]
    run_ids = [run.run_id for run in selected]
    if len({*run_ids}) < max(2, len(run_ids)):
        raise RequestError(f"{', '.join(names)}: name two runs or more, each once; `fab runs` lists them")
    look = target.backend.status(selected)
    unread = [Unread(*run.problems) for run in selected]
    overviews = [
        overview.overview(run, runs.state_by(run, look), runs.progress(run, problems))
        for run, problems in zip(selected, unread, strict=True)
    ]
    comparison = overview.compare(selected, overviews)
    if as_json:
        print(
            json.dumps({"runs": overviews, "settings": {row.name: row.values for row in comparison.settings}})
        )
        return 0
    console = terminal()
    console.print(_comparison_table(selected, comparison))
    for run, problems in zip(selected, unread, strict=True):
        for problem in problems.texts():
            say(console)(printable(f"{run.run_id}: {problem}"))
    _tell_silent(console, look)
    return 0


def _comparison_table(selected: Sequence[Run], comparison: overview.Comparison) -> Table:
    names = [run.described.get("name") for run in selected]
    drawn = table("", *(printable(name or run.run_id) for name, run in zip(names, selected, strict=True)))
    for column, run in zip(drawn.columns[1:], selected, strict=True):
        column.min_width = len(run.run_id)

    def add(name: str, texts: Sequence[str]) -> None:
        drawn.add_row(name, *map(printable, texts))

    if any(names):
        add("run", [run.run_id for run in selected])
    for row in comparison.about:
        add(row.name, row.texts())
    for heading, rows in (("settings that differ", comparison.settings), ("measured", comparison.metrics)):
        drawn.add_row()
        drawn.add_row(heading if rows else f"no {heading}", style="dim")
        for row in rows:
            texts = row.texts()
            if row.best is not None:
                texts[row.best] += "  best"
            add(row.metric.title if row.metric else row.name, texts)
    return drawn


def _tell_silent(console: Console, look: runs.Look) -> None:
    for error in look.errors:
        say(console)(f"no answer from {error}")


def _tell_none(console: Console, target: Target, unreadable: Mapping[str, str]) -> None:
    for line in runs.cannot_be_read(unreadable) or [NO_RUNS.format(target.runs.url)]:
        say(console)(printable(line))


def _print_json(overviews: list[dict[str, Any]], look: runs.Look, unreadable: Mapping[str, str]) -> int:
    no_answer = [str(error) for error in look.errors]
    print(json.dumps({"runs": overviews, "no_answer": no_answer, "unreadable": {**unreadable}}))
    return 0


def stop(
    target: Target,
    name: str | None,
    *,
    grace_s: float,
    by_keeper: Callable[[str], bool] = lambda _: False,
) -> int:
    """Stop a run on all its hosts; it saves a checkpoint first.

    by_keeper: lets the keeper stop a run whose processes are none of this user's; False: it does not keep that run.
    """
    console = terminal()
    run = runs.find(target.runs, name) if name else only_active(target)
    look = target.backend.status([run]).for_run(run)
    before = runs.state_by(run, look)
    if look.errors and target.capabilities.restarts_runs:  # its cluster alone knows, and is silent
        raise look.errors[0]
    # Between two attempts the first has ended, and its Job goes on to the next.
    begins_again = run.current_result() is not None and run.run_id in look.restarting
    if before not in run_directory.ACTIVE and not begins_again:
        is_kept = before != "done" and by_keeper(run.run_id)
        end = "; the keeper does not resume it any more" if is_kept else ""
        if before != "done" and not is_kept:
            launching.ask_to_stop(run)
            # Whoever began an attempt before it could be asked is stopped as one that runs.
            fresh = runs.read(run.directory)
            if fresh is not None and fresh.attempt != run.attempt:
                return stop(target, run.run_id, grace_s=grace_s, by_keeper=by_keeper)
            if not target.capabilities.restarts_runs:
                end = "; a `fab` that waits to start it again, if there is one, ends within seconds"
        say(console)(f"{run.run_id} is not running: it {run_directory.ENDED[before]}{end}")
        return 0
    last = "answer what is under way" if run.described["job"] == job_index.SERVER else "save a checkpoint"
    say(console)(f"stopping {run.run_id} (up to {spoken(grace_s)} to {last})")
    answers = target.backend.stop(run, grace_s=grace_s)
    for host, answer in zip(run.described["hosts"], answers, strict=True):
        if isinstance(answer, HostError):
            say(console)(f"  {answer}")
            continue
        for entry in answer["stopped"]:
            note = f"; {printable(entry['note'])}" if entry.get("note") else ""
            pid = "" if entry["pid"] is None else f" {entry['pid']}"
            say(console)(f"  {host['name']}: process{pid} {entry['how']}{note}")
    all_answered = not any(isinstance(answer, HostError) for answer in answers)
    fresh = runs.read(run.directory) or run
    if all_answered and not fresh.has_begun:
        finalize(fresh, "stopped", None)  # a process that had begun it would have said so
    deadline = time.monotonic() + run_directory.FINISHING_LIMIT_S
    while (after := target.run_state(runs.read(run.directory) or run)) in run_directory.ACTIVE:
        if time.monotonic() > deadline:
            break
        time.sleep(follow.POLL_S)
    run = finalize(run, after, None) if after not in run_directory.ACTIVE else run
    for line in summary(run, after):
        say(console)(line)
    if after in run_directory.ACTIVE and not any(
        isinstance(answer, HostError) or answer["stopped"] for answer in answers
    ):
        is_kept = by_keeper(run.run_id)
        say(console)(KEEPERS if is_kept else NOT_OURS)
        return 0 if is_kept else 1
    return 0 if after in ("stopped", "done") or (begins_again and all_answered) else 1


KEEPERS = (
    "its processes are the keeper's on the hosts, so the keeper stops it at its next look, within two minutes: "
    "`fab keeper status`"
)
NOT_OURS = (
    "it goes on: none of its processes is your user's on the hosts, so another user has started this attempt, such as "
    "the keeper; docs/keeper.md, Which user a resumed run belongs to, says how to stop it"
)


def only_active(target: Target) -> Run:
    listing = runs.survey(target.runs)
    look = target.backend.status(listing.runs)
    active = [run for run in listing.runs if runs.state_by(run, look) in run_directory.ACTIVE]
    if not active:
        none = "no run is active; `fab runs` lists them all"
        unreadable = runs.cannot_be_read(listing.unreadable)
        raise RequestError(none + "".join(f"\n  {line}" for line in unreadable))
    if len(active) > 1:
        raise RequestError(
            f"{len(active)} runs are active, say which RUN: {', '.join(r.run_id for r in active)}"
        )
    return active[0]


def list_jobs(name: str | None) -> int:
    """Print the jobs, a line each, or one of them with all its options."""
    tell = say(terminal())
    if name:
        job = job_index.find(name)
        tell(f"{job.name}  (framework {' or '.join(job.frameworks)})\n  {job.summary}\n")
        tell(job.help())
        return 0
    rows = [
        (job.name, " or ".join(job.frameworks), job.summary) for job in map(job_index.find, job_index.names())
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, frameworks, purpose in rows:
        tell(f"{name:{widths[0]}}  {frameworks:{widths[1]}}  {purpose}")
    tell("\nA job's options: fab jobs --job NAME")
    return 0
