"""A simulator of Secret Manager for the hosts of a rehearsal, checked by Google's discovery document.

Its secrets are files of a folder, PROJECT/SECRET, and read anew for each request. It listens on the address that this
machine has in the hosts' own network, which leads nowhere else.
"""

from __future__ import annotations

import base64
import http.server
import json
import re
import threading
from pathlib import Path
from types import TracebackType

from contracts.aliases import Json
from contracts.host_interface import SECRET_MANAGER
from rehearsal.tpu_api import discovery
from rehearsal.tpu_api.api_error import ApiError, missing

VERSION = re.compile(r"(projects/([\w-]+)/secrets/([\w-]+))/versions/(latest|1)")
"""A secret has one version."""
METHODS = "secretmanager.projects.secrets.versions."


class SecretManager:
    """The server, from `with` to the end of its block."""

    def __init__(self, address: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._document = discovery.shipped("v1", "secretmanager")
        simulator = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, answer = simulator.answer(self.path)
                content = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = http.server.ThreadingHTTPServer((address, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """By which `jobs.runtime.ranks.secret_values` takes this for Secret Manager."""
        host, port = self._server.server_address[:2]
        return {SECRET_MANAGER: f"http://{host!s}:{port}"}

    def __enter__(self) -> SecretManager:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, target: str) -> tuple[int, Json]:
        """Return HTTP code and body."""
        try:
            call = self._document.call("GET", target, b"")
            answer = self._carry_out(call.method.id, call.resource)
        except ApiError as error:
            return error.http_code, error.as_answer()
        wrong = self._document.wrong(call.method.response, answer)
        return (500, {"error": {"message": f"the simulator is wrong: {wrong}"}}) if wrong else (200, answer)

    def _carry_out(self, method: str, resource: str) -> Json:
        named = VERSION.fullmatch(resource)
        if method not in (f"{METHODS}access", f"{METHODS}get"):
            raise ApiError(
                "UNIMPLEMENTED", f"{method}: the simulator has versions.access and versions.get only"
            )
        try:
            value = (self._folder / named[2] / named[3]).read_bytes() if named else None
        except OSError:
            value = None
        if named is None or value is None:
            raise missing(resource)
        name = f"{named[1]}/versions/1"
        if method == f"{METHODS}get":
            return {"name": name, "state": "ENABLED"}
        return {"name": name, "payload": {"data": base64.b64encode(value).decode()}}
