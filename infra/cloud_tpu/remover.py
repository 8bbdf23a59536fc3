"""Deleting a queued resource of ours with its nodes, and being sure that they are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infra.cloud_tpu import request, states
from infra.cloud_tpu.client import Client
from infra.cloud_tpu.errors import CloudTpuError
from infra.cloud_tpu.pace import Pace, words
from infra.cloud_tpu.wanted import Wanted

Json = dict[str, Any]

LIMIT_S = 1800.0
LOOK_AGAIN_S = 5.0
ASK_AGAIN_S = 60.0  # of one that says it is being deleted, and does not go


class Remover:
    """Each method returns when the thing is gone, and touches nothing that is not the owner's."""

    def __init__(self, client: Client, pace: Pace) -> None:
        self._client = client
        self._pace = pace

    def remove(self, name: str, owner: str) -> None:
        """A queued resource and its nodes."""

        def ours() -> Json | None:
            found = self._client.queued_resource(name)
            return found if found and request.is_owned(request.node_of(found), owner) else None

        self._gone(name, ours, states.state_of, lambda: self._client.delete_queued_resource(name))

    def remove_node(self, name: str, owner: str) -> None:
        def ours() -> Json | None:
            found = self._client.node(name)
            return found if found and request.is_owned(found, owner) else None

        self._gone(name, ours, lambda found: str(found.get("state")), lambda: self._client.delete_node(name))

    def remove_orphans(self, wanted: Wanted) -> None:
        """Nodes that the queued resource has left behind, be they ours by label and by name."""
        for node_id in wanted.node_ids:
            name = f"{wanted.parent}/nodes/{node_id}"
            node = self._client.node(name)
            if node and request.is_owned(node, wanted.owner) and request.belongs_to(node, wanted):
                self.remove_node(name, wanted.owner)

    def remove_all(self, project: str, owner: str) -> None:
        """Every queued resource of a stack, in all zones: what interrupted ones have left and no state knows of."""
        for found in self._client.queued_resources(f"projects/{project}/locations/-"):
            if request.is_owned(request.node_of(found), owner):
                self._pace.say(f"{found['name']}: left by an interrupted `pulumi up`; it is deleted")
                self.remove(found["name"], owner)

    def _gone(
        self,
        name: str,
        ours: Callable[[], Json | None],
        state_of: Callable[[Json], str],
        delete: Callable[[], None],
    ) -> None:
        """Delete, look, and delete again where the API has refused it; until it is not there, or not ours."""
        until = self._pace.now() + LIMIT_S
        asked_at: float | None = None
        refusal = ""
        while (found := ours()) is not None:
            now = self._pace.now()
            if now >= until:
                raise CloudTpuError(
                    f"{name}: it is still {state_of(found)} after {words(LIMIT_S)}{refusal}; `pulumi up` tries again"
                )
            patience_s = LOOK_AGAIN_S if refusal else ASK_AGAIN_S
            if (state_of(found) != "DELETING" and asked_at is None) or (
                asked_at is not None and now - asked_at >= patience_s
            ):
                self._pace.require_wanted()
                asked_at, refusal = now, ""
                try:
                    delete()
                except CloudTpuError as error:
                    if error.status not in ("FAILED_PRECONDITION", "NOT_FOUND", "ABORTED"):
                        raise
                    refusal = f": {error}"
            elif asked_at is None:
                asked_at = now  # someone else is deleting it
            self._pace.pause(LOOK_AGAIN_S)
