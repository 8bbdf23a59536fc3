"""Injects faults into the simulated cloud, and changes it without a request of its API."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Literal

from contracts.aliases import Json
from rehearsal.simulator.api_error import ApiError
from rehearsal.tpu_api.capacity import ChipPool
from rehearsal.tpu_api.cloud import Cloud, Entry
from rehearsal.tpu_api.resources import Node, QueuedResource

FaultKind = Literal["too-many-requests", "unavailable", "cut-before", "cut-after", "slow"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """`methods` is a pattern of method names less "tpu.projects.locations.": "nodes.create", "queuedResources.*", "*".

    cut-before: the connection ends and nothing was done. cut-after: it was done and the answer is lost. slow: the
    answer comes after `seconds` of real time, whatever the cloud's clock does.
    """

    kind: FaultKind
    methods: str = "*"
    seconds: float = 0.0

    def error(self) -> ApiError | None:
        """The error that refuses the request, or None."""
        if self.kind == "too-many-requests":
            return ApiError(
                "RESOURCE_EXHAUSTED",
                "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute' of service"
                " 'tpu.googleapis.com'.",
            )
        if self.kind == "unavailable":
            return ApiError("UNAVAILABLE", "The service is currently unavailable.")
        return None


class Control:
    """Names are full ones (projects/…/locations/…/nodes/…), or last parts that are nobody else's.

    A thing that is not there, or whose state does not allow it, raises ApiError; a value without sense ValueError.
    """

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._faults: list[Fault] = []

    # --- capacity and quota -------------------------------------------------------------------------------------

    def set_capacity(self, pool: str, chips: int) -> None:
        """Chips of ZONE:PREFIX:TIER from now on. Fewer than are held take nothing from anybody: `preempt` does."""
        with self._cloud.settled():
            self._cloud.capacity[ChipPool.parse(pool)] = chips
            self._cloud.capacity_may_have_changed()

    def set_quota(self, pool: str, chips: int) -> None:
        """Chips of ZONE:PREFIX:TIER that a project may ask for from now on."""
        with self._cloud.settled():
            self._cloud.quota[ChipPool.parse(pool)] = chips

    # --- what happens to nodes and queued resources ---------------------------------------------------------------

    def preempt(self, name: str, leave_nodes: bool = False) -> None:
        """A spot node, or a spot queued resource with all its nodes, is PREEMPTED; the queued resource is suspended.

        `leave_nodes`: when it is SUSPENDED, the preempted nodes are still there. Others than spot raise ValueError.
        """
        with self._cloud.settled():
            for node in (nodes := self._nodes(name)):
                if node.pool.tier != "spot":
                    raise ValueError(
                        f"{node.name} is {node.pool.tier}: only spot is preempted; terminate it instead"
                    )
            self._cloud.lose_node(nodes[0], "PREEMPTED", leave_nodes=leave_nodes)

    def terminate(self, name: str) -> None:
        """Like `preempt` for any tier, with the state TERMINATED, as at the end of a life cycle."""
        with self._cloud.settled():
            self._cloud.lose_node(self._nodes(name)[0], "TERMINATED", leave_nodes=False)

    def maintain(self, name: str, seconds: float | None = None) -> None:
        """A node, or those of a queued resource, are REPAIRING for a while and then READY."""
        with self._cloud.settled():
            for node in self._nodes(name):
                self._cloud.repair_node(node, self._cloud.delays.repair_s if seconds is None else seconds)

    def fail(self, name: str, message: str = "the request could not be completed") -> None:
        """A queued resource that is not ACTIVE yet is FAILED."""
        with self._cloud.settled():
            thing = self._thing(name)
            if isinstance(thing, Node):
                raise ValueError(f"{name} is a node: only a queued resource fails")
            self._cloud.fail_queued_resource(thing, ApiError("INTERNAL", message))

    def vanish(self, name: str) -> None:
        """A node, or a queued resource with its nodes, is gone at once, as if someone else had deleted it."""
        with self._cloud.settled():
            thing = self._thing(name)
            if isinstance(thing, Node):
                self._cloud.vanish_node(thing)
            else:
                self._cloud.drop_queued_resource(thing)

    # --- errors ---------------------------------------------------------------------------------------------------

    def inject(self, kind: FaultKind, methods: str = "*", times: int = 1, seconds: float = 0.0) -> None:
        """The next requests of these methods go wrong (see Fault)."""
        with self._cloud.lock:
            self._faults += [Fault(kind=kind, methods=methods, seconds=seconds)] * times

    def cut_off(self, zone: str) -> None:
        """A zone does not answer any more, and lists of all zones say so."""
        with self._cloud.lock:
            self._cloud.unreachable.add(zone)

    def clear_faults(self) -> None:
        """Remove all faults."""
        with self._cloud.lock:
            self._faults.clear()
            self._cloud.unreachable.clear()

    def take_fault(self, method: str) -> Fault | None:
        """The first injected fault that hits this method; it has happened then."""
        with self._cloud.lock:
            for index, fault in enumerate(self._faults):
                if fnmatch.fnmatchcase(method, fault.methods):
                    return self._faults.pop(index)
        return None

    # --- time -----------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """The cloud's clock jumps forward, and what comes due in between happens, each at its own moment."""
        with self._cloud.lock:
            self._cloud.clock.advance(seconds)
            self._cloud.settle()

    # --- look -----------------------------------------------------------------------------------------------------

    def alive(self) -> Json:
        """The time, everything that is there, and the injected faults that are still to happen."""
        with self._cloud.settled():
            return {
                "moment": self._cloud.moment,
                "nodes": [node.render() for node in self._cloud.nodes.values()],
                "queuedResources": [qr.render() for qr in self._cloud.queued_resources.values()],
                "faults": [dataclasses.asdict(fault) for fault in self._faults],
            }

    def journal(self) -> list[Entry]:
        """Every state that a node or queued resource has come into, and "gone", in order."""
        with self._cloud.settled():
            return list(self._cloud.journal)

    def _thing(self, name: str) -> Node | QueuedResource:
        things: dict[str, Node | QueuedResource] = {**self._cloud.nodes, **self._cloud.queued_resources}
        return named(name, things, "node or queued resource")

    def _nodes(self, name: str) -> list[Node]:
        thing = self._thing(name)
        nodes = [thing] if isinstance(thing, Node) else self._cloud.owned_nodes(thing)
        if not nodes:
            raise ApiError("FAILED_PRECONDITION", f"{thing.name} is in state {thing.state} and has no nodes")
        return nodes


def named[Thing](name: str, things: Mapping[str, Thing], kind: str) -> Thing:
    """The thing of that name, which is a full one or the last part of only one. kind: of all, in messages.

    Raises ApiError where there is none, ValueError where there are several.
    """
    matches = [full for full in things if name in (full, full.rpartition("/")[2])]
    if len(matches) > 1:
        raise ValueError(f"name={name!r}: there are {', '.join(matches)}; give the full name")
    if not matches:
        raise ApiError("NOT_FOUND", f"name={name!r}: there is no such {kind}")
    return things[matches[0]]
