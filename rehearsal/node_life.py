"""What happens to a node from its request to its end: placed, booted, preempted, repaired, stopped, deleted."""

from rehearsal.cloud import Cloud, stock_out
from rehearsal.errors import ApiError, unready
from rehearsal.nodes import EDGES, Node
from rehearsal.operations import EMPTY, Operation
from rehearsal.queue_life import after_loss, after_removal

NODE_TYPE = "type.googleapis.com/google.cloud.tpu.v2.Node"


def create(cloud: Cloud, node: Node) -> Operation:
    """A node of its own, without a queue: it gets its chips soon, or its operation fails and it is gone."""
    node.operation = operation = cloud.begin(node.parent, node.name, "create")
    cloud.add_node(node)

    def place() -> None:
        if _is_still(cloud, node, "CREATING", operation):
            if cloud.capacity.fits([node.hold()], cloud.held()):
                node.placed = True
                cloud.timeline.after(cloud.delays.create_s, ready)
            else:
                cloud.end(operation, stock_out(node.pool))
                cloud.drop_node(node)

    def ready() -> None:
        if _is_still(cloud, node, "CREATING", operation):
            _ready(cloud, node, operation)

    cloud.timeline.after(cloud.delays.place_s, place)
    return operation


def delete(cloud: Cloud, node: Node) -> Operation:
    """DELETING, then gone. Raises ApiError where it is being deleted already."""
    _require(node, *(state for state, after in EDGES.items() if "DELETING" in after))
    operation = cloud.begin(node.parent, node.name, "delete")
    cloud.move(node, "DELETING")
    cloud.end(node.operation, ApiError("CANCELLED", f"'{node.name}' was deleted meanwhile"))
    after_removal(cloud, node)

    def gone() -> None:
        cloud.drop_node(node)
        cloud.end(operation, EMPTY)

    cloud.timeline.after(cloud.delays.delete_s, gone)
    return operation


def patch(cloud: Cloud, node: Node, changes: dict[str, object]) -> Operation:
    """Other values of fields, once the operation is done. Raises ApiError where the node is not at rest."""
    _require(node, "READY", "STOPPED")
    operation = cloud.begin(node.parent, node.name, "update")

    def changed() -> None:
        if cloud.nodes.get(node.name) is node:
            node.spec = node.spec | changes
            cloud.end(operation, node.render() | {"@type": NODE_TYPE})
        else:
            cloud.end(operation, ApiError("CANCELLED", f"'{node.name}' was deleted meanwhile"))

    cloud.timeline.after(cloud.delays.operation_s, changed)
    return operation


def stop(cloud: Cloud, node: Node) -> Operation:
    """STOPPING, STOPPED; its chips are free. Raises ApiError for more than one worker, as the API documents."""
    if node.accelerator.hosts > 1:
        raise unready(
            node.name, node.state, f"it has {node.accelerator.hosts} workers, and only one can be stopped"
        )
    _require(node, "READY")
    node.operation = operation = cloud.begin(node.parent, node.name, "stop")
    cloud.move(node, "STOPPING")

    def stopped() -> None:
        if _is_still(cloud, node, "STOPPING", operation):
            cloud.move(node, "STOPPED")
            cloud.end(operation, node.render() | {"@type": NODE_TYPE})

    cloud.timeline.after(cloud.delays.stop_s, stopped)
    return operation


def start(cloud: Cloud, node: Node) -> Operation:
    """STARTING, READY; back to STOPPED where there are no chips for it any more."""
    _require(node, "STOPPED")
    node.operation = operation = cloud.begin(node.parent, node.name, "start")
    cloud.move(node, "STARTING")

    def place() -> None:
        if _is_still(cloud, node, "STARTING", operation):
            node.placed = cloud.capacity.fits([node.hold()], cloud.held())
            if node.placed:
                cloud.timeline.after(cloud.delays.create_s, ready)
            else:
                cloud.move(node, "STOPPED")
                cloud.end(operation, stock_out(node.pool))

    def ready() -> None:
        if _is_still(cloud, node, "STARTING", operation):
            _ready(cloud, node, operation)

    cloud.timeline.after(cloud.delays.place_s, place)
    return operation


def lose(cloud: Cloud, node: Node, state: str, *, leave_nodes: bool) -> None:
    """The service takes it: PREEMPTED or TERMINATED, and its queued resource with all its nodes likewise.

    `leave_nodes`: they are still there when the queued resource is SUSPENDED. Raises ApiError where it runs no more.
    """
    _require(node, *(before for before, after in EDGES.items() if state in after))
    owner = cloud.queued_resources.get(node.queued_resource or "")
    for lost in [node] if owner is None else cloud.nodes_of(owner):
        if state in EDGES[lost.state]:
            cloud.move(lost, state)
            cloud.end(lost.operation, unready(lost.name, state, "the operation was aborted"))
    if owner is not None:
        after_loss(cloud, owner, leave_nodes=leave_nodes)


def repair(cloud: Cloud, node: Node, seconds: float) -> None:
    """REPAIRING for that long, then READY again. Raises ApiError where it is not READY."""
    _require(node, "READY")
    cloud.move(node, "REPAIRING")

    def repaired() -> None:
        if cloud.nodes.get(node.name) is node and node.state == "REPAIRING":
            cloud.move(node, "READY")

    cloud.timeline.after(seconds, repaired)


def vanish(cloud: Cloud, node: Node) -> None:
    """Gone at once, as if someone else had deleted it."""
    cloud.drop_node(node)
    after_removal(cloud, node)


def cancel_create(cloud: Cloud, node: Node) -> None:
    """The node that is being created is given up."""
    cloud.end(node.operation, ApiError("CANCELLED", "the operation was cancelled"))
    vanish(cloud, node)


def _ready(cloud: Cloud, node: Node, operation: Operation) -> None:
    node.boot(cloud.hardware)
    cloud.move(node, "READY")
    cloud.end(operation, node.render() | {"@type": NODE_TYPE})


def _is_still(cloud: Cloud, node: Node, state: str, operation: Operation) -> bool:
    """Whether an event that was planned for a node still has something to do."""
    return cloud.nodes.get(node.name) is node and node.state == state and node.operation is operation


def _require(node: Node, *states: str) -> None:
    if node.state not in states:
        raise unready(node.name, node.state, f"it would have to be {' or '.join(states)}")
