"""What happens to a queued resource: accepted, waiting, served, suspended, failed, deleted; never queued again."""

from rehearsal.cloud import Cloud
from rehearsal.errors import ApiError, unready
from rehearsal.nodes import Node
from rehearsal.operations import EMPTY, Operation
from rehearsal.queued_resources import EDGES, QUEUED, QueuedResource

QUEUED_RESOURCE_TYPE = "type.googleapis.com/google.cloud.tpu.v2.QueuedResource"


def submit(cloud: Cloud, qr: QueuedResource) -> Operation:
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
            fail(
                cloud,
                qr,
                ApiError("DEADLINE_EXCEEDED", "the request could not be served before its valid-until time"),
            )

    timeline.after(
        delays.operation_s, lambda: cloud.end(operation, qr.render() | {"@type": QUEUED_RESOURCE_TYPE})
    )
    timeline.after(delays.accept_s, waiting)
    timeline.at(qr.window.opens, cloud.capacity_may_have_changed)
    if qr.window.closes is not None:
        timeline.at(qr.window.closes, expired)
    return operation


def grant(cloud: Cloud) -> None:
    """Serve whoever waits and can be served, the oldest first. One that does not fit holds up nobody behind it."""
    for qr in list(cloud.queued_resources.values()):
        waits = qr.state == "WAITING_FOR_RESOURCES" and qr.window.opens <= cloud.timeline.moment
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


def delete(cloud: Cloud, qr: QueuedResource, *, force: bool) -> Operation:
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


def reset(cloud: Cloud, qr: QueuedResource) -> Operation:
    """Its nodes are restarted and it stays ACTIVE. Raises ApiError where it is not ACTIVE."""
    if qr.state != "ACTIVE":
        raise unready(qr.name, qr.state, "only an ACTIVE one can be reset")
    operation = cloud.begin(qr.parent, qr.name, "reset")
    restarting = [node for node in cloud.nodes_of(qr) if node.state == "READY"]
    for node in restarting:
        cloud.move(node, "RESTARTING")

    def restarted() -> None:
        for node in restarting:
            if cloud.nodes.get(node.name) is node and node.state == "RESTARTING":
                cloud.move(node, "READY")
        cloud.end(operation, qr.render() | {"@type": QUEUED_RESOURCE_TYPE})

    cloud.timeline.after(cloud.delays.create_s, restarted)
    return operation


def fail(cloud: Cloud, qr: QueuedResource, error: ApiError) -> None:
    """FAILED for good, without nodes. Raises ApiError where it has been served or is at its end."""
    if "FAILED" not in EDGES[qr.state]:
        raise unready(qr.name, qr.state, "it can't fail any more")
    for node in cloud.nodes_of(qr):
        cloud.drop_node(node)
    qr.initiator, qr.error = "SERVICE", error
    cloud.move(qr, "FAILED")


def after_loss(cloud: Cloud, qr: QueuedResource, *, leave_nodes: bool) -> None:
    """The service has taken its nodes: it is suspended."""
    _suspend(cloud, qr, "SERVICE", leave_nodes=leave_nodes)


def after_removal(cloud: Cloud, node: Node) -> None:
    """A node is being deleted or has gone: if it was the last of a queued resource, that is suspended."""
    owner = cloud.queued_resources.get(node.queued_resource or "")
    if owner is not None and all(left.state == "DELETING" for left in cloud.nodes_of(owner)):
        _suspend(cloud, owner, "USER", leave_nodes=False)


def _suspend(cloud: Cloud, qr: QueuedResource, initiator: str, *, leave_nodes: bool) -> None:
    if "SUSPENDING" not in EDGES[qr.state]:
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
