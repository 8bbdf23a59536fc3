"""A slice that may be in several zones: asked for in order or in all of them at once, and kept in one.

A request has the same id and the owner's label in every zone. So whatever an interruption leaves behind, in whichever
zone, is found there by the next `create`, `update`, `read` and `delete`, which look in all of them; nothing has to be
remembered. An ACTIVE one is adopted, the others are withdrawn.

`first` has one request at a time, and gives the next zone its turn when one has waited for `zone_wait_s`, was refused
or has failed. `race` has one in every zone. A zone that has refused or failed is not asked again in the same search.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from contracts.durations import spoken
from infra.documents import stock_outs
from infra.slice_apis.retry import (
    AbandonedError,
    Backoff,
    CloudTpuError,
    GoneError,
    LostAgainError,
    RunningError,
    poll_pause_s,
)
from infra.slice_apis.slice_api import MISSING, TAKEN_BACK, UNREAD, Look, SliceApi, Spec

if TYPE_CHECKING:
    from infra.slice_apis.google_api import Listing

LATE_S = 60.0
"""A node that is not shown may only be late: live ones must not be deleted because an answer was old."""
LOOK_AGAIN_S = 5.0
SAY_EVERY_S = 300.0
LOOK_PATIENCE_S = 60.0
WITHDRAW_LIMIT_S = 60.0
SETTLE_LIMIT_S = 300.0
"""For a zone to let go of a slice that another one has, which may be billed meanwhile."""
# A zone that answers so is none for this slice, now; another one may be. After anything else nobody knows what it has.
REFUSED = frozenset(
    {"ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
    | {"NOT_FOUND", "OUT_OF_RANGE"}
)
UNUSABLE = frozenset({"PERMISSION_DENIED", "INVALID_ARGUMENT"})
WRONG = UNUSABLE | {"OUT_OF_RANGE"}
"""Answers to a request that would be refused again."""
NOT_YET = ("ACCEPTED", "WAITING_FOR_RESOURCES")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed[S: Spec]:
    """A request and its state. other_zones: zones that still have a request of ours, which should be gone."""

    spec: S
    look: Look
    other_zones: tuple[str, ...] = ()


def is_over(spec: Spec, look: Look, now: datetime.datetime) -> bool:
    """Whether a request has had its time in its zone. One that is being served may take as long as that takes."""
    return look.state in NOT_YET and stock_outs.age_s(look, now) >= spec.zone_wait_s


def strays[S: Spec](api: SliceApi[S], listing: Listing, spec: S, known_zones: Collection[str]) -> list[S]:
    """The spec of each request in a zone that is not known: an `up` was cut off, and then the zones changed.

    A zone that Google could not ask may have it too; the end of the stack looks again (`Lifecycle.remove_all`).
    """
    return [spec.in_zone(zone) for zone in api.in_listing(listing, spec) if zone not in known_zones]


def require_empty[S: Spec](api: SliceApi[S], listing: Listing, spec: S, refusal: CloudTpuError) -> None:
    """A zone that refuses to be looked at, such as one that the project may not use, has nothing of it.

    Raises CloudTpuError where the listing of all zones shows it there all the same, or could not ask that zone.
    """
    if spec.zone in (*listing.unreachable, *api.in_listing(listing, spec)):
        raise CloudTpuError(
            f"{refusal}\nIt may be in {spec.zone} all the same: {spec.how_to_delete}", refusal.status
        )


class OneZone[S: Spec](Protocol):
    """The operations in one zone, which `infra.slice_apis.lifecycle.Lifecycle` has."""

    def ask(self, spec: S, *, is_recorded: bool) -> str | None: ...
    def look(self, spec: S, resource: dict[str, Any]) -> Look: ...
    def remember(self, spec: S, look: Look, *, is_new: bool = False) -> None: ...
    def require_pending(self, spec: S, operation: str | None, waited_s: float) -> None: ...


class Search[S: Spec]:
    """Finds a zone for one slice. before: the spec in Pulumi's state; None: the state does not have the slice.

    Zones that only `before` has are emptied. Among equal zones, the `zone` of the spec is preferred.
    """

    def __init__(
        self,
        lifecycle: OneZone[S],
        api: SliceApi[S],
        backoff: Backoff,
        desired: S,
        before: S | None,
    ) -> None:
        self._lifecycle = lifecycle
        self._api = api
        self._backoff = backoff
        self._desired = desired
        self._is_recorded = before is not None
        home = (before or desired).zone
        self._specs = {spec.zone: spec for spec in desired.per_zone}
        previous = {spec.zone: spec for spec in before.per_zone} if before else {}
        self._all = {**previous, **self._specs}
        self._preferred = sorted(self._specs, key=lambda zone: zone != home)
        self._open: set[str] = set()  # zones whose request is waited for; of `first` one
        self._requested_at: dict[str, float] = {}  # when, of those that were not ACTIVE when the search began
        self._operations: dict[str, str] = {}  # by which they were asked for, until the request is shown
        self._refused: dict[str, str] = {}  # why a zone is not asked (again)
        self._answers: dict[str, str] = {}  # the status or state of these

    def observed(self) -> Placed[S] | None:
        """The current request, without changing anything; None if no zone has one of ours."""
        held = self._survey(LATE_S)
        for kind in ("active", "waiting", "lost"):
            zones = [zone for zone in self._preferred if zone in held and held[zone].kind == kind]
            if zones:
                other_zones = [zone for zone in held if zone != zones[0] and held[zone].state != "DELETING"]
                is_one_too_many = kind == "active" and other_zones
                return Placed(
                    spec=self._all[zones[0]],
                    look=held[zones[0]],
                    other_zones=tuple(other_zones) if is_one_too_many else (),
                )
        return None

    def run(self) -> Placed[S]:
        """Request the slice, and wait until it is ACTIVE or wait_s is over.

        Raises CloudTpuError if no zone takes or keeps the request, or something runs that only a person may delete.
        """
        self._strays = {
            spec.zone: spec for spec in strays(self._api, self._listing, self._desired, self._all)
        }
        self._all |= self._strays
        self._begin(self._survey(LATE_S))
        started = reported = self._backoff.now()
        last = ""
        while True:
            waited_s = self._backoff.now() - started
            left_s = max(self._desired.wait_s - waited_s, 0.0)
            held = self._look_again(min(left_s, LOOK_PATIENCE_S))
            for zone, look in held.items():
                self._lifecycle.remember(self._all[zone], look, is_new=zone in self._requested_at)
            if active := self._zones_by_kind(held, "active"):
                return self._keep(active[0], held[active[0]])
            lost = self._zones_by_kind(held, "lost")
            for zone in lost:
                self._refuse(zone, held[zone].reason, held[zone].state)
                self._withdraw([zone], "it will not come")
            waiting = self._zones_by_kind(held, "waiting")
            if self._desired.strategy != "race" and (
                self._next_turn(held) if waiting else self._pass_on(next(iter([*lost, *self._specs])))
            ):
                continue
            if not waiting:
                raise self._nothing_left()
            now_at = ", ".join(f"{zone} {held[zone].state}" for zone in waiting)
            if waited_s >= self._desired.wait_s:
                self._backoff.say(
                    f"warning: {self._id} is still {now_at} after {spoken(waited_s)} and stays in the queue:"
                    " `pulumi up` waits on, `pulumi destroy` gives it up"
                )
                best = min(waiting, key=lambda zone: held[zone].state in NOT_YET)
                return Placed(spec=self._specs[best], look=held[best])
            if now_at != last or self._backoff.now() - reported >= SAY_EVERY_S:
                last, reported = now_at, self._backoff.now()
                self._backoff.say(
                    f"{self._id}: {now_at}; waited {spoken(waited_s)}, at most {spoken(left_s)} more"
                )
            self._backoff.pause(min(poll_pause_s(waited_s), max(left_s, 1.0)))

    # --- looking ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _listing(self) -> Listing:
        """What all zones showed when the search began."""
        return self._api.listing(self._desired.project)

    @property
    def _id(self) -> str:
        return self._desired.own_id

    def _zones_by_kind(self, held: Mapping[str, Look], kind: str) -> list[str]:
        """The desired zones whose request is of this kind, the preferred zone first."""
        return [zone for zone in self._preferred if zone in held and held[zone].kind == kind]

    def _survey(self, patience_s: float) -> dict[str, Look]:
        """Our requests in all zones. Raises CloudTpuError if a zone does not answer: it may have one that runs."""
        held = {}
        for zone, spec in self._all.items():
            try:
                resource = self._api.find(spec, patience_s=patience_s)
            except CloudTpuError as error:
                if error.status not in UNUSABLE or zone == self._desired.zone:
                    raise
                require_empty(self._api, self._listing, spec, error)
                self._refuse(zone, str(error), error.status)
                continue
            if resource is not None and self._api.is_owned(resource, spec.owner):
                held[zone] = self._lifecycle.look(spec, resource)
        return held

    def _look_again(self, patience_s: float) -> dict[str, Look]:
        """The requests that are waited for. One that cannot be read now counts as waiting, and is read again later."""
        held = {}
        for zone in [zone for zone in self._specs if zone in self._open]:
            spec = self._specs[zone]
            unread = Look(kind="waiting", state=UNREAD, reason="", resource={}, nodes={})
            try:
                resource = self._api.find(spec, patience_s=patience_s)
                if resource is not None:
                    held[zone] = self._lifecycle.look(spec, resource)
                    self._operations.pop(zone, None)
                else:
                    waited_s = self._backoff.now() - self._requested_at.get(zone, 0.0)
                    self._lifecycle.require_pending(spec, self._operations.get(zone), waited_s)
                    held[zone] = dataclasses.replace(unread, state="ACCEPTED")
            except AbandonedError:
                raise
            except GoneError as error:
                self._refuse(zone, str(error))
            except CloudTpuError as error:
                self._backoff.say(f"warning: {self._id} in {zone}: {error}")
                held[zone] = unread
            # A node that is not shown may only be late.
            if zone in held and held[zone].state == MISSING:
                held[zone] = dataclasses.replace(held[zone], kind="waiting", state=UNREAD)
        return held

    # --- asking -----------------------------------------------------------------------------------------------------

    def _begin(self, held: Mapping[str, Look]) -> None:
        """Adopt an existing request, or make one."""
        for zone, look in held.items():
            if look.kind == "lost" and look.may_be_running:
                self._lifecycle.ask(self._all[zone], is_recorded=self._is_recorded)  # says so, and raises
            if look.kind == "active" and zone in self._strays:
                raise RunningError(
                    f"{self._all[zone].name}: an earlier `pulumi up` of this stack, which was interrupted, has made it"
                    " in a zone that is no longer one of its zones, and it is ACTIVE. Nothing that runs is deleted"
                    f" unless you ask for it:\nadd {zone} to its zones, or delete it: {self._all[zone].how_to_delete}"
                )
        if active := self._zones_by_kind(held, "active"):
            self._lifecycle.ask(self._specs[active[0]], is_recorded=self._is_recorded)
            self._open.add(active[0])
        elif self._desired.strategy == "race":
            self._withdraw(
                [zone for zone in held if zone not in self._specs], "not one of its zones any more"
            )
            for zone in self._specs:
                _ = zone in self._refused or self._ask(zone)
        else:
            first = next(iter([*self._zones_by_kind(held, "waiting"), *self._specs]))
            self._withdraw([zone for zone in held if zone != first], "one zone at a time")
            if first in self._refused or not self._ask(first):
                self._pass_on(first)

    def _ask(self, zone: str) -> bool:
        """Request the slice in a zone. Returns whether the zone has the request now."""
        spec = self._specs[zone]
        try:
            operation = self._lifecycle.ask(spec, is_recorded=self._is_recorded)
        except (AbandonedError, RunningError):
            raise
        except CloudTpuError as error:
            if error.status not in REFUSED and not self._open:
                raise
            self._refuse(zone, str(error), error.status)
            refusal = Look(kind="lost", state="FAILED", reason=str(error), resource={}, nodes={})
            self._lifecycle.remember(spec, refusal)
            return False
        self._open.add(zone)
        self._requested_at[zone] = self._backoff.now()
        if operation is not None:
            self._operations[zone] = operation
        return True

    def _refuse(self, zone: str, reason: str, answer: str = "") -> None:
        self._backoff.say(f"{self._id}: not available in {zone}: {reason.splitlines()[0]}")
        self._refused[zone], self._answers[zone] = reason, answer
        self._open.discard(zone)
        self._operations.pop(zone, None)

    def _next_turn(self, held: Mapping[str, Look]) -> bool:
        """Move the request on if the current zone's turn is over. Returns whether another zone has it now."""
        for zone, look in held.items():
            is_over_here = is_over(self._desired, look, self._api.now())
            if look.kind != "waiting" or not is_over_here or not self._next_zones(zone):
                return False
            waited = spoken(stock_outs.age_s(look, self._api.now()))
            if self._withdraw([zone], f"nothing within {waited}"):
                return False
            self._open.discard(zone)
            return self._pass_on(zone) or not self._ask(zone)
        return False

    def _pass_on(self, current_zone: str) -> bool:
        """Request the slice in the first zone after this one that takes it. Returns whether one does."""
        return any(self._ask(zone) for zone in self._next_zones(current_zone))

    def _next_zones(self, current_zone: str) -> list[str]:
        """The zones that may still be asked, those that come after this one first."""
        order = list(self._specs)
        turn = order.index(current_zone)
        return [zone for zone in [*order[turn + 1 :], *order[:turn]] if zone not in self._refused]

    # --- withdrawing ------------------------------------------------------------------------------------------------

    def _keep(self, zone: str, look: Look) -> Placed[S]:
        other_zones = [other_zone for other_zone in self._all if other_zone != zone]
        left = self._withdraw(other_zones, f"{zone} has it", limit_s=LOOK_AGAIN_S)
        return Placed(spec=self._specs[zone], look=look, other_zones=tuple(left))

    def settle(self, other_zones: Sequence[str]) -> Sequence[str]:
        """Withdraw the requests in other zones. Returns the zones that still have one."""
        self._all = {zone: self._desired.in_zone(zone) for zone in other_zones} | self._all
        return self._withdraw(other_zones, f"{self._desired.zone} has it", limit_s=SETTLE_LIMIT_S)

    def _withdraw(
        self, zones: Iterable[str], reason: str, *, limit_s: float = WITHDRAW_LIMIT_S
    ) -> Sequence[str]:
        """Delete our requests in these zones. Returns the zones that still have one, after a warning.

        A deletion is not waited for: a request does not come back, and the next search looks again.
        """
        left = []
        for zone in zones:
            try:
                if self._delete(self._all[zone], limit_s):
                    self._backoff.say(f"{self._id}: withdrawn in {zone}: {reason}")
            except AbandonedError:
                raise
            except CloudTpuError as error:
                self._backoff.say(f"warning: {self._id} could not be withdrawn in {zone}: {error}")
                left.append(zone)
        return left

    def _delete(self, spec: S, limit_s: float) -> bool:
        """Delete a request. Returns whether there was one."""
        until = self._backoff.now() + limit_s
        while True:
            try:
                resource = self._api.find(spec, patience_s=LOOK_PATIENCE_S)
            except CloudTpuError as error:
                if error.status not in UNUSABLE:
                    raise
                require_empty(self._api, self._api.listing(spec.project), spec, error)
                return False
            ours = resource is not None and self._api.is_owned(resource, spec.owner)
            if resource is None or not ours or self._api.is_being_deleted(resource):
                return False
            self._backoff.require_awaited()
            try:
                self._api.removable(spec).delete()
                return True
            except CloudTpuError as error:
                passes = error.status in ("FAILED_PRECONDITION", "NOT_FOUND", "ABORTED")
                if not passes or self._backoff.now() >= until:
                    raise
            self._backoff.pause(LOOK_AGAIN_S)

    def _nothing_left(self) -> CloudTpuError:
        reasons = "\n".join(f"  {zone}: {reason}" for zone, reason in self._refused.items())
        text = (
            f"{self._id} ({self._desired.kind}, {self._desired.capacity}) is not available in any of its zones:"
            f"\n{reasons}\n`pulumi up` asks for it again."
        )
        answers = {self._answers.get(zone, "") for zone in self._specs}
        if answers & TAKEN_BACK:
            return LostAgainError(text)
        return CloudTpuError(text, "INVALID_ARGUMENT" if answers <= WRONG else "RESOURCE_EXHAUSTED")
