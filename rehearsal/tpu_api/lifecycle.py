"""What happens to queued resources and nodes: accepted, waiting, served, booted, preempted, repaired, deleted.

Every change takes its time: each function records what is asked for and plans the rest on the cloud's timeline.
"""

from rehearsal.tpu_api.api_error import ApiError, unready
from rehearsal.tpu_api.capacity import Pool
from rehearsal.tpu_api.cloud import Cloud
from rehearsal.tpu_api.resources import (
    EMPTY,
    NODE_EDGES,
    QUEUE_EDGES,
    QUEUED,
    Node,
    Operation,
    QueuedResource,
)

NODE_TYPE = "type.googleapis.com/google.cloud.tpu.v2.Node"
QUEUED_RESOURCE_TYPE = "type.googleapis.com/google.cloud.tpu.v2.QueuedResource"


# --- queued resources -----------------------------------------------------------------------------------------------


def submit_queued_resource(cloud: Cloud, qr: QueuedResource) -> Operation:
    """Into the queue. The operation is done when the request is accepted, long before it is served."""
    operation = cloud.begin(qr.parent, qr.name, "create")
    cloud.queued_resources[qr.name] = qr
    cloud.record(qr, qr.state)
    timeline, delays = cloud.timeline, cloud.delays

    def waiting() -> None:
        if cloud.queued_resources.get(qr.name) is qr and qr.state == "ACCEPTED":
            cloud.move(qr, "WAITING_FOR_RESOURCES")

    def expired() -> None:
        if cloud.queued_resources.get(qr.name) is qr and qr.state in QUEUED:
            said = "the request could not be served before its valid-until time"
            fail_queued_resource(cloud, qr, ApiError("DEADLINE_EXCEEDED", said))

    timeline.after(
        delays.operation_s, lambda: cloud.end(operation, qr.render() | {"@type": QUEUED_RESOURCE_TYPE})
    )
    timeline.after(delays.accept_s, waiting)
    if qr.closes is not None:
        timeline.at(qr.closes, expired)
    return operation


def grant_capacity(cloud: Cloud) -> None:
    """Serve whoever waits and can be served, the oldest first. One that does not fit holds up nobody behind it."""
    for qr in list(cloud.queued_resources.values()):
        waits = qr.state == "WAITING_FOR_RESOURCES"
        if waits and cloud.capacity.fits([plan.hold() for plan in qr.plans], cloud.held()):
            _provision(cloud, qr)


def _provision(cloud: Cloud, qr: QueuedResource) -> None:
    qr.initiator = "SERVICE"
    cloud.move(qr, "PROVISIONING")
    for plan in qr.plans:
        plan.placed, plan.created = True, cloud.timeline.moment
        cloud.add_node(plan)

    def ready() -> None:
        for node in cloud.nodes_of(qr):
            if node.state == "CREATING" and qr.state == "PROVISIONING":
                node.boot(cloud.hardware)
                cloud.move(node, "READY")
        if cloud.queued_resources.get(qr.name) is qr and qr.state == "PROVISIONING":
            cloud.move(qr, "ACTIVE")

    cloud.timeline.after(cloud.delays.create_s, ready)


def delete_queued_resource(cloud: Cloud, qr: QueuedResource, *, force: bool) -> Operation:
    """DELETING, then gone, its nodes first. Raises ApiError where it has nodes and force was not asked for."""
    if qr.state == "DELETING":
        raise unready(qr.name, qr.state, "it is being deleted")
    nodes = cloud.nodes_of(qr)
    if nodes and not force:
        said = f"it has nodes ({', '.join(node.id for node in nodes)}); delete them first, or use force"
        raise unready(qr.name, qr.state, said)
    operation = cloud.begin(qr.parent, qr.name, "delete")
    qr.initiator = "USER"
    cloud.move(qr, "DELETING")
    for node in nodes:
        if node.state != "DELETING":
            cloud.move(node, "DELETING")

    def gone() -> None:
        cloud.drop_queued_resource(qr)
        cloud.end(operation, EMPTY)

    cloud.timeline.after(cloud.delays.delete_s, gone)
    return operation


def fail_queued_resource(cloud: Cloud, qr: QueuedResource, error: ApiError) -> None:
    """FAILED for good, without nodes. Raises ApiError where it has been served or is at its end."""
    if "FAILED" not in QUEUE_EDGES[qr.state]:
        raise unready(qr.name, qr.state, "it can't fail any more")
    for node in cloud.nodes_of(qr):
        cloud.drop_node(node)
    qr.initiator, qr.error = "SERVICE", error
    cloud.move(qr, "FAILED")


def _suspend(cloud: Cloud, qr: QueuedResource, initiator: str, *, leave_nodes: bool) -> None:
    if "SUSPENDING" not in QUEUE_EDGES[qr.state]:
        return
    qr.initiator = initiator
    cloud.move(qr, "SUSPENDING")

    def suspended() -> None:
        if cloud.queued_resources.get(qr.name) is qr and qr.state == "SUSPENDING":
            for node in cloud.nodes_of(qr):
                if not leave_nodes:
                    cloud.drop_node(node)
            cloud.move(qr, "SUSPENDED")

    cloud.timeline.after(cloud.delays.suspend_s, suspended)


# --- nodes ----------------------------------------------------------------------------------------------------------


def create_node(cloud: Cloud, node: Node) -> Operation:
    """A node of its own, without a queue: it gets its chips soon, or its operation fails and it is gone."""
    node.operation = operation = cloud.begin(node.parent, node.name, "create")
    cloud.add_node(node)

    def is_wanted() -> bool:
        """Whether there is still something to do for it."""
        return cloud.nodes.get(node.name) is node and node.state == "CREATING"

    def place() -> None:
        if not is_wanted():
            return
        if cloud.capacity.fits([node.hold()], cloud.held()):
            node.placed = True
            cloud.timeline.after(cloud.delays.create_s, ready)
        else:
            cloud.end(operation, stock_out(node.pool))
            cloud.drop_node(node)

    def ready() -> None:
        if is_wanted():
            node.boot(cloud.hardware)
            cloud.move(node, "READY")
            cloud.end(operation, node.render() | {"@type": NODE_TYPE})

    cloud.timeline.after(cloud.delays.place_s, place)
    return operation


def delete_node(cloud: Cloud, node: Node) -> Operation:
    """DELETING, then gone. Raises ApiError where it is being deleted already."""
    _require_edge(node, "DELETING")
    operation = cloud.begin(node.parent, node.name, "delete")
    cloud.move(node, "DELETING")
    cloud.end(node.operation, ApiError("CANCELLED", f"'{node.name}' was deleted meanwhile"))
    _after_removal(cloud, node)

    def gone() -> None:
        cloud.drop_node(node)
        cloud.end(operation, EMPTY)

    cloud.timeline.after(cloud.delays.delete_s, gone)
    return operation


def patch_node(cloud: Cloud, node: Node, changes: dict[str, object]) -> Operation:
    """Other values of fields, once the operation is done. Raises ApiError where the node is not READY."""
    _require_edge(node, "REPAIRING")
    operation = cloud.begin(node.parent, node.name, "update")

    def changed() -> None:
        if cloud.nodes.get(node.name) is node:
            node.spec = node.spec | changes
            cloud.end(operation, node.render() | {"@type": NODE_TYPE})
        else:
            cloud.end(operation, ApiError("CANCELLED", f"'{node.name}' was deleted meanwhile"))

    cloud.timeline.after(cloud.delays.operation_s, changed)
    return operation


def lose_node(cloud: Cloud, node: Node, state: str, *, leave_nodes: bool) -> None:
    """The service takes it: PREEMPTED or TERMINATED, and its queued resource with all its nodes likewise.

    `leave_nodes`: they are still there when the queued resource is SUSPENDED. Raises ApiError where it runs no more.
    """
    _require_edge(node, state)
    owner = cloud.queued_resources.get(node.queued_resource or "")
    for lost in [node] if owner is None else cloud.nodes_of(owner):
        if state in NODE_EDGES[lost.state]:
            cloud.move(lost, state)
            cloud.end(lost.operation, unready(lost.name, state, "the operation was aborted"))
    if owner is not None:
        _suspend(cloud, owner, "SERVICE", leave_nodes=leave_nodes)


def repair_node(cloud: Cloud, node: Node, seconds: float) -> None:
    """REPAIRING for that long, then READY again. Raises ApiError where it is not READY."""
    _require_edge(node, "REPAIRING")
    cloud.move(node, "REPAIRING")

    def repaired() -> None:
        if cloud.nodes.get(node.name) is node and node.state == "REPAIRING":
            cloud.move(node, "READY")

    cloud.timeline.after(seconds, repaired)


def vanish_node(cloud: Cloud, node: Node) -> None:
    """Gone at once, as if someone else had deleted it."""
    cloud.drop_node(node)
    _after_removal(cloud, node)


def stock_out(pool: Pool) -> ApiError:
    """What a node hears for which there are no chips, in the API's words (code 8)."""
    return ApiError(
        "RESOURCE_EXHAUSTED",
        f'There is no more capacity in the zone "{pool.zone}"; you can try in another zone where Cloud TPU Nodes'
        " are offered (see https://cloud.google.com/tpu/docs/regions)",
    )


def _after_removal(cloud: Cloud, node: Node) -> None:
    """A node is being deleted or has gone: if it was the last of a queued resource, that is suspended."""
    owner = cloud.queued_resources.get(node.queued_resource or "")
    if owner is not None and all(left.state == "DELETING" for left in cloud.nodes_of(owner)):
        _suspend(cloud, owner, "USER", leave_nodes=False)


def _require_edge(node: Node, state: str) -> None:
    """Raises ApiError where the node cannot come into that state from its own."""
    allowed = [before for before, after in NODE_EDGES.items() if state in after]
    if node.state not in allowed:
        raise unready(node.name, node.state, f"it would have to be {' or '.join(allowed)}")
