"""What the states of a queued resource and of its nodes come to: waiting, active, or lost for good. Pure.

https://cloud.google.com/tpu/docs/queued-resources#queued_resource_states; a queued resource that has been preempted is
SUSPENDED and never queued again, so the only way on is to delete it and to make it anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["waiting", "active", "lost"]

ACTIVE = "ACTIVE"
MISSING = "MISSING"  # ours: ACTIVE it says, but a node of it is not there
UNREAD = "UNREAD"  # ours: it is there, but its nodes could not be read or changed
# A state that Google adds tomorrow is none of these and counts as waiting: nothing is deleted for a word we don't know.
LOST = frozenset({"SUSPENDING", "SUSPENDED", "FAILED", "DELETING", MISSING, "PREEMPTED", "TERMINATED"})
# A node that someone has stopped, that is repaired, or whose state Google does not know may come back.
LOST_NODE = frozenset({"PREEMPTED", "TERMINATED", "DELETING"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """How a queued resource stood when we looked. `state`: its own, or of an ACTIVE one that of its worst node."""

    kind: Kind
    state: str
    why: str
    queued_resource: Json
    nodes: Mapping[str, Json]

    @property
    def may_be_running(self) -> bool:
        """Active, or ACTIVE with a node that is missing while others run: someone may be working there."""
        running = any(node.get("state") not in LOST_NODE for node in self.nodes.values())
        return self.kind == "active" or (self.state == MISSING and running)


def look(queued_resource: Json, nodes: Mapping[str, Json | None]) -> Look:
    """nodes: by id, None where it is not there; needed of an ACTIVE one only."""
    state = state_of(queued_resource)
    there = {node_id: node for node_id, node in nodes.items() if node is not None}
    kind: Kind = "active" if state == ACTIVE else "lost" if state in LOST else "waiting"
    why = _reason(queued_resource, state) if kind == "lost" else ""
    if kind == "active":
        lost = [
            (node_id, MISSING if node is None else str(node.get("state", "")))
            for node_id, node in nodes.items()
            if node is None or node.get("state") in LOST_NODE
        ]
        if lost:
            # A node that is missing may only be late; one that says itself that it is over is certain.
            worst = next((each for _, each in lost if each != MISSING), MISSING)
            kind, state = "lost", worst
            why = ", ".join(f"node {node_id} is {'gone' if at == MISSING else at}" for node_id, at in lost)
    return Look(kind=kind, state=state, why=why, queued_resource=queued_resource, nodes=there)


def state_of(queued_resource: Json) -> str:
    return str(queued_resource.get("state", {}).get("state", "STATE_UNSPECIFIED"))


def kind_of(state: object) -> Kind:
    """Of the output `state` as Pulumi remembers it."""
    return "active" if state == ACTIVE else "lost" if state in LOST else "waiting"


def _reason(queued_resource: Json, state: str) -> str:
    data = queued_resource.get("state", {})
    message = data.get("failedData", {}).get("error", {}).get("message")
    by = " by a user" if data.get("stateInitiator") == "USER" and state.startswith("SUSPEND") else ""
    return f"it is {state}{by}{f': {message}' if message else ''}"
