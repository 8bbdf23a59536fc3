"""The simulated cloud: its clock, what it holds, and what happens to queued resources and nodes, with a journal of it.

One lock guards it all: whoever reads or changes it holds `lock` and has called `settle`. Nothing runs by itself: each
change records what is asked for and plans the rest for later, and `settle` carries out what has come due since.
"""

import collections
import contextlib
import dataclasses
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from rehearsal.simulator.api_error import ApiError, missing, unready
from rehearsal.tpu_api.capacity import ChipPool, first_over
from rehearsal.tpu_api.resources import (
    EMPTY,
    NODE_EDGES,
    QUEUE_EDGES,
    QUEUED,
    WITHOUT_CHIPS,
    Hardware,
    Node,
    Operation,
    QueuedResource,
)

Action = Callable[[], None]


class Clock:
    """Unix seconds: real time, or, where it is frozen, only what it is advanced by."""

    def __init__(self, frozen_at: float | None = None) -> None:
        self._frozen_at = frozen_at
        self._ahead_s = 0.0

    def now(self) -> float:
        """The time in unix seconds."""
        return (time.time() if self._frozen_at is None else self._frozen_at) + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Jump forward, frozen or not."""
        self._ahead_s += seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delays:
    """The delays of the simulated cloud, in seconds of its clock. The defaults suit a person who watches."""

    operation_s: float = 1.0  # the operation of a request that changes little
    accept_s: float = 1.0  # a queued resource from ACCEPTED to WAITING_FOR_RESOURCES
    place_s: float = 1.0  # until a node without a queue has its chips, or hears that there are none
    create_s: float = 5.0  # from chips to READY
    delete_s: float = 2.0
    suspend_s: float = 2.0  # a queued resource from SUSPENDING to SUSPENDED
    repair_s: float = 10.0  # maintenance

    def scaled(self, factor: float) -> "Delays":
        """The same delays, multiplied by a factor."""
        return Delays(**{name: seconds * factor for name, seconds in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of the journal: a node or queued resource came into a state, or was gone."""

    moment: float
    name: str
    state: str


class Cloud:
    """The state of the simulated cloud, and everything that changes it. `moment`: the present, in unix seconds."""

    def __init__(
        self,
        *,
        clock: Clock,
        delays: Delays,
        capacity: dict[ChipPool, int],
        quota: dict[ChipPool, int],
        hardware: Hardware,
    ) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.moment = clock.now()
        self.delays = delays
        self.capacity = capacity
        self.quota = quota
        self.hardware = hardware
        self.nodes: dict[str, Node] = {}
        self.queued_resources: dict[str, QueuedResource] = {}
        self.operations: dict[str, Operation] = {}
        self.journal: list[Entry] = []
        self.unreachable: set[str] = set()  # zones that do not answer
        self.other_holders: list[Callable[[], collections.Counter[ChipPool]]] = []
        """Of chips: what other APIs of this cloud have made."""
        self.on_more_capacity: list[Action] = []
        """What other APIs do when there may be chips for what waits."""
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count(1)

    # --- time -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out what has come due, in order, each at its own moment; then the present moment is the clock's."""
        now = self.clock.now()
        while self._events and self._events[0][0] <= now:
            due, _, action = heapq.heappop(self._events)
            self.moment = max(self.moment, due)
            action()
        self.moment = max(self.moment, now)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """The cloud to oneself, with all carried out that has come due."""
        with self.lock:
            self.settle()
            yield

    def after(self, seconds: float, action: Action) -> None:
        """Carry out `action` that long after the present moment."""
        heapq.heappush(self._events, (self.moment + seconds, self.number(), action))

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

    def owned_nodes(self, owner: QueuedResource) -> list[Node]:
        """The existing nodes of a queued resource."""
        return [node for node in self.nodes.values() if node.queued_resource == owner.name]

    def node_name_is_taken(self, name: str) -> bool:
        """Whether a node has the name, or a queued resource waits for a node of it."""
        waiting = (qr for qr in self.queued_resources.values() if qr.state in QUEUED)
        return name in self.nodes or any(plan.name == name for qr in waiting for plan in qr.plans)

    def held(self) -> collections.Counter[ChipPool]:
        """The chips that are taken now."""
        total = chips_by_pool(node for node in self.nodes.values() if node.placed)
        for chips in self.other_holders:
            total += chips()
        return total

    def asked_for(self, project: str) -> collections.Counter[ChipPool]:
        """The chips that count against a quota: of queued resources until they are deleted, and of other nodes."""
        inside = f"projects/{project}/"
        plans = [plan for qr in self.queued_resources.values() for plan in qr.plans]
        own = [node for node in self.nodes.values() if node.queued_resource is None]
        return chips_by_pool(node for node in [*plans, *own] if node.name.startswith(inside))

    def has_room(self, chips: collections.Counter[ChipPool]) -> bool:
        """Whether there are so many chips now."""
        return first_over(self.capacity, chips, self.held()) is None

    def _is_there(self, thing: Node | QueuedResource, *states: str) -> bool:
        """Whether it is still there, in one of these states if any are given."""
        things = self.nodes if isinstance(thing, Node) else self.queued_resources
        return things.get(thing.name) is thing and (not states or thing.state in states)

    # --- the changes through which all others go ----------------------------------------------------------------

    def number(self) -> int:
        """A number that was never used before."""
        return next(self._numbers)

    def _begin(self, target: Node | QueuedResource, verb: str) -> Operation:
        """A new operation."""
        parent = "/".join(target.name.split("/")[:4])
        name = f"{parent}/operations/operation-{self.number():06d}"
        operation = Operation(name=name, target=target.name, verb=verb, created=self.moment)
        self.operations[name] = operation
        return operation

    def _end(self, operation: Operation | None, outcome: dict[str, object] | ApiError) -> None:
        """End an operation, if there is one and it has not ended: the first end counts."""
        if operation is not None and not operation.done:
            operation.ended, operation.outcome = self.moment, outcome

    def _record(self, thing: Node | QueuedResource, state: str) -> None:
        """A line for the journal, and news for what stands behind a node."""
        self.journal.append(Entry(moment=self.moment, name=thing.name, state=state))
        if isinstance(thing, Node):
            self.hardware.changed(thing, state)

    def _move(self, thing: Node | QueuedResource, state: str) -> None:
        """Move a thing to another state. A transition that the tables lack is a bug of the simulator: RuntimeError."""
        edges = NODE_EDGES if isinstance(thing, Node) else QUEUE_EDGES
        if state not in edges[thing.state]:
            raise RuntimeError(
                f"{thing.name}: from {thing.state} to {state} is no edge of the simulator's tables"
            )
        thing.state = state
        if isinstance(thing, Node) and state in WITHOUT_CHIPS:
            thing.placed = False
        self._record(thing, state)
        self.capacity_may_have_changed()

    def _add_node(self, node: Node) -> None:
        self.nodes[node.name] = node
        self._record(node, node.state)

    def _ready(self, node: Node) -> None:
        node.boot(self.hardware)
        self._move(node, "READY")

    def _drop_node(self, node: Node) -> None:
        """A node is gone, if it is not yet. What it was busy with has failed."""
        if self._is_there(node):
            del self.nodes[node.name]
            self._record(node, "gone")
            self._end(node.operation, _deleted(node))
            self.capacity_may_have_changed()

    def drop_queued_resource(self, qr: QueuedResource) -> None:
        """A queued resource is gone, and all its nodes with it, if it is not yet."""
        if self._is_there(qr):
            for node in self.owned_nodes(qr):
                self._drop_node(node)
            del self.queued_resources[qr.name]
            self._record(qr, "gone")

    def capacity_may_have_changed(self) -> None:
        """Plan another look at the waiting requests, at this moment but after the current change."""
        self.after(0, self._grant_capacity)

    # --- queued resources -----------------------------------------------------------------------------------------

    def submit_queued_resource(self, qr: QueuedResource) -> Operation:
        """Add a queued resource. The operation is done when the request is accepted, long before it is served."""
        operation = self._begin(qr, "create")
        self.queued_resources[qr.name] = qr
        self._record(qr, qr.state)

        def waiting() -> None:
            if self._is_there(qr, "ACCEPTED"):
                self._move(qr, "WAITING_FOR_RESOURCES")

        def expired() -> None:
            if self._is_there(qr, *QUEUED):
                message = "the request could not be served before its valid-until time"
                self.fail_queued_resource(qr, ApiError("DEADLINE_EXCEEDED", message))

        self.after(self.delays.operation_s, lambda: self._end(operation, qr.as_response()))
        self.after(self.delays.accept_s, waiting)
        if qr.limit_s is not None:
            self.after(qr.limit_s, expired)
        return operation

    def _grant_capacity(self) -> None:
        """Serve the waiting requests that fit, the oldest first. One that does not fit holds up none behind it."""
        for qr in list(self.queued_resources.values()):
            if qr.state == "WAITING_FOR_RESOURCES" and self.has_room(chips_by_pool(qr.plans)):
                self._provision(qr)
        for act in self.on_more_capacity:
            act()

    def _provision(self, qr: QueuedResource) -> None:
        qr.initiator = "SERVICE"
        self._move(qr, "PROVISIONING")
        for plan in qr.plans:
            plan.placed, plan.created = True, self.moment
            self._add_node(plan)

        def ready() -> None:
            for node in self.owned_nodes(qr):
                if node.state == "CREATING" and qr.state == "PROVISIONING":
                    self._ready(node)
            if self._is_there(qr, "PROVISIONING"):
                self._move(qr, "ACTIVE")
                if qr.run_s is not None:
                    self.after(qr.run_s, run_is_over)

        def run_is_over() -> None:
            if self._is_there(qr, "ACTIVE"):
                self.lose_node(self.owned_nodes(qr)[0], "TERMINATED", leave_nodes=False)

        self.after(self.delays.create_s, ready)

    def delete_queued_resource(self, qr: QueuedResource, *, force: bool) -> Operation:
        """DELETING, then gone, its nodes first. Raises ApiError where it has nodes and force was not asked for."""
        if qr.state == "DELETING":
            raise unready(qr.name, qr.state, "it is being deleted")
        nodes = self.owned_nodes(qr)
        if nodes and not force:
            ids = ", ".join(node.name.rpartition("/")[2] for node in nodes)
            raise unready(qr.name, qr.state, f"it has nodes ({ids}); delete them first, or use force")
        operation = self._begin(qr, "delete")
        qr.initiator = "USER"
        self._move(qr, "DELETING")
        for node in nodes:
            if node.state != "DELETING":
                self._move(node, "DELETING")

        def finish() -> None:
            self.drop_queued_resource(qr)
            self._end(operation, EMPTY)

        self.after(self.delays.delete_s, finish)
        return operation

    def fail_queued_resource(self, qr: QueuedResource, error: ApiError) -> None:
        """FAILED for good, without nodes. Raises ApiError where it has been served or is at its end."""
        if "FAILED" not in QUEUE_EDGES[qr.state]:
            raise unready(qr.name, qr.state, "it can't fail any more")
        for node in self.owned_nodes(qr):
            self._drop_node(node)
        qr.initiator, qr.error = "SERVICE", error
        self._move(qr, "FAILED")

    def _suspend(self, qr: QueuedResource, initiator: str, *, leave_nodes: bool) -> None:
        if "SUSPENDING" not in QUEUE_EDGES[qr.state]:
            return
        qr.initiator = initiator
        self._move(qr, "SUSPENDING")

        def suspended() -> None:
            if self._is_there(qr, "SUSPENDING"):
                for node in [] if leave_nodes else self.owned_nodes(qr):
                    self._drop_node(node)
                self._move(qr, "SUSPENDED")

        self.after(self.delays.suspend_s, suspended)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def create_node(self, node: Node) -> Operation:
        """A node of its own, without a queue: it gets its chips soon, or its operation fails and it is gone."""
        node.operation = operation = self._begin(node, "create")
        self._add_node(node)

        def place() -> None:
            if not self._is_there(node, "CREATING"):
                return
            if self.has_room(chips_by_pool([node])):
                node.placed = True
                self.after(self.delays.create_s, ready)
            else:
                self._end(operation, _stock_out(node.pool))
                self._drop_node(node)

        def ready() -> None:
            if self._is_there(node, "CREATING"):
                self._ready(node)
                self._end(operation, node.as_response())

        self.after(self.delays.place_s, place)
        return operation

    def delete_node(self, node: Node) -> Operation:
        """DELETING, then gone. Raises ApiError where it is being deleted already."""
        _require_edge(node, "DELETING")
        operation = self._begin(node, "delete")
        self._move(node, "DELETING")
        self._end(node.operation, _deleted(node))
        self._after_removal(node)

        def finish() -> None:
            self._drop_node(node)
            self._end(operation, EMPTY)

        self.after(self.delays.delete_s, finish)
        return operation

    def patch_node(self, node: Node, changes: dict[str, object]) -> Operation:
        """Other values of fields, once the operation is done. Raises ApiError where the node is not READY."""
        _require_edge(node, "REPAIRING")
        operation = self._begin(node, "update")

        def changed() -> None:
            if self._is_there(node):
                node.spec = node.spec | changes
                self._end(operation, node.as_response())
            else:
                self._end(operation, _deleted(node))

        self.after(self.delays.operation_s, changed)
        return operation

    def lose_node(self, node: Node, state: str, *, leave_nodes: bool) -> None:
        """The service takes it: PREEMPTED or TERMINATED, and its queued resource with all its nodes likewise.

        `leave_nodes`: they are still there when the queued resource is SUSPENDED. Raises ApiError where it is lost.
        """
        _require_edge(node, state)
        owner = self.queued_resources.get(node.queued_resource or "")
        for lost in [node] if owner is None else self.owned_nodes(owner):
            if state in NODE_EDGES[lost.state]:
                self._move(lost, state)
                self._end(lost.operation, unready(lost.name, state, "the operation was aborted"))
        if owner is not None:
            self._suspend(owner, "SERVICE", leave_nodes=leave_nodes)

    def repair_node(self, node: Node, seconds: float) -> None:
        """REPAIRING for that long, then READY again. Raises ApiError where it is not READY."""
        _require_edge(node, "REPAIRING")
        self._move(node, "REPAIRING")

        def repaired() -> None:
            if self._is_there(node, "REPAIRING"):
                self._move(node, "READY")

        self.after(seconds, repaired)

    def vanish_node(self, node: Node) -> None:
        """Gone at once, as if someone else had deleted it."""
        self._drop_node(node)
        self._after_removal(node)

    def _after_removal(self, node: Node) -> None:
        """A node is being deleted or has gone: if it was the last of a queued resource, that is suspended."""
        owner = self.queued_resources.get(node.queued_resource or "")
        if owner is not None and all(left.state == "DELETING" for left in self.owned_nodes(owner)):
            self._suspend(owner, "USER", leave_nodes=False)


def chips_by_pool(nodes: Iterable[Node]) -> collections.Counter[ChipPool]:
    """The chips of nodes, by pool."""
    total: collections.Counter[ChipPool] = collections.Counter()
    for node in nodes:
        total[node.pool] += node.accelerator.chips
    return total


def _deleted(node: Node) -> ApiError:
    return ApiError("CANCELLED", f"'{node.name}' was deleted meanwhile")


def _stock_out(pool: ChipPool) -> ApiError:
    """The error of a node for which there are no chips, in the API's words (code 8)."""
    return ApiError(
        "RESOURCE_EXHAUSTED",
        f'There is no more capacity in the zone "{pool.zone}"; you can try in another zone where Cloud TPU Nodes'
        " are offered (see https://cloud.google.com/tpu/docs/regions)",
    )


def _require_edge(node: Node, state: str) -> None:
    """Raises ApiError where the node cannot come into that state from its own."""
    allowed = [before for before, after in NODE_EDGES.items() if state in after]
    if node.state not in allowed:
        raise unready(node.name, node.state, f"it would have to be {' or '.join(allowed)}")
