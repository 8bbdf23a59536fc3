"""The desired state of a slice on Compute Engine, the bodies that request it, and what Google's answers mean. Pure.

A slice of one host is an instance, a larger one a managed instance group in bulk mode: all of its machines or none
(https://cloud.google.com/compute/docs/instance-groups/about-bulk-mode). A multislice is several of them, its parts.
A group has no labels, so its description has the owner; instances have the owner label, which no template has, as
templates are made before a stack has its id and deleted after it. Nothing is repaired by the group itself (DO_NOTHING):
a slice that is lost is made again by whoever wants it.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contracts.aliases import Json
from infra import naming
from infra.slice_apis.slice_api import (
    ACTIVE,
    INCOMPLETE,
    MISSING,
    Look,
    LookKind,
    Props,
    Spec,
    changed_pairs,
    earliest,
)

WAITING, PROVISIONING = "WAITING_FOR_RESOURCES", "PROVISIONING"
LATE_S = 60.0
"""A group that was made just now may not yet say what it is about to do."""
DEAD = frozenset({"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED", "DEPROVISIONING"})
RUNNING = frozenset({"RUNNING", "REPAIRING", "PENDING_STOP"})
"""An instance that is repaired may come back; nothing is deleted for it."""
MODELS = {
    "SPOT": "spot",
    "FLEX_START": "flex-start",
    "RESERVATION_BOUND": "reserved",
}
UNCERTAIN = frozenset({MISSING, INCOMPLETE})
"""What a listing lacks may be late, or someone else has deleted it: it is not lost for certain while the rest runs."""
GROUP = "compute#instanceGroupManager"
"""The kind of a group, as Google writes it."""
Part = Mapping[str, Any]
"""{"group": the group or None, "instances": those that are there}: of one slice, or of one of a multislice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec(Spec):
    """A slice that Compute Engine makes: the properties of `infra.compute_slice.ComputeSliceArgs`."""

    slice_id: str
    machine_type: str
    hosts: int
    count: int
    templates: Mapping[str, str]
    policies: Mapping[str, str]

    @classmethod
    def from_props(cls, props: Props) -> GroupSpec:
        spec = super().from_props(props)
        return dataclasses.replace(spec, hosts=spec.hosts or 1, count=spec.count or 1)

    @property
    def own_id(self) -> str:
        return self.slice_id

    @property
    def name(self) -> str:
        return f"projects/{self.project}/zones/{self.zone}/slices/{self.slice_id}"

    @property
    def parts(self) -> int:
        return self.count

    @property
    def is_group(self) -> bool:
        """Whether each part is a group and not a single instance."""
        return self.hosts > 1

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the groups or instances, with a number behind them if there are several."""
        return naming.part_names(self.slice_id, self.count)

    @property
    def template(self) -> str:
        return self.templates[_region(self.zone)]

    @property
    def policy(self) -> str:
        return self.policies.get(_region(self.zone), "")

    @property
    def hardware_name(self) -> str:
        return self.accelerator_type or self.machine_type

    @property
    def how_to_delete(self) -> str:
        thing = "instance-groups managed" if self.is_group else "instances"
        return (
            f"gcloud compute {thing} delete {' '.join(self.part_names)}"
            f" --project={self.project} --zone={self.zone}"
        )

    @property
    def about_taken_name(self) -> str:
        return f"See `gcloud compute instances list --project={self.project} --zones={self.zone}`"


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]


# --- the bodies of requests ---------------------------------------------------------------------------------------


def group(spec: GroupSpec, name: str) -> Json:
    """The body of instanceGroupManagers.insert. https://cloud.google.com/compute/docs/reference/rest/v1/instanceGroupManagers

    Its machines are numbered from 1.
    """
    return {
        "name": name,
        "baseInstanceName": f"{name}-w-###",
        "description": owner_text(spec.owner, spec.description),
        "instanceTemplate": spec.template,
        "allInstancesConfig": {"properties": {"labels": dict(spec.labels)}},
        "targetSize": spec.hosts,
        "targetSizePolicy": {"mode": "BULK"},
        "instanceLifecyclePolicy": {"defaultActionOnFailure": "DO_NOTHING"},
        "updatePolicy": {"type": "OPPORTUNISTIC"},
        **({"resourcePolicies": {"workloadPolicy": spec.policy}} if spec.policy else {}),
    }


def instance(spec: GroupSpec, name: str) -> Json:
    """The body of instances.insert, beside the template."""
    body: Json = {"name": name, "labels": dict(spec.labels)}
    if spec.capacity == "flex-start" and spec.valid_until_s:
        body["params"] = {"requestValidForDuration": {"seconds": str(spec.valid_until_s)}}
    return body


def owner_text(owner: str, description: str) -> str:
    """The description of a group, by which its owner is known."""
    return " ".join(filter(None, [description, f"{naming.OWNER_LABEL}={owner}"]))


def owner_of(thing: Json) -> str:
    """The owner of a group or instance; "": nobody that we know."""
    if is_group(thing):
        match = re.search(rf"(?:^| ){naming.OWNER_LABEL}=([a-z0-9_-]+)$", str(thing.get("description", "")))
        return match[1] if match else ""
    return str(thing.get("labels", {}).get(naming.OWNER_LABEL, ""))


def is_group(thing: Json) -> bool:
    return thing.get("kind") == GROUP


def part_of(thing: Json) -> str:
    """The name of the part that a group or instance is, or of the group that has made the instance."""
    name = str(thing["name"])
    if is_group(thing):
        return name
    made_by = metadata_of(thing).get("created-by", "")
    return _last(made_by) if made_by else re.sub(r"-w-\d+$", "", name)


def zone_of(thing: Json) -> str:
    return str(thing.get("zone", "")).rpartition("/")[2]


def gathered(spec: GroupSpec, things: Sequence[Json]) -> Json | None:
    """The slice that groups and instances of its zone make up; None: none of them has to do with it.

    Its `parts` are those of which something of the owner's is there, by name; `others` are names that somebody else's
    things have; `createTime` is that of its oldest part, RFC 3339.
    """
    parts: dict[str, Json] = {}
    others = []
    for thing in things:
        name = part_of(thing)
        if name not in spec.part_names:
            continue
        if not spec.owner or owner_of(thing) != spec.owner:
            others.append(str(thing["name"]))
            continue
        part = parts.setdefault(name, {"group": None, "instances": []})
        if is_group(thing):
            part["group"] = thing
        else:
            part["instances"].append(thing)
    if not parts and not others:
        return None
    oldest = _oldest(thing for part in parts.values() for thing in (part["group"], *part["instances"]))
    return {"name": spec.name, "parts": parts, "others": others, "failed": {}, "createTime": oldest}


def _oldest(things: Iterable[Json | None]) -> str:
    return earliest(thing.get("creationTimestamp") for thing in things if thing is not None)


def instance_changes(spec: GroupSpec, instance: Json, before: Sequence[Props]) -> dict[str, Json]:
    """What makes an instance that runs as its spec: by method of `instances`, the body. before: properties that were
    ours."""
    changes: dict[str, Json] = {}
    labels = changed_pairs(
        instance.get("labels", {}), spec.labels, [previous.get("labels") or {} for previous in before]
    )
    if labels is not None:
        fingerprint = instance.get("labelFingerprint", "")
        changes["setLabels"] = {"labels": labels, "labelFingerprint": fingerprint}
    metadata = changed_pairs(
        metadata_of(instance), spec.metadata, [previous.get("metadata") or {} for previous in before]
    )
    if metadata is not None:
        items = [{"key": key, "value": value} for key, value in metadata.items()]
        fingerprint = instance.get("metadata", {}).get("fingerprint", "")
        changes["setMetadata"] = {"items": items, "fingerprint": fingerprint}
    tags = instance.get("tags", {})
    if spec.tags and {*tags.get("items", [])} != {*spec.tags}:
        changes["setTags"] = {"items": list(spec.tags), "fingerprint": tags.get("fingerprint", "")}
    return changes


def metadata_of(thing: Json) -> dict[str, str]:
    items = thing.get("metadata", {}).get("items", [])
    return {str(item["key"]): str(item.get("value", "")) for item in items}


def differences(spec: GroupSpec, look: Look) -> tuple[str, ...]:
    """The properties in which a slice differs from the spec, without those that can be changed in place.

    While it waits, another template counts, as nobody knows in what it differs.
    """
    names: set[str] = set()
    for part in look.resource["parts"].values():
        existing = part["group"]
        if (existing is not None) != spec.is_group:
            names.add("hosts")
        if existing is not None:
            policy = existing.get("resourcePolicies", {}).get("workloadPolicy", "")
            differs = {
                "hosts": existing.get("targetSize", 0) != spec.hosts,
                "topology": _last(policy) != _last(spec.policy),
                "templates": look.kind == "waiting"
                and _last(existing.get("instanceTemplate", "")) != _last(spec.template),
            }
            names |= {name for name, is_different in differs.items() if is_different}
        for instance in part["instances"]:
            if _last(instance.get("machineType", "")) != spec.machine_type:
                names.add("machine_type")
            if _capacity(instance) not in (spec.capacity, ""):
                names.add("capacity")
    return tuple(sorted(names))


def _capacity(thing: Json) -> str:
    """What an instance's provisioning model says; "": STANDARD, which reserved ones may have too."""
    return MODELS.get(thing.get("scheduling", {}).get("provisioningModel", ""), "")


def capacity_of(thing: Json) -> str:
    """The capacity of an instance for people."""
    affinity = thing.get("reservationAffinity", {}).get("consumeReservationType")
    return _capacity(thing) or ("reserved" if affinity == "SPECIFIC_RESERVATION" else "on-demand")


def _last(path: str) -> str:
    return path.rpartition("/")[2]


# --- how it stands ------------------------------------------------------------------------------------------------


def look(spec: GroupSpec, resource: Json, now: datetime.datetime) -> Look:
    """The state of a slice: that of its worst part."""
    standing = {
        name: part_standing(spec, resource["parts"].get(name), now)
        if name not in resource["failed"]
        else ("lost", "FAILED", str(resource["failed"][name]))
        for name in spec.part_names
    }
    order = [
        *(item for item in standing.items() if item[1][0] == "lost" and item[1][1] not in UNCERTAIN),
        *(item for item in standing.items() if item[1][1] in UNCERTAIN),
        *(item for item in standing.items() if item[1][1] == WAITING),
        *(item for item in standing.items() if item[1][0] == "waiting"),
    ]
    kind: LookKind = "active"
    state, reason = ACTIVE, ""
    if order:
        name, (kind, state, reason) = order[0]
        reason = f"{name} {reason}" if reason else ""
    nodes = {
        name: {**part, "name": name, "createTime": _oldest(part["instances"])}
        for name, part in resource["parts"].items()
        if name in spec.part_names and part["instances"]
    }
    runs = any(
        instance.get("status") in RUNNING
        for part in resource["parts"].values()
        for instance in part["instances"]
    )
    return Look(
        kind=kind,
        state=state,
        reason=reason,
        resource=resource,
        nodes=nodes,
        may_be_running=kind == "active" or (state in UNCERTAIN and runs),
    )


def part_standing(spec: GroupSpec, part: Part | None, now: datetime.datetime) -> tuple[LookKind, str, str]:
    """(kind, state, reason) of one part. Pure."""
    if part is None:
        return "lost", MISSING, "is gone"
    statuses = {str(instance["name"]): str(instance.get("status", "")) for instance in part["instances"]}
    dead = [name for name, status in statuses.items() if status in DEAD]
    existing = part["group"]
    if existing is None and any(name not in spec.part_names for name in statuses):
        return "lost", "DELETING", "is being deleted"  # the machines of a group that is gone
    if existing is not None and existing.get("currentActions", {}).get("deleting", 0) > 0:
        return "lost", "DELETING", "is being deleted"
    if dead:
        return (
            "lost",
            _lost_state(spec),
            f"has lost {', '.join(f'{name} ({statuses[name]})' for name in dead)}",
        )
    created = (existing or part["instances"][0]).get("creationTimestamp")
    age_s = (now - datetime.datetime.fromisoformat(created)).total_seconds() if created else 0.0
    is_served = bool(statuses) and "PENDING" not in statuses.values()
    if not is_served and spec.valid_until_s and age_s >= spec.valid_until_s:
        return "lost", "FAILED", "could not be served before its valid-until time"
    if existing is not None:
        actions, status = existing.get("currentActions", {}), existing.get("status", {})
        bulk = status.get("bulkInstanceOperation", {})
        is_busy = bool(bulk.get("inProgress")) or any(
            actions.get(action, 0)
            for action in ("creating", "creatingWithoutRetries", "recreating", "verifying")
        )
        is_settled = not is_busy and (bool(status.get("isStable")) or age_s >= LATE_S)
        size = int(
            existing.get("targetSize", 0)
        )  # its own: what runs with another is not taken for incomplete
        if len(statuses) < size and is_settled:
            return "lost", INCOMPLETE, f"has {len(statuses)} of {size} machines"
        topologies = [
            str(topology.get("state")) for topology in status.get("appliedAcceleratorTopologies", [])
        ]
        if not is_busy and {"FAILED", "DEACTIVATING"} & {*topologies}:
            return "lost", "FAILED", f"has the topology {spec.topology} in state {', '.join(topologies)}"
        is_whole = len(statuses) == size
        has_policy = bool(existing.get("resourcePolicies", {}).get("workloadPolicy"))
        is_connected = not has_policy or {*topologies} in ({ACTIVE}, {"ACTIVE_DEGRADED"})
    else:
        is_whole = is_connected = True
    if is_whole and is_connected and {*statuses.values()} <= RUNNING:
        return "active", ACTIVE, ""
    return "waiting", PROVISIONING if is_served else WAITING, ""


def _lost_state(spec: GroupSpec) -> str:
    """Only spot machines, and those with an end, are taken by Google."""
    return "PREEMPTED" if spec.capacity in ("spot", "flex-start") else "STOPPED"


def ends_at(resource: Json) -> str:
    """When Google deletes the first of its instances by itself (RFC 3339); "": it does not."""
    moments = [
        moment
        for part in resource["parts"].values()
        for instance in part["instances"]
        if (
            moment := instance.get("resourceStatus", {}).get("scheduling", {}).get("terminationTimestamp")
            or instance.get("scheduling", {}).get("terminationTime")
        )
    ]
    return min(moments, key=datetime.datetime.fromisoformat, default="")
