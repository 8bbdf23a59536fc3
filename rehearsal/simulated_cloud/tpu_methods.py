"""What each method of the Cloud TPU API does in the simulated cloud: a call that the document allows in, an answer out.

Here are the methods that tpu-stack calls, and the stand-ins for the gcp provider and gcloud; others are answered 501.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from contracts.aliases import Json
from infra.catalogue import generations
from rehearsal.simulated_cloud.capacity import ChipPool, Offers, accelerator_config, first_over
from rehearsal.simulated_cloud.cloud import Operation
from rehearsal.simulated_cloud.tpu_lifecycle import TpuLifecycle, chips_by_pool
from rehearsal.simulated_cloud.tpu_records import Node, QueuedResource, render_operation
from rehearsal.simulator.api_error import ApiError, invalid, taken
from rehearsal.simulator.discovery import Call, Document, shipped
from rehearsal.simulator.repeats_and_pages import Repeats, page

PREFIX = "tpu.projects.locations."
ALL_ZONES_METHODS = ("queuedResources.list", "nodes.list")
"""They take "-" for the location and list all of them."""
PAGE_SIZE = 100  # where none is asked for

# Documented for queuedResourceId, nodeId and nodeIdPrefix of a queued resource; used here for every id.
_ID = re.compile(r"[A-Za-z0-9_.~+%-]+")
_EMPTY: Json = {"description": "", "tags": [], "labels": {}, "metadata": {}}
PATCHABLE = (*_EMPTY, "networkConfig.enableExternalIps")


class TpuService:
    """A `rehearsal.simulator.http_server.ApiService`, called with the lock of the cloud held, once that has settled."""

    def __init__(self, lifecycle: TpuLifecycle, offers: Offers) -> None:
        self._lifecycle, self._cloud = lifecycle, lifecycle.cloud
        self._offers = offers
        once = Repeats[Operation]().once
        self._table: dict[str, Callable[[Call], Json | Operation]] = {
            "acceleratorTypes.list": self._accelerator_types,
            "runtimeVersions.list": self._runtime_versions,
            "operations.get": lambda call: self._cloud.operation(call.resource),
            "nodes.create": self._create_node,
            "nodes.get": lambda call: self._node(call).render(),
            "nodes.list": lambda call: self._list(call, "nodes", Node),
            "nodes.patch": self._patch_node,
            "nodes.delete": lambda call: lifecycle.delete_node(self._node(call)),
            "nodes.getGuestAttributes": lambda call: {"guestAttributes": self._node(call).guest_attributes()},
            "queuedResources.create": lambda call: once(call, self._create_queued_resource),
            "queuedResources.get": lambda call: self._queued_resource(call).render(),
            "queuedResources.list": lambda call: self._list(call, "queuedResources", QueuedResource),
            "queuedResources.delete": lambda call: once(call, self._delete_queued_resource),
        }

    def document(self, target: str) -> Document:
        return shipped("v2alpha1" if target.startswith("/v2alpha1/") else "v2")

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        return error.http_code, error.as_answer()

    def carry_out(self, call: Call) -> Json:
        name = call.method.id.removeprefix(PREFIX)
        is_alpha = call.method.path.pattern.startswith("v2alpha1")
        if name not in self._table or (is_alpha and name != "queuedResources.create"):
            simulated = "queuedResources.create" if is_alpha else ", ".join(self._table)
            raise ApiError("UNIMPLEMENTED", f"{name} is not simulated; there are {simulated}")
        zone = call.resource.split("/")[3]
        if not (zone == "-" and name in ALL_ZONES_METHODS):
            self._offers.require_zone(zone)
            if zone in self._cloud.unreachable:
                raise ApiError("UNAVAILABLE", f"{zone} cannot be reached")
        result = self._table[name](call)
        answer = render_operation(result) if isinstance(result, Operation) else result
        if zone == "-" and self._cloud.unreachable:
            answer["unreachable"] = [
                f"locations/{unreachable_zone}" for unreachable_zone in sorted(self._cloud.unreachable)
            ]
        return answer

    # --- what there is to choose from -------------------------------------------------------------------------

    def _accelerator_types(self, call: Call) -> Json:
        zone = call.resource.rpartition("/")[2]
        types = [
            {"name": f"{call.resource}/acceleratorTypes/{accelerator.type_name}", "type": accelerator.type_name,
             "acceleratorConfigs": [accelerator_config(accelerator)]}
            for accelerator in self._offers.accelerators(zone)
        ]  # fmt: skip
        return self._page(call, "acceleratorTypes", types)

    def _runtime_versions(self, call: Call) -> Json:
        versions = self._offers.runtime_versions()
        entries = [
            {"name": f"{call.resource}/runtimeVersions/{version}", "version": version} for version in versions
        ]
        return self._page(call, "runtimeVersions", entries)

    # --- nodes ------------------------------------------------------------------------------------------------

    def _node(self, call: Call) -> Node:
        return self._cloud.find(Node, call.resource)

    def _create_node(self, call: Call) -> Operation:
        node_id = call.query.get("nodeId") or f"tpu-{self._cloud.number()}"
        tier = tier_of_node(call.body)
        node = self._new_node(call.resource, node_id, call.body, tier=tier, at="Node")
        self._require_quota(call.resource, chips_by_pool([node]))
        return self._lifecycle.create_node(node)

    def _patch_node(self, call: Call) -> Operation:
        node = self._node(call)
        changes = patched(call.query["updateMask"], node.spec, call.body)
        return self._lifecycle.patch_node(node, changes)

    def _new_node(self, parent: str, node_id: str, spec: Json, *, tier: str, at: str) -> Node:
        """A node that is not in the cloud yet. Raises ApiError for a taken id or hardware that is not offered."""
        cloud, offers = self._cloud, self._offers
        name = f"{parent}/nodes/{_checked_id(node_id, f'{at} id')}"
        zone = parent.rpartition("/")[2]
        if self._lifecycle.node_name_is_taken(name):
            raise taken(name)
        accelerator = offers.accelerator(spec, zone, at)
        version = spec["runtimeVersion"]
        if not generations.is_runtime_version(version):
            versions = ", ".join(offers.runtime_versions())
            raise invalid(f"{at}.runtimeVersion", f"{version!r} is no runtime version; there are {versions}")
        if "networkConfig" in spec and "networkConfigs" in spec:
            raise invalid(at, "networkConfig and networkConfigs are mutually exclusive")
        return Node(
            name=name,
            spec=spec,
            accelerator=accelerator,
            pool=ChipPool(zone=zone, prefix=accelerator.generation.type_prefix, tier=tier),
            created=cloud.moment,
            number=cloud.number(),
        )

    # --- queued resources -------------------------------------------------------------------------------------

    def _queued_resource(self, call: Call) -> QueuedResource:
        return self._cloud.find(QueuedResource, call.resource)

    def _create_queued_resource(self, call: Call) -> Operation:
        own_id = call.query.get("queuedResourceId") or f"qr-{self._cloud.number()}"
        qr = self._new_queued_resource(call.resource, own_id, call.body)
        self._require_quota(call.resource, chips_by_pool(qr.plans))
        return self._lifecycle.submit_queued_resource(qr)

    def _delete_queued_resource(self, call: Call) -> Operation:
        is_forced = call.query.get("force", False)
        return self._lifecycle.delete_queued_resource(self._queued_resource(call), force=is_forced)

    def _new_queued_resource(self, parent: str, own_id: str, spec: Json) -> QueuedResource:
        """A queued resource that is not in the cloud yet, with the nodes that it asks for. Raises ApiError."""
        name = f"{parent}/queuedResources/{_checked_id(own_id, 'queuedResourceId')}"
        if name in self._cloud.things:
            raise taken(name)
        if "spot" in spec and "guaranteed" in spec:
            raise invalid("QueuedResource", "spot and guaranteed are one union: give one of them")
        spec, run_s = _as_v2(spec)
        tier: str = "spot" if "spot" in spec else "reserved" if "reservationName" in spec else "on-demand"
        tier = tier if run_s is None else "flex-start"
        plans: list[Node] = []
        for index, node_spec in enumerate(spec.get("tpu", {}).get("nodeSpec", [])):
            at = f"QueuedResource.tpu.nodeSpec[{index}]"
            if node_spec["parent"] != parent:
                raise invalid(
                    f"{at}.parent", f"{node_spec['parent']!r} is not the queued resource's own, {parent!r}"
                )
            if tier_of_node(node_spec["node"]) not in ("on-demand", tier):
                problem = f"asks for another tier than the queued resource, {tier}"
                raise invalid(f"{at}.node.schedulingConfig", problem)
            for node_id in _node_ids(node_spec, own_id, at):
                plan = self._new_node(parent, node_id, node_spec["node"], tier=tier, at=f"{at}.node")
                plan.queued_resource, plan.multislice = name, "multisliceParams" in node_spec
                if plan.name in {planned.name for planned in plans}:
                    raise invalid(at, f"asks for {plan.name} a second time")
                plans.append(plan)
        if not plans:
            raise invalid("QueuedResource.tpu.nodeSpec", "is empty: ask for a node")
        policy = spec.get("queueingPolicy", {})
        if policy.keys() - {"validUntilDuration"}:
            raise ApiError("UNIMPLEMENTED", "queueingPolicy: only validUntilDuration is simulated")
        limit = policy.get("validUntilDuration")
        return QueuedResource(
            name=name,
            spec=spec,
            plans=plans,
            created=self._cloud.moment,
            limit_s=float(limit.removesuffix("s")) if limit else None,
            run_s=run_s,
        )

    def _list(self, call: Call, key: str, kind: type[Node] | type[QueuedResource]) -> Json:
        """The things of a kind in the requested location, or in all that can be reached."""
        project, _, zone = call.resource.rpartition("/locations/")
        inside = f"{project}/locations/" if zone == "-" else f"{call.resource}/"
        hidden = tuple(f"{project}/locations/{unreachable}/" for unreachable in self._cloud.unreachable)
        things = [thing for thing in self._cloud.all(kind) if thing.name.startswith(inside)]
        return self._page(
            call, key, [thing.render() for thing in things if not thing.name.startswith(hidden)]
        )

    @staticmethod
    def _page(call: Call, key: str, items: Sequence[Json]) -> Json:
        for name in ("filter", "orderBy"):
            if call.query.get(name):
                raise ApiError("UNIMPLEMENTED", f"{name}: this stand-in does not filter or sort")
        return page(call, key, items, call.query.get("pageSize") or PAGE_SIZE)

    # --- quota ---------------------------------------------------------------------------------------------

    def _require_quota(self, parent: str, requested: Counter[ChipPool]) -> None:
        """Raises ApiError RESOURCE_EXHAUSTED, in the API's words, where a project asks for more than its quota."""
        quota = self._cloud.quota
        over = first_over(quota, requested, self._lifecycle.asked_for(parent.split("/")[1]))
        if over is None:
            return
        is_pod = over.prefix.endswith("litepod")
        generation = over.prefix.removesuffix("litepod").upper() + ("sLitepod" if is_pod else "")
        tier = {"spot": "Preemptible", "reserved": "Reserved", "on-demand": "", "flex-start": "Preemptible"}[
            over.tier
        ]
        raise ApiError(
            "RESOURCE_EXHAUSTED",
            f"Quota limit 'TPU{generation}{tier}PerProjectPerZoneForTPUAPI' has been exceeded."
            f" Limit: {quota[over]} in zone {over.zone}.",
        )


def tier_of_node(spec: Json) -> str:
    """The tier in a node's own scheduling. Raises ApiError for spot and reserved at once."""
    scheduling = spec.get("schedulingConfig", {})
    spot = scheduling.get("spot") or scheduling.get("preemptible")
    if spot and scheduling.get("reserved"):
        raise invalid("Node.schedulingConfig", "spot and reserved exclude one another")
    return "spot" if spot else "reserved" if scheduling.get("reserved") else "on-demand"


def patched(mask: str, current: Json, body: Json) -> Json:
    """The fields that a patch sets on a node. Raises ApiError for a field that cannot be patched."""
    changes: Json = {}
    for path in mask.split(","):
        field = re.sub(r"_([a-z])", lambda match: match[1].upper(), path.strip())
        if field not in PATCHABLE:
            raise invalid("updateMask", f"{path!r} can't be changed; only {', '.join(PATCHABLE)}")
        if field == "networkConfig.enableExternalIps":
            external = body.get("networkConfig", {}).get("enableExternalIps", False)
            changes["networkConfig"] = current.get("networkConfig", {}) | {"enableExternalIps": external}
        else:
            changes[field] = body.get(field, _EMPTY[field])
    return changes


FLEX_START_LIMIT_S = 7 * 86400.0
"""https://cloud.google.com/tpu/docs/request-using-flex-start (November 2026)."""


def _as_v2(spec: Json) -> tuple[Json, float | None]:
    """A queued resource's body of v2alpha1 as v2 shows it, and for how long its nodes may run (None: no limit).

    Raises ApiError for a flex-start request without a limit, or with one of more than seven days.
    """
    model, duration = spec.get("provisioningModel"), spec.get("runDuration", {}).get("maxRunDuration")
    if (model == "FLEX_START") != (duration is not None) or model not in (None, "FLEX_START"):
        problem = "only FLEX_START is simulated, with runDuration.maxRunDuration"
        raise invalid("QueuedResource.provisioningModel", problem)
    run_s = None if duration is None else float(duration.removesuffix("s"))
    if run_s is not None and not 0 < run_s <= FLEX_START_LIMIT_S:
        raise invalid("QueuedResource.runDuration.maxRunDuration", f"{duration} is not within 7 days")
    v2 = {key: value for key, value in spec.items() if key not in ("provisioningModel", "runDuration")}
    for node_spec in v2.get("tpu", {}).get("nodeSpec", []):
        if "multiNodeParams" in node_spec:
            node_spec["multisliceParams"] = node_spec.pop("multiNodeParams")
    return v2, run_s


def _node_ids(node_spec: Json, own_id: str, at: str) -> list[str]:
    many = node_spec.get("multisliceParams")
    if many is None:
        return [node_spec.get("nodeId") or own_id]
    if "nodeId" in node_spec:
        raise invalid(at, "nodeId is for one node, multisliceParams for several: give one of them")
    if many["nodeCount"] < 2:
        raise invalid(f"{at}.multisliceParams.nodeCount", f"{many['nodeCount']} is too few: more than 1")
    prefix = many.get("nodeIdPrefix") or own_id
    return [f"{prefix}-{number}" for number in range(many["nodeCount"])]


def _checked_id(text: str, at: str) -> str:
    if not _ID.fullmatch(text):
        raise invalid(at, f"{text!r} is no id: it has letters, digits and _.~+%- only")
    return text
