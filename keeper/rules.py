"""What to do about a wanted run, by what is seen of it now. Pure: no clock, nothing remembered but the entry.

`glance` is for every look: it costs nothing but what all runs are listed with. Only where that is not enough is a run
examined, and then `next_step` decides. Each step is small, and the look after it decides anew.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from contracts.durations import spoken
from contracts.run_directory import ACTIVE as ACTIVE
from contracts.run_directory import ENDED, State
from keeper.store import Wanted

SILENT_S = 90.0
"""Since the last heartbeat was written; one is written every 10 s, and a host is given up after a minute."""
FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0

Slice = Literal["none", "absent", "waiting", "overdue", "active", "doubled", "lost", "unread"]
"""Of a wanted run. none: no queued resource of this stack, as on this machine. unread: Google gives no answer.

overdue: it waits, and the next of its zones has its turn. doubled: active, and another zone has a request of it too.
"""
QUEUED: tuple[Slice, ...] = ("waiting", "overdue")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign:
    """What a listing shows of a run's directory. beat_age_s: None where there is no heartbeat."""

    beat_age_s: float | None
    has_result: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """A run that was examined. is_wrong: its request was; is_outage: it failed because something outside was away;
    error: in words. saved: steps of its checkpoints.

    cost_usd: of all its attempts so far; None where that is not known. max_usd: as its latest attempt was started
    with; None: as the entry has it.
    """

    state: State
    is_wrong: bool = False
    is_outage: bool = False
    error: str = ""
    saved: tuple[int, ...] = ()
    cost_usd: float | None = None
    max_usd: float | None = None

    @property
    def newest(self) -> int:
        return self.saved[-1] if self.saved else -1


Do = Literal["nothing", "examine", "ask", "resume", "stop", "end"]
STOPPED = "`fab stop` has ended it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    do: Do
    reason: str = ""


def glance(wanted: Wanted, of_slice: Slice, sign: Sign | None, now_s: float) -> Step:
    """Decide by what a listing shows. sign: None where the run's directory cannot be listed from here."""
    if wanted.state == "ended" or of_slice == "unread":
        return Step(do="nothing")
    if wanted.unkept:
        return Step(do="end", reason="`fab unkeep` has taken it back")
    if of_slice == "doubled":
        return Step(do="ask", reason="another zone has a request of its slice too")
    if of_slice in ("absent", "lost", *QUEUED):
        if told := STOPPED if wanted.stop else refusal(wanted, now_s):
            return Step(do="end", reason=told)
        if of_slice == "waiting" or wanted.not_before_s > now_s:
            return Step(do="nothing")
        if of_slice == "overdue":
            return Step(do="ask", reason="the next zone has its turn")
        return Step(do="ask", reason=f"its slice is {'gone' if of_slice == 'absent' else 'lost'}")
    if wanted.for_queue:
        return Step(do="nothing" if wanted.state == "watched" else "examine")
    if wanted.stop or sign is None or sign.has_result or wanted.state != "watched":
        return Step(do="examine")
    if sign.beat_age_s is None or sign.beat_age_s > SILENT_S:
        return Step(do="examine")
    return Step(do="nothing")


def next_step(wanted: Wanted, facts: Facts, now_s: float) -> Step:
    """Decide about a run that was examined, whose slice is there."""
    if facts.state in ACTIVE:
        return Step(do="stop" if wanted.stop else "nothing", reason=f"it is {facts.state}")
    if wanted.stop:
        return Step(do="end", reason=f"{STOPPED}; it {ENDED[facts.state]}")
    if facts.state == "done":
        return Step(do="end", reason="it is done")
    if facts.state == "stopped":
        return Step(do="end", reason=f"it was stopped{f': {facts.error}' if facts.error else ''}")
    if facts.is_wrong:
        return Step(do="end", reason=f"it would fail again: {facts.error}")
    own_fault = facts.state in ("failed", "hung") and not wanted.slice_lost and not facts.is_outage
    if own_fault and wanted.last_restored_step is not None and facts.newest <= wanted.last_restored_step:
        where = f"the checkpoint of step {facts.newest}" if facts.saved else "the start"
        return Step(
            do="end",
            reason=f"it {facts.state} twice from {where}, with no new checkpoint between"
            f"{f': {facts.error}' if facts.error else ''}",
        )
    limited = dataclasses.replace(wanted, max_usd=limit_usd(wanted, facts))
    if told := refusal(limited, now_s, facts.cost_usd):
        return Step(do="end", reason=told)
    if wanted.not_before_s > now_s:
        return Step(do="nothing", reason=f"the next try is in {spoken(wanted.not_before_s - now_s)}")
    where = f"the checkpoint of step {facts.newest}" if facts.saved else "the start"
    return Step(do="resume", reason=f"it {ENDED[facts.state]}, and goes on from {where}")


def limit_usd(wanted: Wanted, facts: Facts) -> float | None:
    """What all its attempts may cost: `fab train --resume --max-usd` may have changed it since it is kept."""
    return facts.max_usd if facts.max_usd is not None else wanted.max_usd


def refusal(wanted: Wanted, now_s: float, cost_usd: float | None = None) -> str:
    """Why it may not be brought back any more; "" where it may."""
    if wanted.attempts_left <= 0:
        return "it has no attempts left"
    if wanted.deadline_s is not None and now_s > wanted.deadline_s:
        return f"its deadline was {spoken(now_s - wanted.deadline_s)} ago"
    if wanted.max_usd is not None and cost_usd is not None and cost_usd >= wanted.max_usd:
        return f"it has cost {cost_usd:.2f} USD of at most {wanted.max_usd:.2f}"
    return ""


def resumed(wanted: Wanted, facts: Facts, now_s: float) -> Wanted:
    """Return the entry as it is written before a run is resumed, so that whoever is killed meanwhile has counted."""
    is_new = wanted.last_restored_step is None or facts.newest > wanted.last_restored_step
    failures = 1 if is_new else wanted.failures + 1
    return dataclasses.replace(
        wanted,
        state="recovering",
        attempts_left=wanted.attempts_left - 1,
        last_restored_step=facts.newest,
        failures=failures,
        not_before_s=now_s + pause_s(failures),
    )


def pause_s(failures: int) -> float:
    """Before the next try, after so many without a new checkpoint; it doubles."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1)))
