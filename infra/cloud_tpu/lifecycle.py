"""What happens to a queued resource: made or adopted, waited for, changed in place, looked at, deleted.

What is ours carries the stack's owner label; what does not is never touched. What waits and what is over may be deleted
and made anew; what runs is deleted only by `delete`, that is when the engine asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contracts.aliases import Json
from contracts.durations import spoken
from infra.cloud_tpu import request, workers
from infra.cloud_tpu.request import Look, Props, SliceSpec
from infra.cloud_tpu.retry import (
    AbandonedError,
    Backoff,
    CloudTpuError,
    GoneError,
    LostAgainError,
    RunningError,
    poll_pause_s,
)
from infra.cloud_tpu.zones import LATE_S, LOOK_AGAIN_S, SAY_EVERY_S, Placed, Search, require_empty, strays
from infra.documents import Documents, DocumentsError, stock_outs

if TYPE_CHECKING:
    from infra.cloud_tpu.client import Client
    from infra.google_api import Listing


GUEST_LIMIT_S = 300.0
PATCH_LIMIT_S = 300.0
PATCH_AGAIN_S = 10.0
ROUNDS = 4  # to make one: what is in the way is removed, and someone may be quicker than we
DELETE_LIMIT_S = 1800.0
DELETE_AGAIN_S = 60.0  # of one that says it is being deleted, and does not go
STORE_PATIENCE_S = 5.0  # for a record of what a zone had; nothing waits for it longer


class Lifecycle:
    """Methods take Pulumi properties, return outputs, and raise CloudTpuError with a message for the user.

    Every method looks for a slice with several `zones` in all of them. The property `zone` is where the slice should
    be, the output `zone` where it is; `infra.cloud_tpu.zones` decides between the two.
    """

    def __init__(self, client: Client, backoff: Backoff) -> None:
        self._client = client.under(backoff)
        self._backoff = backoff
        self._noted: set[tuple[str, str, str]] = set()

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
                f"warning: {placed.spec.queued_resource_id} exists, but {error}\n`pulumi up` continues with it"
            )
            unread = dataclasses.replace(placed.look, kind="waiting", state=request.UNREAD)
            return self._shown(props, dataclasses.replace(placed, look=unread), [])

    def restore(self, props: Props, lost: Callable[[str], None]) -> Json:
        """Like `create`; a slice that runs stays as it is. A lost one is deleted first, also with nodes that still run.

        lost: called with the reason before anything is deleted.
        """
        placed = self._existing(SliceSpec.from_props(props))
        if placed is not None and placed.look.kind == "active" and not placed.other_zones:
            return self._outputs(props, placed, before=())
        if placed is not None and placed.look.kind == "lost":
            lost(placed.look.reason)
            self._remove(placed.spec.name, placed.spec.owner)
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
        return outputs | {
            "others": list(self._search(SliceSpec.from_props(outputs), outputs).settle(other_zones))
        }

    def read(self, props: Props) -> Json | None:
        """The outputs as they are; None where there is no such thing of ours. What is dead stays, in its state.

        It is not dropped from Pulumi's state, because it still counts against the quota until someone deletes it: the
        next `up` (delete and make again, see `changes`) or `destroy`. Raises where Google gives no answer: that says
        nothing about the resource.
        """
        placed = self._existing(SliceSpec.from_props(props))
        if placed is None:
            return None
        spec, look = placed.spec, placed.look
        if look.kind == "lost":
            self._backoff.say(f"{spec.queued_resource_id} is lost: {look.reason}; `pulumi up` makes it again")
        if placed.other_zones:
            self._backoff.say(
                f"warning: {spec.queued_resource_id} is ACTIVE in {spec.zone}, and there is one in"
                f" {', '.join(placed.other_zones)} as well; `pulumi up` withdraws that"
            )
        in_order = _in_order(spec, look) if look.kind == "active" else []
        return self._shown(props, placed, [workers.read(self._client, node) for node in in_order])

    def delete(self, props: Props) -> None:
        """Delete a slice with its nodes and their remains, and return when all are gone. What is not ours stays.

        Raises CloudTpuError if something may be left, after deleting all that could be deleted.
        """
        home_spec = SliceSpec.from_props(props)
        troubles: list[CloudTpuError] = []
        listing = self._client.queued_resources(home_spec.project) if home_spec.zones else None
        stray_specs = strays(listing, home_spec, home_spec.zones) if listing else []
        for spec in [*home_spec.per_zone, *stray_specs]:
            try:
                self._delete(spec, listing if spec.zone != home_spec.zone else None)
            except AbandonedError:
                raise
            except CloudTpuError as error:
                troubles.append(error)
        if troubles:
            raise CloudTpuError("\n".join(map(str, troubles)), troubles[0].status)

    def _delete(self, spec: SliceSpec, listing: Listing | None) -> None:
        """listing: of all zones; it shows whether a zone that denies access has the slice."""
        try:
            queued_resource = self._client.queued_resource(spec.name)
        except CloudTpuError as error:
            if listing is None or error.status != "PERMISSION_DENIED":
                raise
            require_empty(listing, spec, error)
            return
        if queued_resource is not None and not request.is_owned(
            request.requested_node(queued_resource), spec.owner
        ):
            self._backoff.say(
                f"warning: {spec.name} does not belong to this stack any more; it is left alone"
            )
        elif queued_resource is not None:
            self._remove(spec.name, spec.owner)
        self._remove_orphans(spec)

    # --- where it is ------------------------------------------------------------------------------------------------

    def _placed(self, props: Props, before: Props | None) -> Placed:
        """Active, or still waiting. before: as the state has it; None: the state does not know of it."""
        spec, is_recorded = SliceSpec.from_props(props), before is not None
        if spec.zones or (before is not None and before.get("zones")):
            return self._search(spec, before).run()
        operation = self.ask(spec, is_recorded=is_recorded)
        return Placed(spec=spec, look=self._wait(spec, operation))

    def _existing(self, spec: SliceSpec) -> Placed | None:
        if spec.zones:
            return self._search(spec, None).observed()
        queued_resource = self._client.queued_resource(spec.name)
        if queued_resource is None or not request.is_owned(
            request.requested_node(queued_resource), spec.owner
        ):
            return None
        return Placed(spec=spec, look=self.look(spec, queued_resource))

    def _search(self, spec: SliceSpec, before: Props | None) -> Search:
        return Search(
            self, self._client, self._backoff, spec, None if before is None else SliceSpec.from_props(before)
        )

    def remember(self, spec: SliceSpec, look: Look, *, is_new: bool = False) -> None:
        """Record in the stack's store, if it has one, whether there was capacity. is_new: it has just become ACTIVE.

        A record that cannot be written is only a warning.
        """
        outcome = stock_outs.seen_in(look, self._client.now(), is_new=is_new)
        note = (spec.zone, str(outcome), stock_outs.utc_hour(self._client.now()))
        if not spec.store_url or outcome is None or note in self._noted:
            return
        self._noted.add(note)
        try:
            stock_outs.remember(
                Documents(spec.store_url, patience_s=STORE_PATIENCE_S),
                stock_outs.ZoneOffer(zone=spec.zone, kind=spec.kind, capacity=spec.capacity),
                outcome,
                self._client.now(),
            )
        except DocumentsError as error:
            self._backoff.say(f"warning: what {spec.zone} has to offer is not remembered: {error}")

    # --- to have a request ------------------------------------------------------------------------------------------

    def ask(self, spec: SliceSpec, *, is_recorded: bool) -> str | None:
        """Make sure that the slice is requested. Returns the operation's name if this call made the request.

        is_recorded: Pulumi's state has the request, so it differs at most in what can be changed in place.
        """
        refusal: CloudTpuError | None = None
        for _ in range(ROUNDS):
            existing = self._client.queued_resource(spec.name)
            if existing is None:
                self._clear_nodes(spec)
                self._backoff.require_awaited()
                try:
                    body = request.queued_resource(spec)
                    operation = self._client.create_queued_resource(
                        spec.parent, spec.queued_resource_id, body, version=request.api_version(spec)
                    )
                except CloudTpuError as error:
                    if error.status != "ALREADY_EXISTS":
                        raise
                    refusal = error
                    continue
                self._backoff.say(f"{spec.queued_resource_id}: asked for {spec.hardware}")
                self._backoff.require_awaited()  # also that it was when the request arrived
                return str(operation["name"])
            self._require_ours(spec, existing)
            look = self.look(spec, existing)
            differing = (
                () if is_recorded else request.differences(spec, existing, waiting=look.kind == "waiting")
            )
            if look.kind == "lost" and look.may_be_running:
                raise RunningError(
                    f"{spec.name}: {look.reason}, and its other nodes run. Nothing that runs is deleted unless you"
                    f" ask for it:\n`pulumi up --refresh` makes it again, or delete it: {spec.how_to_delete}"
                )
            if look.kind == "lost":
                self._backoff.say(
                    f"{spec.queued_resource_id}: removing what is left of an earlier one: {look.reason}"
                )
                self._remove(spec.name, spec.owner)
            elif not differing:
                if not is_recorded:
                    self._backoff.say(
                        f"{spec.queued_resource_id}: taken over from an earlier `pulumi up`; it is {look.state}"
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
                    f"{spec.queued_resource_id}: an earlier `pulumi up` asked for another {', '.join(differing)};"
                    " that request is withdrawn"
                )
                self._remove(spec.name, spec.owner)
        raise CloudTpuError(
            f"{spec.name}: Google says that the name is taken, and shows nothing of that name: {refusal}"
            f"\nA request of someone else for a node {' or '.join(spec.node_ids[:2])} may be waiting; see"
            f" `gcloud compute tpus queued-resources list --project={spec.project} --zone={spec.zone}`",
            "ALREADY_EXISTS",
        )

    def _require_ours(self, spec: SliceSpec, queued_resource: Json) -> None:
        if not request.is_owned(request.requested_node(queued_resource), spec.owner):
            raise CloudTpuError(
                f"{spec.name}: it exists already and belongs to another stack; it is left alone."
                "\nGive the slice another name, or, if nobody needs the old one, delete it:"
                f" {spec.how_to_delete}",
                "ALREADY_EXISTS",
            )

    def _clear_nodes(self, spec: SliceSpec) -> None:
        """Remove our dead nodes of these names. Raises CloudTpuError where there are others."""
        for node_id in spec.node_ids:
            node = self._client.node(f"{spec.parent}/nodes/{node_id}")
            if node is None:
                continue
            if request.is_owned(node, spec.owner) and node.get("state") in request.LOST_NODE:
                self.delete_node(f"{spec.parent}/nodes/{node_id}", spec.owner)
                continue
            raise CloudTpuError(
                f"{spec.parent}/nodes/{node_id}: there is a node of this name already ({node.get('state')}), not made"
                f" by the queued resource {spec.queued_resource_id}; it is left alone.\nIf it is this slice's own,"
                " which was direct before: remove the slice, `pulumi up`, add it again, `pulumi up`."
                "\nOtherwise give the slice another name, or, if nobody needs the node, delete it:"
                f" gcloud compute tpus tpu-vm delete {node_id} --project={spec.project} --zone={spec.zone}",
                "ALREADY_EXISTS",
            )

    # --- to have it -------------------------------------------------------------------------------------------------

    def _wait(self, spec: SliceSpec, operation: str | None) -> Look:
        """Wait until the slice is active, at most wait_s. Raises CloudTpuError if it is lost, after deleting the rest.

        A request that is served and shows no node may be an old answer: it is not given back for that.
        """
        look = self._until_active(spec, operation)
        if look.kind != "lost":
            return look
        if look.state == request.MISSING:
            self._backoff.say(f"warning: {spec.queued_resource_id}: {look.reason}; `pulumi up` looks again")
            return dataclasses.replace(look, kind="waiting", state=request.UNREAD)
        self._backoff.require_awaited()
        message = f"{spec.queued_resource_id} ({spec.hardware}) is not available: {look.reason}"
        try:
            self._remove(spec.name, spec.owner)
        except AbandonedError:
            raise
        except CloudTpuError as error:
            raise CloudTpuError(
                f"{message}\nIts remains could not be deleted, the next `pulumi up` does that: {error}"
            ) from None
        kind = LostAgainError if look.state in request.TAKEN_BACK else CloudTpuError
        raise kind(f"{message}\nNothing is left of it; `pulumi up` asks for it again.")

    def _outputs(self, props: Props, placed: Placed, *, before: Sequence[Props]) -> Json:
        """Bring an active one's nodes up to date and describe it."""
        spec, look = placed.spec, placed.look
        if look.kind != "active":
            return self._shown(props, placed, [])
        was = [*before, request.requested_node(look.queued_resource)]
        nodes = self._patched(spec, _in_order(spec, look), was)
        worker_lists = workers.awaited(self._client, self._backoff, nodes, GUEST_LIMIT_S)
        fresh = {node["name"].rpartition("/")[2]: node for node in nodes}
        current = request.look(look.queued_resource, fresh)
        return self._shown(props, dataclasses.replace(placed, look=current), worker_lists)

    def _patched(
        self, spec: SliceSpec, nodes: Sequence[Json], before: Sequence[Mapping[str, Any]]
    ) -> list[Json]:
        """Change nodes in place to what the spec says, and return them as they are then. before: see `request.patch`.

        Each node by itself: the API has no change of a queued resource, and only those of its nodes can change.
        """
        for node in nodes:
            mask, body = request.patch(spec, node, before)
            if mask:
                self._patch(_name(spec, node), mask, body)
        return [self._client.node(_name(spec, node)) or node for node in nodes]

    def _patch(self, name: str, mask: str, body: Json) -> None:
        until = self._backoff.now() + PATCH_LIMIT_S
        while True:
            try:
                self._until_done(self._client.patch_node(name, mask, body), PATCH_LIMIT_S)
                return
            except CloudTpuError as error:
                # A node under maintenance, or one that another change is under way on, takes it a little later.
                if error.status != "FAILED_PRECONDITION" or self._backoff.now() >= until:
                    raise
                left = spoken(until - self._backoff.now())
                self._backoff.say(f"{name.rpartition('/')[2]}: {error}; tried again for {left}")
            self._backoff.pause(PATCH_AGAIN_S)

    def _shown(self, props: Props, placed: Placed, worker_lists: Sequence[list[Json]]) -> Json:
        spec, look = placed.spec, placed.look
        zone_outputs = {"zone": spec.zone, "others": list(placed.other_zones)} if spec.zones else {}
        in_order = _in_order(spec, look) if look.kind == "active" else []
        return {
            **props,
            **zone_outputs,
            "state": look.state,
            "nodes": [
                workers.output(node, node_workers)
                for node, node_workers in zip(in_order, worker_lists, strict=False)
            ],
            "create_time": look.queued_resource.get("createTime", ""),
            "ends_at": request.ends_at(spec, in_order),
        }

    # --- waiting ------------------------------------------------------------------------------------------------

    def look(self, spec: SliceSpec, queued_resource: Json) -> Look:
        """Return the state of a request and its nodes. A node counts as missing after a minute of looking for it."""
        until = self._backoff.now() + LATE_S
        while True:
            observed = self._once(spec, queued_resource)
            if observed.state != request.MISSING or self._backoff.now() >= until:
                return observed
            self._backoff.pause(poll_pause_s(0.0))
            queued_resource = self._client.queued_resource(spec.name) or queued_resource

    def _until_active(self, spec: SliceSpec, operation: str | None) -> Look:
        """Wait until the slice is active or lost, at most wait_s. operation: the one that has just requested it.

        Raises CloudTpuError if the request is gone, and AbandonedError if nobody waits any more. Nothing else: the
        request exists, and a state that does not know of it would leave it behind.
        """
        started = reported = self._backoff.now()
        last, is_new = "requested", operation is not None
        observed = Look(kind="waiting", state="ACCEPTED", reason="", queued_resource={}, nodes={})
        while True:
            waited_s = self._backoff.now() - started
            left_s = spec.wait_s - waited_s
            try:
                queued_resource = self._client.queued_resource(spec.name, patience_s=max(left_s, 0.0))
                if queued_resource is None:
                    self.require_pending(spec, operation, waited_s)
                else:
                    observed, operation = self.look(spec, queued_resource), None
            except (AbandonedError, GoneError):
                raise
            except CloudTpuError as error:
                self._backoff.say(f"warning: {spec.queued_resource_id}: {error}")
                if error.status not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
                    return observed
            self.remember(spec, observed, is_new=is_new or last != "requested")
            if observed.kind != "waiting":
                return observed
            if waited_s >= spec.wait_s:
                self._backoff.say(
                    f"warning: {spec.queued_resource_id} is still {observed.state} after {spoken(waited_s)} and "
                    "stays in the queue: `pulumi up` waits on, `pulumi destroy` gives it up"
                )
                return observed
            if observed.state != last or self._backoff.now() - reported >= SAY_EVERY_S:
                last, reported = observed.state, self._backoff.now()
                self._backoff.say(
                    f"{spec.queued_resource_id}: {observed.state} for {spec.hardware};"
                    f" waited {spoken(waited_s)}, at most {spoken(left_s)} more"
                )
            self._backoff.pause(min(poll_pause_s(waited_s), max(left_s, 1.0)))

    def _until_done(self, operation: Json, limit_s: float) -> None:
        """Wait for an operation. Raises CloudTpuError if it fails or does not end in time."""
        until = self._backoff.now() + limit_s
        current: Json | None = operation
        while current is not None and not current.get("done"):
            if self._backoff.now() >= until:
                raise CloudTpuError(f"{operation['name']}: it has not ended within {spoken(limit_s)}")
            self._backoff.pause(2.0)
            current = self._client.operation(operation["name"])
        if current is not None and "error" in current:
            raise CloudTpuError(f"{operation['name']}: {current['error'].get('message', 'it has failed')}")

    def _once(self, spec: SliceSpec, queued_resource: Json) -> Look:
        nodes: dict[str, Json | None] = {}
        if request.resource_state(queued_resource) == request.ACTIVE:
            nodes = {
                node_id: self._client.node(f"{spec.parent}/nodes/{node_id}")
                for node_id in request.node_ids(queued_resource)
            }
        return request.look(queued_resource, nodes)

    def require_pending(self, spec: SliceSpec, operation: str | None, waited_s: float) -> None:
        """Check that a request that is not shown may still appear. Raises GoneError if it is gone."""
        pending = self._client.operation(operation) if operation else None
        error = (pending or {}).get("error", {})
        if error or waited_s >= LATE_S or operation is None:
            message = error.get("message", "someone else has deleted it")
            raise GoneError(
                f"{spec.queued_resource_id} ({spec.hardware}) is not there any more: {message}."
                " `pulumi up` asks for it again."
            )

    # --- until it is gone -------------------------------------------------------------------------------------------

    def _remove(self, name: str, owner: str) -> None:
        """Delete a queued resource and its nodes."""

        def ours() -> Json | None:
            queued_resource = self._client.queued_resource(name)
            return (
                queued_resource
                if queued_resource and request.is_owned(request.requested_node(queued_resource), owner)
                else None
            )

        self._until_gone(
            name, ours, request.resource_state, lambda: self._client.delete_queued_resource(name)
        )

    def delete_node(self, name: str, owner: str) -> None:
        """Delete a node, and return when it is gone. A node of another owner stays."""

        def ours() -> Json | None:
            node = self._client.node(name)
            return node if node and request.is_owned(node, owner) else None

        self._until_gone(
            name, ours, lambda node: str(node.get("state")), lambda: self._client.delete_node(name)
        )

    def _remove_orphans(self, spec: SliceSpec) -> None:
        """Nodes that the queued resource has left behind, be they ours by label and by name."""
        for node_id in spec.node_ids:
            name = f"{spec.parent}/nodes/{node_id}"
            node = self._client.node(name)
            if node and request.is_owned(node, spec.owner) and request.belongs_to(node, spec):
                self.delete_node(name, spec.owner)

    def remove_all(self, project: str, owner: str, zones: Collection[str] | None = None) -> None:
        """Delete every queued resource and node of a stack in all zones: what an interrupted `pulumi up` has left.

        zones: where there may be some; None: not known. Raises CloudTpuError if one of them could not be asked, after
        deleting what the others showed.
        """
        reason = "left by an interrupted `pulumi up`; it is deleted"
        queued = self._client.queued_resources(project)
        for queued_resource in queued.items:
            if request.is_owned(request.requested_node(queued_resource), owner):
                self._backoff.say(f"{queued_resource['name']}: {reason}")
                self._remove(queued_resource["name"], owner)
        nodes = self._client.nodes(project)
        for node in nodes.items:
            if request.is_owned(node, owner):
                self._backoff.say(f"{node['name']}: {reason}")
                self.delete_node(node["name"], owner)
        unreachable = {*queued.unreachable, *nodes.unreachable}
        if unknown := sorted(unreachable if zones is None else unreachable & {*zones}):
            raise CloudTpuError(f"Google could not say what it holds in {', '.join(unknown)}", "UNAVAILABLE")

    def _until_gone(
        self,
        name: str,
        ours: Callable[[], Json | None],
        get_state: Callable[[Json], str],
        delete: Callable[[], None],
    ) -> None:
        """Delete, and try again where the API refuses, until the resource is gone or not ours."""
        until = self._backoff.now() + DELETE_LIMIT_S
        asked_at: float | None = None
        refusal = ""
        while (remaining := ours()) is not None:
            now = self._backoff.now()
            if now >= until:
                raise CloudTpuError(
                    f"{name}: it is still {get_state(remaining)} after {spoken(DELETE_LIMIT_S)}{refusal}; `pulumi "
                    "up` tries again"
                )
            patience_s = LOOK_AGAIN_S if refusal else DELETE_AGAIN_S
            if (get_state(remaining) != "DELETING" and asked_at is None) or (
                asked_at is not None and now - asked_at >= patience_s
            ):
                self._backoff.require_awaited()
                asked_at, refusal = now, ""
                try:
                    delete()
                except CloudTpuError as error:
                    if error.status not in ("FAILED_PRECONDITION", "NOT_FOUND", "ABORTED"):
                        raise
                    refusal = f": {error}"
            elif asked_at is None:
                asked_at = now  # someone else is deleting it
            self._backoff.pause(LOOK_AGAIN_S)


def _in_order(spec: SliceSpec, look: Look) -> list[Json]:
    return [look.nodes[node_id] for node_id in spec.node_ids if node_id in look.nodes]


def _name(spec: SliceSpec, node: Json) -> str:
    """The full name with the project's id: Google may write its number."""
    return f"{spec.parent}/nodes/{node['name'].rpartition('/')[2]}"
