"""What each method of Compute Engine does in the simulated cloud: a call that the document allows in, an answer out.

Here are the methods that tpu-stack calls, and the stand-in for the gcp provider; others are answered 501.
"""

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from contracts.aliases import Json
from rehearsal.simulated_cloud.cloud import Operation
from rehearsal.simulated_cloud.compute_lifecycle import ComputeLifecycle, tpu_of
from rehearsal.simulated_cloud.compute_records import ROOT, Group, Instance, render_operation
from rehearsal.simulator.api_error import ApiError, invalid, missing, taken
from rehearsal.simulator.discovery import Call, Document, shipped
from rehearsal.simulator.repeats_and_pages import Repeats, page

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


class ComputeService:
    """A `rehearsal.simulator.http_server.ApiService`, called with the lock of the cloud held, once that has settled."""

    def __init__(self, lifecycle: ComputeLifecycle) -> None:
        self._lifecycle, self._cloud = lifecycle, lifecycle.cloud
        self._repeats = Repeats[Operation]()
        templates, policies = lifecycle.templates, lifecycle.policies
        self._answers: dict[str, Callable[[Call], Json]] = {
            "instances.get": lambda call: self._instance(call).render(),
            "instances.list": self._list_instances,
            "instances.aggregatedList": self._all_instances,
            "instances.getGuestAttributes": self._guest_attributes,
            "instanceGroupManagers.get": lambda call: self._shown(self._group(call)),
            "instanceGroupManagers.aggregatedList": self._all_groups,
            "machineTypes.get": self._machine_type,
            "regionInstanceTemplates.get": lambda call: self._template(
                f"{_region(call)}/instanceTemplates/{call.names['instanceTemplate']}"
            ),
        }
        self._operations: dict[str, Callable[[Call], Operation]] = {
            "zoneOperations.get": lambda call: self._cloud.operation(
                f"{_zone(call)}/operations/{call.names['operation']}"
            ),
            "instances.insert": self._insert_instance,
            "instances.delete": lambda call: lifecycle.delete_instance(self._instance(call)),
            "instances.setLabels": lambda call: self._change(call, "labels", "labelFingerprint"),
            "instances.setMetadata": lambda call: self._change(call, "metadata", "fingerprint"),
            "instances.setTags": lambda call: self._change(call, "tags", "fingerprint"),
            "instanceGroupManagers.insert": self._insert_group,
            "instanceGroupManagers.delete": lambda call: lifecycle.delete_group(self._group(call)),
            "instanceGroupManagers.setInstanceTemplate": self._set_template,
            "regionInstanceTemplates.insert": lambda call: self._keep(call, templates, "instanceTemplates"),
            "regionInstanceTemplates.delete": lambda call: self._forget(call, templates, "instanceTemplates"),
            "resourcePolicies.insert": lambda call: self._keep(call, policies, "resourcePolicies"),
            "resourcePolicies.delete": lambda call: self._forget(call, policies, "resourcePolicies"),
        }
        """Those that answer with an operation."""

    def document(self, target: str) -> Document:  # noqa: ARG002
        return shipped("v1", "compute", COLLECTIONS)

    def carry_out(self, call: Call) -> Json:
        name = call.method.id.removeprefix("compute.")
        if (zone := call.names.get("zone")) in self._cloud.unreachable:
            raise ApiError("UNAVAILABLE", f"{zone} cannot be reached")
        if name in self._answers:
            return self._answers[name](call)
        if name in self._operations:
            return render_operation(self._repeats.once(call, self._operations[name]))
        simulated = ", ".join([*self._answers, *self._operations])
        raise ApiError("UNIMPLEMENTED", f"{name} is not simulated; there are {simulated}")

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        reason, code = REASONS.get(error.status, ("invalid", error.http_code))
        entry = {"message": error.message, "domain": "global", "reason": reason}
        return code, {"error": {"code": code, "message": error.message, "errors": [entry]}}

    # --- how --------------------------------------------------------------------------------------------------------

    def _machine_type(self, call: Call) -> Json:
        """Every zone has every type: which has which, the catalogue says, and that is not asked twice."""
        name = call.names["machineType"]
        return {"kind": "compute#machineType", "name": name, "zone": call.names["zone"]}

    def _instance(self, call: Call) -> Instance:
        return self._cloud.find(Instance, f"{_zone(call)}/instances/{call.names['instance']}")

    def _group(self, call: Call) -> Group:
        name = call.names["instanceGroupManager"]
        return self._cloud.find(Group, f"{_zone(call)}/instanceGroupManagers/{name}")

    def _new_name(self, call: Call, collection: str) -> str:
        """Raises ApiError where it is no name, or is taken."""
        name = f"{_zone(call)}/{collection}/{_checked_name(call.body)}"
        if name in self._cloud.things:
            raise taken(name)
        return name

    def _shown(self, group: Group) -> Json:
        policy = group.body.get("resourcePolicies", {}).get("workloadPolicy", "")
        topology = self._lifecycle.policies.get(_path(policy), {}).get("workloadPolicy", {})
        return group.render(str(topology.get("acceleratorTopology", "")), len(self._lifecycle.members(group)))

    # --- instances --------------------------------------------------------------------------------------------------

    def _insert_instance(self, call: Call) -> Operation:
        name = self._new_name(call, "instances")
        if "sourceInstanceTemplate" not in call.query:
            raise ApiError("UNIMPLEMENTED", "instances.insert: only with sourceInstanceTemplate")
        properties = copy.deepcopy(self._template(call.query["sourceInstanceTemplate"])["properties"])
        own = ("labels", "metadata", "tags", "scheduling")
        properties |= {field: call.body[field] for field in own if field in call.body}
        if call.body.get("resourcePolicies"):
            raise invalid("resourcePolicies", "a workload policy is for groups")
        pool, chips = tpu_of(properties, call.names["zone"])
        valid = call.body.get("params", {}).get("requestValidForDuration")
        instance = Instance(
            name=name,
            properties=properties,
            pool=pool,
            chips=chips,
            number=self._cloud.number(),
            created=self._cloud.moment,
            valid_s=float(valid["seconds"]) if valid else None,
        )
        return self._lifecycle.insert_instance(instance)

    def _template(self, link: str) -> Json:
        path = _path(link)
        if path not in self._lifecycle.templates:
            raise missing(path)
        return self._lifecycle.templates[path]

    def _list_instances(self, call: Call) -> Json:
        inside = f"{_zone(call)}/instances/"
        label = _LABEL_FILTER.fullmatch(call.query.get("filter", ""))
        if call.query.get("filter") and label is None:
            raise ApiError("UNIMPLEMENTED", "filter: this stand-in knows labels.KEY=VALUE only")
        items = [
            instance.render()
            for instance in self._cloud.all(Instance)
            if instance.name.startswith(inside)
            and (label is None or instance.labels.get(label[1]) == label[2])
        ]
        size = call.query.get("maxResults") or PAGE_SIZE
        return {"kind": "compute#instanceList", **page(call, "items", items, size)}

    def _all_instances(self, call: Call) -> Json:
        rendered = {instance.name: instance.render() for instance in self._cloud.all(Instance)}
        return self._aggregated(call, "instances", "compute#instanceAggregatedList", rendered)

    def _all_groups(self, call: Call) -> Json:
        rendered = {group.name: self._shown(group) for group in self._cloud.all(Group)}
        kind = "compute#instanceGroupManagerAggregatedList"
        return self._aggregated(call, "instanceGroupManagers", kind, rendered)

    def _aggregated(self, call: Call, key: str, kind: str, rendered: Mapping[str, Json]) -> Json:
        inside, unreachable = f"projects/{call.names['project']}/", self._cloud.unreachable
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
            raise missing(f"{instance.name}/guestAttributes/{query}")
        return {"kind": "compute#guestAttributes", "queryPath": query, "queryValue": {"items": items}}

    def _change(self, call: Call, field: str, mark: str) -> Operation:
        instance = self._instance(call)
        rendered = instance.render()
        current = rendered["labelFingerprint"] if field == "labels" else rendered[field]["fingerprint"]
        if call.body.get(mark) != current:
            raise ApiError("FAILED_PRECONDITION", f"{mark} is not that of the {field} as they are now")
        value = call.body.get("labels", {}) if field == "labels" else _without(call.body, mark)
        return self._lifecycle.change(instance, {field: value})

    # --- groups -----------------------------------------------------------------------------------------------------

    def _insert_group(self, call: Call) -> Operation:
        body, name = call.body, self._new_name(call, "instanceGroupManagers")
        template = self._template(str(body.get("instanceTemplate", "")))
        pool, chips = tpu_of(template["properties"], call.names["zone"])
        self._require_topology(body, chips)
        group = Group(
            name=name,
            body=body,
            pool=pool,
            chips=chips,
            number=self._cloud.number(),
            created=self._cloud.moment,
        )
        return self._lifecycle.insert_group(group)

    def _require_topology(self, body: Json, chips: int) -> None:
        """Raises ApiError, in Google's words, for what no slice can be."""
        link = body.get("resourcePolicies", {}).get("workloadPolicy", "")
        if not link:
            return
        if "/" not in link:
            raise invalid("resourcePolicies.workloadPolicy", f"'{link}' is no URL of a resource policy")
        policy = self._lifecycle.policies.get(_path(link))
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
        changes = {"instanceTemplate": call.body["instanceTemplate"]}
        return self._lifecycle.change(self._group(call), changes)

    # --- templates and policies, which only are there ----------------------------------------------------------------

    def _keep(self, call: Call, things: dict[str, Json], collection: str) -> Operation:
        path = f"{_region(call)}/{collection}/{_checked_name(call.body)}"
        if path in things:
            raise taken(path)
        things[path] = call.body
        return self._done(path, "insert")

    def _forget(self, call: Call, things: dict[str, Json], collection: str) -> Operation:
        name = call.names.get("instanceTemplate") or call.names["resourcePolicy"]
        path = f"{_region(call)}/{collection}/{name}"
        if path not in things:
            raise missing(path)
        for group in self._cloud.all(Group):
            links = (
                group.body["instanceTemplate"],
                group.body.get("resourcePolicies", {}).get("workloadPolicy", ""),
            )
            if path in map(_path, links):
                raise ApiError(
                    "INVALID_ARGUMENT", f"The resource '{path}' is already being used by '{group.name}'"
                )
        del things[path]
        return self._done(path, "delete")

    def _done(self, path: str, verb: str) -> Operation:
        operation = self._cloud.begin(path, verb)
        self._cloud.end(operation, {})
        return operation


def _zone(call: Call) -> str:
    return f"projects/{call.names['project']}/zones/{call.names['zone']}"


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
