"""Makes bodies of the API from a spec, and reads them: whose a thing is, and whether it asks for the same. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from infra import naming
from infra.cloud_tpu.spec import Spec

Json = dict[str, Any]

SCOPES = (
    "https://www.googleapis.com/auth/cloud-platform",
)  # what a host may do is up to its account's roles
MODES = {"read-write": "READ_WRITE", "read-only": "READ_ONLY"}
TIMING_SLACK_S = 120.0
# nodes.patch documents only these: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes/patch
EXTERNAL_ADDRESSES = "networkConfig.enableExternalIps"


def queued_resource(spec: Spec) -> Json:
    """The body of queuedResources.create. https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources

    Tier: spot, or a reservation, or neither (on-demand); `guaranteed` asks for a minimum of time and is not said
    without one.
    """
    node_spec: Json = {"parent": spec.parent, "node": _node(spec)}
    if spec.node_count == 1:
        node_spec["nodeId"] = spec.queued_resource_id
    else:
        node_spec["multisliceParams"] = {
            "nodeCount": spec.node_count,
            "nodeIdPrefix": spec.queued_resource_id,
        }
    body: Json = {"tpu": {"nodeSpec": [node_spec]}}
    if spec.capacity == "spot":
        body["spot"] = {}
    if spec.capacity == "reserved":
        body["reservationName"] = spec.reservation_name
    if spec.guaranteed_s:
        body["guaranteed"] = {"minDuration": f"{spec.guaranteed_s}s"}
    if spec.valid_until_s:
        body["queueingPolicy"] = {"validUntilDuration": f"{spec.valid_until_s}s"}
    return body


def _node(spec: Spec) -> Json:
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


def node_of(queued_resource: Json) -> Json:
    """The node that a queued resource asks for."""
    specs = queued_resource.get("tpu", {}).get("nodeSpec") or [{}]
    node: Json = specs[0].get("node", {})
    return node


def node_ids(queued_resource: Json) -> tuple[str, ...]:
    """Of the nodes that it asks for, which need not be those that we would ask for now."""
    own_id = str(queued_resource.get("name", "")).rpartition("/")[2]
    found: list[str] = []
    for node_spec in queued_resource.get("tpu", {}).get("nodeSpec", []):
        many = node_spec.get("multisliceParams")
        if many is None:
            found.append(node_spec.get("nodeId") or own_id)
        else:
            prefix = many.get("nodeIdPrefix") or own_id
            found += [f"{prefix}-{number}" for number in range(int(many.get("nodeCount", 0)))]
    return tuple(found)


def is_owned(node: Json, owner: str) -> bool:
    """Whether a node, or what asks for one, is this stack's. A queued resource has no labels of its own."""
    return bool(owner) and node.get("labels", {}).get(naming.OWNER_LABEL) == owner


def belongs_to(node: Json, spec: Spec) -> bool:
    """Whether a node was made by the queued resource. Google may write the project as a number: ends are compared."""
    tail = f"/locations/{spec.zone}/queuedResources/{spec.queued_resource_id}"
    return str(node.get("queuedResource", "")).endswith(tail)


def differences(spec: Spec, found: Json, *, waiting: bool) -> tuple[str, ...]:
    """Properties in which a queued resource is other than spec, less those that can be changed in place.

    Only names are compared where Google may write a full path. What we leave to Google (no network, no account) is not
    compared. Timing matters as long as it waits.
    """
    node_spec = (found.get("tpu", {}).get("nodeSpec") or [{}])[0]
    node = node_of(found)
    network = node.get("networkConfig", {})
    hardware = node.get("acceleratorConfig", {})
    pairs: list[tuple[str, object, object]] = [
        ("runtime_version", spec.runtime_version, node.get("runtimeVersion")),
        ("capacity", spec.capacity, _capacity(found)),
        ("node_count", spec.node_count, node_spec.get("multisliceParams", {}).get("nodeCount", 1)),
        (
            "guaranteed_s",
            float(spec.guaranteed_s),
            _seconds(found.get("guaranteed", {}).get("minDuration")),
        ),
        ("data_disks", _disks_asked_for(spec), _disks(node.get("dataDisks", []))),
        (
            "boot_disk_kms_key",
            spec.boot_disk_kms_key,
            node.get("bootDiskConfig", {}).get("customerEncryptionKey", {}).get("kmsKeyName", ""),
        ),
    ]
    if _last(spec.reservation_name) != "-":  # any reservation: Google may name the one that it took
        pairs.append(("reservation_name", _last(spec.reservation_name), _last(found.get("reservationName"))))
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
    if waiting and abs(spec.valid_until_s - _valid_until_s(found)) > TIMING_SLACK_S:
        found_names.append("valid_until_s")
    return tuple(found_names)


def patch(spec: Spec, node: Json, before: Sequence[Mapping[str, Any]]) -> tuple[str, Json]:
    """(updateMask, body) of the nodes.patch that makes a node as its spec; ("", {}) where it is.

    `before`: labels and metadata that were ours, as {"labels": …, "metadata": …}; what of it is not in the spec any
    more is taken away. Keys of others (gcloud writes ssh-keys, Google its own labels) stay.
    """
    body: Json = {}
    for field, ours in (("labels", spec.labels), ("metadata", spec.metadata)):
        has: Mapping[str, str] = node.get(field, {})
        dropped = {key for each in before for key in (each.get(field) or {})} - set(ours)
        merged = {key: value for key, value in has.items() if key not in dropped} | dict(ours)
        if merged != dict(has):
            body[field] = merged
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


def _capacity(found: Json) -> str:
    if "spot" in found:
        return "spot"
    return "reserved" if found.get("reservationName") else "on-demand"


def _last(path: str | None) -> str:
    return (path or "").rpartition("/")[2]


def _seconds(duration: str | None) -> float:
    return float(duration.removesuffix("s")) if duration else 0.0


def _valid_until_s(found: Json) -> float:
    policy = found.get("queueingPolicy", {})
    if "validUntilTime" in policy and "createTime" in found:
        until, since = (
            datetime.datetime.fromisoformat(text) for text in (policy["validUntilTime"], found["createTime"])
        )
        return (until - since).total_seconds()
    return _seconds(policy.get("validUntilDuration"))


def _disks_asked_for(spec: Spec) -> list[tuple[str, str]]:
    return sorted((_last(disk.source_disk), MODES[disk.mode]) for disk in spec.data_disks)


def _disks(disks: Sequence[Json]) -> list[tuple[str, str]]:
    return sorted((_last(disk.get("sourceDisk")), disk.get("mode", "READ_WRITE")) for disk in disks)
