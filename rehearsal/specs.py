"""From what a request asks for to a node or queued resource: its names, its hardware, its place in the quota."""

import re
from typing import Any

from rehearsal.cloud import Cloud
from rehearsal.errors import ApiError, invalid, taken
from rehearsal.nodes import Node
from rehearsal.offers import Offers
from rehearsal.pools import Hold, Pool, Tier
from rehearsal.queued_resources import QueuedResource, Window

Json = dict[str, Any]

# Documented for queuedResourceId, nodeId and nodeIdPrefix of a queued resource; used here for every id.
_ID = re.compile(r"[A-Za-z0-9_.~+%-]+")
_EMPTY: Json = {"description": "", "tags": [], "labels": {}, "metadata": {}}
PATCHABLE = (*_EMPTY, "networkConfig.enableExternalIps")


def node(cloud: Cloud, offers: Offers, parent: str, node_id: str, spec: Json, *, tier: Tier, at: str) -> Node:
    """A node that is not in the cloud yet. Raises ApiError for an id that is taken or hardware that is not offered."""
    name = f"{parent}/nodes/{_id(node_id, f'{at} id')}"
    zone = parent.rpartition("/")[2]
    if cloud.node_name_is_taken(name):
        raise taken(name)
    accelerator = offers.accelerator(spec, zone, at)
    if not offers.has_runtime(spec["runtimeVersion"]):
        known = ", ".join(offers.runtime_versions())
        raise invalid(
            f"{at}.runtimeVersion", f"{spec['runtimeVersion']!r} is no runtime version; there are {known}"
        )
    if "networkConfig" in spec and "networkConfigs" in spec:
        raise invalid(at, "networkConfig and networkConfigs are mutually exclusive")
    return Node(
        name=name,
        spec=spec,
        accelerator=accelerator,
        pool=Pool(zone=zone, prefix=accelerator.generation.type_prefix, tier=tier),
        created=cloud.timeline.moment,
        incarnation=cloud.number(),
    )


def node_tier(spec: Json) -> Tier:
    """What a node's own scheduling asks for. Raises ApiError for spot and reserved at once."""
    scheduling = spec.get("schedulingConfig", {})
    spot = scheduling.get("spot") or scheduling.get("preemptible")
    if spot and scheduling.get("reserved"):
        raise invalid("Node.schedulingConfig", "spot and reserved exclude one another")
    return "spot" if spot else "reserved" if scheduling.get("reserved") else "on-demand"


def queued_resource(cloud: Cloud, offers: Offers, parent: str, own_id: str, spec: Json) -> QueuedResource:
    """A queued resource that is not in the cloud yet, with the nodes that it asks for. Raises ApiError."""
    name = f"{parent}/queuedResources/{_id(own_id, 'queuedResourceId')}"
    if name in cloud.queued_resources:
        raise taken(name)
    if "spot" in spec and "guaranteed" in spec:
        raise invalid("QueuedResource", "spot and guaranteed are one union: give one of them")
    tier: Tier = "spot" if "spot" in spec else "reserved" if "reservationName" in spec else "on-demand"
    plans: list[Node] = []
    for index, wanted in enumerate(spec.get("tpu", {}).get("nodeSpec", [])):
        at = f"QueuedResource.tpu.nodeSpec[{index}]"
        if wanted["parent"] != parent:
            raise invalid(
                f"{at}.parent", f"{wanted['parent']!r} is not the queued resource's own, {parent!r}"
            )
        if node_tier(wanted["node"]) not in ("on-demand", tier):
            raise invalid(
                f"{at}.node.schedulingConfig", f"asks for another tier than the queued resource, {tier}"
            )
        for node_id in _node_ids(wanted, own_id, at):
            plan = node(cloud, offers, parent, node_id, wanted["node"], tier=tier, at=f"{at}.node")
            plan.queued_resource, plan.multislice = name, "multisliceParams" in wanted
            if plan.name in {other.name for other in plans}:
                raise invalid(at, f"asks for {plan.name} a second time")
            plans.append(plan)
    if not plans:
        raise invalid("QueuedResource.tpu.nodeSpec", "is empty: ask for a node")
    now = cloud.timeline.moment
    window = Window.parse(spec.get("queueingPolicy", {}), now)
    return QueuedResource(name=name, spec=spec, plans=plans, window=window, created=now)


def _node_ids(wanted: Json, own_id: str, at: str) -> list[str]:
    many = wanted.get("multisliceParams")
    if many is None:
        return [wanted.get("nodeId") or own_id]
    if "nodeId" in wanted:
        raise invalid(at, "nodeId is for one node, multisliceParams for several: give one of them")
    if many["nodeCount"] < 2:
        raise invalid(f"{at}.multisliceParams.nodeCount", f"{many['nodeCount']} is too few: more than 1")
    prefix = many.get("nodeIdPrefix") or own_id
    return [f"{prefix}-{number}" for number in range(many["nodeCount"])]


def require_quota(cloud: Cloud, parent: str, wanted: list[Hold]) -> None:
    """Raises ApiError RESOURCE_EXHAUSTED, in the API's words, where a project asks for more than its quota."""
    over = cloud.quota.first_over(wanted, cloud.asked_for(parent.split("/")[1]))
    if over is not None:
        generation = over.prefix.removesuffix("litepod").upper() + (
            "sLitepod" if over.prefix.endswith("litepod") else ""
        )
        tier = {"spot": "Preemptible", "reserved": "Reserved", "on-demand": ""}[over.tier]
        raise ApiError(
            "RESOURCE_EXHAUSTED",
            f"Quota limit 'TPU{generation}{tier}PerProjectPerZoneForTPUAPI' has been exceeded."
            f" Limit: {cloud.quota.of(over)} in zone {over.zone}.",
        )


def changes(mask: str, current: Json, body: Json) -> Json:
    """What a patch sets of a node. Raises ApiError for a field that can't be patched."""
    found: Json = {}
    for path in mask.split(","):
        field = re.sub(r"_([a-z])", lambda match: match[1].upper(), path.strip())
        if field not in PATCHABLE:
            raise invalid("updateMask", f"{path!r} can't be changed; only {', '.join(PATCHABLE)}")
        if field == "networkConfig.enableExternalIps":
            external = body.get("networkConfig", {}).get("enableExternalIps", False)
            found["networkConfig"] = current.get("networkConfig", {}) | {"enableExternalIps": external}
        else:
            found[field] = body.get(field, _EMPTY[field])
    return found


def _id(text: str, at: str) -> str:
    if not _ID.fullmatch(text):
        raise invalid(at, f"{text!r} is no id: it has letters, digits and _.~+%- only")
    return text
