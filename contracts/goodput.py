"""Goodput and cost: which share of the time on its slice a run turned into lasting progress, and what that time cost.

Both are computed from run.json, result.json and the heartbeats alone. The terms follow Google's ML Goodput Measurement
(https://github.com/AI-Hypercomputer/ml-goodput-measurement): productive time is that of steps which no later attempt
repeats; everything else is badput of some category. What a process has not measured is "unknown".

An attempt is measured by its process 0, which puts into each heartbeat as `timing`:
    {"parts": seconds by part (jobs.runtime.monitoring.metrics), "open": the part it is in, "from_step": the step after
     which the attempt went on, "saved_step": the last one that was saved, where these are known}
When the next attempt begins, its starter copies what is known of the last one into run.json (`measured`).

List prices come into run.json as an attempt's `price`, {"usd_per_hour": of its whole slice, "billed_usd_per_hour": less
what a grant covers, null where unknown}; null where there is no list price. An unknown cost is None, never zero.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from contracts.durations import HOUR_S, spoken
from contracts.inventory import is_made_again
from contracts.run_records import amount, is_moment, parse_time

Category = Literal[
    "productive", "lost", "input_wait", "evaluation", "saving", "recording", "starting", "restoring", "compiling",
    "waiting", "idle", "finishing", "unknown",
]  # fmt: skip
CATEGORIES: tuple[Category, ...] = get_args(Category)

TITLES: Mapping[Category, str] = {"productive": "steps that lasted", "lost": "steps lost"}
"""Of the categories that are not called by their name."""
MEANINGS: Mapping[Category, str] = {
    "productive": "computing steps that no later attempt took again: the goodput",
    "lost": "steps after the checkpoint that the next attempt, or nobody, went on from",
    "input_wait": "making a batch while the devices had nothing to do",
    "evaluation": "evaluations on the way and at the end",
    "saving": "held up by a checkpoint; most of it is written beside the steps",
    "recording": "writing metrics and traces",
    "starting": "starting the processes, joining, reading the data",
    "restoring": "reading a checkpoint",
    "compiling": "compiling, with the first step",
    "waiting": "the slice was there, and the next attempt had not begun",
    "idle": "nothing moved, until that was noticed",
    "finishing": "what follows the last step: the export, a last look",
    "unknown": "not told apart by what ran",
}
PART_CATEGORIES: Mapping[str, Category] = {
    "start": "starting", "restore": "restoring", "compile": "compiling", "compute": "productive",
    "input_wait": "input_wait", "evaluation": "evaluation", "checkpoint": "saving", "logging": "recording",
    "profile": "recording", "finish": "finishing", "command": "unknown",
}  # fmt: skip
"""The category of each part of jobs.runtime.monitoring.metrics."""
STEP_CATEGORIES: tuple[Category, ...] = ("productive", "input_wait")
"""Categories of a step that is lost."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Milliseconds by category, each above 0; together they are the slice time, to the millisecond."""

    milliseconds: Mapping[Category, int] = dataclasses.field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.milliseconds.values()) / 1000

    @property
    def seconds(self) -> dict[Category, float]:
        """In the order of CATEGORIES."""
        return {name: self.milliseconds[name] / 1000 for name in CATEGORIES if name in self.milliseconds}

    @property
    def share(self) -> float | None:
        """The goodput, from 0 to 1, at least where some of the time is unknown; None where nothing is known."""
        total = sum(self.milliseconds.values())
        if not total or ("productive" not in self.milliseconds and "unknown" in self.milliseconds):
            return None
        return self.milliseconds.get("productive", 0) / total

    @property
    def is_known(self) -> bool:
        """Whether anything is known but how long it took."""
        return not self.milliseconds.keys() <= {"unknown"}

    def share_text(self) -> str:
        """As in "81% of 1 h 3 min"."""
        if self.share is None:
            return f"not known ({spoken(self.total_s)})"
        at_least = "at least " if "unknown" in self.milliseconds else ""
        return f"{at_least}{self.share:.0%} of {spoken(self.total_s)}"

    def badput_text(self) -> str:
        """The shares of the other categories that took 1 % of the time or more, the largest first."""
        total = sum(self.milliseconds.values())
        largest = sorted(self.milliseconds.items(), key=lambda item: -item[1])
        return ", ".join(
            f"{title(name)} {part / total:.0%}"
            for name, part in largest
            if name != "productive" and part >= 0.01 * total
        )

    def text(self) -> str:
        """As in "81% of 1 h 3 min; steps lost 7%, starting 6%"."""
        badput = self.badput_text()
        return self.share_text() + (f"; {badput}" if badput else "")


def title(category: Category) -> str:
    return TITLES.get(category, category.replace("_", " "))


def total_goodput(parts: Sequence[Goodput]) -> Goodput:
    sums = {name: sum(part.milliseconds.get(name, 0) for part in parts) for name in CATEGORIES}
    return Goodput({name: value for name, value in sums.items() if value})


def measured(attempt: Mapping[str, Any], result: Any, heartbeats: Sequence[Any]) -> dict[str, Any]:
    """What run.json keeps of an attempt's time once another one begins. result: of that attempt, if it has one.
    heartbeats: of its processes."""
    result = _mapping(result)
    beats = [_mapping(beat) for beat in heartbeats]
    first = next((beat for beat in beats if beat.get("rank") == 0), {})
    timing = dict(_mapping(first.get("timing")))
    if isinstance(result.get("time_s"), dict):
        timing["parts"] = result["time_s"]
    steps = [amount(record.get(name)) for record, name in ((result, "steps"), (first, "step"))]
    timing["step"] = max((step for step in steps if step is not None), default=0)
    moved_s, end_s = amount(first.get("step_time")), amount(result.get("time"))
    if result.get("outcome") == "hung" and moved_s is not None and end_s is not None:
        timing["idle_s"] = round(max(0.0, end_s - moved_s), 3)
    return {"wall_s": wall_s(attempt, result, beats), **({"timing": timing} if timing.get("parts") else {})}


def run_goodput(run: Any, result: Any, heartbeats: Sequence[Any]) -> Goodput | None:
    """The goodput of all attempts so far, from the contents of run.json, result.json and the heartbeats. Attempts whose
    duration is not known are left out; None where that is so of all."""
    parts = [part for part in attempt_goodputs(run, result, heartbeats) if part is not None]
    return total_goodput(parts) if parts else None


def attempt_goodputs(run: Any, result: Any, heartbeats: Sequence[Any]) -> list[Goodput | None]:
    """The same of each attempt, with the time that its slice waited for it; None where its duration is not known."""
    listed = _mapping(run).get("attempts")
    attempts = [attempt for attempt in listed if _is_attempt(attempt)] if isinstance(listed, list) else []
    if not attempts:
        return []
    *earlier, latest = attempts
    number = latest.get("attempt")
    latest_beats = [beat for beat in map(_mapping, heartbeats) if beat.get("attempt") == number]
    result = _mapping(result) if _mapping(result).get("attempt") == number else {}
    ended = {"outcome": result.get("outcome"), **measured(latest, result, latest_beats)}
    records = [*earlier, {**latest, **ended}]
    kept_steps = _kept_steps(records)
    return [
        _goodput(record, lasting, before)
        for record, lasting, before in zip(records, kept_steps, [None, *records], strict=False)
    ]


def _goodput(record: Mapping[str, Any], kept_step: float, before: Mapping[str, Any] | None) -> Goodput | None:
    total = _ms(record.get("wall_s"))
    if total is None:
        return None
    spent = _spent(record, total, kept_step)
    spent["waiting"] = spent.get("waiting", 0) + (0 if before is None else _waiting_ms(before, record))
    return Goodput({name: spent[name] for name in CATEGORIES if spent.get(name)})


def _spent(record: Mapping[str, Any], total: int, kept_step: float) -> dict[Category, int]:
    """The milliseconds of one attempt by category, which add up to `total`."""
    timing = _mapping(record.get("timing"))
    parts: dict[Category, int] = {}
    for name, value in _mapping(timing.get("parts")).items():
        if name in PART_CATEGORIES and (part := _ms(value)) is not None:
            parts[PART_CATEGORIES[name]] = parts.get(PART_CATEGORIES[name], 0) + part
    if not any(parts.values()):
        return {"unknown": total}
    step = amount(timing.get("step")) or 0
    if "productive" in parts:  # a command's time before its first line of metrics
        parts["starting"] = parts.get("starting", 0) + parts.pop("unknown", 0)
    elif {*parts} == {"starting"} and (step or record.get("outcome") == "done"):
        return {"unknown": total}  # a job that tells no parts apart
    _fit(parts, total)
    opened = PART_CATEGORIES.get(str(timing.get("open")), "productive")
    idle = min(_ms(timing.get("idle_s")) or 0, parts.get(opened, 0))
    parts[opened] = parts.get(opened, 0) - idle
    lost_share = _lost_share(amount(timing.get("from_step")) or 0, step, kept_step)
    lost = {name: round(parts.get(name, 0) * lost_share) for name in STEP_CATEGORIES}
    lasting = {name: part - lost.get(name, 0) for name, part in parts.items()}
    return {**lasting, "idle": idle, "lost": sum(lost.values())}


def _fit(parts: dict[Category, int], total: int) -> None:
    """Make the parts add up to the attempt's time: what is missing passed before its process began to measure; where
    clocks differ and it has measured more than there was, all become shorter."""
    over = sum(parts.values()) - total
    if over <= 0:
        parts["starting"] = parts.get("starting", 0) - over
        return
    sum_ms = over + total
    for name in parts:
        parts[name] = parts[name] * total // sum_ms
    parts[max(parts, key=lambda name: parts[name])] += total - sum(parts.values())


def _lost_share(from_step: float, step: float, kept_step: float) -> float:
    """The share of an attempt's steps that came after `kept_step`. They count as equally long."""
    return 0.0 if step <= from_step else (step - min(step, max(from_step, kept_step))) / (step - from_step)


def _kept_steps(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """The last step of each attempt that a later one did not take again; of those that nobody has gone on from and that
    ended before their last step, the last one that was saved."""
    lasting: list[float] = []
    resumed_from = math.inf
    for record in reversed(records):
        timing = _mapping(record.get("timing"))
        saved = amount(timing.get("saved_step"))
        has_ended_badly = record.get("outcome") not in (None, "done")
        lasting.append(
            saved if resumed_from == math.inf and has_ended_badly and saved is not None else resumed_from
        )
        if (from_step := amount(timing.get("from_step"))) is not None:
            resumed_from = min(resumed_from, from_step)
    return lasting[::-1]


def _waiting_ms(before: Mapping[str, Any], record: Mapping[str, Any]) -> int:
    """How long the slice stood for an attempt after the one before it had ended. A run that was stopped had none."""
    wall = amount(before.get("wall_s"))
    earlier, created = before.get("slice_created"), record.get("slice_created")
    if wall is None or not earlier or not created or before.get("outcome") in ("stopped", "done"):
        return 0
    ended_s = parse_time(before["started"]) + wall
    if is_made_again(earlier, created):
        at_s = parse_rfc_3339(created)
        if at_s is None or at_s < ended_s:  # another slice, which may have had other runs meanwhile
            return 0
        ended_s = parse_rfc_3339(record.get("slice_active_at")) or at_s
    return max(0, round(1000 * (parse_time(record["started"]) - ended_s)))


def parse_rfc_3339(moment: object) -> float | None:
    """The Unix time of a moment as Google's APIs write it; None where it is none."""
    try:
        at = datetime.datetime.fromisoformat(str(moment).replace("Z", "+00:00"))
        return at.timestamp() if at.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _is_attempt(value: object) -> bool:
    return isinstance(value, dict) and is_moment(value.get("started"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _ms(value: object) -> int | None:
    seconds = amount(value)
    return None if seconds is None else round(1000 * seconds)


@dataclasses.dataclass(frozen=True)
class Cost:
    """usd: at list prices. billed_usd: less what a grant covers; None where that is not known."""

    usd: float
    billed_usd: float | None

    def text(self, unit: str = "") -> str:
        """The cost as a person reads it. unit: what follows an amount, such as " an hour"."""
        listed = f"{self.usd:,.2f} USD{unit}"
        if self.billed_usd is None:
            return f"{listed} at list prices, less what a grant covers"
        if self.billed_usd >= self.usd:
            return f"{listed} at list prices"
        if self.billed_usd <= 0:
            return f"free by the grant ({listed} at list prices)"
        return f"{self.billed_usd:,.2f} USD{unit} at list prices, {self.usd - self.billed_usd:,.2f} more by the grant"


def cost(attempts: Sequence[Any], last_wall_s: float | None) -> Cost | None:
    """The cost of all attempts, the last of which took `last_wall_s` so far; None if a price or a time is not known."""
    usd, billed_usd = 0.0, 0.0
    is_billed_known = bool(attempts)
    for index, attempt in enumerate(attempts):
        record = attempt if isinstance(attempt, dict) else {}
        price = record.get("price")
        price = price if isinstance(price, dict) else {}
        wall_s = last_wall_s if index == len(attempts) - 1 else amount(record.get("wall_s"))
        an_hour = amount(price.get("usd_per_hour"))
        if an_hour is None or wall_s is None:
            return None
        billed = amount(price.get("billed_usd_per_hour"))
        is_billed_known = is_billed_known and billed is not None
        usd += an_hour * wall_s / HOUR_S
        billed_usd += (billed or 0.0) * wall_s / HOUR_S
    return Cost(usd, billed_usd if is_billed_known else None) if attempts else None


def total_wall_s(attempts: Sequence[Any], last_wall_s: float | None) -> float | None:
    """The duration of all attempts, the last of which took `last_wall_s` so far; None if one of them is not known."""
    earlier_s = [
        amount(attempt.get("wall_s")) if isinstance(attempt, dict) else None for attempt in attempts[:-1]
    ]
    known_s = [known for known in [*earlier_s, last_wall_s] if known is not None]
    return sum(known_s) if attempts and len(known_s) == len(attempts) else None


def wall_s(attempt: Any, result: Any, heartbeats: Sequence[Any]) -> float | None:
    """The duration of one attempt: from its result, else until its last heartbeat or until it was ended, whichever was
    first: a host that was frozen or cut off may beat again afterwards. None if it is not known."""
    record = result or {}
    recorded_s = amount(record.get("wall_s"))
    beats_s = [at_s for beat in heartbeats if (at_s := amount(beat.get("time"))) is not None]
    ends_s = [max(beats_s)] if beats_s else []
    if (ended_s := amount(record.get("time"))) is not None:
        ends_s.append(ended_s)
    if recorded_s is not None or not ends_s:
        return recorded_s
    return max(0.0, min(ends_s) - parse_time(attempt["started"]))
