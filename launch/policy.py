"""What to do about a run and its slice, by what people want and what is observed. Pure, and standard library only.

`next_action` decides about a run, `next_slice_action` about a slice, `assignments` which of those that wait gets which
slice. Nothing else decides whether a run waits, starts, is started again, is given up or stopped, and whether a slice
is requested or given back. `fab train --max-restarts` and `fab recover` ask `judge`, the part about a run that has
ended; so does the first process of a run on pods.

What is observed is present, absent or unknown. On unknown nothing is started, given up, deleted or called lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from contracts.durations import spoken
from contracts.errors import UNAVAILABLE, WRONG_REQUEST
from contracts.inventory import is_made_again
from contracts.run_directory import ENDED, State
from launch.control.control_documents import Attempt, Outcome, Run, Slice

Presence = Literal["present", "absent", "unknown"]
Standing = Literal["fixed", "active", "doubled", "waiting", "overdue", "lost", "absent", "unknown"]
"""Of a slice. fixed: nothing here can make it again, as this machine. doubled: active, and another of its zones has a
request too. overdue: it waits for capacity, and the next of its zones is to be tried."""
USABLE: tuple[Standing, ...] = ("fixed", "active", "doubled")
WITHOUT_HOSTS: tuple[Standing, ...] = ("waiting", "overdue", "lost", "absent")
Cause = Literal[
    "done", "stopped", "over budget", "wrong request", "outside", "preempted", "failed", "hung", "lost"
]
OWN: tuple[Cause, ...] = ("failed", "hung", "lost")
"""Causes that may be the job's own, and would repeat themselves."""

SILENT_S = 90.0
"""Since the last heartbeat was written; one is written every 10 s, and a host is given up after a minute."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
MOST_FAILED_STARTS = 5
MOST_PREPARES = 12
"""With the growing pauses some seven hours."""
MOST_LOSSES = 5
"""Losses of the hosts in a row, with no new checkpoint between, that take no restart."""
MOST_OUTAGES = 24
"""In a row; with the growing pauses about a day."""
ENDING_S = 900.0
"""Before a slice of flex-start is taken back: a run would hardly get to its first checkpoint."""
STARTING_LIMIT_S = 900.0
"""For so long after an attempt was begun it may still start, where whoever began it was interrupted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceObserved:
    """created: when it was created, as its API says it; "" where that is not known. ends_s: when it is taken back, in
    Unix seconds; None: it has no such time."""

    standing: Standing
    created: str = ""
    ends_s: float | None = None

    def is_ending(self, now_s: float) -> bool:
        """Whether it is taken back so soon that nothing is started on it any more."""
        return self.ends_s is not None and self.ends_s - now_s < ENDING_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signs:
    """What a listing shows of a run's directory. beat_age_s: of the newest heartbeat of process 0; None: there is
    none."""

    beat_age_s: float | None
    has_result: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunObserved:
    """A run that was examined: its directory was read, and its hosts were asked.

    living: whether processes of its latest attempt are. attempt: the latest that its directory knows of, -1 for none.
    silent: hosts that did not answer. checkpoint: the newest step, -1 for none. error: in a line, of one that is done
    its main number. cost_usd: of all its attempts, None where that is not known. max_usd: as its latest attempt was
    started with.
    """

    living: Presence
    state: State = "lost"
    cause: Cause = "lost"
    attempt: int = -1
    silent: int = 0
    checkpoint: int = -1
    error: str = ""
    cost_usd: float | None = None
    max_usd: float | None = None
    is_own_command: bool = False


Do = Literal["wait", "examine", "start", "stop", "end", "remove", "request", "prepare", "release"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """outcome: of `end`."""

    do: Do
    reason: str = ""
    outcome: Outcome = "failed"


def _why_unwanted(run: Run) -> str:
    return f"`fab {'rm' if run.desired == 'removed' else 'stop'}` has ended it"


def failure_cause(state: State, result: Mapping[str, object] | None) -> Cause:
    """Return why a run that has ended did so. result: of its latest attempt."""
    result = result or {}
    if state == "done":
        return "done"
    if result.get("out_of_budget"):
        return "over budget"
    if state == "stopped":
        return "stopped"
    if result.get("request") or result.get("exit_code") == WRONG_REQUEST:
        return "wrong request"
    if result.get("exit_code") == UNAVAILABLE:
        return "outside"
    return "preempted" if state == "preempted" else "hung" if state == "hung" else (
        "failed" if state == "failed" else "lost"
    )  # fmt: skip


def pause_s(failures: int) -> float:
    """Return the pause before the next try, after so many failures in a row; it doubles."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, min(failures, 20) - 1)))


# --- a run ----------------------------------------------------------------------------------------------------------


def next_action(
    run: Run,
    slice_spec: Slice,
    place: SliceObserved,
    signs: Signs | None,
    observed: RunObserved | None,
    now_s: float,
) -> Action:
    """Decide about a run. signs: None where its directory cannot be listed. observed: None: it was not examined."""
    if run.end is not None:
        return Action(do="remove" if run.desired == "removed" else "wait")
    if run.desired == "unmanaged":
        return Action(do="end", outcome="unmanaged", reason="`fab unkeep` has taken it back")
    if run.slice is None:
        return _unassigned(run, now_s)
    if place.standing == "unknown":
        return Action(do="wait", reason=f"whether {run.slice} is there cannot be seen now")
    if place.standing in WITHOUT_HOSTS:
        return _without_slice(run, slice_spec, place, observed, now_s)
    if run.attempt is None and run.submission is not None:
        return _unless_ending(_first_start(run, slice_spec, now_s), run, place, now_s)
    if observed is None:
        beat_age_s = None if signs is None or signs.has_result else signs.beat_age_s
        is_fresh = beat_age_s is not None and beat_age_s <= SILENT_S
        if is_fresh and run.desired == "running" and run.seen == "running":
            return Action(do="wait")
        return Action(do="examine")
    if observed.living == "present":
        return Action(do="stop" if run.is_unwanted else "wait", reason=f"it is {observed.state}")
    if observed.living == "unknown" and slice_spec.refused:
        return Action(do="end", outcome="lost", reason=slice_spec.refused)
    if observed.living == "unknown":
        return Action(do="wait", reason=f"{observed.silent or 'some'} of its hosts do not answer")
    action = judge(run, observed, now_s, slice_spec=slice_spec, created=place.created)
    return _unless_ending(action, run, place, now_s)


def _unless_ending(action: Action, run: Run, place: SliceObserved, now_s: float) -> Action:
    """Return the action; to wait in place of a start on a slice that is about to be taken back."""
    if action.do == "start" and place.is_ending(now_s):
        reason = f"{run.slice} is about to be taken back; the run starts once it is made again"
        return Action(do="wait", reason=reason)
    return action


def judge(
    run: Run, observed: RunObserved, now_s: float, *, slice_spec: Slice | None = None, created: str = ""
) -> Action:
    """Decide about a run of which nothing lives: whether it has ended, waits, or is started again.

    created: of its slice now; another one than of its attempt tells that the hosts of that are lost.
    """
    attempt = run.attempt
    is_begun = attempt is not None and attempt.number > observed.attempt
    if attempt is not None and is_begun and run.desired != "running" and now_s < attempt.starting_until_s:
        # Whoever began it may have been frozen, and then no newer attempt fences it off.
        return Action(do="wait", reason="it is being started, and is stopped then")
    if run.is_unwanted:
        outcome: Outcome = "stopped" if observed.attempt >= 0 else "cancelled"
        return Action(
            do="end", outcome=outcome if observed.cause != "done" else "done", reason=_why_unwanted(run)
        )
    if not is_begun and (ending := _ending(observed)) is not None:
        return ending
    cause = "lost" if is_begun else observed.cause
    is_new = attempt is None or observed.checkpoint > attempt.checkpoint
    is_slice_lost = attempt is not None and is_made_again(attempt.created, created)
    if is_slice_lost and cause in OWN:
        cause = "preempted"
    ended = ENDED.get(observed.state, "ended") if not is_begun else "was not started"
    if run.failed_starts + is_begun >= MOST_FAILED_STARTS:
        return Action(do="end", reason=f"given up after {MOST_FAILED_STARTS} tries to start it: {run.reason}")
    if cause in OWN and not is_begun and not is_new and attempt is not None and attempt.after in OWN:
        return Action(
            do="end",
            outcome="hung" if cause == "hung" else "lost" if cause == "lost" else "failed",
            reason=f"it {ended} twice from {_restart_point(observed)}, with no new checkpoint between"
            f"{_colon(observed.error)}",
        )
    if cause == "outside" and run.failures >= MOST_OUTAGES and not is_new:
        return Action(
            do="end", reason=f"given up after {MOST_OUTAGES} outages in a row{_colon(observed.error)}"
        )
    if slice_spec is not None and slice_spec.refused:
        return Action(do="end", reason=slice_spec.refused)
    if refusal := refused(run, now_s, observed):
        return Action(do="end", reason=refusal)
    limits = run.limits
    if (
        limits.restarts is not None
        and limits.restarts <= 0
        and not is_begun
        and takes_restart(run, cause, is_new=is_new)
    ):
        return Action(
            do="end",
            outcome=observed.state if observed.state in ("hung", "lost", "preempted") else "failed",
            reason=f"it {ended}{_colon(observed.error)}",
        )
    if run.not_before_s > now_s:
        return Action(do="wait", reason=f"it {ended}, and is started again after a pause")
    goes_on = f"goes on from {_restart_point(observed)}" if observed.checkpoint >= 0 else "starts again"
    if observed.is_own_command:
        goes_on += ", with its RUN_DIR as it was"
    return Action(do="start", reason=f"it {ended}, and {goes_on}")


def _ending(observed: RunObserved) -> Action | None:
    """Return the end of a run that ended for good, whatever it may still cost or try."""
    if observed.cause == "done":
        return Action(do="end", outcome="done", reason=f"it is done{_colon(observed.error)}")
    if observed.cause in ("stopped", "over budget"):
        return Action(do="end", outcome="stopped", reason=f"it was stopped{_colon(observed.error)}")
    if observed.cause == "wrong request":
        return Action(do="end", outcome="failed", reason=f"it would fail again{_colon(observed.error)}")
    return None


def takes_restart(run: Run, cause: Cause, *, is_new: bool) -> bool:
    """Return whether starting a run again takes one of its restarts: what happened may be the job's own fault, or it
    has been lost again and again without getting on."""
    if cause == "outside":
        return False
    if cause in ("failed", "hung"):
        return True
    return not is_new and run.failures >= MOST_LOSSES


def refused(run: Run, now_s: float, observed: RunObserved | None = None) -> str:
    """Return why a run may not be started any more; "" where it may."""
    limits, max_usd = run.limits, _max_usd(run, observed)
    if limits.attempts is not None and limits.attempts <= 0:
        return "it has no attempts left"
    if limits.deadline_s is not None and now_s > limits.deadline_s:
        return f"its deadline was {spoken(now_s - limits.deadline_s)} ago"
    if observed is not None and is_spent(run, observed):
        return f"it has cost {observed.cost_usd:.2f} USD of at most {max_usd:.2f}"
    return ""


def is_spent(run: Run, observed: RunObserved) -> bool:
    """Return whether a run has cost what it may cost."""
    max_usd, cost_usd = _max_usd(run, observed), observed.cost_usd
    return max_usd is not None and cost_usd is not None and cost_usd >= max_usd


def _max_usd(run: Run, observed: RunObserved | None) -> float | None:
    return observed.max_usd if observed is not None and observed.max_usd is not None else run.limits.max_usd


def begin_attempt(run: Run, observed: RunObserved | None, created: str, now_s: float) -> Run:
    """Return the run as it is written before an attempt is started: the attempt is counted before it starts, so a
    crash cannot repeat it. observed: None: it has never run."""
    limits, before = run.limits, run.attempt
    number = max(observed.attempt if observed else -1, before.number if before else -1) + 1
    checkpoint, failed_starts = observed.checkpoint if observed else -1, run.failed_starts
    if observed is None or (observed.attempt < 0 and before is None):
        fresh, failures, after = limits, 0, ""
    else:
        is_new = before is None or checkpoint > before.checkpoint
        is_slice_lost = before is not None and is_made_again(before.created, created)
        is_begun = before is not None and before.number > observed.attempt
        cause = "preempted" if (is_slice_lost and observed.cause in OWN) or is_begun else observed.cause
        failures, after = 1 if is_new else run.failures + 1, cause
        takes = takes_restart(run, cause, is_new=is_new)
        counts = cause != "outside"
        failed_starts += is_begun
        fresh = dataclasses.replace(
            limits,
            attempts=None if limits.attempts is None else limits.attempts - counts,
            restarts=None if limits.restarts is None else max(0, limits.restarts - takes),
        )
    return dataclasses.replace(
        run,
        attempt=Attempt(
            number=number,
            created=created,
            checkpoint=checkpoint,
            after=after,
            starting_until_s=now_s + STARTING_LIMIT_S,
        ),
        limits=fresh,
        failures=failures,
        failed_starts=failed_starts,
        not_before_s=now_s + pause_s(failures),
        seen="",
    )


def undo_attempt(before: Run, counted: Run, now_s: float, *, counts: bool) -> Run:
    """Return a run whose attempt could not be started, and nothing of it lives. before: as it was before that attempt.
    counts: it was no fault of somebody else at work there."""
    if not counts:
        pause = max(counted.not_before_s, now_s + FIRST_PAUSE_S)
        return dataclasses.replace(
            counted,
            attempt=before.attempt,
            limits=before.limits,
            failures=before.failures,
            not_before_s=pause,
        )
    failed = counted.failed_starts + 1
    return dataclasses.replace(
        counted,
        attempt=before.attempt,
        failed_starts=failed,
        not_before_s=max(counted.not_before_s, now_s + pause_s(failed)),
    )


def _unassigned(run: Run, now_s: float) -> Action:
    if run.is_unwanted:
        return Action(do="end", outcome="cancelled", reason=run.reason or _why_unwanted(run))
    if refusal := refused(run, now_s):
        return Action(do="end", reason=refusal)
    return Action(do="wait", reason=f"it waits for {' or '.join(run.slices)}")


def _without_slice(
    run: Run, slice_spec: Slice, place: SliceObserved, observed: RunObserved | None, now_s: float
) -> Action:
    """Decide about a run whose hosts are gone. observed: as its directory tells, where that can be read."""
    if run.is_unwanted:
        outcome: Outcome = "stopped" if run.attempt is not None or run.submission is None else "cancelled"
        return Action(do="end", outcome=outcome, reason=_why_unwanted(run))
    is_seen = observed is not None and not (run.attempt and run.attempt.number > observed.attempt)
    if is_seen and observed is not None and (ending := _ending(observed)) is not None:
        return ending
    if slice_spec.refused:
        return Action(do="end", reason=slice_spec.refused)
    if refusal := refused(run, now_s, observed):
        return Action(do="end", reason=refusal)
    if place.standing in ("waiting", "overdue"):
        return Action(do="wait", reason=f"no capacity for {run.slice} yet")
    return Action(do="wait", reason=f"its slice is {'gone' if place.standing == 'absent' else 'lost'}")


def _first_start(run: Run, slice_spec: Slice, now_s: float) -> Action:
    if run.is_unwanted:
        return Action(do="end", outcome="cancelled", reason=_why_unwanted(run))
    if run.failed_starts >= MOST_FAILED_STARTS:
        return Action(do="end", reason=f"given up after {MOST_FAILED_STARTS} tries: {run.reason}")
    if refusal := slice_spec.refused or refused(run, now_s):
        return Action(do="end", reason=refusal)
    if max(run.not_before_s, slice_spec.busy_until_s) > now_s:
        return Action(do="wait", reason=run.reason)
    return Action(do="start", reason="it starts")


def _restart_point(observed: RunObserved) -> str:
    return f"the checkpoint of step {observed.checkpoint}" if observed.checkpoint >= 0 else "the start"


def _colon(text: str) -> str:
    return f": {text}" if text else ""


# --- a slice --------------------------------------------------------------------------------------------------------


def next_slice_action(
    slice_spec: Slice, place: SliceObserved, runs: Iterable[Run], silent: int, now_s: float
) -> Action:
    """Decide about a slice. runs: that have it, and have not ended. silent: its hosts that do not answer, as far as
    they were asked."""
    having = [run for run in runs if run.slice == slice_spec.name and run.end is None]
    needed = [run for run in having if run.desired == "running"]
    standing, is_early = place.standing, slice_spec.not_before_s > now_s
    if standing in ("unknown", "fixed"):
        return Action(do="wait")
    if not needed:
        is_ours = slice_spec.requested and not having
        return Action(do="release", reason="no run needs it any more") if is_ours else Action(do="wait")
    if standing == "doubled":
        return Action(do="request", reason="another zone has a request of it too")
    if slice_spec.refused or is_early:
        return Action(do="wait", reason=slice_spec.reason)
    if standing == "overdue":
        return Action(do="request", reason="the next zone has its turn")
    if standing in ("lost", "absent"):
        return Action(do="request", reason=f"it is {'gone' if standing == 'absent' else 'lost'}")
    if standing == "active":
        are_new = any(run.attempt and is_made_again(run.attempt.created, place.created) for run in needed)
        if silent or ((slice_spec.requested or are_new) and slice_spec.prepared != place.created):
            reason = f"{silent} of its hosts do not answer" if silent else "its hosts are new"
            return Action(do="prepare", reason=reason)
    return Action(do="wait")


# --- the queue ------------------------------------------------------------------------------------------------------


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Return the runs in the order in which they get a slice; one whose hosts were not ready lets the others go
    first."""
    return sorted(runs, key=lambda run: (run.failed_starts, -run.priority, run.order, run.run_id))


def assignments(
    runs: Sequence[Run], slices: Mapping[str, tuple[Slice, SliceObserved]], now_s: float
) -> dict[str, str]:
    """Return the slice that each run gets now, by run id; a run whose slice is gone moves to one that is free.

    slices: all that the stack declares.
    """
    living = [run for run in runs if run.end is None and run.desired != "unmanaged"]
    taken = {run.slice for run in living if run.slice is not None}
    assigned: dict[str, str] = {}

    def is_free(name: str) -> bool:
        slice_spec, place = slices[name]
        is_ready = (
            place.standing in USABLE and slice_spec.busy_until_s <= now_s and not place.is_ending(now_s)
        )
        return name not in taken and is_ready and not slice_spec.refused

    def is_recoverable(name: str) -> bool:
        slice_spec, place = slices[name]
        return name not in taken and place.standing in WITHOUT_HOSTS and not slice_spec.refused

    for run in in_order(run for run in living if run.desired == "running" and run.submission is not None):
        names = [name for name in run.slices if name in slices]
        if run.slice is not None and (
            run.slice not in slices or slices[run.slice][1].standing not in WITHOUT_HOSTS
        ):
            continue
        chosen = next(filter(is_free, names), None)
        if chosen is None and run.slice is None:
            chosen = next(filter(is_recoverable, names), None)
        if chosen is not None and run.not_before_s <= now_s:
            assigned[run.run_id] = chosen
            taken.add(chosen)
    return assigned
