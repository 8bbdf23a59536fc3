"""`fab keep`, `fab unkeep`, `fab stop` of a run that is wanted, `fab keeper status`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence

from contracts.durations import HOUR_S, spoken
from contracts.errors import DONE, RequestError
from infra.documents import Documents, DocumentsError
from keeper.__main__ import reconcile
from keeper.stack_store import neglected, stack_documents, store_at
from keeper.world import World
from launch import runs
from launch.control import control_documents
from launch.control.control_documents import Attempt, Limits
from launch.output import printable, say, table, terminal
from launch.request.run_environment import require_references
from launch.runs import Run
from launch.targets import Target, TargetRequest

SHOWN_LINES = 3
MOST_ENDED = 30
NOTHING_RESTORED = -2
"""The checkpoint of an attempt that no reconciler has begun: whatever the run has saved is new."""


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
                "pod again; leave --keep out"
            )
        if not target.inventory.has_keeper:
            raise RequestError(
                f"--stack {target.name}: it has no keeper; set tpu-stack:keeper: true, then `pulumi up` and `fab "
                "keeper install`; without one, `fab train --max-restarts` brings a run back as long as the command runs"
            )
        if not target.slice.origin.startswith(("queued-resource ", "group ", "instance ")):
            raise RequestError(
                f"{target.slice.name}: it is a {target.slice.origin}, and the keeper makes only queued slices and "
                "those of Compute Engine again; set provisioning: queued or compute for it, then `pulumi up`"
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
        require_references(run.described.get("secrets", {}), "the keeper")
        store = store_at(stack_documents(target))
        try:
            store.run(run.run_id)  # by whose clock it is now
            now_s = store.now_s()
            deadline_s = None if self.hours is None else now_s + HOUR_S * self.hours

            def change(before: control_documents.Run | None) -> control_documents.Run:
                if before is not None and before.desired == "removed":
                    raise RequestError(f"{run.run_id} is being removed, and cannot be kept")
                limits = Limits(attempts=control_documents.KEEP_ATTEMPTS)
                if before is not None and before.end is None:
                    limits = before.limits
                limits = dataclasses.replace(
                    limits,
                    attempts=limits.attempts if self.attempts is None else self.attempts,
                    deadline_s=limits.deadline_s if self.hours is None else deadline_s,
                    max_usd=run.described.get("max_usd"),
                )
                if before is not None and before.end is None:
                    return dataclasses.replace(before, desired="running", limits=limits)
                attempt = Attempt(
                    number=run.attempt, created=target.slice.created or "", checkpoint=NOTHING_RESTORED
                )
                return control_documents.Run(
                    run_id=run.run_id,
                    stack=target.inventory.stack,
                    runs_url=target.runs_url,
                    slices=(target.slice.name,),
                    slice=target.slice.name,
                    project=target.inventory.project,
                    name=run.described.get("name"),
                    limits=limits,
                    added_s=now_s,
                    attempt=attempt,
                    seen="running",
                    reason="it was started and handed over",
                    history=before.history if before else (),
                )

            document = store.edit_run(run.run_id, change)
        except DocumentsError as error:
            raise RequestError(f"{run.run_id} is not kept: {error}") from None
        assert document is not None
        until = "" if document.limits.deadline_s is None else f", until {_moment(document.limits.deadline_s)}"
        limit = f"at most {document.limits.attempts} more attempts{until}"
        return f"{document.run_id} is kept: {limit}; `fab keeper status`"


def keep(target: Target, on: Callable[[str], Target], name: str, hand_over: HandOver) -> int:
    """Carry out `fab keep`. target: any slice that may be meant. on: returns a slice of the stack by name."""
    run = runs.find(target.runs, name)
    own = str(run.slice_record.get("name") or target.slice.name)
    say(terminal())(hand_over.keep(run, target if own == target.slice.name else on(own)))
    return DONE


def unkeep(documents: Documents, name: str) -> int:
    """Carry out `fab unkeep`: the run itself goes on. name: as of any run.

    What the keeper has asked for and waits for is given back at its next look.
    """
    store = store_at(documents)
    kept_runs = [run for run in _kept_runs(documents) if run.desired in ("running", "stopped")]
    run_id = _find(kept_runs, name)

    def change(now: control_documents.Run | None) -> control_documents.Run | None:
        is_over = now is None or now.end is not None or now.project is None
        return None if now is None or is_over else now.to_be("unmanaged")

    left = store.edit_run(run_id, change)
    note = "; what the keeper has asked for and still waits is withdrawn at its next look" if left else ""
    say(terminal())(f"{run_id} is not kept any more; if it runs, it goes on{note}")
    return DONE


def _kept_runs(documents: Documents) -> list[control_documents.Run]:
    """Return the runs that are kept, and those that were kept and ended last, the oldest first."""
    all_runs = sorted(store_at(documents).read().runs.values(), key=lambda run: run.added_s)
    ended = [run.run_id for run in all_runs if run.end is not None][:-MOST_ENDED]
    return [run for run in all_runs if run.submission is None and run.run_id not in ended]


def _find(kept_runs: Sequence[control_documents.Run], name: str) -> str:
    """Return the id of the run that is meant, of those that are kept with the oldest first.

    name: an id, the beginning or end of one, a name, "latest", which is the one that was handed over last, or
    "latest:JOB", the last of those of a job.

    Raises:
        RequestError: no run that is kept fits, or more than one does.
    """
    fitting = [run for run in kept_runs if name in (run.run_id, run.name)] or [
        run for run in kept_runs if name and (run.run_id.startswith(name) or run.run_id.endswith(name))
    ]
    if name == runs.LATEST or name.startswith(runs.LATEST_JOB):
        job = name.removeprefix(runs.LATEST_JOB)
        matching = [run for run in kept_runs if name == runs.LATEST or run.run_id.rsplit("-", 3)[0] == job]
        fitting = matching[-1:]
    if not fitting:
        raise RequestError(f"{name} is not kept; `fab keeper status` lists those that are")
    if len(fitting) > 1:
        named = ", ".join(run.run_id for run in fitting[:5])
        raise RequestError(f"{name}: {len(fitting)} runs that are kept fit ({named}); write more of the id")
    return fitting[0].run_id


def stop(target: Target, run_id: str) -> bool:
    """Write that a run is to be stopped, so that it is stopped at the next look and not started again; False: nobody
    starts it again."""
    try:
        documents = stack_documents(target)
    except RequestError:  # a stack without a bucket
        return False
    try:
        run = store_at(documents).edit_run(run_id, lambda now: now and now.to_be("stopped"))
    except DocumentsError as error:
        raise RequestError(f"{run_id}: the keeper cannot be told to stop it: {error}") from None
    return run is not None and run.end is None and run.is_unwanted


def remove(target: Target, stack: TargetRequest, run_id: str) -> str | None:
    """Write that a run is to be removed, and return a line about it, "" if it is gone; None: nobody starts it again.

    Its directory goes once a look has shown that nothing of it lives or is being started: where there is a keeper at
    its next look, else now.

    Raises:
        DocumentsError: nobody can tell.
    """
    try:
        documents = stack_documents(target)
    except RequestError:  # a stack without a bucket
        return None
    store, tell = store_at(documents), say(terminal())
    marked = store.edit_run(run_id, lambda now: now and now.to_be("removed"))
    if marked is None or marked.desired != "removed":
        return None
    if target.inventory.has_keeper:
        line = neglected(store)
        return f"{run_id} is to be removed; the keeper does so at its next look" + (
            f"\n{line}" if line else ""
        )
    reconcile(store, World(documents, tell, program="fab rm", request=stack), tell, stack, [run_id])
    left = store.run(run_id)
    if left is None:  # as the reconciler has said
        return ""
    return f"{run_id} is to be removed, and is not yet: {left.reason}; `fab queue work` does so, or `fab rm` again"


def resumed_by(target: Target) -> dict[str, str]:
    """Return the ids of the runs that somebody may start again, and how that is ended.

    Raises:
        DocumentsError: nobody can tell.
    """
    try:
        documents = stack_documents(target)
    except RequestError:  # a stack without a bucket has none
        return {}
    reasons = {}
    for run in store_at(documents).read().runs.values():
        if run.desired == "removed":
            reasons[run.run_id] = "it is being removed"
        elif run.end is None and run.submission is not None:
            reasons[run.run_id] = f"the queue resumes it; `fab queue cancel {run.submission.number}` first"
        elif run.is_kept:
            reasons[run.run_id] = f"the keeper resumes it; `fab unkeep {run.run_id}` first"
    return reasons


def status(documents: Documents) -> int:
    """Carry out `fab keeper status`: what it did, what it will do, and why, of all slices."""
    kept_runs, console = _kept_runs(documents), terminal()
    if not kept_runs:
        say(console)(f"no run is kept in {documents.url}; `fab train --keep`, or `fab keep RUN`")
        return DONE
    store = store_at(documents)
    rows = table("run", "slice", "state", "attempts left", "until", "why")
    for run in kept_runs:
        limits, wait_s = run.limits, run.not_before_s - store.now_s()
        later = f"; next try in {spoken(wait_s)}" if run.is_kept and not run.seen and wait_s > 0 else ""
        rows.add_row(
            run.run_id,
            run.slice or " or ".join(run.slices),
            _state(run),
            "" if limits.attempts is None else str(limits.attempts),
            "" if limits.deadline_s is None else _moment(limits.deadline_s),
            printable(run.reason + later),
        )
    console.print(rows)
    if line := neglected(store):
        say(console)(line)
    for run in kept_runs:
        for act in run.history[-SHOWN_LINES:]:
            line = f"{act['time']} {run.run_id} {act['act']}: {act['reason']}"
            console.print(printable(line), soft_wrap=True, highlight=False)
    return DONE


def _state(run: control_documents.Run) -> str:
    if run.desired == "removed":
        return "removing"
    if run.end is not None:
        return "ended"
    if run.desired != "running":
        return "stopping" if run.desired == "stopped" else "unkept"
    return "watched" if run.seen else "waiting"


def _moment(unix_s: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_s, datetime.UTC):%Y-%m-%d %H:%M} UTC"
