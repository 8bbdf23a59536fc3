"""What each method of Compute Engine does in the simulated cloud: a call that the document allows in, an answer out.

Here are the methods that tpu-stack calls, and the stand-in for the gcp provider; others are answered 501.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from contracts.aliases import Json
from rehearsal.compute_api.compute_cloud import ComputeCloud, tpu_of
from rehearsal.compute_api.compute_control import ComputeControl
from rehearsal.compute_api.compute_resources import ROOT, Group, Instance, Operation, url
from rehearsal.simulator.api_error import ApiError, invalid, missing, taken
from rehearsal.simulator.discovery import Call, Document, shipped
from rehearsal.simulator.repeats_and_pages import Repeats, page
from rehearsal.tpu_api import TpuApi

PREFIX = "/compute/v1/"
COLLECTIONS = frozenset(
    {"instances", "instanceGroupManagers", "zoneOperations", "regionOperations"}
    | {"regionInstanceTemplates", "resourcePolicies", "machineTypes"}
)
# Google's reasons and HTTP codes, https://cloud.google.com/compute/docs/api/troubleshooting-api-errors
REASONS = {
    "NOT_FOUND": ("notFound", 404),
    "ALREADY_EXISTS": ("alreadyExists", 409),
    "INVALID_ARGUMENT": ("invalid", 400),
    "FAILED_PRECONDITION": ("resourceNotReady", 400),
    "RESOURCE_EXHAUSTED": ("rateLimitExceeded", 403),
    "UNAVAILABLE": ("backendError", 503),
    "PERMISSION_DENIED": ("forbidden", 403),
    "INTERNAL": ("internalError", 500),
    "UNIMPLEMENTED": ("notImplemented", 501),
}
PAGE_SIZE = 500
_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_FILTER = re.compile(r"labels\.([\w-]+) ?= ?\"?([\w-]+)\"?")


class ComputeApi:
    """Compute Engine beside the Cloud TPU API of `api`, at the same address."""

    def __init__(self, api: TpuApi) -> None:
        self.cloud = cloud = ComputeCloud(api.cloud)
        self.control = ComputeControl(cloud)
        self._repeats = Repeats[Operation]()
        self._table: dict[str, Callable[[Call], Json]] = {
            "instances.insert": lambda call: self._once(call, self._insert_instance),
            "instances.get": lambda call: self._instance(call).render(),
            "instances.list": self._list_instances,
            "instances.aggregatedList": self._all_instances,
            "instances.delete": lambda call: self._once(
                call, lambda call: cloud.delete_instance(self._instance(call))
            ),
            "instances.getGuestAttributes": self._guest_attributes,
            "instances.setLabels": lambda call: self._change(call, "labels", "labelFingerprint"),
            "instances.setMetadata": lambda call: self._change(call, "metadata", "fingerprint"),
            "instances.setTags": lambda call: self._change(call, "tags", "fingerprint"),
            "instanceGroupManagers.insert": lambda call: self._once(call, self._insert_group),
            "instanceGroupManagers.get": lambda call: self._shown(self._group(call)),
            "instanceGroupManagers.aggregatedList": self._all_groups,
            "instanceGroupManagers.delete": lambda call: self._once(
                call, lambda call: cloud.delete_group(self._group(call))
            ),
            "instanceGroupManagers.setInstanceTemplate": lambda call: self._once(call, self._set_template),
            "zoneOperations.get": self._operation,
            "machineTypes.get": self._machine_type,
            "regionInstanceTemplates.insert": lambda call: self._keep(
                call, cloud.templates, "instanceTemplates"
            ),
            "regionInstanceTemplates.get": lambda call: self._template(
                f"{_region(call)}/instanceTemplates/{call.names['instanceTemplate']}"
            ),
            "regionInstanceTemplates.delete": lambda call: self._forget(
                call, cloud.templates, "instanceTemplates"
            ),
            "resourcePolicies.insert": lambda call: self._keep(call, cloud.policies, "resourcePolicies"),
            "resourcePolicies.delete": lambda call: self._forget(call, cloud.policies, "resourcePolicies"),
        }
        api.add(PREFIX, self)

    # --- as a `rehearsal.simulator.http_server.ApiService` ----------------------------------------------------------

    def document(self, target: str) -> Document:  # noqa: ARG002
        return shipped("v1", "compute", COLLECTIONS)

    def carry_out(self, call: Call) -> Json:
        name = call.method.id.removeprefix("compute.")
        if name not in self._table:
            raise ApiError("UNIMPLEMENTED", f"{name} is not simulated; there are {', '.join(self._table)}")
        if (zone := call.names.get("zone")) in self.cloud.cloud.unreachable:
            raise ApiError("UNAVAILABLE", f"{zone} cannot be reached")
        return self._table[name](call)

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        reason, code = REASONS.get(error.status, ("invalid", error.http_code))
        entry = {"message": error.message, "domain": "global", "reason": reason}
        return code, {"error": {"code": code, "message": error.message, "errors": [entry]}}

    # --- how --------------------------------------------------------------------------------------------------------

    def _once(self, call: Call, method: Callable[[Call], Operation]) -> Json:
        return self._repeats.once(call, method).render()

    def _zone(self, call: Call) -> str:
        return f"projects/{call.names['project']}/zones/{call.names['zone']}"

    def _operation(self, call: Call) -> Json:
        path = f"{self._zone(call)}/operations/{call.names['operation']}"
        if path not in self.cloud.operations:
            raise missing(path)
        return self.cloud.operations[path].render()

    def _machine_type(self, call: Call) -> Json:
        """Every zone has every type: which has which, the catalogue says, and that is not asked twice."""
        name = call.names["machineType"]
        return {"kind": "compute#machineType", "name": name, "zone": call.names["zone"]}

    def _instance(self, call: Call) -> Instance:
        path = f"{self._zone(call)}/instances/{call.names['instance']}"
        if path not in self.cloud.instances:
            raise missing(path)
        return self.cloud.instances[path]

    def _group(self, call: Call) -> Group:
        path = f"{self._zone(call)}/instanceGroupManagers/{call.names['instanceGroupManager']}"
        if path not in self.cloud.groups:
            raise missing(path)
        return self.cloud.groups[path]

    def _shown(self, group: Group) -> Json:
        policy = group.body.get("resourcePolicies", {}).get("workloadPolicy", "")
        topology = self.cloud.policies.get(_path(policy), {}).get("workloadPolicy", {})
        return group.render(str(topology.get("acceleratorTopology", "")), len(self.cloud.members(group)))

    # --- instances --------------------------------------------------------------------------------------------------

    def _insert_instance(self, call: Call) -> Operation:
        path = f"{self._zone(call)}/instances/{_checked_name(call.body)}"
        if path in self.cloud.instances:
            raise taken(path)
        if "sourceInstanceTemplate" not in call.query:
            raise ApiError("UNIMPLEMENTED", "instances.insert: only with sourceInstanceTemplate")
        properties = copy.deepcopy(self._template(call.query["sourceInstanceTemplate"])["properties"])
        for name in ("labels", "metadata", "tags", "scheduling"):
            if name in call.body:
                properties[name] = call.body[name]
        if call.body.get("resourcePolicies"):
            raise invalid("resourcePolicies", "a workload policy is for groups")
        pool, chips = tpu_of(properties, call.names["zone"])
        valid = call.body.get("params", {}).get("requestValidForDuration")
        instance = Instance(
            path=path,
            properties=properties,
            pool=pool,
            chips=chips,
            number=self.cloud.cloud.number(),
            created=self.cloud.cloud.moment,
            valid_s=float(valid["seconds"]) if valid else None,
        )
        return self.cloud.insert_instance(instance)

    def _template(self, link: str) -> Json:
        path = _path(link)
        if path not in self.cloud.templates:
            raise missing(path)
        return self.cloud.templates[path]

    def _list_instances(self, call: Call) -> Json:
        inside = f"{self._zone(call)}/instances/"
        label = _LABEL_FILTER.fullmatch(call.query.get("filter", ""))
        if call.query.get("filter") and label is None:
            raise ApiError("UNIMPLEMENTED", "filter: this stand-in knows labels.KEY=VALUE only")
        items = [
            instance.render()
            for path, instance in self.cloud.instances.items()
            if path.startswith(inside) and (label is None or instance.labels.get(label[1]) == label[2])
        ]
        size = call.query.get("maxResults") or PAGE_SIZE
        return {"kind": "compute#instanceList", **page(call, "items", items, size)}

    def _all_instances(self, call: Call) -> Json:
        rendered = {path: instance.render() for path, instance in self.cloud.instances.items()}
        return self._aggregated(call, "instances", "compute#instanceAggregatedList", rendered)

    def _all_groups(self, call: Call) -> Json:
        rendered = {path: self._shown(group) for path, group in self.cloud.groups.items()}
        kind = "compute#instanceGroupManagerAggregatedList"
        return self._aggregated(call, "instanceGroupManagers", kind, rendered)

    def _aggregated(self, call: Call, key: str, kind: str, rendered: Mapping[str, Json]) -> Json:
        inside, unreachable = f"projects/{call.names['project']}/", self.cloud.cloud.unreachable
        items: dict[str, Any] = {}
        for path, thing in sorted(rendered.items()):
            zone = path.split("/")[3]
            if path.startswith(inside) and zone not in unreachable:
                items.setdefault(f"zones/{zone}", {key: []})[key].append(thing)
        answer: Json = {"kind": kind, "items": items}
        if unreachable:
            answer["unreachables"] = [f"zones/{zone}" for zone in sorted(unreachable)]
        return answer

    def _guest_attributes(self, call: Call) -> Json:
        instance, query = self._instance(call), str(call.query.get("queryPath", ""))
        items = [
            {"namespace": namespace, "key": key, "value": value}
            for namespace, key, value in instance.guest_attributes
            if f"{namespace}/{key}".startswith(query)
        ]
        if not items:
            raise missing(f"{instance.path}/guestAttributes/{query}")
        return {"kind": "compute#guestAttributes", "queryPath": query, "queryValue": {"items": items}}

    def _change(self, call: Call, field: str, mark: str) -> Json:
        def change(call: Call) -> Operation:
            instance = self._instance(call)
            rendered = instance.render()
            current = rendered["labelFingerprint"] if field == "labels" else rendered[field]["fingerprint"]
            if call.body.get(mark) != current:
                raise ApiError("FAILED_PRECONDITION", f"{mark} is not that of the {field} as they are now")
            value = call.body.get("labels", {}) if field == "labels" else _without(call.body, mark)
            return self.cloud.change(instance, {field: value})

        return self._once(call, change)

    # --- groups -----------------------------------------------------------------------------------------------------

    def _insert_group(self, call: Call) -> Operation:
        body = call.body
        path = f"{self._zone(call)}/instanceGroupManagers/{_checked_name(body)}"
        if path in self.cloud.groups:
            raise taken(path)
        template = self._template(str(body.get("instanceTemplate", "")))
        pool, chips = tpu_of(template["properties"], call.names["zone"])
        self._require_topology(body, chips)
        group = Group(
            path=path,
            body=body,
            pool=pool,
            chips=chips,
            number=self.cloud.cloud.number(),
            created=self.cloud.cloud.moment,
        )
        return self.cloud.insert_group(group)

    def _require_topology(self, body: Json, chips: int) -> None:
        """Raises ApiError, in Google's words, for what no slice can be."""
        link = body.get("resourcePolicies", {}).get("workloadPolicy", "")
        if not link:
            return
        if "/" not in link:
            raise invalid("resourcePolicies.workloadPolicy", f"'{link}' is no URL of a resource policy")
        policy = self.cloud.policies.get(_path(link))
        if policy is None:
            raise missing(_path(link))
        if body.get("targetSizePolicy", {}).get("mode") != "BULK":
            raise invalid("targetSizePolicy.mode", "MIGs with TPU accelerator topology require BULK mode")
        topology = policy.get("workloadPolicy", {}).get("acceleratorTopology", "")
        size = math.prod(map(int, topology.split("x"))) // chips
        if body.get("targetSize") != size:
            raise invalid("targetSize", f"Target size should be {size} but was {body.get('targetSize')}")

    def _set_template(self, call: Call) -> Operation:
        self._template(call.body["instanceTemplate"])
        return self.cloud.change(self._group(call), {"instanceTemplate": call.body["instanceTemplate"]})

    # --- templates and policies, which only are there ----------------------------------------------------------------

    def _keep(self, call: Call, things: dict[str, Json], collection: str) -> Json:
        path = f"{_region(call)}/{collection}/{_checked_name(call.body)}"
        if path in things:
            raise taken(path)
        things[path] = call.body
        return self._regional(call, path, "insert")

    def _forget(self, call: Call, things: dict[str, Json], collection: str) -> Json:
        name = call.names.get("instanceTemplate") or call.names["resourcePolicy"]
        path = f"{_region(call)}/{collection}/{name}"
        if path not in things:
            raise missing(path)
        for group in self.cloud.groups.values():
            links = (
                group.body["instanceTemplate"],
                group.body.get("resourcePolicies", {}).get("workloadPolicy", ""),
            )
            if path in map(_path, links):
                raise ApiError(
                    "INVALID_ARGUMENT", f"The resource '{path}' is already being used by '{group.path}'"
                )
        del things[path]
        return self._regional(call, path, "delete")

    def _regional(self, call: Call, path: str, verb: str) -> Json:
        number = self.cloud.cloud.number()
        return {
            "kind": "compute#operation",
            "id": str(number),
            "name": f"operation-{number:06d}",
            "region": url(_region(call)),
            "operationType": verb,
            "targetLink": url(path),
            "status": "DONE",
            "progress": 100,
        }


def _region(call: Call) -> str:
    return f"projects/{call.names['project']}/regions/{call.names['region']}"


def _path(link: str) -> str:
    """projects/… of a link in any of its forms."""
    return link.removeprefix(ROOT).removeprefix("https://compute.googleapis.com/compute/v1/")


def _checked_name(body: Json) -> str:
    name = str(body.get("name", ""))
    if not _NAME.fullmatch(name):
        raise invalid("name", f"{name!r} is no name: up to 63 of lower-case letters, digits and hyphens")
    return name


def _without(body: Json, mark: str) -> Json:
    return {name: value for name, value in body.items() if name not in (mark, "kind")}
