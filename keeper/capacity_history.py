"""`fab capacity`: what zones had to offer, as the requests of a stack's slices found it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from contracts.durations import HOUR_S, spoken
from contracts.errors import RequestError
from infra.documents import DocumentsError, stock_outs
from infra.documents.stock_outs import Hours, ZoneOffer
from keeper.stack_store import documents_for
from launch import targets
from launch.output import table

DAYS = 30
HEADINGS = (
    "zone", "type", "capacity", "asked", "in vain", "last in vain", "last served", "hours of the day, UTC",
)  # fmt: skip
NEVER, SERVED, BOTH, OUT = "·", "○", "◐", "●"
LEGEND = (
    f"asked, in vain: hours of the last %d days. A mark for each hour from 00: {OUT} in vain, {BOTH} both, "
    f"{SERVED} served, {NEVER} not asked"
)


def capacity(console: Console, request: targets.TargetRequest, *, days: int, as_json: bool) -> int:
    """Print it, the zone that served most often first; as_json: every hour that is known.

    Raises:
        RequestError: the stack has no place where that is remembered, or it does not answer.
    """
    if request.stack == targets.LOCAL:
        raise RequestError("this machine asks for no TPUs; say --stack as well")
    documents = documents_for(request)
    try:
        hours_by_offer = stock_outs.read(documents)
    except DocumentsError as error:
        raise RequestError(str(error)) from None
    if as_json:
        lines = [vars(offer) | vars(hours) for offer, hours in hours_by_offer.items()]
        console.print(json.dumps(lines), highlight=False, markup=False, soft_wrap=True)
    elif not hours_by_offer:
        console.print(
            f"{documents.url}: no request has been noted yet; those for slices that wait for capacity are"
        )
    else:
        console.print(capacity_table(hours_by_offer, days=days, now=datetime.datetime.now(datetime.UTC)))
        console.print(LEGEND % days, style="dim")
    return 0


def capacity_table(hours_by_offer: Mapping[ZoneOffer, Hours], *, days: int, now: datetime.datetime) -> Table:
    """Return a row for each zone, type and capacity, of the hours of the last days. Pure."""
    since = stock_outs.utc_hour(now - datetime.timedelta(days=days))
    recent = {
        offer: Hours(
            out=tuple(hour for hour in hours.out if hour >= since),
            served=tuple(hour for hour in hours.served if hour >= since),
        )
        for offer, hours in hours_by_offer.items()
    }
    rows = table(*HEADINGS, right=("asked", "in vain"), wrap=False)
    for offer, hours in sorted(
        recent.items(), key=lambda item: (item[0].kind, _in_vain(item[1]), item[0].zone)
    ):
        requested = len({*hours.out, *hours.served})
        rows.add_row(
            offer.zone,
            offer.kind,
            offer.capacity,
            str(requested),
            f"{_in_vain(hours):.0%}" if requested else "",
            _ago(hours.out, now),
            _ago(hours.served, now),
            "".join(_slot(f"T{hour:02}", hours) for hour in range(24)),
        )
    return rows


def _in_vain(hours: Hours) -> float:
    """The share of the hours in which nothing was served."""
    requested = {*hours.out, *hours.served}
    return len(requested - {*hours.served}) / len(requested) if requested else 1.0


def _slot(hour: str, hours: Hours) -> str:
    out, served = (any(moment.endswith(hour) for moment in kind) for kind in (hours.out, hours.served))
    return BOTH if out and served else OUT if out else SERVED if served else NEVER


def _ago(hours: tuple[str, ...], now: datetime.datetime) -> str:
    if not hours:
        return "–"
    latest = datetime.datetime.fromisoformat(f"{hours[-1]}:00:00+00:00")
    past_s = (now - latest).total_seconds()
    return f"{spoken(past_s, units=1)} ago" if past_s >= HOUR_S else "this hour"
