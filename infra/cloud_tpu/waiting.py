"""Waiting for a queued resource to be ACTIVE, for hours if need be, and saying how it stands."""

from __future__ import annotations

from typing import Any

from infra.cloud_tpu import request, states
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.errors import AbandonedError, CloudTpuError
from infra.cloud_tpu.pace import Pace, poll_pause_s, words
from infra.cloud_tpu.states import Look
from infra.cloud_tpu.wanted import Wanted

Json = dict[str, Any]

SAY_EVERY_S = 300.0
# What is not shown may only be late: live ones must not be deleted because an answer was old.
LATE_S = 60.0


class Waiting:
    """Looks at a queued resource until it has become something."""

    def __init__(self, client: Client, pace: Pace) -> None:
        self._client = client
        self._pace = pace

    def look(self, wanted: Wanted, found: Json) -> Look:
        """How it stands, its nodes included. A missing node is looked for again for a minute before we say so."""
        until = self._pace.now() + LATE_S
        while True:
            seen = self._once(wanted, found)
            if seen.state != states.MISSING or self._pace.now() >= until:
                return seen
            self._pace.pause(poll_pause_s(0.0))
            found = self._client.queued_resource(wanted.name) or found

    def until_active(self, wanted: Wanted, operation: str | None) -> Look:
        """Active, lost, or still waiting when wait_s is over. operation: the one by which we asked for it just now.

        Raises CloudTpuError where it is gone, and AbandonedError where nobody waits any more. Nothing else: the request
        is there, and a state that does not know of it would leave it behind.
        """
        started = said = self._pace.now()
        last = "requested"
        seen = Look(kind="waiting", state="ACCEPTED", why="", queued_resource={}, nodes={})
        while True:
            waited_s = self._pace.now() - started
            left_s = wanted.wait_s - waited_s
            try:
                found = self._client.queued_resource(wanted.name, patience_s=max(left_s, 0.0))
                if found is None:
                    self._require_pending(wanted, operation, waited_s)
                else:
                    seen, operation = self.look(wanted, found), None
            except (AbandonedError, _GoneError):
                raise
            except CloudTpuError as error:
                self._pace.say(f"warning: {wanted.queued_resource_id}: {error}")
                if error.status not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
                    return seen
            if seen.kind != "waiting":
                return seen
            if waited_s >= wanted.wait_s:
                self._pace.say(
                    f"warning: {wanted.queued_resource_id} is still {seen.state} after {words(waited_s)} and stays in"
                    " the queue: `pulumi up` waits on, `pulumi destroy` gives it up"
                )
                return seen
            if seen.state != last or self._pace.now() - said >= SAY_EVERY_S:
                last, said = seen.state, self._pace.now()
                self._pace.say(
                    f"{wanted.queued_resource_id}: {seen.state} for {wanted.hardware};"
                    f" waited {words(waited_s)}, at most {words(left_s)} more"
                )
            self._pace.pause(min(poll_pause_s(waited_s), max(left_s, 1.0)))

    def until_done(self, operation: Json, limit_s: float) -> None:
        """Raises CloudTpuError where an operation has failed, or has not ended in time."""
        until = self._pace.now() + limit_s
        found: Json | None = operation
        while found is not None and not found.get("done"):
            if self._pace.now() >= until:
                raise CloudTpuError(f"{operation['name']}: it has not ended within {words(limit_s)}")
            self._pace.pause(2.0)
            found = self._client.operation(operation["name"])
        if found is not None and "error" in found:
            raise CloudTpuError(f"{operation['name']}: {found['error'].get('message', 'it has failed')}")

    def _once(self, wanted: Wanted, found: Json) -> Look:
        nodes: dict[str, Json | None] = {}
        if states.state_of(found) == states.ACTIVE:
            nodes = {
                node_id: self._client.node(f"{wanted.parent}/nodes/{node_id}")
                for node_id in request.node_ids(found)
            }
        return states.look(found, nodes)

    def _require_pending(self, wanted: Wanted, operation: str | None, waited_s: float) -> None:
        """It is not there: not yet, or not any more? Raises _GoneError for the latter."""
        pending = self._client.operation(operation) if operation else None
        error = (pending or {}).get("error", {})
        if error or waited_s >= LATE_S or operation is None:
            message = error.get("message", "someone else has deleted it")
            raise _GoneError(
                f"{wanted.queued_resource_id} ({wanted.hardware}) is not there any more: {message}."
                " `pulumi up` asks for it again."
            )


class _GoneError(CloudTpuError):
    """The request has vanished: there is nothing that a state could know of."""

    __module__ = "builtins"
