"""What happens to queued resources and nodes in the simulated cloud."""

import collections
import functools
from collections.abc import Iterable

from contracts.aliases import Json
from rehearsal.simulated_cloud.capacity import ChipPool
from rehearsal.simulated_cloud.cloud import Cloud, Operation
from rehearsal.simulated_cloud.tpu_records import (
    EMPTY,
    NODE_EDGES,
    QUEUE_EDGES,
    QUEUED,
    WITHOUT_CHIPS,
    Node,
    QueuedResource,
)
from rehearsal.simulator.api_error import ApiError, unready


class TpuLifecycle:
    """Everything that changes a queued resource or a node. cloud: whose lock guards it."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        cloud.on_more_capacity.append(self._grant_capacity)

    # --- look -------------------------------------------------------------------------------------------------

    def owned_nodes(self, owner: QueuedResource) -> list[Node]:
        """The existing nodes of a queued resource."""
        return [node for node in self.cloud.all(Node) if node.queued_resource == owner.name]

    def node_name_is_taken(self, name: str) -> bool:
        """Whether a node has the name, or a queued resource waits for a node of it."""
        waiting = (qr for qr in self.cloud.all(QueuedResource) if qr.state in QUEUED)
        return name in self.cloud.things or any(plan.name == name for qr in waiting for plan in qr.plans)

    def asked_for(self, project: str) -> collections.Counter[ChipPool]:
        """The chips that count against a quota: of queued resources until they are deleted, and of other nodes."""
        inside = f"projects/{project}/"
        plans = [plan for qr in self.cloud.all(QueuedResource) for plan in qr.plans]
        own = [node for node in self.cloud.all(Node) if node.queued_resource is None]
        return chips_by_pool(node for node in [*plans, *own] if node.name.startswith(inside))

    def _is_there(self, thing: Node | QueuedResource, *states: str) -> bool:
        """Whether it is still there, in one of these states."""
        return self.cloud.holds(thing) and thing.state in states

    def _owner(self, node: Node) -> QueuedResource | None:
        owner = self.cloud.things.get(node.queued_resource or "")
        return owner if isinstance(owner, QueuedResource) else None

    def _move(self, thing: Node | QueuedResource, state: str) -> None:
        """Move a thing to another state. A transition that the tables lack is a bug of the simulator: RuntimeError."""
        edges = NODE_EDGES if isinstance(thing, Node) else QUEUE_EDGES
        if state not in edges[thing.state]:
            raise RuntimeError(
                f"{thing.name}: from {thing.state} to {state} is no edge of the simulator's tables"
            )
        thing.state = state
        if state in WITHOUT_CHIPS:
            self.cloud.give_back(thing)
        self.cloud.record(thing, state)

    def _ready(self, node: Node) -> None:
        node.boot(self.cloud.hardware)
        self._move(node, "READY")

    # --- queued resources -----------------------------------------------------------------------------------------

    def submit_queued_resource(self, qr: QueuedResource) -> Operation:
        """Add a queued resource. The operation is done when the request is accepted, long before it is served."""
        cloud, delays = self.cloud, self.cloud.delays
        operation = cloud.begin(qr.name, "create")
        cloud.add(qr, qr.state)

        def waiting() -> None:
            if self._is_there(qr, "ACCEPTED"):
                self._move(qr, "WAITING_FOR_RESOURCES")

        def expired() -> None:
            if self._is_there(qr, *QUEUED):
                message = "the request could not be served before its valid-until time"
                self.fail_queued_resource(qr, ApiError("DEADLINE_EXCEEDED", message))

        cloud.after(delays.operation_s, lambda: cloud.end(operation, qr.as_response()))
        cloud.after(delays.accept_s, waiting)
        if qr.limit_s is not None:
            cloud.after(qr.limit_s, expired)
        return operation

    def _grant_capacity(self) -> None:
        """Serve the waiting requests that fit, the oldest first. One that does not fit holds up none behind it."""
        for qr in self.cloud.all(QueuedResource):
            if qr.state == "WAITING_FOR_RESOURCES" and self.cloud.has_room(chips_by_pool(qr.plans)):
                self._provision(qr)

    def _provision(self, qr: QueuedResource) -> None:
        qr.initiator = "SERVICE"
        self._move(qr, "PROVISIONING")
        for plan in qr.plans:
            plan.created = self.cloud.moment
            self.cloud.take(plan, chips_by_pool([plan]))
            self.cloud.add(plan, plan.state)

        def ready() -> None:
            for node in self.owned_nodes(qr):
                if node.state == "CREATING" and qr.state == "PROVISIONING":
                    self._ready(node)
            if self._is_there(qr, "PROVISIONING"):
                self._move(qr, "ACTIVE")
                if qr.run_s is not None:
                    self.cloud.after(qr.run_s, run_is_over)

        def run_is_over() -> None:
            if self._is_there(qr, "ACTIVE"):
                self.lose(qr, "TERMINATED")

        self.cloud.after(self.cloud.delays.create_s, ready)

    def delete_queued_resource(self, qr: QueuedResource, *, force: bool) -> Operation:
        """DELETING, then gone, its nodes first. Raises ApiError where it has nodes and force was not asked for."""
        if qr.state == "DELETING":
            raise unready(qr.name, qr.state, "it is being deleted")
        nodes = self.owned_nodes(qr)
        if nodes and not force:
            ids = ", ".join(node.name.rpartition("/")[2] for node in nodes)
            raise unready(qr.name, qr.state, f"it has nodes ({ids}); delete them first, or use force")
        operation = self.cloud.begin(qr.name, "delete")
        qr.initiator = "USER"
        self._move(qr, "DELETING")
        for node in nodes:
            if node.state != "DELETING":
                self._move(node, "DELETING")

        def finish() -> None:
            self.vanish(qr)
            self.cloud.end(operation, EMPTY)

        self.cloud.after(self.cloud.delays.delete_s, finish)
        return operation

    def fail_queued_resource(self, qr: QueuedResource, error: ApiError) -> None:
        """FAILED for good, without nodes. Raises ApiError where it has been served or is at its end."""
        if "FAILED" not in QUEUE_EDGES[qr.state]:
            raise unready(qr.name, qr.state, "it can't fail any more")
        for node in self.owned_nodes(qr):
            self.cloud.drop(node)
        qr.initiator, qr.error = "SERVICE", error
        self._move(qr, "FAILED")

    def _suspend(self, qr: QueuedResource, initiator: str, *, leave_nodes: bool = False) -> None:
        if "SUSPENDING" not in QUEUE_EDGES[qr.state]:
            return
        qr.initiator = initiator
        self._move(qr, "SUSPENDING")

        def suspended() -> None:
            if self._is_there(qr, "SUSPENDING"):
                for node in [] if leave_nodes else self.owned_nodes(qr):
                    self.cloud.drop(node)
                self._move(qr, "SUSPENDED")

        self.cloud.after(self.cloud.delays.suspend_s, suspended)

    # --- nodes ----------------------------------------------------------------------------------------------------

    def create_node(self, node: Node) -> Operation:
        """A node of its own, without a queue: it gets its chips soon, or its operation fails and it is gone."""
        cloud, chips = self.cloud, chips_by_pool([node])
        node.operation = operation = cloud.begin(node.name, "create")
        cloud.add(node, node.state)

        def place() -> None:
            if not self._is_there(node, "CREATING"):
                return
            if cloud.has_room(chips):
                cloud.take(node, chips)
                cloud.after(cloud.delays.create_s, ready)
            else:
                cloud.end(operation, _stock_out(node.pool))
                cloud.drop(node)

        def ready() -> None:
            if self._is_there(node, "CREATING"):
                self._ready(node)
                cloud.end(operation, node.as_response())

        cloud.after(cloud.delays.place_s, place)
        return operation

    def delete_node(self, node: Node) -> Operation:
        """DELETING, then gone. Raises ApiError where it is being deleted already."""
        _require_edge(node, "DELETING")
        operation = self.cloud.begin(node.name, "delete")
        self._move(node, "DELETING")
        self.cloud.end(node.operation, _deleted(node))
        self._after_removal(node)

        def finish() -> None:
            self.cloud.drop(node)
            self.cloud.end(operation, EMPTY)

        self.cloud.after(self.cloud.delays.delete_s, finish)
        return operation

    def patch_node(self, node: Node, changes: Json) -> Operation:
        """Other values of fields, once the operation is done. Raises ApiError where the node is not READY."""
        _require_edge(node, "REPAIRING")
        operation = self.cloud.begin(node.name, "update")

        def changed() -> None:
            is_there = self.cloud.holds(node)
            if is_there:
                node.spec = node.spec | changes
            self.cloud.end(operation, node.as_response() if is_there else _deleted(node))

        self.cloud.after(self.cloud.delays.operation_s, changed)
        return operation

    def _after_removal(self, node: Node) -> None:
        """A node is being deleted or has gone: if it was the last of a queued resource, that is suspended."""
        owner = self._owner(node)
        if owner is not None and all(left.state == "DELETING" for left in self.owned_nodes(owner)):
            self._suspend(owner, "USER")

    # --- what befalls them ----------------------------------------------------------------------------------------

    def lose(self, thing: Node | QueuedResource, state: str, *, leave_nodes: bool = False) -> None:
        """The service takes a node: PREEMPTED or TERMINATED, and its queued resource with all its nodes likewise.

        `leave_nodes`: they are still there when the queued resource is SUSPENDED. Raises ApiError where it is lost.
        """
        node = self._nodes(thing)[0]
        _require_edge(node, state)
        owner = self._owner(node)
        for lost in [node] if owner is None else self.owned_nodes(owner):
            if state in NODE_EDGES[lost.state]:
                self._move(lost, state)
                self.cloud.end(lost.operation, unready(lost.name, state, "the operation was aborted"))
        if owner is not None:
            self._suspend(owner, "SERVICE", leave_nodes=leave_nodes)

    def repair(self, thing: Node | QueuedResource, seconds: float) -> None:
        """A node, or all of a queued resource, are REPAIRING, then READY. Raises ApiError where they are not READY."""

        def repaired(node: Node) -> None:
            if self._is_there(node, "REPAIRING"):
                self._move(node, "READY")

        for node in self._nodes(thing):
            _require_edge(node, "REPAIRING")
            self._move(node, "REPAIRING")
            self.cloud.after(seconds, functools.partial(repaired, node))

    def vanish(self, thing: Node | QueuedResource) -> None:
        """A node, or a queued resource with all its nodes, is gone at once."""
        if isinstance(thing, Node):
            self.cloud.drop(thing)
            self._after_removal(thing)
        elif self.cloud.holds(thing):
            for node in self.owned_nodes(thing):
                self.cloud.drop(node)
            self.cloud.drop(thing)

    def _nodes(self, thing: Node | QueuedResource) -> list[Node]:
        """Raises ApiError where a queued resource has none."""
        nodes = [thing] if isinstance(thing, Node) else self.owned_nodes(thing)
        if not nodes:
            raise ApiError("FAILED_PRECONDITION", f"{thing.name} is in state {thing.state} and has no nodes")
        return nodes


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
