"""Everything that the simulated cloud holds: its time, capacity, nodes, queued resources, operations, and a journal.

One lock guards it all: whoever reads or changes it holds `lock` and has called `settle`. Nothing runs by itself:
`settle` carries out what has come due since the last look.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator

from rehearsal.tpu_api.api_error import ApiError, missing
from rehearsal.tpu_api.capacity import Hold, Limits
from rehearsal.tpu_api.clock import Clock, Timeline
from rehearsal.tpu_api.resources import (
    NODE_EDGES,
    QUEUE_EDGES,
    QUEUED,
    WITHOUT_CHIPS,
    Hardware,
    Node,
    Operation,
    QueuedResource,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """How long things take, in seconds of the cloud's clock. The defaults suit a person who watches."""

    operation_s: float = 1.0  # the operation of a request that changes little
    accept_s: float = 1.0  # a queued resource from ACCEPTED to WAITING_FOR_RESOURCES
    place_s: float = 1.0  # until a node without a queue has its chips, or hears that there are none
    create_s: float = 5.0  # from chips to READY
    delete_s: float = 2.0
    suspend_s: float = 2.0  # a queued resource from SUSPENDING to SUSPENDED
    repair_s: float = 10.0  # maintenance

    def scaled(self, factor: float) -> "Delays":
        """The same, each that many times as long."""
        return Delays(**{name: seconds * factor for name, seconds in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the journal: a node or queued resource came into a state, or was gone."""

    moment: float
    name: str
    state: str


class Cloud:
    """The state of the simulated cloud, and the few changes through which all others go."""

    def __init__(
        self, *, clock: Clock, delays: Delays, capacity: Limits, quota: Limits, hardware: Hardware
    ) -> None:
        self.lock = threading.RLock()
        self.timeline = Timeline(clock)
        self.delays = delays
        self.capacity = capacity
        self.quota = quota
        self.hardware = hardware
        self.nodes: dict[str, Node] = {}
        self.queued_resources: dict[str, QueuedResource] = {}
        self.operations: dict[str, Operation] = {}
        self.journal: list[Entry] = []
        self._grants: list[Callable[[], None]] = []
        self._numbers = itertools.count(1)

    def settle(self) -> None:
        """Carry out what has come due."""
        self.timeline.settle()

    # --- look -------------------------------------------------------------------------------------------------

    def node(self, name: str) -> Node:
        """Raises ApiError NOT_FOUND."""
        if name not in self.nodes:
            raise missing(name)
        return self.nodes[name]

    def queued_resource(self, name: str) -> QueuedResource:
        """Raises ApiError NOT_FOUND."""
        if name not in self.queued_resources:
            raise missing(name)
        return self.queued_resources[name]

    def nodes_of(self, owner: QueuedResource) -> list[Node]:
        """The nodes of a queued resource that there are."""
        return [node for node in self.nodes.values() if node.queued_resource == owner.name]

    def node_name_is_taken(self, name: str) -> bool:
        """By a node, or by one that a queued resource is waiting for."""
        waiting = (qr for qr in self.queued_resources.values() if qr.state in QUEUED)
        return name in self.nodes or any(plan.name == name for qr in waiting for plan in qr.plans)

    def held(self) -> Iterator[Hold]:
        """The chips that are taken now."""
        return (node.hold() for node in self.nodes.values() if node.placed)

    def asked_for(self, project: str) -> Iterator[Hold]:
        """What counts against a project's quota: every queued resource until it is deleted, and nodes without one."""
        for qr in self.queued_resources.values():
            if qr.name.startswith(f"projects/{project}/"):
                yield from (plan.hold() for plan in qr.plans)
        for node in self.nodes.values():
            if node.name.startswith(f"projects/{project}/") and node.queued_resource is None:
                yield node.hold()

    # --- change -----------------------------------------------------------------------------------------------

    def number(self) -> int:
        """One that nobody has had."""
        return next(self._numbers)

    def begin(self, parent: str, target: str, verb: str) -> Operation:
        """A new operation."""
        name = f"{parent}/operations/operation-{self.number():06d}"
        operation = Operation(name=name, target=target, verb=verb, created=self.timeline.moment)
        self.operations[name] = operation
        return operation

    def end(self, operation: Operation | None, outcome: dict[str, object] | ApiError) -> None:
        """End an operation, if there is one and it has not ended."""
        if operation is not None:
            operation.end(self.timeline.moment, outcome)

    def record(self, thing: Node | QueuedResource, state: str) -> None:
        """A line for the journal, and news for what stands behind a node."""
        self.journal.append(Entry(moment=self.timeline.moment, name=thing.name, state=state))
        if isinstance(thing, Node):
            self.hardware.changed(thing, state)

    def move(self, thing: Node | QueuedResource, state: str) -> None:
        """To another state. An edge that the tables lack is a bug of the simulator: RuntimeError."""
        edges = NODE_EDGES if isinstance(thing, Node) else QUEUE_EDGES
        if state not in edges[thing.state]:
            raise RuntimeError(
                f"{thing.name}: from {thing.state} to {state} is no edge of the simulator's tables"
            )
        thing.state = state
        if isinstance(thing, Node) and state in WITHOUT_CHIPS:
            thing.placed = False
        self.record(thing, state)
        self.capacity_may_have_changed()

    def add_node(self, node: Node) -> None:
        """A node comes into being."""
        self.nodes[node.name] = node
        self.record(node, node.state)

    def drop_node(self, node: Node) -> None:
        """A node is gone, if it is not yet. What it was busy with has failed."""
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            self.record(node, "gone")
            self.end(node.operation, ApiError("CANCELLED", f"'{node.name}' was deleted meanwhile"))
            self.capacity_may_have_changed()

    def drop_queued_resource(self, qr: QueuedResource) -> None:
        """A queued resource is gone, and all its nodes with it, if it is not yet."""
        if self.queued_resources.get(qr.name) is qr:
            for node in self.nodes_of(qr):
                self.drop_node(node)
            del self.queued_resources[qr.name]
            self.record(qr, "gone")

    def on_capacity(self, grant: Callable[[], None]) -> None:
        """Call `grant` whenever there may be more chips than before."""
        self._grants.append(grant)

    def capacity_may_have_changed(self) -> None:
        """Whoever waits for chips is asked again, at this moment but not in the middle of what is going on."""
        for grant in self._grants:
            self.timeline.after(0, grant)
