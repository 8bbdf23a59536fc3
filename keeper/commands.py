"""`fab keep`, `fab unkeep`, `fab keeper`, `fab train --keep`, and `fab capacity`."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from contracts.durations import HOUR_S, spoken
from contracts.errors import DONE, RequestError
from infra import stock_outs
from infra.documents import Documents, DocumentsError
from infra.stock_outs import Hours, Offer
from keeper import store
from keeper.queue import Queue
from keeper.store import Wanted
from launch import runs, targets
from launch.output import printable, say, terminal
from launch.runs import Run
from launch.targets import Target

SHOWN_ACTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandOver:
    """`fab keep` and `fab train --keep`: see `console.follow.HandOver`.

    attempts, hours: how often and for how long the run is resumed; None: as often as by default, without an end.
    """

    attempts: int | None = None
    hours: float | None = None

    def check(self, target: Target) -> None:
        """Make sure that a keeper keeps the runs of a target, and can.

        Raises:
            RequestError: its stack has no keeper, or the slice is none that it could make again.
        """
        if not target.capabilities.is_billed:
            return
        if target.capabilities.restarts_runs:
            raise RequestError(
                f"{target.slice.name}: the keeper has nothing to do on node pools, where the cluster starts each lost "
                "pod again, --max-restarts times; leave --keep out"
            )
        if not target.inventory.has_keeper:
            raise RequestError(
                f"--stack {target.name}: it has no keeper; set tpu-stack:keeper: true, then `pulumi up` and `fab "
                "keeper install`; without one, `fab train --max-restarts` brings a run back as long as the command runs"
            )
        if not target.slice.origin.startswith("queued-resource "):
            raise RequestError(
                f"{target.slice.name}: it is a {target.slice.origin}, and the keeper makes only queued slices again; "
                "set provisioning: queued for it, then `pulumi up`"
            )

    def take(self, run: Run, target: Target) -> str:
        """What has been started goes on, whether it can be handed over or not."""
        try:
            return self.keep(run, target)
        except RequestError as error:
            return f"warning: {error}; `fab keep {run.run_id}` tries again"

    def keep(self, run: Run, target: Target) -> str:
        """Add a run to those that are kept, or give it new limits; return a line about it.

        Raises:
            RequestError: it cannot be kept.
        """
        self.check(target)
        documents = store.store_of(target)
        limits: dict[str, Any] = {} if self.attempts is None else {"attempts_left": self.attempts}
        where: dict[str, Any] = {
            "slice": target.slice.name,
            "runs_url": target.runs_url,
            "max_usd": run.described.get("max_usd"),
        }

        def change(before: Wanted | None) -> Wanted:
            if before is not None and before.state != "ended":
                return dataclasses.replace(before, stop=False, unkept=False, **where, **limits)
            return Wanted(
                run_id=run.run_id,
                stack=target.inventory.stack,
                added_s=documents.now_s(),
                project=target.inventory.project,
                origin=target.slice.origin,
                name=run.described.get("name"),
                reason="it was started and handed over",
                acts=before.acts if before else (),
                **where,
                **limits,
            )

        try:
            documents.read(store.WANTED)  # by whose clock it is now
            if self.hours is not None:
                limits["deadline_s"] = documents.now_s() + 3600.0 * self.hours
            entry = store.change_wanted(documents, run.run_id, change)
        except DocumentsError as error:
            raise RequestError(f"{run.run_id} is not kept: {error}") from None
        assert entry is not None
        until = "" if entry.deadline_s is None else f", until {_moment(entry.deadline_s)}"
        return (
            f"{entry.run_id} is kept: at most {entry.attempts_left} more attempts{until}; `fab keeper status`"
        )


def keep(target: Target, on: Callable[[str], Target], wanted: str, hand_over: HandOver) -> int:
    """Carry out `fab keep`. target: any slice that may be meant. on: returns a slice of the stack by name."""
    run = runs.find(target.runs, wanted)
    own = str((run.described.get("slice") or {}).get("name") or target.slice.name)
    say(terminal())(hand_over.keep(run, target if own == target.slice.name else on(own)))
    return DONE


def unkeep(documents: Documents, wanted: str) -> int:
    """Carry out `fab unkeep`: the run itself goes on. wanted: as of any run.

    The entry of a stack's run goes at the keeper's next look, which withdraws a slice that was asked for and waits.
    """
    run_id = _meant([each for each in _entries(documents) if not (each.for_queue or each.unkept)], wanted)

    def change(now: Wanted | None) -> Wanted | None:
        has_slice = now is not None and now.is_kept and now.project is not None
        return dataclasses.replace(now, unkept=True) if now is not None and has_slice else None

    try:
        left = store.change_wanted(documents, run_id, change)
    except DocumentsError as error:
        raise RequestError(str(error)) from None
    asked = "; what the keeper has asked for and still waits is withdrawn at its next look" if left else ""
    say(terminal())(f"{run_id} is not kept any more; if it runs, it goes on{asked}")
    return DONE


def _entries(documents: Documents) -> list[Wanted]:
    """Return what is kept, the oldest first."""
    try:
        return sorted(store.read_wanted(documents).values(), key=lambda each: each.added_s)
    except DocumentsError as error:
        raise RequestError(str(error)) from None


def _meant(entries: Sequence[Wanted], wanted: str) -> str:
    """Return the id of the run that is meant, of entries with the oldest first.

    wanted: an id, the beginning or end of one, a name, "latest", which is the one that was handed over last, or
    "latest:JOB", the last of those of a job.

    Raises:
        RequestError: no run that is kept fits, or more than one does.
    """
    fitting = [each for each in entries if wanted in (each.run_id, each.name)] or [
        each
        for each in entries
        if wanted and (each.run_id.startswith(wanted) or each.run_id.endswith(wanted))
    ]
    if wanted == runs.LATEST or wanted.startswith(runs.LATEST_OF):
        job = wanted.removeprefix(runs.LATEST_OF)
        of = [each for each in entries if wanted == runs.LATEST or each.run_id.rsplit("-", 3)[0] == job]
        fitting = of[-1:]
    if not fitting:
        raise RequestError(f"{wanted} is not kept; `fab keeper status` lists those that are")
    if len(fitting) > 1:
        named = ", ".join(each.run_id for each in fitting[:5])
        raise RequestError(f"{wanted}: {len(fitting)} runs that are kept fit ({named}); write more of the id")
    return fitting[0].run_id


def stop(target: Target, run_id: str) -> bool:
    """Let the keeper stop a run that it keeps, at its next look, and not bring it back; False: it keeps no such run."""
    if target.capabilities.is_billed and not target.inventory.has_keeper:
        return False

    def change(now: Wanted | None) -> Wanted | None:
        return None if now is None else dataclasses.replace(now, stop=True)

    try:
        found = store.change_wanted(store.store_of(target), run_id, change)
    except DocumentsError as error:
        raise RequestError(f"{run_id}: the keeper cannot be told to stop it: {error}") from None
    return found is not None and found.is_kept


def resumed_by(target: Target) -> dict[str, str]:
    """Return the ids of the runs that the keeper or the queue would resume, and how that is ended.

    Raises:
        DocumentsError: nobody can tell.
    """
    try:
        documents = store.store_of(target)
    except RequestError:  # a stack without a bucket has neither
        return {}
    kept = [each.run_id for each in store.read_wanted(documents).values() if each.is_kept]
    entries = [each for each in Queue(documents).entries() if each.is_pending and each.run_id is not None]
    return {run_id: f"the keeper resumes it; `fab unkeep {run_id}` first" for run_id in kept} | {
        str(each.run_id): f"the queue resumes it; `fab queue cancel {each.number}` first" for each in entries
    }


def status(documents: Documents) -> int:
    """Carry out `fab keeper status`: what it did, what it will do, and why, of all slices."""
    entries, console = _entries(documents), terminal()
    if not entries:
        say(console)(f"no run is kept in {documents.url}; `fab train --keep`, or `fab keep RUN`")
        return DONE
    table = Table("run", "slice", "state", "attempts left", "until", "why", box=None, pad_edge=False)
    for each in entries:
        until = "" if each.deadline_s is None else f"{_moment(each.deadline_s)}"
        wait_s = each.not_before_s - documents.now_s()
        is_later = each.state in ("waiting", "recovering") and wait_s > 0
        later = f"; next try in {spoken(wait_s)}" if is_later else ""
        table.add_row(
            each.run_id,
            each.slice,
            "unkept" if each.unkept else each.state,
            str(each.attempts_left),
            until,
            printable(each.reason + later),
        )
    console.print(table)
    if line := store.neglected(documents):
        say(console)(line)
    for each in entries:
        for act in each.acts[-SHOWN_ACTS:]:
            line = f"{act['time']} {each.run_id} {act['act']}: {act['reason']}"
            console.print(printable(line), soft_wrap=True, highlight=False)
    return DONE


def _moment(unix_s: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_s, datetime.UTC):%Y-%m-%d %H:%M} UTC"


# --- what zones had to offer, as the requests of a stack's slices found it -------------------------------------------

DAYS = 30
HEADINGS = (
    "zone", "type", "capacity", "asked", "in vain", "last in vain", "last served", "hours of the day, UTC",
)  # fmt: skip
NEVER, SERVED, SOME, OUT = "·", "○", "◐", "●"
LEGEND = (
    f"asked, in vain: hours of the last %d days. A mark for each hour from 00: {OUT} in vain, {SOME} both, "
    f"{SERVED} served, {NEVER} not asked"
)


def capacity(console: Console, asked: targets.Wanted, *, days: int, as_json: bool) -> int:
    """Print it, the zone that served most often first; as_json: every hour that is known.

    Raises:
        RequestError: the stack has no place where that is remembered, or it does not answer.
    """
    if asked.stack == targets.LOCAL:
        raise RequestError("this machine asks for no TPUs; say --stack as well")
    documents = store.documents_for(asked)
    try:
        found = stock_outs.read(documents)
    except DocumentsError as error:
        raise RequestError(str(error)) from None
    if as_json:
        lines = [vars(offer) | vars(hours) for offer, hours in found.items()]
        console.print(json.dumps(lines), highlight=False, markup=False, soft_wrap=True)
    elif not found:
        console.print(f"{documents.url}: no request has been noted yet; those for queued slices are")
    else:
        console.print(capacity_table(found, days=days, now=datetime.datetime.now(datetime.UTC)))
        console.print(LEGEND % days, style="dim")
    return 0


def capacity_table(found: Mapping[Offer, Hours], *, days: int, now: datetime.datetime) -> Table:
    """Return a row for each zone, type and capacity, of the hours of the last days. Pure."""
    since = stock_outs.hour_of(now - datetime.timedelta(days=days))
    recent = {
        offer: Hours(
            out=tuple(hour for hour in hours.out if hour >= since),
            served=tuple(hour for hour in hours.served if hour >= since),
        )
        for offer, hours in found.items()
    }
    made = Table(box=None, pad_edge=False, header_style="dim")
    for heading in HEADINGS:
        made.add_column(heading, justify="right" if heading in ("asked", "in vain") else "left", no_wrap=True)
    for offer, hours in sorted(
        recent.items(), key=lambda item: (item[0].kind, _in_vain(item[1]), item[0].zone)
    ):
        asked = len({*hours.out, *hours.served})
        made.add_row(
            offer.zone,
            offer.kind,
            offer.capacity,
            str(asked),
            f"{_in_vain(hours):.0%}" if asked else "",
            _ago(hours.out, now),
            _ago(hours.served, now),
            "".join(_slot(f"T{hour:02}", hours) for hour in range(24)),
        )
    return made


def _in_vain(hours: Hours) -> float:
    """The share of the hours in which nothing was served."""
    asked = {*hours.out, *hours.served}
    return len(asked - {*hours.served}) / len(asked) if asked else 1.0


def _slot(hour: str, hours: Hours) -> str:
    out, served = (any(each.endswith(hour) for each in kind) for kind in (hours.out, hours.served))
    return SOME if out and served else OUT if out else SERVED if served else NEVER


def _ago(hours: tuple[str, ...], now: datetime.datetime) -> str:
    if not hours:
        return "–"
    latest = datetime.datetime.fromisoformat(f"{hours[-1]}:00:00+00:00")
    past_s = (now - latest).total_seconds()
    return f"{spoken(past_s, units=1)} ago" if past_s >= HOUR_S else "this hour"
