"""What happens to a slice, whichever API makes it: made or adopted, waited for, changed in place, looked at, deleted.

What is ours carries the stack's owner label; what does not is never touched. What waits and what is over may be deleted
and made anew; what runs is deleted only by `delete`, that is when the engine asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from contracts.aliases import Json
from contracts.durations import spoken
from infra.documents import Documents, DocumentsError, deleted_slices, stock_outs
from infra.slice_apis.retry import (
    AbandonedError,
    CloudTpuError,
    GoneError,
    LostAgainError,
    RunningError,
    poll_pause_s,
)
from infra.slice_apis.slice_api import MISSING, TAKEN_BACK, UNREAD, Look, Props, Removable, SliceApi, Spec
from infra.slice_apis.zone_search import (
    LATE_S,
    LOOK_AGAIN_S,
    SAY_EVERY_S,
    Placed,
    Search,
    require_empty,
    strays,
)

if TYPE_CHECKING:
    from infra.slice_apis.google_api import Listing


GUEST_LIMIT_S = 300.0
ROUNDS = 4  # to make one: what is in the way is removed, and someone may be quicker than we
DELETE_LIMIT_S = 1800.0
DELETE_AGAIN_S = 60.0  # of one that says it is being deleted, and does not go
REFUSED_PAUSE_S = 60.0
"""Before a zone that has refused for want of capacity is asked again, where Google has no queue."""
STORE_PATIENCE_S = 5.0  # for a record of what a zone had; nothing waits for it longer


class Lifecycle[S: Spec]:
    """Methods take Pulumi properties, return outputs, and raise CloudTpuError with a message for the user.

    Every method looks for a slice with several `zones` in all of them. The property `zone` is where the slice should
    be, the output `zone` where it is; `infra.slice_apis.zone_search` decides between the two.
    """

    def __init__(self, api: SliceApi[S]) -> None:
        self._api = api
        self._backoff = api.backoff
        self._noted: set[tuple[str, str, str]] = set()

    def name(self, props: Props) -> str:
        """The full name of the slice."""
        return self._api.spec(props).name

    def create(self, props: Props) -> Json:
        """Request the slice and wait until it is ACTIVE, or continue what an interrupted `pulumi up` has left.

        When wait_s is over and it still waits, that is a success without nodes: the state then knows it, so that
        `pulumi destroy` removes it and the next `pulumi up` waits on (see `changes`). For the same reason nothing that
        goes wrong with the waiting fails the creation, once there is a request. One that has failed is deleted again.
        """
        placed = self._placed(props, None)
        try:
            return self._outputs(props, placed, before=())
        except AbandonedError:
            raise
        except CloudTpuError as error:
            self._backoff.say(
                f"warning: {placed.spec.own_id} exists, but {error}\n`pulumi up` continues with it"
            )
            unread = dataclasses.replace(placed.look, kind="waiting", state=UNREAD)
            return self._shown(props, dataclasses.replace(placed, look=unread), [])

    def restore(self, props: Props, lost: Callable[[str], None]) -> Json:
        """Like `create`; a slice that runs stays as it is. A lost one is deleted first, also with nodes that still run.

        lost: called with the reason before anything is deleted.
        """
        placed = self._existing(self._api.spec(props))
        if placed is not None and placed.look.kind == "active" and not placed.other_zones:
            return self._outputs(props, placed, before=())
        if placed is not None and placed.look.kind == "lost":
            lost(placed.look.reason)
            self.remove(self._api.removable(placed.spec))
        return self.create(props)

    def update(self, before: Props, props: Props) -> Json:
        """Labels, metadata, tags, description and addresses in place, once it is ACTIVE; wait for that if it is not.

        One that was lost since the last look is made anew here, as it has nothing more to lose.
        """
        return self._outputs(props, self._placed(props, before), before=(before,))

    def settled(self, outputs: Json) -> Json:
        """The outputs of a creation or change, once the zones in `others` have had time to withdraw what they have."""
        if not (other_zones := outputs.get("others")):
            return outputs
        return outputs | {"others": list(self._search(self._api.spec(outputs), outputs).settle(other_zones))}

    def read(self, props: Props) -> Json | None:
        """The outputs as they are; None where there is no such thing of ours. What is dead stays, in its state.

        It is not dropped from Pulumi's state, because it still counts against the quota until someone deletes it: the
        next `up` (delete and make again, see `changes`) or `destroy`. Raises where Google gives no answer: that says
        nothing about the resource.
        """
        placed = self._existing(self._api.spec(props))
        if placed is None:
            return None
        spec, look = placed.spec, placed.look
        if look.kind == "lost":
            self._backoff.say(f"{spec.own_id} is lost: {look.reason}; `pulumi up` makes it again")
        if placed.other_zones:
            self._backoff.say(
                f"warning: {spec.own_id} is ACTIVE in {spec.zone}, and there is one in"
                f" {', '.join(placed.other_zones)} as well; `pulumi up` withdraws that"
            )
        nodes = self._api.workers(spec, look, limit_s=0.0) if look.kind == "active" else []
        return self._shown(props, placed, nodes)

    def delete(self, props: Props) -> None:
        """Delete a slice with its nodes and their remains, and return when all are gone. What is not ours stays.

        Raises CloudTpuError if something may be left, after deleting all that could be deleted.
        """
        home_spec = self._api.spec(props)
        troubles: list[CloudTpuError] = []
        listing = self._api.listing(home_spec.project) if home_spec.zones else None
        stray_specs = strays(self._api, listing, home_spec, home_spec.zones) if listing else []
        for spec in [*home_spec.per_zone, *stray_specs]:
            try:
                self._delete(props, spec, listing if spec.zone != home_spec.zone else None)
            except AbandonedError:
                raise
            except CloudTpuError as error:
                troubles.append(error)
        if troubles:
            raise CloudTpuError("\n".join(map(str, troubles)), troubles[0].status)

    def _delete(self, props: Props, spec: S, listing: Listing | None) -> None:
        """listing: of all zones; it shows whether a zone that denies access has the slice."""
        try:
            resource = self._api.find(spec)
        except CloudTpuError as error:
            if listing is None or error.status != "PERMISSION_DENIED":
                raise
            require_empty(self._api, listing, spec, error)
            return
        if resource is not None and not self._api.is_owned(resource, spec.owner):
            self._backoff.say(
                f"warning: {spec.name} does not belong to this stack any more; it is left alone"
            )
        elif resource is not None:
            observed = self._api.glance(spec, resource)
            self.remove(self._api.removable(spec))
            if observed.kind == "active":
                self._remember_deletion(props, spec, observed)
        for remaining in self._api.remains(spec):
            self.remove(remaining)

    # --- where it is ------------------------------------------------------------------------------------------------

    def _placed(self, props: Props, before: Props | None) -> Placed[S]:
        """Active, or still waiting. before: as the state has it; None: the state does not know of it."""
        spec = self._api.spec(props)
        until = self._backoff.now() + spec.wait_s
        while True:
            try:
                return self._placed_once(spec, before)
            except CloudTpuError as error:
                is_worth_it = stock_outs.NO_CAPACITY.search(str(error)) and not self._api.is_queued(spec)
                if not is_worth_it or self._backoff.now() + REFUSED_PAUSE_S > until:
                    raise
                self._backoff.say(
                    f"{error}\nIt is asked for again in {spoken(REFUSED_PAUSE_S)}, for at most"
                    f" {spoken(until - self._backoff.now())} more"
                )
                self._backoff.pause(REFUSED_PAUSE_S)

    def _placed_once(self, spec: S, before: Props | None) -> Placed[S]:
        if spec.zones or (before is not None and before.get("zones")):
            return self._search(spec, before).run()
        operation = self.ask(spec, is_recorded=before is not None)
        return Placed(spec=spec, look=self._wait(spec, operation))

    def _existing(self, spec: S) -> Placed[S] | None:
        if spec.zones:
            return self._search(spec, None).observed()
        resource = self._api.find(spec)
        if resource is None or not self._api.is_owned(resource, spec.owner):
            return None
        return Placed(spec=spec, look=self.look(spec, resource))

    def _search(self, spec: S, before: Props | None) -> Search[S]:
        return Search(
            self, self._api, self._backoff, spec, None if before is None else self._api.spec(before)
        )

    def remember(self, spec: S, look: Look, *, is_new: bool = False) -> None:
        """Record in the stack's store, if it has one, whether there was capacity. is_new: it has just become ACTIVE.

        A record that cannot be written is only a warning.
        """
        outcome = stock_outs.seen_in(look, self._api.now(), is_new=is_new)
        note = (spec.zone, str(outcome), stock_outs.utc_hour(self._api.now()))
        if not spec.store_url or outcome is None or note in self._noted:
            return
        self._noted.add(note)
        try:
            stock_outs.remember(
                Documents(spec.store_url, patience_s=STORE_PATIENCE_S),
                stock_outs.ZoneOffer(zone=spec.zone, kind=spec.kind, capacity=spec.capacity),
                outcome,
                self._api.now(),
            )
        except DocumentsError as error:
            self._backoff.say(f"warning: what {spec.zone} has to offer is not remembered: {error}")

    def _remember_deletion(self, props: Props, spec: S, look: Look) -> None:
        """Record in the stack's store, if it has one, until when a slice cost. See `remember`."""
        created = look.resource.get("createTime", "")
        if not spec.store_url or not created:
            return
        record = deleted_slices.DeletedSlice(
            created=created,
            active_at=look.active_at
            or (props.get("active_at") if props.get("create_time") == created else "")
            or "",
            deleted=self._api.now().isoformat(),
            accelerator_type=props.get("accelerator_type") or "",
            count=int(props.get("count") or props.get("node_count") or 1),
            zone=spec.zone,
            capacity=spec.capacity,
        )
        try:
            deleted_slices.remember(Documents(spec.store_url, patience_s=STORE_PATIENCE_S), record)
        except DocumentsError as error:
            self._backoff.say(f"warning: the end of {spec.own_id} is not remembered: {error}")

    # --- to have a request ------------------------------------------------------------------------------------------

    def ask(self, spec: S, *, is_recorded: bool) -> str | None:
        """Make sure that the slice is requested. Returns the operation's name if this call made the request.

        is_recorded: Pulumi's state has the request, so it differs at most in what can be changed in place.
        """
        refusal: CloudTpuError | None = None
        for _ in range(ROUNDS):
            existing = self._api.find(spec)
            if existing is None or (
                self._api.is_owned(existing, spec.owner) and self._api.is_partial(spec, existing)
            ):
                for dead in self._api.in_the_way(spec):
                    self.remove(dead)
                self._backoff.require_awaited()
                try:
                    operation = self._api.ask(spec)
                except CloudTpuError as error:
                    if error.status != "ALREADY_EXISTS":
                        raise
                    refusal = error
                    continue
                self._backoff.say(f"{spec.own_id}: asked for {spec.hardware}")
                self._backoff.require_awaited()  # also that it was when the request arrived
                return operation
            self._require_ours(spec, existing)
            look = self.look(spec, existing)
            differing = () if is_recorded else self._api.differences(spec, look)
            if look.kind == "lost" and look.may_be_running:
                raise RunningError(
                    f"{spec.name}: {look.reason}, and its other nodes run. Nothing that runs is deleted unless you"
                    f" ask for it:\n`pulumi up --refresh` makes it again, or delete it: {spec.how_to_delete}"
                )
            if look.kind == "lost":
                self._backoff.say(f"{spec.own_id}: removing what is left of an earlier one: {look.reason}")
                self.remove(self._api.removable(spec))
            elif not differing:
                if not is_recorded:
                    self._backoff.say(
                        f"{spec.own_id}: taken over from an earlier `pulumi up`; it is {look.state}"
                    )
                return None
            elif look.kind == "active":
                raise RunningError(
                    f"{spec.name}: an earlier `pulumi up` of this stack, which was interrupted, has made it with"
                    f" another {', '.join(differing)}, and it is ACTIVE. Nothing that runs is deleted unless "
                    f"you ask for it:\nput the configuration back to what it was, or delete it: {spec.how_to_delete}"
                )
            else:
                self._backoff.say(
                    f"{spec.own_id}: an earlier `pulumi up` asked for another {', '.join(differing)};"
                    " that request is withdrawn"
                )
                self.remove(self._api.removable(spec))
        raise CloudTpuError(
            f"{spec.name}: Google says that the name is taken, and shows nothing of that name: {refusal}"
            f"\n{spec.about_taken_name}",
            "ALREADY_EXISTS",
        )

    def _require_ours(self, spec: S, resource: Json) -> None:
        if not self._api.is_owned(resource, spec.owner):
            raise CloudTpuError(
                f"{spec.name}: it exists already and belongs to another stack; it is left alone."
                "\nGive the slice another name, or, if nobody needs the old one, delete it:"
                f" {spec.how_to_delete}",
                "ALREADY_EXISTS",
            )

    # --- to have it -------------------------------------------------------------------------------------------------

    def _wait(self, spec: S, operation: str | None) -> Look:
        """Wait until the slice is active, at most wait_s. Raises CloudTpuError if it is lost, after deleting the rest.

        A request that is served and shows no node may be an old answer: it is not given back for that.
        """
        look = self._until_active(spec, operation)
        if look.kind != "lost":
            return look
        if look.state == MISSING:
            self._backoff.say(f"warning: {spec.own_id}: {look.reason}; `pulumi up` looks again")
            return dataclasses.replace(look, kind="waiting", state=UNREAD)
        self._backoff.require_awaited()
        message = f"{spec.own_id} ({spec.hardware}) is not available: {look.reason}"
        try:
            self.remove(self._api.removable(spec))
        except AbandonedError:
            raise
        except CloudTpuError as error:
            raise CloudTpuError(
                f"{message}\nIts remains could not be deleted, the next `pulumi up` does that: {error}"
            ) from None
        kind = LostAgainError if look.state in TAKEN_BACK else CloudTpuError
        raise kind(f"{message}\nNothing is left of it; `pulumi up` asks for it again.")

    def _outputs(self, props: Props, placed: Placed[S], *, before: Sequence[Props]) -> Json:
        """Bring an active one's nodes up to date and describe it."""
        spec, look = placed.spec, placed.look
        if look.kind != "active":
            return self._shown(props, placed, [])
        current = self._api.adjusted(spec, look, before)
        nodes = self._api.workers(spec, current, limit_s=GUEST_LIMIT_S)
        return self._shown(props, dataclasses.replace(placed, look=current), nodes)

    def _shown(self, props: Props, placed: Placed[S], nodes: Sequence[Json]) -> Json:
        spec, look = placed.spec, placed.look
        zone_outputs = {"zone": spec.zone, "others": list(placed.other_zones)} if spec.zones else {}
        return {
            **props,
            **zone_outputs,
            "state": look.state,
            "nodes": list(nodes),
            "create_time": look.resource.get("createTime", ""),
            "active_at": look.active_at,
            **self._api.more_outputs(spec, look),
        }

    # --- waiting ------------------------------------------------------------------------------------------------

    def look(self, spec: S, resource: Json) -> Look:
        """Return the state of a request and its nodes. A node counts as missing after a minute of looking for it."""
        until = self._backoff.now() + LATE_S
        while True:
            observed = self._api.look(spec, resource)
            if observed.state != MISSING or self._backoff.now() >= until:
                return observed
            self._backoff.pause(poll_pause_s(0.0))
            resource = self._api.find(spec) or resource

    def _until_active(self, spec: S, operation: str | None) -> Look:
        """Wait until the slice is active or lost, at most wait_s. operation: the one that has just requested it.

        Raises CloudTpuError if the request is gone, and AbandonedError if nobody waits any more. Nothing else: the
        request exists, and a state that does not know of it would leave it behind.
        """
        started = reported = self._backoff.now()
        last, is_new = "requested", operation is not None
        observed = Look(kind="waiting", state="ACCEPTED", reason="", resource={}, nodes={})
        while True:
            waited_s = self._backoff.now() - started
            left_s = spec.wait_s - waited_s
            try:
                resource = self._api.find(spec, patience_s=max(left_s, 0.0))
                if resource is None:
                    self.require_pending(spec, operation, waited_s)
                else:
                    observed, operation = self.look(spec, resource), None
            except (AbandonedError, GoneError):
                raise
            except CloudTpuError as error:
                self._backoff.say(f"warning: {spec.own_id}: {error}")
                if error.status not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
                    return observed
            self.remember(spec, observed, is_new=is_new or last != "requested")
            if observed.kind != "waiting":
                return observed
            if waited_s >= spec.wait_s:
                self._backoff.say(
                    f"warning: {spec.own_id} is still {observed.state} after {spoken(waited_s)} and "
                    "stays in the queue: `pulumi up` waits on, `pulumi destroy` gives it up"
                )
                return observed
            if observed.state != last or self._backoff.now() - reported >= SAY_EVERY_S:
                last, reported = observed.state, self._backoff.now()
                self._backoff.say(
                    f"{spec.own_id}: {observed.state} for {spec.hardware};"
                    f" waited {spoken(waited_s)}, at most {spoken(left_s)} more"
                )
            self._backoff.pause(min(poll_pause_s(waited_s), max(left_s, 1.0)))

    def require_pending(self, spec: S, operation: str | None, waited_s: float) -> None:
        """Check that a request that is not shown may still appear. Raises GoneError if it is gone."""
        pending = self._api.operation(operation) if operation else None
        error = (pending or {}).get("error", {})
        if error or waited_s >= LATE_S or operation is None:
            message = error.get("message", "someone else has deleted it")
            raise GoneError(
                f"{spec.own_id} ({spec.hardware}) is not there any more: {message}."
                " `pulumi up` asks for it again."
            )

    # --- until it is gone -------------------------------------------------------------------------------------------

    def remove_all(self, project: str, owner: str, zones: Collection[str] | None = None) -> None:
        """Delete everything of a stack in all zones: what an interrupted `pulumi up` has left.

        zones: where there may be some; None: not known. Raises CloudTpuError if one of them could not be asked, after
        deleting what the others showed.
        """
        unreachable: set[str] = set()
        for remaining in self._api.leftovers(project, owner, unreachable):
            self._backoff.say(f"{remaining.name}: left by an interrupted `pulumi up`; it is deleted")
            self.remove(remaining)
        _require_none(unreachable if zones is None else unreachable & {*zones})

    def require_reachable(self, props: Props) -> None:
        """Raises CloudTpuError: a zone of the slice cannot be asked now, which is not waited for here."""
        spec = self._api.spec(props)
        unreachable = self._api.listing(spec.project).unreachable
        _require_none({*unreachable} & {each.zone for each in spec.per_zone})

    def remove(self, thing: Removable) -> None:
        """Delete, and try again where the API refuses, until the thing is gone or not ours."""
        until = self._backoff.now() + DELETE_LIMIT_S
        asked_at: float | None = None
        refusal = ""
        while (remaining := thing.find()) is not None:
            now, state = self._backoff.now(), thing.get_state(remaining)
            if now >= until:
                raise CloudTpuError(
                    f"{thing.name}: it is still {state} after {spoken(DELETE_LIMIT_S)}{refusal}; `pulumi "
                    "up` tries again"
                )
            patience_s = LOOK_AGAIN_S if refusal else DELETE_AGAIN_S
            if (state != "DELETING" and asked_at is None) or (
                asked_at is not None and now - asked_at >= patience_s
            ):
                self._backoff.require_awaited()
                asked_at, refusal = now, ""
                try:
                    thing.delete()
                except CloudTpuError as error:
                    if error.status not in ("FAILED_PRECONDITION", "NOT_FOUND", "ABORTED"):
                        raise
                    refusal = f": {error}"
            elif asked_at is None:
                asked_at = now  # someone else is deleting it
            self._backoff.pause(LOOK_AGAIN_S)


def _require_none(unreachable: Collection[str]) -> None:
    if unreachable:
        zones = ", ".join(sorted(unreachable))
        raise CloudTpuError(f"Google could not say what it holds in {zones}", "UNAVAILABLE")
