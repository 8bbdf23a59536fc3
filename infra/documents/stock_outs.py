"""What zones had to offer, hour by hour, as this stack's requests for slices found it: one small document.

`infra.slice_apis.lifecycle` writes it, `fab capacity` shows it. Of each zone, type and capacity it has the hours (UTC)
in which a request waited in vain or was refused for want of chips (`out`), and those in which one was served
(`served`).
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from infra.documents import Documents, DocumentsError

if TYPE_CHECKING:
    from infra.slice_apis.slice_api import Look

Outcome = Literal["out", "served"]

NAME = "capacity.json"
IN_VAIN_S = 300.0
"""A request that has waited so long waits for chips: with chips at hand the queue takes a few seconds."""
MOST_HOURS = 24 * 60
"""Of each kind that are kept: two months of trying all the time."""
# Google's words in November 2026: "There is no more capacity in the zone …", code 8; of Compute Engine
# ZONE_RESOURCE_POOL_EXHAUSTED, "The zone … does not have enough resources available to fulfill the request".
NO_CAPACITY = re.compile(
    r"no more capacity|stock.?out|not (have )?enough (resources|capacity)|RESOURCE_POOL_EXHAUSTED",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZoneOffer:
    """What was requested. kind: `2 × v5litepod-16`, or generation and topology."""

    zone: str
    kind: str
    capacity: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hours:
    """The hours in which an offer was out and in which it was served, in order, as 2026-11-23T09 (UTC).

    Both may have the same hour."""

    out: tuple[str, ...] = ()
    served: tuple[str, ...] = ()


def utc_hour(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H")


def seen_in(look: Look, now: datetime.datetime, *, is_new: bool) -> Outcome | None:
    """What the state of a request shows about the zone; None: nothing. is_new: it has just become ACTIVE. Pure."""
    if look.kind == "active":
        return "served" if is_new else None
    if look.kind == "lost":
        return "out" if NO_CAPACITY.search(look.reason) else None
    waits = look.state == "WAITING_FOR_RESOURCES"
    return "out" if waits and age_s(look, now) >= IN_VAIN_S else None


def age_s(look: Look, now: datetime.datetime) -> float:
    """The age of a request, by Google's clock at both ends; 0 if the request has no creation time."""
    since = look.resource.get("createTime")
    return (now - datetime.datetime.fromisoformat(since)).total_seconds() if since else 0.0


def remember(documents: Documents, offer: ZoneOffer, outcome: Outcome, now: datetime.datetime) -> None:
    """Add this hour. Raises DocumentsError where the documents cannot be read or written."""
    key, hour = f"{offer.zone} {offer.capacity} {offer.kind}", utc_hour(now)

    def added(before: Any) -> Any:
        hours_by_offer = _parsed(before, documents.url)
        hours = hours_by_offer.get(key, {})
        kept_hours = sorted({*hours.get(outcome, []), hour})[-MOST_HOURS:]
        return {**hours_by_offer, key: {**hours, outcome: kept_hours}}

    documents.change(NAME, added)


def read(documents: Documents) -> dict[ZoneOffer, Hours]:
    """Everything that is known. Raises DocumentsError."""
    hours_by_offer = {}
    for key, hours in _parsed(documents.read(NAME).value, documents.url).items():
        zone, capacity, kind = key.split(" ", 2)
        offer = ZoneOffer(zone=zone, kind=kind, capacity=capacity)
        hours_by_offer[offer] = Hours(out=tuple(hours.get("out", ())), served=tuple(hours.get("served", ())))
    return hours_by_offer


def _parsed(value: Any, url: str) -> dict[str, Mapping[str, list[str]]]:
    fine = value is None or (
        isinstance(value, dict)
        and all(key.count(" ") >= 2 and isinstance(hours, dict) for key, hours in value.items())
    )
    if not fine:
        raise DocumentsError(f"{url}/{NAME} is not a record of capacity; remove it, and it begins anew")
    return dict(value or {})
