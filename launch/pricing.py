"""What runs and slices cost: list prices of the catalogue, hours, what a grant covers; and the budget of a run."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from contracts import goodput
from contracts.durations import HOUR_S, spoken
from contracts.errors import RequestError
from contracts.goodput import Cost, Goodput, cost
from contracts.inventory import Inventory, Slice
from contracts.process_environment import PLATFORMS
from contracts.run_records import amount
from infra.documents import Documents
from infra.documents.deleted_slices import DeletedSlice, read
from jobs.runtime.monitoring.metric_definitions import finite
from launch.runs import Run, parse_time


def list_price(tpu_slice: Slice) -> dict[str, float | None] | None:
    """Return what an hour of a slice costs, as an attempt in run.json has it; None where no list price is known."""
    return listed_price(dataclasses.asdict(dataclasses.replace(tpu_slice, hosts=())))


def listed_price(described: Mapping[str, Any]) -> dict[str, float | None] | None:
    """The same of a slice as run.json has it, which may be of any version."""
    if described.get("accelerator_type") in PLATFORMS:
        return None  # this machine, which no catalogue has
    from infra import catalogue

    try:
        kind = catalogue.accelerator(described["accelerator_type"], "any")
        usd = catalogue.price_usd_per_hour(kind, described["zone"], described["capacity"])
        if usd is None:
            return None
        count, granted = described["count"], described.get("granted_chips")
        chips = kind.chips * count
        billed = None if granted is None else usd * count * max(0, chips - granted) / chips
        return {"usd_per_hour": usd * count, "billed_usd_per_hour": billed}
    except (catalogue.CatalogueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def an_hour(tpu_slice: Slice) -> str:
    """Return what an hour of a slice costs, in words."""
    price = list_price(tpu_slice)
    if price is None:
        return f"not known for {tpu_slice.accelerator_type} ({tpu_slice.capacity}) in {tpu_slice.zone}"
    return f"{_cost(price, HOUR_S).text(' an hour')} ({tpu_slice.capacity}, {tpu_slice.zone})"


def _cost(price: dict[str, float | None], length_s: float) -> Cost:
    result = cost([{"price": price}], length_s)
    assert result is not None
    return result


def run_cost(run: Run) -> Cost | None:
    """Return what the slice of a run cost for the time of its attempts so far; None where that is not known."""
    return cost(_attempts(run), run.wall_s)


def _attempts(run: Run) -> list[dict[str, Any]]:
    """The attempts with their prices; those of earlier versions at the price of the run's slice."""
    price = listed_price(run.slice_record)
    return [{"price": price, **attempt} for attempt in run.described["attempts"]]


def active_s(tpu_slice: Slice) -> float | None:
    """Return since when a slice costs, in Unix seconds; None where the inventory does not say it."""
    return goodput.parse_rfc_3339(tpu_slice.active_at or tpu_slice.created)


def slice_cost(tpu_slice: Slice, now_s: float) -> tuple[float, Cost | None] | None:
    """Return the age of a slice in seconds and what it has cost; None if its age is unknown or it has no hosts."""
    at_s = active_s(tpu_slice)
    if at_s is None or not tpu_slice.hosts:
        return None
    price, length_s = list_price(tpu_slice), max(0.0, now_s - at_s)
    return length_s, None if price is None else _cost(price, length_s)


def stack_costs(slices: Sequence[Slice], now_s: float) -> Iterator[str]:
    """Return a line for each slice that is there, and one for all where there are several."""
    costs: list[Cost] = []
    priced = [one_slice for one_slice in slices if one_slice.is_usable and list_price(one_slice) is not None]
    for tpu_slice in priced:
        line = f"slice {tpu_slice.name} ({tpu_slice.accelerator_type}): {an_hour(tpu_slice)}"
        if tpu_slice.pool is not None:
            line += (
                " while a run has its nodes" if tpu_slice.pool.scales_to_zero else ", with a run or without"
            )
        so_far = slice_cost(tpu_slice, now_s)
        if so_far is not None and so_far[1] is not None:
            costs.append(so_far[1])
            line += f"; {so_far[1].text()} in the {spoken(so_far[0])} that it is there"
        yield line
    if len(costs) > 1:
        yield f"together {total(costs).text()} so far"


def total(costs: Sequence[Cost]) -> Cost:
    billed = [cost_of_slice.billed_usd for cost_of_slice in costs]
    billed_usd = [usd for usd in billed if usd is not None]
    return Cost(
        math.fsum(cost_of_slice.usd for cost_of_slice in costs),
        math.fsum(billed_usd) if len(billed_usd) == len(billed) else None,
    )


def deleted_slices(inventory: Inventory) -> Sequence[DeletedSlice]:
    """Return what a stack's bucket records of slices that are gone. Raises RequestError: it cannot be read."""
    return () if inventory.control is None else read(Documents(inventory.control))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Month:
    """What the slices of a stack did in a month, and what that cost.

    month: as in 2026-11, in UTC; an attempt belongs to the one in which it began. runs: ids. cost: of the time that has
    a known price; None where none has. is_cost_complete: whether all of it has.
    """

    month: str
    runs: frozenset[str]
    goodput: Goodput
    cost: Cost | None
    is_cost_complete: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Span:
    """Time of a slice. price: as an attempt in run.json has it. run_id: the run that held it; None: nobody did."""

    at_s: float
    goodput: Goodput
    price: Any
    run_id: str | None = None

    @property
    def month(self) -> str:
        return f"{datetime.datetime.fromtimestamp(self.at_s, datetime.UTC):%Y-%m}"


def by_month(
    listed: Sequence[Run], slices: Sequence[Slice], deleted: Sequence[DeletedSlice], now_s: float
) -> list[Month]:
    """Divide the time of a stack's slices by month, the newest first. slices: those that are there now; of those that
    are neither there nor `deleted` nothing is known after the end of their last run."""
    spans: list[_Span] = []
    held: dict[str, list[_Span]] = {}
    active_at: dict[str, str] = {}
    for run in listed:
        parts = goodput.attempt_goodputs(run.described, run.result, run.heartbeats)
        for attempt, part in zip(_attempts(run), parts, strict=True):
            if part is not None:
                at_s = parse_time(attempt["started"]) - part.seconds.get("waiting", 0.0)
                spans.append(_Span(at_s=at_s, goodput=part, price=attempt["price"], run_id=run.run_id))
                created = str(attempt.get("slice_created") or "")
                held.setdefault(created, []).append(spans[-1])
                active_at[created] = str(attempt.get("slice_active_at") or "")
    last: dict[str, tuple[float, Any]] = {
        tpu_slice.created: (now_s, list_price(tpu_slice))
        for tpu_slice in slices
        if tpu_slice.hosts and tpu_slice.is_usable
    }
    active_at |= {tpu_slice.created: tpu_slice.active_at for tpu_slice in slices if tpu_slice.active_at}
    active_at |= {gone.created: gone.active_at for gone in deleted if gone.active_at}
    for gone in deleted:
        if (deleted_s := goodput.parse_rfc_3339(gone.deleted)) is not None:
            spans_of_it = held.get(gone.created)
            price = spans_of_it[-1].price if spans_of_it else listed_price(dataclasses.asdict(gone))
            last[gone.created] = (deleted_s, price)
    for created in {*held, *last}:
        if (active_s := goodput.parse_rfc_3339(active_at.get(created) or created)) is not None:
            spans += _unused(active_s, held.get(created, []), last.get(created))
    months: dict[str, list[_Span]] = {}
    for span in spans:
        months.setdefault(span.month, []).append(span)
    return [_month(month, months[month]) for month in sorted(months, reverse=True)]


def _month(month: str, spans: Sequence[_Span]) -> Month:
    costs = [
        span_cost
        for span in spans
        if (span_cost := cost([{"price": span.price}], span.goodput.total_s)) is not None
    ]
    return Month(
        month=month,
        runs=frozenset(span.run_id for span in spans if span.run_id is not None),
        goodput=goodput.total_goodput([span.goodput for span in spans]),
        cost=total(costs) if costs else None,
        is_cost_complete=len(costs) == len(spans),
    )


def _unused(active_s: float, held: Sequence[_Span], last: tuple[float, Any] | None) -> Iterator[_Span]:
    """The time of one slice that no run held, divided at the ends of months. last: until when it was there, and its
    price; None: that is not known."""
    price = last[1] if last is not None else held[-1].price
    ends = [*((span.at_s, span.at_s + span.goodput.total_s) for span in held)]
    ends += [(last[0], last[0])] if last is not None else []
    free_s = active_s
    for begin_s, end_s in sorted(ends):
        while free_s < begin_s:
            first = datetime.datetime.fromtimestamp(free_s, datetime.UTC).replace(
                day=1, hour=0, minute=0, second=0, microsecond=0
            )
            next_month_s = (first + datetime.timedelta(days=32)).replace(day=1).timestamp()
            until_s = min(begin_s, next_month_s)
            if idle_ms := round(1000 * (until_s - free_s)):
                yield _Span(at_s=free_s, goodput=Goodput({"idle": idle_ms}), price=price)
            free_s = until_s
        free_s = max(free_s, end_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run may cost, at list prices, in all its attempts: a grant's hours count as if they were paid for."""

    max_usd: float
    spent_usd: float
    usd_per_hour: float

    @property
    def left_s(self) -> int:
        """Seconds that the next attempt may take."""
        return math.floor((self.max_usd - self.spent_usd) / self.usd_per_hour * HOUR_S)

    @property
    def reason(self) -> str:
        """Why the attempt is stopped, in the end."""
        return f"its budget of {self.max_usd:,.2f} USD is spent, at {self.usd_per_hour:,.2f} USD an hour by the list"

    @property
    def text(self) -> str:
        """What is said of it before the attempt begins."""
        before = f", less {self.spent_usd:,.2f} USD of earlier attempts" if self.spent_usd else ""
        return (
            f"budget {self.max_usd:,.2f} USD{before}: the run is stopped after {spoken(max(0, self.left_s))}, "
            f"at {self.usd_per_hour:,.2f} USD an hour by the list"
        )


def budget(max_usd: float | None, tpu_slice: Slice, before: Run | None) -> Budget | None:
    """Return the budget of an attempt; None where there is none. before: the run, where it is resumed.

    Raises:
        RequestError: the slice has no list price, or all of it is spent.
    """
    limit_usd = max_usd if max_usd is not None else finite(before and before.described.get("max_usd"))
    if limit_usd is None:
        return None
    price = amount((list_price(tpu_slice) or {}).get("usd_per_hour"))
    if not price:
        raise RequestError(
            f"--max-usd {limit_usd:g}: no list price is known for {tpu_slice.accelerator_type} "
            f"({tpu_slice.capacity}) in {tpu_slice.zone}, so that nobody could tell when it is spent; leave it out"
        )
    spent_usd = least_usd(before) if before else 0.0
    if before is not None and (before.current_result() or {}).get("out_of_budget"):
        # Its hosts have counted so; the record, which begins and ends at other moments, may have a little less.
        spent_usd = max(spent_usd, finite(before.described.get("max_usd")) or 0.0)
    result = Budget(max_usd=limit_usd, spent_usd=spent_usd, usd_per_hour=price)
    if result.left_s <= 0 and before is not None:
        raise RequestError(
            f"--max-usd {limit_usd:g}: {before.run_id} has spent {result.spent_usd:,.2f} of its {limit_usd:,.2f} USD; "
            f"allow it more, as in: fab train --resume {before.run_id} --max-usd {2 * max(limit_usd, spent_usd):.2f}"
        )
    return result


def least_usd(run: Run) -> float:
    """Return what a run has cost at least: its attempts whose price and time are known."""
    attempts = _attempts(run)
    walls = [*(amount(attempt.get("wall_s")) for attempt in attempts[:-1]), run.wall_s]
    costs = (cost([attempt], wall_s) for attempt, wall_s in zip(attempts, walls, strict=True))
    return math.fsum(attempt.usd for attempt in costs if attempt is not None)
