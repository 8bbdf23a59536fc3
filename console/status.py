"""`fab status`, `logs`, `runs`, `compare`, `stop` and `jobs`: one function a command, each returning its exit code."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from console import follow, overview
from contracts import run_directory
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_costs import Cost
from contracts.run_directory import SILENCE_LIMIT_S, State
from contracts.run_records import Unread
from jobs.runtime.host_samples import COLUMNS, HostSamples
from launch import costs, recovery, run_record, runs
from launch import jobs as job_index
from launch.hosts import Agent, HostError, PendingAnswer, stop_processes
from launch.output import Lines, printable, say, terminal
from launch.run_record import finalize
from launch.runs import Run
from launch.targets import Target

HOST_BEFORE = re.compile(r"^host \d+: ")
"""Which one a result blames, before its reason."""
NO_RUNS = "no runs yet in {}; `make train` or `fab train --job flax_mlm` starts one"


def status(target: Target, wanted: str | None, *, as_json: bool = False) -> int:
    """Print a table of the hosts of each active run, or of the run asked for."""
    console = terminal()
    unreadable: Mapping[str, str] = {}
    if wanted:
        chosen = [runs.find(target.runs, wanted)]
        known = runs.look(target.find_agents(chosen[0].described), chosen[0])
    else:
        listing = runs.survey(target.runs)
        chosen, unreadable = listing.runs, listing.unreadable
        known = runs.look_at_all(target.agents_of_all(chosen))
    if not chosen and not as_json:
        _tell_none(console, target, unreadable)
        return 0
    states = {run.run_id: runs.state_by(run, known) for run in chosen}
    for index, run in enumerate(
        chosen
    ):  # a cluster forgets its pods in time, and keeps those that wait in vain
        if states[run.run_id] == "lost" and (index == 0 or known.of(run).begins_again):
            chosen[index], states[run.run_id] = follow.concluded(run, "lost", target)
    if wanted is None:
        chosen = [run for run in chosen if states[run.run_id] in run_directory.ACTIVE] or chosen[:1]
    chosen = [follow.with_agents_beats(run, known) for run in chosen]
    if as_json:
        return _print_json([_status(run, states[run.run_id], known) for run in chosen], known, unreadable)
    for run in chosen:
        unread = Unread(*run.problems)
        step, latest = runs.progress(run, unread)
        figure = runs.figure(run, latest)
        say(console)(
            f"{run.run_id}  {states[run.run_id]}  step {step}/{run.total_steps or '?'}"
            + (f"  {printable(figure)}" if figure else "")
            + f"  attempt {run.attempt}  {runs.age(run)} old"
            + (f"  {cost.text()}" if (cost := costs.of_run(run)) else "")
        )
        sampled = overview.samples(run, unread)
        console.print(_hosts_table(run, known.of(run), states[run.run_id]))
        if states[run.run_id] in run_directory.ACTIVE:
            for table in _samples_tables(run, sampled):
                console.print(table)
        for warning in follow.warnings(run):
            say(console)(f"warning: {printable(warning)}")
        for finding in overview.findings(run, states[run.run_id], sampled):
            say(console)(finding.text)
        for problem in unread.texts():
            say(console)(printable(problem))
        if states[run.run_id] not in (*run_directory.ACTIVE, "done"):
            for line in run_record.summary(run, states[run.run_id])[1:]:
                say(console)(line)
    for line in (*costs.of_stack(target.inventory.slices, time.time()), *runs.cannot_be_read(unreadable)):
        say(console)(printable(line))
    _tell_silent(console, known)
    return 0


def _status(run: Run, state: State, known: runs.Look) -> dict[str, Any]:
    unread = Unread(*run.problems)
    progress, sampled = runs.progress(run, unread), overview.samples(run, unread)
    return {
        **overview.overview(run, state, progress),
        "problems": unread.texts(),
        "host_states": overview.hosts(run, known.of(run), sampled),
        "warnings": follow.warnings(run),
        "findings": [dataclasses.asdict(each) for each in overview.findings(run, state, sampled)],
    }


def _samples_tables(run: Run, sampled: Sequence[HostSamples | None]) -> Iterator[Table]:
    """What the hosts do now, then what their devices do: a column for each value that some host has."""
    latest = {each.host: each.fresh(time.time()) for each in sampled if each is not None}
    told = {name for values in latest.values() for name in values}
    if all(values.get("root_free_mib") == values.get("disk_free_mib") for values in latest.values()):
        told.discard("root_free_mib")  # the run directory is on the disk of /
    for of_devices in (False, True):
        names = [
            name
            for name, column in COLUMNS.items()
            if name in told and name != "step" and column.is_of_devices == of_devices
        ]
        table = Table("host", *(COLUMNS[name].title for name in names), box=None, pad_edge=False)
        table.header_style = "dim"
        for host, each in zip(run.described["hosts"], sampled, strict=False):
            if each is not None:
                values = latest[each.host]
                table.add_row(
                    printable(host["name"]), *(each.text(n, values[n]) if n in values else "" for n in names)
                )
        if names:
            yield table


def _hosts_table(run: Run, known: runs.Look, state: State) -> Table:
    """What each host says; of a run that failed without the reason, which stands once below the table."""
    error = str((run.current_result() or {}).get("error") or "") if state in ("failed", "hung") else ""
    reason = printable(HOST_BEFORE.sub("", error.partition("\n")[0]))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("host", "process", "state", "step", "heartbeat", "says"):
        table.add_column(heading)
    for host in overview.hosts(run, known):
        age_s = host["heartbeat_age_s"]
        table.add_row(
            printable(host["host"]),
            host["process"] + (f" (pid {host['pid']})" if host["pid"] else ""),
            printable(host["state"] or ""),
            "" if host["step"] is None else str(host["step"]),
            "none" if age_s is None else f"{spoken(age_s)} ago",
            _without(reason, printable(host["message"] or "")),
        )
    return table


def _without(reason: str, message: str) -> str:
    return message.replace(f": {reason}", "").replace(reason, "see below") if reason else message


def logs(target: Target, wanted: str, *, host: int | None, keep_on: bool, lines: int) -> int:
    """Print the last lines of the hosts' logs and, with `keep_on`, what comes until the run ends."""
    run = runs.find(target.runs, wanted)
    if host is not None and host >= run.processes:
        raise RequestError(f"--host {host}: {run.run_id} has the hosts 0 to {run.processes - 1}")
    chosen = [host] if host is not None else list(range(run.processes))

    def show(index: int, line: str) -> None:
        print(line if host is not None else f"[{index}] {line}", flush=True)

    def show_attempt(run: Run, lines: int) -> bool:
        return show_all(
            target.find_agents(run.described),
            run,
            chosen,
            lines=lines,
            keep_on=keep_on,
            show=show,
            tell=lambda text: print(text, file=sys.stderr, flush=True),
        )

    all_answered = show_attempt(run, lines)
    while (
        keep_on and target.capabilities.restarts_runs and (again := _started_again(target, run)) is not None
    ):
        print(f"attempt {again.attempt}", file=sys.stderr, flush=True)
        run, all_answered = again, show_attempt(again, 0)
    return 0 if all_answered else 1


def _started_again(target: Target, run: Run) -> Run | None:
    """Wait for the next attempt of a run that its cluster starts again; None: it has ended."""
    until_s = time.monotonic() + follow.UNHEARD_LIMIT_S
    while True:
        fresh = runs.read(run.directory)
        if fresh is None or fresh.attempt > run.attempt:
            return fresh
        known = runs.look(target.agents, fresh)
        state = runs.state_by(fresh, known)
        is_in_doubt = runs.may_be_restarted(fresh, known, state) and time.monotonic() < until_s
        if state not in run_directory.ACTIVE and not is_in_doubt:
            return None
        time.sleep(ASK_AGAIN_S)


def list_runs(target: Target, *, limit: int | None, as_json: bool = False) -> int:
    """Print a table of runs, the newest first."""
    console = terminal()
    listing = runs.survey(target.runs)
    everything = listing.runs
    if not everything and not as_json:
        _tell_none(console, target, listing.unreadable)
        return 0
    shown = everything[:limit]
    known = runs.look_at_all(target.agents_of_all(shown))
    if as_json:
        said = [overview.overview(run, runs.state_by(run, known)) for run in shown]
        return _print_json(said, known, listing.unreadable)
    table = Table(box=None, pad_edge=False, header_style="dim")
    ids = max(len(run.run_id) for run in shown)
    cost = {run.run_id: found for run in shown if (found := costs.of_run(run))}
    for heading in ("run", "name", "job", "state", "step", "measured", *(["cost"] if cost else []), "age"):
        table.add_column(
            heading,
            justify="right" if heading in ("step", "cost", "age") else "left",
            # However narrow the terminal is: half an id names no run.
            min_width=ids if heading == "run" else None,
        )
    problems: list[str] = []
    for run in shown:
        unread = Unread()
        step, latest = runs.progress(run, unread)
        first, *more = (*run.problems, *([] if latest else unread.texts()), "")
        if first:
            problems.append(f"{run.run_id}: {first}" + (f" (and {len(more) - 1} more)" if more[1:] else ""))
        table.add_row(
            run.run_id,
            printable(run.described.get("name") or ""),
            printable(run.what),
            runs.state_by(run, known),
            f"{step}/{run.total_steps or '?'}",
            printable(runs.figure(run, latest)),
            *([_usd(cost.get(run.run_id))] if cost else []),
            runs.age(run),
        )
    console.print(table)
    if cost:
        say(console)(f"these runs: {costs.sum_of([*cost.values()]).text()}")
    for line in (*problems[: runs.MOST_UNREADABLE], *runs.cannot_be_read(listing.unreadable)):
        say(console)(printable(line))
    _tell_silent(console, known)
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


def compare(target: Target, wanted: Sequence[str], *, as_json: bool) -> int:
    """Print several runs side by side: what differs in their settings, and what they measured.

    Raises:
        RequestError: fewer than two runs are named, or one is named twice, or is not there.
    """
    several = [runs.find(target.runs, each) for each in wanted]
    named = [run.run_id for run in several]
    if len({*named}) < max(2, len(named)):
        raise RequestError(f"{', '.join(wanted)}: name two runs or more, each once; `fab runs` lists them")
    known = runs.look_at_all(target.agents_of_all(several))
    unread = [Unread(*run.problems) for run in several]
    said = [
        overview.overview(run, runs.state_by(run, known), runs.progress(run, problems))
        for run, problems in zip(several, unread, strict=True)
    ]
    found = overview.compare(several, said)
    if as_json:
        print(json.dumps({"runs": said, "settings": {row.name: row.values for row in found.settings}}))
        return 0
    console = terminal()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for run in several:
        name = printable(run.described.get("name") or run.run_id)
        table.add_column(name, min_width=len(run.run_id), overflow="fold")
    if any(run.described.get("name") for run in several):
        table.add_row("run", *named)
    for row in found.about:
        _add(table, row.name, row.texts())
    for heading, rows in (("settings that differ", found.settings), ("measured", found.metrics)):
        table.add_row()
        table.add_row(heading if rows else f"no {heading}", style="dim")
        for row in rows:
            texts = row.texts()
            if row.best is not None:
                texts[row.best] += "  best"
            _add(table, row.metric.title if row.metric else row.name, texts)
    console.print(table)
    for run, problems in zip(several, unread, strict=True):
        for problem in problems.texts():
            say(console)(printable(f"{run.run_id}: {problem}"))
    _tell_silent(console, known)
    return 0


def _add(table: Table, name: str, texts: Sequence[str]) -> None:
    table.add_row(name, *map(printable, texts))


def _tell_silent(console: Console, known: runs.Look) -> None:
    for error in known.errors:
        say(console)(f"no answer from {error}")


def _tell_none(console: Console, target: Target, unreadable: Mapping[str, str]) -> None:
    for line in runs.cannot_be_read(unreadable) or [NO_RUNS.format(target.runs.url)]:
        say(console)(printable(line))


def _print_json(said: list[dict[str, Any]], known: runs.Look, unreadable: Mapping[str, str]) -> int:
    no_answer = [str(error) for error in known.errors]
    print(json.dumps({"runs": said, "no_answer": no_answer, "unreadable": {**unreadable}}))
    return 0


def stop(
    target: Target,
    wanted: str | None,
    *,
    grace_s: float,
    by_keeper: Callable[[str], bool] = lambda _: False,
) -> int:
    """Stop a run on all its hosts; it saves a checkpoint first.

    by_keeper: lets the keeper stop a run whose processes are none of this user's; False: it does not keep that run.
    """
    console = terminal()
    run = runs.find(target.runs, wanted) if wanted else only_active(target)
    agents = target.find_agents(run.described)
    known = runs.look(agents, run)
    before = runs.state_by(run, known)
    if known.errors and target.capabilities.restarts_runs:  # its cluster alone knows, and is silent
        raise known.errors[0]
    # Between two attempts the first has ended, and its Job goes on to the next.
    begins_again = before not in run_directory.ACTIVE and target.backend.begins_again(run.run_id)
    if before not in run_directory.ACTIVE and not begins_again:
        is_kept = before != "done" and by_keeper(run.run_id)
        if before != "done" and not is_kept:
            recovery.ask_to_stop(run)
        end = "; the keeper does not resume it any more" if is_kept else ""
        say(console)(f"{run.run_id} is not running: it {run_directory.ENDED[before]}{end}")
        return 0
    last = "answer what is under way" if run.described["job"] == job_index.SERVER else "save a checkpoint"
    say(console)(f"stopping {run.run_id} (up to {spoken(grace_s)} to {last})")
    answers = stop_processes(agents, run.run_id, run.attempt, grace_s=grace_s)
    for agent, answer in zip(agents, answers, strict=True):
        if isinstance(answer, HostError):
            say(console)(f"  {answer}")
            continue
        for entry in answer["stopped"]:
            note = f"; {printable(entry['note'])}" if entry.get("note") else ""
            pid = "" if entry["pid"] is None else f" {entry['pid']}"
            say(console)(f"  {agent.host}: process{pid} {entry['how']}{note}")
    all_answered = not any(isinstance(answer, HostError) for answer in answers)
    fresh = runs.read(run.directory) or run
    if all_answered and not fresh.has_begun:
        finalize(fresh, "stopped", None)  # a process that had begun it would have said so
    deadline = time.monotonic() + run_directory.FINISHING_LIMIT_S
    while (after := runs.state_now(agents, runs.read(run.directory) or run)) in run_directory.ACTIVE:
        if time.monotonic() > deadline:
            break
        time.sleep(follow.POLL_S)
    run = finalize(run, after, None) if after not in run_directory.ACTIVE else run
    for line in run_record.summary(run, after):
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
    "the keeper; docs/operations.md, Who a resumed run belongs to, says how to stop it"
)


def only_active(target: Target) -> Run:
    listing = runs.survey(target.runs)
    known = runs.look_at_all(target.agents_of_all(listing.runs))
    active = [run for run in listing.runs if runs.state_by(run, known) in run_directory.ACTIVE]
    if not active:
        none = "no run is active; `fab runs` lists them all"
        unreadable = runs.cannot_be_read(listing.unreadable)
        raise RequestError(none + "".join(f"\n  {line}" for line in unreadable))
    if len(active) > 1:
        raise RequestError(
            f"{len(active)} runs are active, say which RUN: {', '.join(r.run_id for r in active)}"
        )
    return active[0]


def list_jobs(wanted: str | None) -> int:
    """Print the jobs, a line each, or one of them with all its options."""
    tell = say(terminal())
    if wanted:
        job = job_index.find(wanted)
        tell(f"{job.name}  (framework {' or '.join(job.frameworks)})\n  {job.summary}\n")
        tell(job.help())
        return 0
    rows = [
        (job.name, " or ".join(job.frameworks), job.summary) for job in map(job_index.find, job_index.names())
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, frameworks, summary in rows:
        tell(f"{name:{widths[0]}}  {frameworks:{widths[1]}}  {summary}")
    tell("\nA job's options: fab jobs --job NAME")
    return 0


CHUNK_BYTES = 256 * 1024
POLL_S = 0.5
ASK_AGAIN_S = 2.0
ANSWER_LIMIT_S = 10.0

Show = Callable[[int, str], None]
"""Is handed a host's index and a line of its log."""
Tell = Callable[[str], None]
"""Is told of hosts that do not answer."""


def show_all(
    agents: Sequence[Agent],
    run: Run,
    hosts: Sequence[int],
    *,
    lines: int,
    keep_on: bool,
    show: Show,
    tell: Tell,
) -> bool:
    """Hand the last `lines` lines of these hosts' logs (all where 0) to `show`, host by host, and with `keep_on` what
    comes until their processes have ended. Whether every host answered."""
    if lines == 0:
        return follow_all(agents, run, dict.fromkeys(hosts, 0), show, tell, keep_on=keep_on)
    offsets, unheard = {}, []
    with concurrent.futures.ThreadPoolExecutor(min(64, len(hosts))) as pool:
        tails = {host: pool.submit(tail, agents[host], run, host, lines=lines) for host in hosts}
    for host, reading in tails.items():
        try:
            found, offsets[host] = reading.result()
        except HostError as error:
            offsets[host] = -CHUNK_BYTES
            unheard.append(error)
            continue
        for line in found:
            show(host, line)
    if keep_on:
        return follow_all(agents, run, offsets, show, tell)
    for each in unheard:
        tell(str(each))
    return not unheard


def tail(agent: Agent, run: Run, host: int, *, lines: int) -> tuple[list[str], int]:
    """Return the last `lines` lines of one host's log, and the offset at which to continue.

    Raises:
        HostError: the host did not answer, or has no such log.
    """
    window = CHUNK_BYTES
    while True:
        answer = _ask(agent, run, host, -window).result()
        begin, size = answer["offset"], answer["size"]
        kept: collections.deque[str] = collections.deque(maxlen=lines)
        cut = Lines()
        while True:
            kept.extend(cut.feed(answer["text"]))
            # Only what was there when the reading began: a log that grows faster than it is read ends all the same.
            if not answer["text"] or answer["next_offset"] >= size:
                break
            answer = _ask(agent, run, host, answer["next_offset"]).result()
        kept.extend(cut.end())
        if len(kept) == lines or begin == 0:
            return list(kept), answer["next_offset"]
        window *= 8


def follow_all(
    agents: Sequence[Agent],
    run: Run,
    offsets: Mapping[int, int],
    show: Show,
    tell: Tell = lambda _: None,
    *,
    keep_on: bool = True,
) -> bool:
    """Hand every line of the hosts in `offsets` from there on to `show` until their processes have ended and all is
    read; without `keep_on` until what is there now is read. Whether every host answered in the end.

    A host that does not answer is told of once and asked again. When the others have ended and it has been silent for
    as long as a lost host's run may last, it is waited for no more.
    """
    reading = [_Reader(agents[host], run, host, offset, keep_on) for host, offset in offsets.items()]
    while open_readers := [reader for reader in reading if not reader.is_done]:
        for reader in open_readers:
            reader.ask_if_due()
        asked = [reader.pending.future for reader in open_readers if reader.pending]
        due_s = [reader.due_s for reader in open_readers if reader.pending is None]
        pause_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        if asked:
            concurrent.futures.wait(asked, pause_s, return_when=concurrent.futures.FIRST_COMPLETED)
        else:
            time.sleep(pause_s or 0.0)
        for reader in open_readers:
            reader.take_answer(show, tell)
        if all(reader.is_done or reader.is_lost() for reader in reading):
            break
    for reader in reading:
        if not reader.is_done and keep_on:
            tell(f"{reader.agent.host}: has not answered for {spoken(reader.silent_s())}; its log ends here")
    return all(reader.is_done for reader in reading)


class _Reader:
    """One host's log, read on from an offset; never more than one piece of it is in memory."""

    def __init__(self, agent: Agent, run: Run, host: int, offset: int, keep_on: bool) -> None:
        self.agent, self._run, self._host, self._offset, self._keep_on = agent, run, host, offset, keep_on
        self.pending: PendingAnswer | None = None
        self.is_done = False
        self.due_s = self._heard_s = time.monotonic()
        self._answers = True
        self._goal: int | None = None
        self._cut = Lines()

    def ask_if_due(self) -> None:
        if self.pending is None and time.monotonic() >= self.due_s:
            self.pending = _ask(self.agent, self._run, self._host, self._offset)

    def take_answer(self, show: Show, tell: Tell) -> None:
        """Show what has come, if something has."""
        if self.pending is None or not self.pending.future.done():
            return
        pending, self.pending = self.pending, None
        try:
            answer = pending.result()
        except HostError as error:
            if self._answers:
                tell(f"{error}; it is asked again" if self._keep_on else str(error))
            self._answers, self.due_s = False, time.monotonic() + ASK_AGAIN_S
            return
        if not self._answers:
            tell(f"{self.agent.host} answers again")
        self._answers, self._heard_s = True, time.monotonic()
        self._offset, size = answer["next_offset"], answer["size"]
        self._goal = size if self._goal is None else self._goal
        for line in self._cut.feed(answer["text"]):
            show(self._host, line)
        has_all = not answer["text"] or self._offset >= (size if self._keep_on else self._goal)
        if has_all and (answer["ended"] or not self._keep_on):
            self.is_done = True
            for line in self._cut.end():
                show(self._host, line)
        self.due_s = time.monotonic() + (POLL_S if has_all else 0.0)

    def silent_s(self) -> float:
        return 0.0 if self._answers else time.monotonic() - self._heard_s

    def is_lost(self) -> bool:
        """Return whether this host is no longer waited for once the others have ended."""
        return not self._answers and (not self._keep_on or self.silent_s() > SILENCE_LIMIT_S)


def _ask(agent: Agent, run: Run, host: int, offset: int) -> PendingAnswer:
    request: dict[str, Any] = {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "process_id": host,
        "offset": offset,
        "limit_bytes": CHUNK_BYTES,
    }
    return agent.begin("logs", request, timeout_s=ANSWER_LIMIT_S)
