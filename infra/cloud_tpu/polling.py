"""Waits until a queued resource is ACTIVE, for hours if need be, or until it is deleted and gone with its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contracts.durations import spoken
from infra.cloud_tpu import request, states
from infra.cloud_tpu.backoff import Backoff, poll_pause_s
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.refusal import AbandonedError, CloudTpuError
from infra.cloud_tpu.spec import Spec
from infra.cloud_tpu.states import Look

Json = dict[str, Any]

SAY_EVERY_S = 300.0
# What is not shown may only be late: live ones must not be deleted because an answer was old.
LATE_S = 60.0
DELETE_LIMIT_S = 1800.0
LOOK_AGAIN_S = 5.0
DELETE_AGAIN_S = 60.0  # of one that says it is being deleted, and does not go


class Waiting:
    """Looks until something has become what it should. What is not the owner's is not touched."""

    def __init__(self, client: Client, backoff: Backoff) -> None:
        self._client = client
        self._backoff = backoff

    def look(self, spec: Spec, found: Json) -> Look:
        """How it stands, its nodes included. A missing node is looked for again for a minute before we say so."""
        until = self._backoff.now() + LATE_S
        while True:
            seen = self._once(spec, found)
            if seen.state != states.MISSING or self._backoff.now() >= until:
                return seen
            self._backoff.pause(poll_pause_s(0.0))
            found = self._client.queued_resource(spec.name) or found

    def until_active(self, spec: Spec, operation: str | None) -> Look:
        """Active, lost, or still waiting when wait_s is over. operation: the one by which we asked for it just now.

        Raises CloudTpuError where it is gone, and AbandonedError where nobody waits any more. Nothing else: the request
        is there, and a state that does not know of it would leave it behind.
        """
        started = said = self._backoff.now()
        last = "requested"
        seen = Look(kind="waiting", state="ACCEPTED", why="", queued_resource={}, nodes={})
        while True:
            waited_s = self._backoff.now() - started
            left_s = spec.wait_s - waited_s
            try:
                found = self._client.queued_resource(spec.name, patience_s=max(left_s, 0.0))
                if found is None:
                    self._require_pending(spec, operation, waited_s)
                else:
                    seen, operation = self.look(spec, found), None
            except (AbandonedError, _GoneError):
                raise
            except CloudTpuError as error:
                self._backoff.say(f"warning: {spec.queued_resource_id}: {error}")
                if error.status not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
                    return seen
            if seen.kind != "waiting":
                return seen
            if waited_s >= spec.wait_s:
                self._backoff.say(
                    f"warning: {spec.queued_resource_id} is still {seen.state} after {spoken(waited_s)} and stays in"
                    " the queue: `pulumi up` waits on, `pulumi destroy` gives it up"
                )
                return seen
            if seen.state != last or self._backoff.now() - said >= SAY_EVERY_S:
                last, said = seen.state, self._backoff.now()
                self._backoff.say(
                    f"{spec.queued_resource_id}: {seen.state} for {spec.hardware};"
                    f" waited {spoken(waited_s)}, at most {spoken(left_s)} more"
                )
            self._backoff.pause(min(poll_pause_s(waited_s), max(left_s, 1.0)))

    def until_done(self, operation: Json, limit_s: float) -> None:
        """Raises CloudTpuError where an operation has failed, or has not ended in time."""
        until = self._backoff.now() + limit_s
        found: Json | None = operation
        while found is not None and not found.get("done"):
            if self._backoff.now() >= until:
                raise CloudTpuError(f"{operation['name']}: it has not ended within {spoken(limit_s)}")
            self._backoff.pause(2.0)
            found = self._client.operation(operation["name"])
        if found is not None and "error" in found:
            raise CloudTpuError(f"{operation['name']}: {found['error'].get('message', 'it has failed')}")

    # --- until it is gone -------------------------------------------------------------------------------------------

    def remove(self, name: str, owner: str) -> None:
        """A queued resource and its nodes."""

        def ours() -> Json | None:
            found = self._client.queued_resource(name)
            return found if found and request.is_owned(request.node_of(found), owner) else None

        self._until_gone(name, ours, states.state_of, lambda: self._client.delete_queued_resource(name))

    def remove_node(self, name: str, owner: str) -> None:
        def ours() -> Json | None:
            found = self._client.node(name)
            return found if found and request.is_owned(found, owner) else None

        self._until_gone(
            name, ours, lambda found: str(found.get("state")), lambda: self._client.delete_node(name)
        )

    def remove_orphans(self, spec: Spec) -> None:
        """Nodes that the queued resource has left behind, be they ours by label and by name."""
        for node_id in spec.node_ids:
            name = f"{spec.parent}/nodes/{node_id}"
            node = self._client.node(name)
            if node and request.is_owned(node, spec.owner) and request.belongs_to(node, spec):
                self.remove_node(name, spec.owner)

    def remove_all(self, project: str, owner: str) -> None:
        """Every queued resource of a stack, in all zones: what interrupted ones have left and no state knows of."""
        for found in self._client.queued_resources(f"projects/{project}/locations/-"):
            if request.is_owned(request.node_of(found), owner):
                self._backoff.say(f"{found['name']}: left by an interrupted `pulumi up`; it is deleted")
                self.remove(found["name"], owner)

    def _until_gone(
        self,
        name: str,
        ours: Callable[[], Json | None],
        state_of: Callable[[Json], str],
        delete: Callable[[], None],
    ) -> None:
        """Delete, look, and delete again where the API has refused it; until it is not there, or not ours."""
        until = self._backoff.now() + DELETE_LIMIT_S
        asked_at: float | None = None
        refusal = ""
        while (found := ours()) is not None:
            now = self._backoff.now()
            if now >= until:
                raise CloudTpuError(
                    f"{name}: it is still {state_of(found)} after {spoken(DELETE_LIMIT_S)}{refusal}; `pulumi up` tries"
                    " again"
                )
            patience_s = LOOK_AGAIN_S if refusal else DELETE_AGAIN_S
            if (state_of(found) != "DELETING" and asked_at is None) or (
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

    # --- how --------------------------------------------------------------------------------------------------------

    def _once(self, spec: Spec, found: Json) -> Look:
        nodes: dict[str, Json | None] = {}
        if states.state_of(found) == states.ACTIVE:
            nodes = {
                node_id: self._client.node(f"{spec.parent}/nodes/{node_id}")
                for node_id in request.node_ids(found)
            }
        return states.look(found, nodes)

    def _require_pending(self, spec: Spec, operation: str | None, waited_s: float) -> None:
        """It is not there: not yet, or not any more? Raises _GoneError for the latter."""
        pending = self._client.operation(operation) if operation else None
        error = (pending or {}).get("error", {})
        if error or waited_s >= LATE_S or operation is None:
            message = error.get("message", "someone else has deleted it")
            raise _GoneError(
                f"{spec.queued_resource_id} ({spec.hardware}) is not there any more: {message}."
                " `pulumi up` asks for it again."
            )


class _GoneError(CloudTpuError):
    """The request has vanished: there is nothing that a state could know of."""

    __module__ = "builtins"
