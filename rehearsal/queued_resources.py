"""A queued resource: a request for nodes that waits for them, and how the API shows it."""

import copy
import dataclasses
from typing import Any

from rehearsal.clock import from_duration, from_timestamp, timestamp
from rehearsal.errors import ApiError, invalid
from rehearsal.nodes import Node

Json = dict[str, Any]

# From a state to those that may follow. None leads back to the queue: what was preempted is not served again.
EDGES: dict[str, tuple[str, ...]] = {
    "ACCEPTED": ("WAITING_FOR_RESOURCES", "FAILED", "DELETING"),
    "WAITING_FOR_RESOURCES": ("PROVISIONING", "FAILED", "DELETING"),
    "PROVISIONING": ("ACTIVE", "SUSPENDING", "FAILED", "DELETING"),
    "ACTIVE": ("SUSPENDING", "DELETING"),
    "SUSPENDING": ("SUSPENDED", "DELETING"),
    "SUSPENDED": ("DELETING",),
    "FAILED": ("DELETING",),
    "DELETING": (),
}
QUEUED = ("ACCEPTED", "WAITING_FOR_RESOURCES")
_DATA = {
    "ACCEPTED": "acceptedData",
    "PROVISIONING": "provisioningData",
    "ACTIVE": "activeData",
    "SUSPENDING": "suspendingData",
    "SUSPENDED": "suspendedData",
    "DELETING": "deletingData",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """When a request may be served, in unix seconds."""

    opens: float
    closes: float | None

    @classmethod
    def parse(cls, policy: Json, now: float) -> "Window":
        """From a queueingPolicy. Raises ApiError where it has more than one field: Google makes them one union."""
        if len(policy) > 1:
            raise invalid(
                "QueuedResource.queueingPolicy", f"has {' and '.join(sorted(policy))}; give one of them"
            )
        interval = policy.get("validInterval", {})
        after, until = interval.get("startTime"), interval.get("endTime")
        after, until = policy.get("validAfterTime", after), policy.get("validUntilTime", until)
        opens = from_timestamp(after) if after else now
        closes = from_timestamp(until) if until else None
        if "validAfterDuration" in policy:
            opens = now + from_duration(policy["validAfterDuration"])
        if "validUntilDuration" in policy:
            closes = now + from_duration(policy["validUntilDuration"])
        if closes is not None and closes <= max(opens, now):
            raise invalid("QueuedResource.queueingPolicy", "ends before it begins, or has ended already")
        return cls(opens=max(opens, now), closes=closes)


@dataclasses.dataclass(kw_only=True)
class QueuedResource:
    """A record of the cloud, changed as time goes on. `plans` are the nodes that it asks for, not made yet."""

    name: str
    spec: Json
    plans: list[Node]
    window: Window
    created: float
    state: str = "ACCEPTED"
    initiator: str = "USER"
    error: ApiError | None = None

    @property
    def parent(self) -> str:
        """projects/…/locations/…"""
        return self.name.rpartition("/queuedResources/")[0]

    def render(self) -> Json:
        """As the API answers."""
        state: Json = {"state": self.state, "stateInitiator": self.initiator}
        if self.state in _DATA:
            state[_DATA[self.state]] = {}
        if self.error is not None:
            state["failedData"] = {"error": self.error.as_status()}
        answer = copy.deepcopy(self.spec)
        return answer | {"name": self.name, "createTime": timestamp(self.created), "state": state}
