"""The desired state of a queued resource, the bodies that request it, and what Google's answers mean. Pure.

`SliceSpec` is read from Pulumi's properties, which the configuration's reader has checked. `look` sums up the states of
a queued resource and its nodes: waiting, active, or lost for good. A queued resource that has been preempted is
SUSPENDED and never queued again, so the only way on is to delete it and make it again
(https://cloud.google.com/tpu/docs/queued-resources#queued_resource_states).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from contracts.aliases import Json
from infra import naming
from infra.slice_apis.slice_api import (
    ACTIVE,
    LOST,
    MISSING,
    MODES,
    SCOPES,
    Disk,
    Look,
    LookKind,
    Props,
    Spec,
    changed_pairs,
)

ApiVersion = Literal["v2", "v2alpha1"]

TIMING_SLACK_S = 120.0
# nodes.patch documents only these: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/patch
EXTERNAL_ADDRESSES = "networkConfig.enableExternalIps"

# A node that someone has stopped, that is repaired, or whose state Google does not know may come back.
LOST_NODE = frozenset({"PREEMPTED", "TERMINATED", "DELETING"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceSpec(Spec):
    """A slice that is made by a queued resource: the properties of `infra.queued_resource.QueuedResourceArgs`."""

    queued_resource_id: str
    accelerator_generation: str
    runtime_version: str
    reservation_name: str
    node_count: int
    guaranteed_s: int
    run_duration_s: int
    network: str
    external_addresses: bool
    service_account_email: str
    data_disks: tuple[Disk, ...]
    boot_disk_kms_key: str

    @classmethod
    def from_props(cls, props: Props) -> SliceSpec:
        spec = super().from_props(props)
        labels = dict(spec.labels)
        if spec.run_duration_s:
            labels[naming.RUN_DURATION_LABEL] = str(spec.run_duration_s)
        return dataclasses.replace(spec, labels=labels, node_count=spec.node_count or 1)

    @property
    def own_id(self) -> str:
        return self.queued_resource_id

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"

    @property
    def name(self) -> str:
        return f"{self.parent}/queuedResources/{self.queued_resource_id}"

    @property
    def parts(self) -> int:
        return self.node_count

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The ids of the nodes in order: the queued resource's own id, with a number behind it if there are several."""
        return naming.part_names(self.queued_resource_id, self.node_count)

    @property
    def hardware_name(self) -> str:
        return self.accelerator_type or f"{self.accelerator_generation} {self.topology}"

    @property
    def how_to_delete(self) -> str:
        return (
            f"gcloud compute tpus queued-resources delete {self.queued_resource_id}"
            f" --project={self.project} --zone={self.zone} --force"
        )

    @property
    def about_taken_name(self) -> str:
        return (
            f"A request of someone else for a node {' or '.join(self.node_ids[:2])} may be waiting; see"
            f" `gcloud compute tpus queued-resources list --project={self.project} --zone={self.zone}`"
        )


# --- the bodies of requests ---------------------------------------------------------------------------------------


def queued_resource(spec: SliceSpec) -> Json:
    """The body of queuedResources.create. https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources

    Tier: spot, or a reservation, or neither (on-demand); `guaranteed` asks for a minimum of time and is not said
    without one. flex-start: of `api_version` v2alpha1, whose discovery document (20261001) has `provisioningModel`,
    `runDuration` and another name for the parameters of several nodes.
    """
    node_spec: Json = {"parent": spec.parent, "node": _node(spec)}
    if spec.node_count == 1:
        node_spec["nodeId"] = spec.queued_resource_id
    else:
        node_spec["multisliceParams" if api_version(spec) == "v2" else "multiNodeParams"] = {
            "nodeCount": spec.node_count,
            "nodeIdPrefix": spec.queued_resource_id,
        }
    body: Json = {"tpu": {"nodeSpec": [node_spec]}}
    if spec.capacity == "flex-start":
        body["provisioningModel"] = "FLEX_START"
        body["runDuration"] = {"maxRunDuration": f"{spec.run_duration_s}s"}
    if spec.capacity == "spot":
        body["spot"] = {}
    if spec.capacity == "reserved":
        body["reservationName"] = spec.reservation_name
    if spec.guaranteed_s:
        body["guaranteed"] = {"minDuration": f"{spec.guaranteed_s}s"}
    if spec.valid_until_s:
        body["queueingPolicy"] = {"validUntilDuration": f"{spec.valid_until_s}s"}
    return body


def api_version(spec: SliceSpec) -> ApiVersion:
    """The version of the Cloud TPU API that takes the request. Everything else than the request is v2's."""
    return "v2alpha1" if spec.capacity == "flex-start" else "v2"


def ends_at(spec: SliceSpec, nodes: Iterable[Json]) -> str:
    """When Google takes the nodes of a flex-start request back, RFC 3339; "" for others, or where no node is shown.

    Counted from the creation of its first node: it may be a little later, and never earlier.
    """
    created = [str(node["createTime"]) for node in nodes if node.get("createTime")]
    if not spec.run_duration_s or not created:
        return ""
    first = min(datetime.datetime.fromisoformat(moment) for moment in created)
    return (first + datetime.timedelta(seconds=spec.run_duration_s)).isoformat()


def _node(spec: SliceSpec) -> Json:
    network: Json = {"enableExternalIps": spec.external_addresses}
    if spec.network:
        network["network"] = spec.network
    if spec.subnetwork:
        network["subnetwork"] = spec.subnetwork
    node: Json = {
        "runtimeVersion": spec.runtime_version,
        "networkConfig": network,
        "labels": dict(spec.labels),
    }
    if spec.accelerator_type:
        node["acceleratorType"] = spec.accelerator_type
    else:
        node["acceleratorConfig"] = {"type": spec.accelerator_generation, "topology": spec.topology}
    if spec.service_account_email:
        node["serviceAccount"] = {"email": spec.service_account_email, "scope": list(SCOPES)}
    if spec.metadata:
        node["metadata"] = dict(spec.metadata)
    if spec.tags:
        node["tags"] = list(spec.tags)
    if spec.data_disks:
        node["dataDisks"] = [
            {"sourceDisk": disk.source_disk, "mode": MODES[disk.mode]} for disk in spec.data_disks
        ]
    if spec.boot_disk_kms_key:
        node["bootDiskConfig"] = {"customerEncryptionKey": {"kmsKeyName": spec.boot_disk_kms_key}}
    if spec.description:
        node["description"] = spec.description
    return node


def requested_node(queued_resource: Json) -> Json:
    """The node that a queued resource asks for."""
    specs = queued_resource.get("tpu", {}).get("nodeSpec") or [{}]
    node: Json = specs[0].get("node", {})
    return node


def node_ids(queued_resource: Json) -> tuple[str, ...]:
    """The ids of the nodes that it requests, which may differ from those that we would request now."""
    own_id = str(queued_resource.get("name", "")).rpartition("/")[2]
    ids: list[str] = []
    for node_spec in queued_resource.get("tpu", {}).get("nodeSpec", []):
        many = node_spec.get("multisliceParams")
        if many is None:
            ids.append(node_spec.get("nodeId") or own_id)
        else:
            prefix = many.get("nodeIdPrefix") or own_id
            ids += [f"{prefix}-{number}" for number in range(int(many.get("nodeCount", 0)))]
    return tuple(ids)


def is_owned(node: Json, owner: str) -> bool:
    """Whether a node, or what asks for one, is this stack's. A queued resource has no labels of its own."""
    return bool(owner) and node.get("labels", {}).get(naming.OWNER_LABEL) == owner


def belongs_to(node: Json, spec: SliceSpec) -> bool:
    """Whether a node was made by the queued resource. Google may write the project as a number: ends are compared."""
    tail = f"/locations/{spec.zone}/queuedResources/{spec.queued_resource_id}"
    return str(node.get("queuedResource", "")).endswith(tail)


def differences(spec: SliceSpec, queued_resource: Json, *, waiting: bool) -> tuple[str, ...]:
    """The properties in which a queued resource differs from the spec, without those that can be changed in place.

    Only names are compared where Google may write a full path. What we leave to Google (no network, no account) is not
    compared. Timing matters as long as it waits.
    """
    node_spec = (queued_resource.get("tpu", {}).get("nodeSpec") or [{}])[0]
    node = requested_node(queued_resource)
    network = node.get("networkConfig", {})
    hardware = node.get("acceleratorConfig", {})
    pairs: list[tuple[str, object, object]] = [
        ("runtime_version", spec.runtime_version, node.get("runtimeVersion")),
        ("capacity", spec.capacity, _capacity(queued_resource)),
        (
            "run_duration_s",
            str(spec.run_duration_s or ""),
            node.get("labels", {}).get(naming.RUN_DURATION_LABEL, ""),
        ),
        ("node_count", spec.node_count, node_spec.get("multisliceParams", {}).get("nodeCount", 1)),
        (
            "guaranteed_s",
            float(spec.guaranteed_s),
            _seconds(queued_resource.get("guaranteed", {}).get("minDuration")),
        ),
        ("data_disks", _disks_asked_for(spec), _disks(node.get("dataDisks", []))),
        (
            "boot_disk_kms_key",
            spec.boot_disk_kms_key,
            node.get("bootDiskConfig", {}).get("customerEncryptionKey", {}).get("kmsKeyName", ""),
        ),
    ]
    if _last(spec.reservation_name) != "-":  # any reservation: Google may name the one that it took
        pairs.append(
            ("reservation_name", _last(spec.reservation_name), _last(queued_resource.get("reservationName")))
        )
    if spec.accelerator_type and "acceleratorType" in node:
        pairs.append(("accelerator_type", spec.accelerator_type, node["acceleratorType"]))
    if spec.accelerator_generation and hardware:
        pairs.append(("accelerator_generation", spec.accelerator_generation, hardware.get("type")))
        pairs.append(("topology", spec.topology, hardware.get("topology")))
    if spec.network:
        pairs.append(("network", _last(spec.network), _last(network.get("network"))))
    if spec.subnetwork:
        pairs.append(("subnetwork", _last(spec.subnetwork), _last(network.get("subnetwork"))))
    if spec.service_account_email:
        email = node.get("serviceAccount", {}).get("email")
        pairs.append(("service_account_email", spec.service_account_email, email))
    found_names = [name for name, ours, theirs in pairs if ours != theirs]
    if waiting and abs(spec.valid_until_s - _valid_until_s(queued_resource)) > TIMING_SLACK_S:
        found_names.append("valid_until_s")
    return tuple(found_names)


def patch(spec: SliceSpec, node: Json, before: Sequence[Mapping[str, Any]]) -> tuple[str, Json]:
    """(updateMask, body) of the nodes.patch that makes a node as its spec; ("", {}) where it is.

    `before`: labels and metadata that were ours, as {"labels": …, "metadata": …}; those that the spec no longer has are
    removed. Keys of others (gcloud writes ssh-keys, Google its own labels) stay.
    """
    body: Json = {}
    for field, ours in (("labels", spec.labels), ("metadata", spec.metadata)):
        earlier = [previous.get(field) or {} for previous in before]
        if (pairs := changed_pairs(node.get(field, {}), ours, earlier)) is not None:
            body[field] = pairs
    if sorted(node.get("tags", [])) != sorted(spec.tags):
        body["tags"] = list(spec.tags)
    if node.get("description", "") != spec.description:
        body["description"] = spec.description
    mask = list(body)
    external = bool(node.get("networkConfig", {}).get("enableExternalIps", False))
    if external != spec.external_addresses:
        body["networkConfig"] = {"enableExternalIps": spec.external_addresses}
        mask.append(EXTERNAL_ADDRESSES)
    return ",".join(mask), body


def _capacity(queued_resource: Json) -> str:
    if naming.RUN_DURATION_LABEL in requested_node(queued_resource).get("labels", {}):
        return "flex-start"
    if "spot" in queued_resource:
        return "spot"
    return "reserved" if queued_resource.get("reservationName") else "on-demand"


def _last(path: str | None) -> str:
    return (path or "").rpartition("/")[2]


def _seconds(duration: str | None) -> float:
    return float(duration.removesuffix("s")) if duration else 0.0


def _valid_until_s(queued_resource: Json) -> float:
    policy = queued_resource.get("queueingPolicy", {})
    if "validUntilTime" in policy and "createTime" in queued_resource:
        until, since = (
            datetime.datetime.fromisoformat(text)
            for text in (policy["validUntilTime"], queued_resource["createTime"])
        )
        return (until - since).total_seconds()
    return _seconds(policy.get("validUntilDuration"))


def _disks_asked_for(spec: SliceSpec) -> list[tuple[str, str]]:
    return sorted((_last(disk.source_disk), MODES[disk.mode]) for disk in spec.data_disks)


def _disks(disks: Sequence[Json]) -> list[tuple[str, str]]:
    return sorted((_last(disk.get("sourceDisk")), disk.get("mode", "READ_WRITE")) for disk in disks)


# --- how it stands ------------------------------------------------------------------------------------------------


def look(queued_resource: Json, nodes: Mapping[str, Json | None]) -> Look:
    """nodes: by id, None where there is none; only needed if the resource is ACTIVE."""
    state = resource_state(queued_resource)
    present = {node_id: node for node_id, node in nodes.items() if node is not None}
    kind: LookKind = "active" if state == ACTIVE else "lost" if state in LOST else "waiting"
    reason = _reason(queued_resource, state) if kind == "lost" else ""
    if kind == "active":
        lost = [
            (node_id, MISSING if node is None else str(node.get("state", "")))
            for node_id, node in nodes.items()
            if node is None or node.get("state") in LOST_NODE
        ]
        if lost:
            # A node that is missing may only be late; one that says itself that it is over is certain.
            worst = next((node_state for _, node_state in lost if node_state != MISSING), MISSING)
            kind, state = "lost", worst
            reason = ", ".join(f"node {node_id} is {'gone' if at == MISSING else at}" for node_id, at in lost)
    running = any(node.get("state") not in LOST_NODE for node in present.values())
    return Look(
        kind=kind,
        state=state,
        reason=reason,
        resource=queued_resource,
        nodes=present,
        may_be_running=kind == "active" or (state == MISSING and running),
    )


def resource_state(queued_resource: Json) -> str:
    return str(queued_resource.get("state", {}).get("state", "STATE_UNSPECIFIED"))


def _reason(queued_resource: Json, state: str) -> str:
    data = queued_resource.get("state", {})
    message = data.get("failedData", {}).get("error", {}).get("message")
    by = " by a user" if data.get("stateInitiator") == "USER" and state.startswith("SUSPEND") else ""
    return f"it is {state}{by}{f': {message}' if message else ''}"
