"""What each method of the API does in the simulated cloud: a call that the document allows in, an answer out."""

from collections.abc import Callable
from typing import Any

from rehearsal import node_life, queue_life, specs
from rehearsal.cloud import Cloud
from rehearsal.discovery import Call
from rehearsal.errors import ApiError, invalid, missing
from rehearsal.listings import Listings, pages
from rehearsal.offers import Offers
from rehearsal.operations import Operation

Json = dict[str, Any]

PREFIX = "tpu.projects.locations."
# These take "-" for the location and list all of them.
EVERYWHERE = ("nodes.list", "queuedResources.list", "operations.list")


class Methods:
    """The API over a cloud. Whoever calls holds the cloud's lock and has settled it."""

    def __init__(self, cloud: Cloud, offers: Offers) -> None:
        self._cloud = cloud
        self._offers = offers
        self._answered: dict[tuple[str, str], tuple[Json, Json]] = {}
        self._table: dict[str, Callable[[Call], Json]] = Listings(offers).table() | {
            "operations.get": lambda call: self._operation(call).render(),
            "operations.list": self._operations,
            "operations.delete": self._forget_operation,
            "operations.cancel": self._cancel_operation,
            "nodes.create": self._create_node,
            "nodes.get": lambda call: cloud.node(call.resource).render(),
            "nodes.list": lambda call: self._page(call, "nodes", cloud.nodes),
            "nodes.patch": self._patch_node,
            "nodes.delete": lambda call: node_life.delete(cloud, cloud.node(call.resource)).render(),
            "nodes.start": lambda call: node_life.start(cloud, cloud.node(call.resource)).render(),
            "nodes.stop": lambda call: node_life.stop(cloud, cloud.node(call.resource)).render(),
            "nodes.getGuestAttributes": self._guest_attributes,
            "queuedResources.create": lambda call: self._once(call, self._create_queued_resource),
            "queuedResources.get": lambda call: cloud.queued_resource(call.resource).render(),
            "queuedResources.list": lambda call: self._page(call, "queuedResources", cloud.queued_resources),
            "queuedResources.delete": lambda call: self._once(call, self._delete_queued_resource),
            "queuedResources.reset": lambda call: queue_life.reset(
                cloud, cloud.queued_resource(call.resource)
            ).render(),
        }

    def carry_out(self, call: Call) -> Json:
        """The method's answer. Raises ApiError."""
        method = call.method.id.removeprefix(PREFIX)
        zone = "".join(call.resource.split("/")[3:4])  # none for the list of locations
        if zone and not (zone == "-" and method in EVERYWHERE):
            self._offers.require_zone(zone)
        return self._table[method](call)

    def _once(self, call: Call, method: Callable[[Call], Json]) -> Json:
        """A request with a requestId that has been answered gets the same operation, and nothing is done again."""
        request_id = call.query.get("requestId")
        if request_id is None:
            return method(call)
        asked = {"resource": call.resource, "body": call.body, "query": call.query}
        key = (call.method.id, request_id)
        if key in self._answered:
            before, answer = self._answered[key]
            if before != asked:
                raise invalid("requestId", f"{request_id!r} was used for another request")
            return (
                self._cloud.operations[answer["name"]].render()
                if answer["name"] in self._cloud.operations
                else answer
            )
        answer = method(call)
        self._answered[key] = (asked, answer)
        return answer

    # --- nodes ------------------------------------------------------------------------------------------------

    def _create_node(self, call: Call) -> Json:
        node_id = call.query.get("nodeId") or f"tpu-{self._cloud.number()}"
        tier = specs.node_tier(call.body)
        node = specs.node(self._cloud, self._offers, call.resource, node_id, call.body, tier=tier, at="Node")
        specs.require_quota(self._cloud, call.resource, [node.hold()])
        return node_life.create(self._cloud, node).render()

    def _patch_node(self, call: Call) -> Json:
        node = self._cloud.node(call.resource)
        changes = specs.changes(call.query["updateMask"], node.spec, call.body)
        return node_life.patch(self._cloud, node, changes).render()

    def _guest_attributes(self, call: Call) -> Json:
        node = self._cloud.node(call.resource)
        everyone = [str(worker) for worker in range(node.accelerator.hosts)]
        asked = call.body.get("workerIds") or everyone
        if unknown := sorted(set(asked) - set(everyone)):
            raise invalid(
                "GetGuestAttributesRequest.workerIds",
                f"{', '.join(unknown)}: {node.id} has {', '.join(everyone)}",
            )
        return {
            "guestAttributes": node.guest_attributes(
                call.body.get("queryPath", ""), [int(each) for each in asked]
            )
        }

    # --- queued resources -------------------------------------------------------------------------------------

    def _create_queued_resource(self, call: Call) -> Json:
        own_id = call.query.get("queuedResourceId") or f"qr-{self._cloud.number()}"
        qr = specs.queued_resource(self._cloud, self._offers, call.resource, own_id, call.body)
        specs.require_quota(self._cloud, call.resource, [plan.hold() for plan in qr.plans])
        return queue_life.submit(self._cloud, qr).render()

    def _delete_queued_resource(self, call: Call) -> Json:
        qr = self._cloud.queued_resource(call.resource)
        return queue_life.delete(self._cloud, qr, force=call.query.get("force", False)).render()

    # --- operations -------------------------------------------------------------------------------------------

    def _operation(self, call: Call) -> Operation:
        if call.resource not in self._cloud.operations:
            raise missing(call.resource)
        return self._cloud.operations[call.resource]

    def _operations(self, call: Call) -> Json:
        if call.query.get("returnPartialSuccess"):
            raise ApiError("UNIMPLEMENTED", "returnPartialSuccess is not supported")
        return self._page(call, "operations", self._cloud.operations)

    def _forget_operation(self, call: Call) -> Json:
        del self._cloud.operations[self._operation(call).name]
        return {}

    def _cancel_operation(self, call: Call) -> Json:
        """Best effort, as documented: a node that is being created is given up, everything else goes on."""
        operation = self._operation(call)
        node = self._cloud.nodes.get(operation.target)
        if not operation.done:
            operation.cancel_requested = True
            if operation.verb == "create" and node is not None and node.operation is operation:
                node_life.cancel_create(self._cloud, node)
        return {}

    # --- pages ------------------------------------------------------------------------------------------------

    def _page(self, call: Call, key: str, things: dict[str, Any]) -> Json:
        """Of a location, or with "-" of all of them."""
        project, _, zone = call.resource.rpartition("/locations/")
        inside = f"{project}/locations/" if zone == "-" else f"{call.resource}/"
        found = [thing for name, thing in sorted(things.items()) if name.startswith(inside)]
        return pages(call, key, [thing.render() for thing in found])
