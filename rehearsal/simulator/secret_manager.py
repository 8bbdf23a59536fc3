"""A simulator of Secret Manager for the hosts of a rehearsal, checked by Google's discovery document.

Its secrets are files of a folder, PROJECT/SECRET, and read anew for each request.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

from contracts.aliases import Json
from rehearsal.simulator.api_error import ApiError, missing
from rehearsal.simulator.discovery import Call, Document, shipped

VERSION = re.compile(r"(projects/([\w-]+)/secrets/([\w-]+))/versions/(latest|1)")
"""A secret has one version."""
METHODS = "secretmanager.projects.secrets.versions."


class SecretManager:
    """A `rehearsal.simulator.http_server.ApiService`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def document(self, target: str) -> Document:  # noqa: ARG002
        return shipped("v1", "secretmanager")

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        return error.http_code, error.as_answer()

    def carry_out(self, call: Call) -> Json:
        method, named = call.method.id, VERSION.fullmatch(call.resource)
        if method not in (f"{METHODS}access", f"{METHODS}get"):
            raise ApiError(
                "UNIMPLEMENTED", f"{method}: the simulator has versions.access and versions.get only"
            )
        try:
            value = (self._folder / named[2] / named[3]).read_bytes() if named else None
        except OSError:
            value = None
        if named is None or value is None:
            raise missing(call.resource)
        name = f"{named[1]}/versions/1"
        if method == f"{METHODS}get":
            return {"name": name, "state": "ENABLED"}
        return {"name": name, "payload": {"data": base64.b64encode(value).decode()}}
