"""Buckets and objects of the program, made on the server that stands for Cloud Storage in a rehearsal.

Without such a server they are in the stand-in's world only, as everything else is.
"""

from __future__ import annotations

import json
import os
import urllib.parse
from collections.abc import Mapping
from typing import Any

from rehearsal.gcp_stand_in.local_servers import send

SERVER = "STORAGE_EMULATOR_HOST"
HOSTS = "TPU_STACK_STAND_IN_HOSTS"
"""JSON of what a rehearsal's hosts are, which the keeper's description of a real stack does not say."""
DESCRIPTION = "control/stack.json"
BUCKET, OBJECT = "gcp:storage/bucket:Bucket", "gcp:storage/bucketObject:BucketObject"
PATIENCE_S = 60.0


def write(type_token: str, inputs: Mapping[str, Any]) -> None:
    """Make a bucket, or write an object. Raises WorldError if the server does not answer."""
    if type_token == BUCKET:
        _ask("POST", "/storage/v1/b?project=rehearsal", {"name": inputs["name"]})
    elif type_token == OBJECT:
        content = str(inputs.get("content", ""))
        if inputs["name"] == DESCRIPTION:
            content = json.dumps(json.loads(content) | json.loads(os.environ.get(HOSTS, "{}")), indent=1)
        query = urllib.parse.urlencode({"uploadType": "media", "name": inputs["name"]})
        _ask("POST", f"/upload/storage/v1/b/{inputs['bucket']}/o?{query}", content)


def remove(type_token: str, inputs: Mapping[str, Any]) -> None:
    """Remove an object. A bucket stays until the rehearsal ends. Raises WorldError, as `put`."""
    if type_token == OBJECT:
        name = urllib.parse.quote(str(inputs["name"]), safe="")
        _ask("DELETE", f"/storage/v1/b/{inputs['bucket']}/o/{name}", None)


def is_empty(bucket: str) -> bool:
    """Whether a bucket holds no object. Raises WorldError, as `put`."""
    answer = _ask("GET", f"/storage/v1/b/{bucket}/o?prefix=", None)
    return not json.loads(answer or b"{}").get("items")


def _ask(method: str, path: str, value: object) -> bytes:
    """The answer; nothing where there is no server, or where it knows of no such thing or has it already."""
    server = os.environ.get(SERVER)
    if not server:
        return b""
    data = None if value is None else (value if isinstance(value, str) else json.dumps(value)).encode()
    return send(method, server + path, data, server="bucket server", patience_s=PATIENCE_S)
