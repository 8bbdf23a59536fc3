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
from infra import stock_outs
from infra.cloud_tpu import request
from infra.cloud_tpu.request import Look, Spec
from infra.cloud_tpu.retry import (
    AbandonedError,
    Backoff,
    CloudTpuError,
    GoneError,
    LostAgainError,
    RunningError,
    poll_pause_s,
)

if TYPE_CHECKING:
    from infra.cloud_tpu.client import Client, Listing

LATE_S = 60.0
"""What is not shown may only be late: live ones must not be deleted because an answer was old."""
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
class Placed:
    """A request and how it stands. others: zones that still have something of ours beside it, which should be gone."""

    spec: Spec
    look: Look
    others: tuple[str, ...] = ()


def is_over(spec: Spec, look: Look, now: datetime.datetime) -> bool:
    """Whether a request has had its time in its zone. One that is being served may take as long as that takes."""
    return look.state in NOT_YET and stock_outs.age_s(look, now) >= spec.zone_wait_s


def shown(listing: Listing, spec: Spec) -> list[str]:
    """The zones in which a listing shows it. A project may be called by its number there."""
    ours = [each for each in listing.found if request.is_owned(request.node_of(each), spec.owner)]
    names = [each["name"].split("/") for each in ours]
    return [name[3] for name in names if name[5] == spec.queued_resource_id]


def strays(listing: Listing, spec: Spec, known: Collection[str]) -> list[Spec]:
    """The same in zones beside its known ones that have it: an `up` was cut off, and then the zones changed.

    A zone that Google could not ask may have it too; the end of the stack looks again (`Lifecycle.remove_all`).
    """
    return [dataclasses.replace(spec, zone=zone) for zone in shown(listing, spec) if zone not in known]


def require_empty(listing: Listing, spec: Spec, refusal: CloudTpuError) -> None:
    """A zone that refuses to be looked at, such as one that the project may not use, has nothing of it.

    Raises CloudTpuError where the listing of all zones shows it there all the same, or could not ask that zone.
    """
    if spec.zone in (*listing.unreachable, *shown(listing, spec)):
        raise CloudTpuError(
            f"{refusal}\nIt may be in {spec.zone} all the same: {spec.how_to_delete}", refusal.status
        )


class OneZone(Protocol):
    """What is done in one zone, as `infra.cloud_tpu.lifecycle.Lifecycle` has it."""

    def ask(self, spec: Spec, *, is_recorded: bool) -> str | None: ...
    def look(self, spec: Spec, found: dict[str, Any]) -> Look: ...
    def remember(self, spec: Spec, look: Look, *, is_new: bool = False) -> None: ...
    def require_pending(self, spec: Spec, operation: str | None, waited_s: float) -> None: ...


class Search:
    """For one slice in its zones. before: as the state has it; None: the state does not know of it.

    Zones that `before` has and `wanted` has not any more are only emptied. The one that a state or a caller says it is
    in (`zone`) is preferred where several are alike.
    """

    def __init__(
        self, lifecycle: OneZone, client: Client, backoff: Backoff, wanted: Spec, before: Spec | None
    ) -> None:
        self._lifecycle = lifecycle
        self._client = client
        self._backoff = backoff
        self._wanted = wanted
        self._is_recorded = before is not None
        home = (before or wanted).zone
        self._specs = {spec.zone: spec for spec in wanted.everywhere}
        former = {spec.zone: spec for spec in before.everywhere} if before else {}
        self._all = {**former, **self._specs}
        self._preferred = sorted(self._specs, key=lambda zone: zone != home)
        self._open: set[str] = set()  # zones whose request is waited for; of `first` one
        self._asked: dict[str, float] = {}  # when, of those that were not ACTIVE when the search began
        self._operations: dict[str, str] = {}  # by which they were asked for, until the request is shown
        self._refused: dict[str, str] = {}  # why a zone is not asked (again)
        self._answers: dict[str, str] = {}  # the status or state of these

    def found(self) -> Placed | None:
        """How it stands now, without changing anything; None where no zone has anything of ours."""
        held = self._survey(LATE_S)
        for kind in ("active", "waiting", "lost"):
            zones = [zone for zone in self._preferred if zone in held and held[zone].kind == kind]
            if zones:
                others = [zone for zone in held if zone != zones[0] and held[zone].state != "DELETING"]
                is_one_too_many = kind == "active" and others
                return Placed(
                    spec=self._all[zones[0]],
                    look=held[zones[0]],
                    others=tuple(others) if is_one_too_many else (),
                )
        return None

    def run(self) -> Placed:
        """See to it that it is asked for, and wait until it is ACTIVE or wait_s is over.

        Raises CloudTpuError where no zone takes or keeps the request, or something runs that only a person may delete.
        """
        self._strays = {spec.zone: spec for spec in strays(self._listing, self._wanted, self._all)}
        self._all |= self._strays
        self._begin(self._survey(LATE_S))
        started = said = self._backoff.now()
        last = ""
        while True:
            waited_s = self._backoff.now() - started
            left_s = max(self._wanted.wait_s - waited_s, 0.0)
            held = self._look_again(min(left_s, LOOK_PATIENCE_S))
            for zone, look in held.items():
                self._lifecycle.remember(self._all[zone], look, is_new=zone in self._asked)
            if active := self._of_kind(held, "active"):
                return self._kept(active[0], held[active[0]])
            lost = self._of_kind(held, "lost")
            for zone in lost:
                self._refuse(zone, held[zone].why, held[zone].state)
                self._withdraw([zone], "it will not come")
            waiting = self._of_kind(held, "waiting")
            if self._wanted.strategy != "race" and (
                self._next_turn(held) if waiting else self._pass_on(next(iter([*lost, *self._specs])))
            ):
                continue
            if not waiting:
                raise self._nothing_left()
            now_at = ", ".join(f"{zone} {held[zone].state}" for zone in waiting)
            if waited_s >= self._wanted.wait_s:
                self._backoff.say(
                    f"warning: {self._id} is still {now_at} after {spoken(waited_s)} and stays in the queue:"
                    " `pulumi up` waits on, `pulumi destroy` gives it up"
                )
                best = min(waiting, key=lambda zone: held[zone].state in NOT_YET)
                return Placed(spec=self._specs[best], look=held[best])
            if now_at != last or self._backoff.now() - said >= SAY_EVERY_S:
                last, said = now_at, self._backoff.now()
                self._backoff.say(
                    f"{self._id}: {now_at}; waited {spoken(waited_s)}, at most {spoken(left_s)} more"
                )
            self._backoff.pause(min(poll_pause_s(waited_s), max(left_s, 1.0)))

    # --- looking ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _listing(self) -> Listing:
        """What all zones showed when the search began."""
        return self._client.queued_resources(self._wanted.project)

    @property
    def _id(self) -> str:
        return self._wanted.queued_resource_id

    def _of_kind(self, held: Mapping[str, Look], kind: str) -> list[str]:
        """The wanted zones that stand so, the preferred one first."""
        return [zone for zone in self._preferred if zone in held and held[zone].kind == kind]

    def _survey(self, patience_s: float) -> dict[str, Look]:
        """What every zone has of ours. Raises CloudTpuError where one does not answer: it may have one that runs."""
        held = {}
        for zone, spec in self._all.items():
            try:
                found = self._client.queued_resource(spec.name, patience_s=patience_s)
            except CloudTpuError as error:
                if error.status not in UNUSABLE or zone == self._wanted.zone:
                    raise
                require_empty(self._listing, spec, error)
                self._refuse(zone, str(error), error.status)
                continue
            if found is not None and request.is_owned(request.node_of(found), spec.owner):
                held[zone] = self._lifecycle.look(spec, found)
        return held

    def _look_again(self, patience_s: float) -> dict[str, Look]:
        """How those that are waited for stand. What cannot be read now is looked at later, and waits meanwhile."""
        held = {}
        for zone in [zone for zone in self._specs if zone in self._open]:
            spec = self._specs[zone]
            unread = Look(kind="waiting", state=request.UNREAD, why="", queued_resource={}, nodes={})
            try:
                found = self._client.queued_resource(spec.name, patience_s=patience_s)
                if found is not None:
                    held[zone] = self._lifecycle.look(spec, found)
                    self._operations.pop(zone, None)
                else:
                    waited_s = self._backoff.now() - self._asked.get(zone, 0.0)
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
            if zone in held and held[zone].state == request.MISSING:
                held[zone] = dataclasses.replace(held[zone], kind="waiting", state=request.UNREAD)
        return held

    # --- asking -----------------------------------------------------------------------------------------------------

    def _begin(self, held: Mapping[str, Look]) -> None:
        """Adopt what is there, or ask for it."""
        for zone, look in held.items():
            if look.kind == "lost" and look.may_be_running:
                self._lifecycle.ask(self._all[zone], is_recorded=self._is_recorded)  # says so, and raises
            if look.kind == "active" and zone in self._strays:
                raise RunningError(
                    f"{self._all[zone].name}: an earlier `pulumi up` of this stack, which was interrupted, has made it"
                    " in a zone that is none of its zones any more, and it is ACTIVE. Nothing that runs is deleted"
                    f" without being asked:\nadd {zone} to its zones, or delete it: {self._all[zone].how_to_delete}"
                )
        if active := self._of_kind(held, "active"):
            self._lifecycle.ask(self._specs[active[0]], is_recorded=self._is_recorded)
            self._open.add(active[0])
        elif self._wanted.strategy == "race":
            self._withdraw(
                [zone for zone in held if zone not in self._specs], "not one of its zones any more"
            )
            for zone in self._specs:
                _ = zone in self._refused or self._ask(zone)
        else:
            first = next(iter([*self._of_kind(held, "waiting"), *self._specs]))
            self._withdraw([zone for zone in held if zone != first], "one zone at a time")
            if first in self._refused or not self._ask(first):
                self._pass_on(first)

    def _ask(self, zone: str) -> bool:
        """Whether the zone has the request now."""
        spec = self._specs[zone]
        try:
            operation = self._lifecycle.ask(spec, is_recorded=self._is_recorded)
        except (AbandonedError, RunningError):
            raise
        except CloudTpuError as error:
            if error.status not in REFUSED and not self._open:
                raise
            self._refuse(zone, str(error), error.status)
            refusal = Look(kind="lost", state="FAILED", why=str(error), queued_resource={}, nodes={})
            self._lifecycle.remember(spec, refusal)
            return False
        self._open.add(zone)
        self._asked[zone] = self._backoff.now()
        if operation is not None:
            self._operations[zone] = operation
        return True

    def _refuse(self, zone: str, why: str, answer: str = "") -> None:
        self._backoff.say(f"{self._id}: not to be had in {zone}: {why.splitlines()[0]}")
        self._refused[zone], self._answers[zone] = why, answer
        self._open.discard(zone)
        self._operations.pop(zone, None)

    def _next_turn(self, held: Mapping[str, Look]) -> bool:
        """Give the next zone its turn where that of the present one is over. Whether another has the request now."""
        for here, look in held.items():
            is_over_here = is_over(self._wanted, look, self._client.now())
            if look.kind != "waiting" or not is_over_here or not self._others(here):
                return False
            waited = spoken(stock_outs.age_s(look, self._client.now()))
            if self._withdraw([here], f"nothing within {waited}"):
                return False
            self._open.discard(here)
            return self._pass_on(here) or not self._ask(here)
        return False

    def _pass_on(self, here: str) -> bool:
        """Whether the first zone after this one that takes the request has it now."""
        return any(self._ask(zone) for zone in self._others(here))

    def _others(self, here: str) -> list[str]:
        """The zones that may still be asked, those that come after this one first."""
        order = list(self._specs)
        turn = order.index(here)
        return [zone for zone in [*order[turn + 1 :], *order[:turn]] if zone not in self._refused]

    # --- withdrawing ------------------------------------------------------------------------------------------------

    def _kept(self, zone: str, look: Look) -> Placed:
        others = [each for each in self._all if each != zone]
        left = self._withdraw(others, f"{zone} has it", limit_s=LOOK_AGAIN_S)
        return Placed(spec=self._specs[zone], look=look, others=tuple(left))

    def settle(self, others: Sequence[str]) -> Sequence[str]:
        """Withdraw what others than the slice's zone still have of it; those that keep it."""
        self._all = {zone: dataclasses.replace(self._wanted, zone=zone) for zone in others} | self._all
        return self._withdraw(others, f"{self._wanted.zone} has it", limit_s=SETTLE_LIMIT_S)

    def _withdraw(
        self, zones: Iterable[str], why: str, *, limit_s: float = WITHDRAW_LIMIT_S
    ) -> Sequence[str]:
        """Have deleted what these zones have of ours. Returns those that still have it, with a line that says so.

        What is being deleted is not waited for: it does not come back, and the next search looks again.
        """
        left = []
        for zone in zones:
            try:
                if self._delete(self._all[zone], limit_s):
                    self._backoff.say(f"{self._id}: withdrawn in {zone}: {why}")
            except AbandonedError:
                raise
            except CloudTpuError as error:
                self._backoff.say(f"warning: {self._id} could not be withdrawn in {zone}: {error}")
                left.append(zone)
        return left

    def _delete(self, spec: Spec, limit_s: float) -> bool:
        """Whether there was something to delete."""
        until = self._backoff.now() + limit_s
        while True:
            try:
                found = self._client.queued_resource(spec.name, patience_s=LOOK_PATIENCE_S)
            except CloudTpuError as error:
                if error.status not in UNUSABLE:
                    raise
                require_empty(self._client.queued_resources(spec.project), spec, error)
                return False
            ours = found is not None and request.is_owned(request.node_of(found), spec.owner)
            if found is None or not ours or request.state_of(found) == "DELETING":
                return False
            self._backoff.require_awaited()
            try:
                self._client.delete_queued_resource(spec.name)
                return True
            except CloudTpuError as error:
                passes = error.status in ("FAILED_PRECONDITION", "NOT_FOUND", "ABORTED")
                if not passes or self._backoff.now() >= until:
                    raise
            self._backoff.pause(LOOK_AGAIN_S)

    def _nothing_left(self) -> CloudTpuError:
        reasons = "\n".join(f"  {zone}: {why}" for zone, why in self._refused.items())
        text = (
            f"{self._id} ({self._wanted.kind}, {self._wanted.capacity}) was not to be had in any of its zones:"
            f"\n{reasons}\n`pulumi up` asks for it again."
        )
        answers = {self._answers.get(zone, "") for zone in self._specs}
        if answers & request.TAKEN_BACK:
            return LostAgainError(text)
        return CloudTpuError(text, "INVALID_ARGUMENT" if answers <= WRONG else "RESOURCE_EXHAUSTED")
