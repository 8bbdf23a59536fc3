"""Instance templates and placement policies of slices, which the simulated Compute Engine needs to make slices.

Without one they are in the stand-in's world only, as everything else is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from contracts.aliases import Json
from rehearsal.gcp_stand_in.local_servers import send

TEMPLATE = "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate"
POLICY = "gcp:compute/resourcePolicy:ResourcePolicy"
COLLECTIONS = {TEMPLATE: "instanceTemplates", POLICY: "resourcePolicies"}
SERVER = "simulated Compute Engine"


def write(endpoint: str | None, type_token: str, inputs: Mapping[str, Any]) -> None:
    """endpoint: as in gcp:computeCustomEndpoint; None: there is no simulator. Raises WorldError."""
    if endpoint is None or not _is_told(type_token, inputs):
        return
    body = template_body(inputs) if type_token == TEMPLATE else policy_body(inputs)
    url = f"{endpoint}{_collection(type_token, inputs)}"
    send("POST", url, json.dumps(body).encode(), server=SERVER)


def remove(endpoint: str | None, type_token: str, inputs: Mapping[str, Any]) -> None:
    """Raises WorldError where a slice still uses it."""
    if endpoint is not None and _is_told(type_token, inputs):
        url = f"{endpoint}{_collection(type_token, inputs)}/{inputs['name']}"
        send("DELETE", url, None, server=SERVER)


def _is_told(type_token: str, inputs: Mapping[str, Any]) -> bool:
    return type_token == TEMPLATE or (type_token == POLICY and bool(inputs.get("workloadPolicy")))


def _collection(type_token: str, inputs: Mapping[str, Any]) -> str:
    return f"projects/{inputs['project']}/regions/{inputs['region']}/{COLLECTIONS[type_token]}"


def policy_body(inputs: Mapping[str, Any]) -> Json:
    return {"name": inputs["name"], "workloadPolicy": dict(inputs["workloadPolicy"])}


def template_body(inputs: Mapping[str, Any]) -> Json:
    """The API's form of the provider's inputs, of those that the simulator reads. Pure."""
    metadata = dict(inputs.get("metadata") or {})
    if inputs.get("metadataStartupScript"):
        metadata["startup-script"] = inputs["metadataStartupScript"]
    properties: Json = {
        "machineType": inputs["machineType"],
        "labels": dict(inputs.get("labels") or {}),
        "tags": {"items": list(inputs.get("tags") or [])},
        "metadata": {"items": [{"key": key, "value": value} for key, value in sorted(metadata.items())]},
        "scheduling": _scheduling(inputs.get("scheduling") or {}),
        "networkInterfaces": [_interface(each) for each in inputs.get("networkInterfaces") or []],
        "disks": [_disk(each) for each in inputs.get("disks") or []],
    }
    if account := inputs.get("serviceAccount"):
        properties["serviceAccounts"] = [{"email": account["email"], "scopes": list(account["scopes"])}]
    if affinity := inputs.get("reservationAffinity"):
        specific = affinity.get("specificReservation") or {}
        properties["reservationAffinity"] = {"consumeReservationType": affinity["type"]} | {
            name: specific[name] for name in ("key", "values") if name in specific
        }
    return {"name": inputs["name"], "properties": properties}


def _scheduling(inputs: Mapping[str, Any]) -> Json:
    names = ("provisioningModel", "instanceTerminationAction", "onHostMaintenance", "automaticRestart")
    scheduling: Json = {name: inputs[name] for name in names if inputs.get(name) is not None}
    if (duration := inputs.get("maxRunDuration")) is not None:
        scheduling["maxRunDuration"] = {"seconds": str(duration["seconds"])}
    return scheduling


def _interface(inputs: Mapping[str, Any]) -> Json:
    interface: Json = {
        name: inputs[name] for name in ("network", "subnetwork", "nicType") if inputs.get(name)
    }
    if inputs.get("accessConfigs"):
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT"}]
    return interface


def _disk(inputs: Mapping[str, Any]) -> Json:
    if inputs.get("source"):
        return {"source": inputs["source"], "mode": inputs.get("mode") or "READ_WRITE"}
    fields = {"sourceImage": inputs.get("sourceImage"), "diskType": inputs.get("diskType")}
    if inputs.get("diskSizeGb"):
        fields["diskSizeGb"] = str(inputs["diskSizeGb"])
    parameters = {name: value for name, value in fields.items() if value}
    return {"boot": bool(inputs.get("boot")), "autoDelete": True, "initializeParams": parameters}
