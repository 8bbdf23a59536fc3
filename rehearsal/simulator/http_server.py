"""The HTTP server of simulated APIs. Requests are checked by Google's discovery documents, and so are the answers.

Any bearer token is taken, and none too; none is ever logged. Every answer says in a header that it is a simulator's.
"""

import http.server
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol

from contracts.aliases import Json
from rehearsal.simulator.api_error import ApiError
from rehearsal.simulator.discovery import Call, Document

LOG = logging.getLogger("rehearsal")
HEADER = ("X-Rehearsal", "a simulator, not Google")


class ConnectionCutError(Exception):
    """The connection is to end without an answer."""


class ApiService(Protocol):
    """One simulated API."""

    def document(self, target: str) -> Document:
        """The document of the version that a path names."""
        ...

    def carry_out(self, call: Call) -> Json:
        """Raises ApiError; ConnectionCutError where the client is to hear nothing."""
        ...

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        """HTTP code and body of a refusal."""
        ...


class SimulatorServer:
    """The server, from `with` to the end of its block. `closing` is set when it ends.

    services: by the beginning of their paths; of several that fit, that of the longest answers. now: the time that
    answers are dated with, unix seconds: it is how a client learns what Google's clock says.
    """

    def __init__(
        self,
        services: Mapping[str, ApiService],
        *,
        address: str = "127.0.0.1",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._services = services
        self.now = now
        self.closing = threading.Event()
        self._server = _Server(self, address)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="simulator", daemon=True
        )

    @property
    def url(self) -> str:
        """http://ADDRESS:PORT"""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> "SimulatorServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nobody is answered any more; connections that are still open hear so with their next request."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, http_method: str, target: str, body: bytes) -> tuple[int, Json] | None:
        """HTTP code and body; None: the connection is to end without an answer."""
        if self.closing.is_set():
            return None
        prefix = max((prefix for prefix in self._services if target.startswith(prefix)), key=len)
        service = self._services[prefix]
        try:
            document = service.document(target)
            call = document.call(http_method, target, body)
            answer = service.carry_out(call)
            if wrong := document.wrong(call.method.response, answer):
                details = "; ".join(f"{at}: {text}" for at, text in wrong)
                raise ApiError("INTERNAL", f"the simulator's answer to {call.method.id} is wrong: {details}")
            return 200, answer
        except ConnectionCutError:
            return None
        except ApiError as error:
            return service.error_body(error)
        except Exception as error:
            LOG.exception("a bug of the simulator")
            message = f"a bug of the simulator: {type(error).__name__}: {error}"
            return service.error_body(ApiError("INTERNAL", message))


class _Server(http.server.ThreadingHTTPServer):
    """A server with one thread for each connection; the process does not wait for them at its end."""

    request_queue_size = 64

    def __init__(self, simulator: SimulatorServer, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.simulator = simulator

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle is no news."""
        LOG.debug("the connection from %s ended early: %s", client_address, sys.exception())
        del request


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads a request, has it answered, writes the answer."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "rehearsal"
    sys_version = ""
    timeout = 600  # of a connection that says nothing
    # An answer goes out in two writes; the second would wait 40 ms for the first's receipt.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        answered = self.server.simulator.answer(self.command, self.path, body)
        if answered is None:
            self.close_connection = True
            return
        code, answer = answered
        content = (json.dumps(answer, indent=2, ensure_ascii=False) + "\n").encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header(*HEADER)
        self.end_headers()
        self.wfile.write(content)
        LOG.debug("%s %s %s", self.command, self.path.partition("?")[0], code)

    do_POST = do_PATCH = do_DELETE = do_PUT = do_GET

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.server.simulator.now() if timestamp is None else timestamp)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the raw path can hold a token."""
