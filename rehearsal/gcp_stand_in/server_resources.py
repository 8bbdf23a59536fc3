"""What servers of a rehearsal have of the program's resources: buckets, objects, what slices of Compute Engine need.

Without such a server they are in the stand-in's world only, as everything else is.
"""

from __future__ import annotations

import json
import os
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from contracts.aliases import Json
from rehearsal.gcp_stand_in.stand_in_world import WorldError
from rehearsal.local_servers import CONFLICT, NOT_FOUND, RefusalError, ask

STORAGE = "STORAGE_EMULATOR_HOST"
HOSTS = "TPU_STACK_STAND_IN_HOSTS"
"""JSON of what a rehearsal's hosts are, which the keeper's description of a real stack does not say."""
DESCRIPTION = "control/stack.json"
PATIENCE_S = 60.0
"""For how long a server that does not answer is asked again."""

BUCKET, OBJECT = "gcp:storage/bucket:Bucket", "gcp:storage/bucketObject:BucketObject"
TEMPLATE = "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate"
POLICY = "gcp:compute/resourcePolicy:ResourcePolicy"
COLLECTIONS = {TEMPLATE: "instanceTemplates", POLICY: "resourcePolicies"}


def write(type_token: str, inputs: Mapping[str, Any], compute: str | None = None) -> None:
    """Make a resource on its server. compute: the URL of Compute Engine. Raises WorldError if that does not answer."""
    if type_token == BUCKET:
        _ask_storage("POST", "/storage/v1/b?project=rehearsal", json.dumps({"name": inputs["name"]}))
    elif type_token == OBJECT:
        content = str(inputs.get("content", ""))
        if inputs["name"] == DESCRIPTION:
            content = json.dumps(json.loads(content) | json.loads(os.environ.get(HOSTS, "{}")), indent=1)
        query = urllib.parse.urlencode({"uploadType": "media", "name": inputs["name"]})
        _ask_storage("POST", f"/upload/storage/v1/b/{inputs['bucket']}/o?{query}", content)
    elif compute and _is_needed(type_token, inputs):
        body = template_body(inputs) if type_token == TEMPLATE else policy_body(inputs)
        _insist("POST", f"{compute}{_collection(type_token, inputs)}", json.dumps(body))


def remove(type_token: str, inputs: Mapping[str, Any], compute: str | None) -> None:
    """Remove it there; a bucket stays until the rehearsal ends. Raises WorldError, also where a slice still uses it."""
    if type_token == OBJECT:
        name = urllib.parse.quote(str(inputs["name"]), safe="")
        _ask_storage("DELETE", f"/storage/v1/b/{inputs['bucket']}/o/{name}")
    elif compute and _is_needed(type_token, inputs):
        _insist("DELETE", f"{compute}{_collection(type_token, inputs)}/{inputs['name']}")


def is_empty(bucket: str) -> bool:
    """Whether a bucket holds no object. Raises WorldError, as `write`."""
    answer = _ask_storage("GET", f"/storage/v1/b/{bucket}/o?prefix=")
    return not json.loads(answer or b"{}").get("items")


def _ask_storage(method: str, path: str, content: str | None = None) -> bytes:
    """The answer; nothing where there is no server."""
    server = os.environ.get(STORAGE)
    return _insist(method, server + path, content) if server else b""


def _insist(method: str, url: str, content: str | None = None) -> bytes:
    """The answer; nothing where the server has the thing already, or no such thing."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask(method, url, None if content is None else content.encode())
        except RefusalError as refusal:
            if refusal.code == (CONFLICT if method == "POST" else NOT_FOUND):
                return b""
            raise WorldError(str(refusal)) from None
        except OSError as error:
            if time.monotonic() >= deadline:
                raise WorldError(f"the server {url} does not answer: {error}") from None
            time.sleep(1.0)


def _is_needed(type_token: str, inputs: Mapping[str, Any]) -> bool:
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
