"""The simulator as an HTTP server on loopback.

Any bearer token is taken, and none too; none is ever logged. Every answer says in a header that it is a simulator's.
"""

import contextlib
import http.server
import json
import logging
import socket
import sys
import threading
from typing import Any

from rehearsal.tpu_api import discovery
from rehearsal.tpu_api.api_error import ApiError
from rehearsal.tpu_api.cloud import Cloud
from rehearsal.tpu_api.control import Control
from rehearsal.tpu_api.methods import PREFIX, Methods

Json = dict[str, Any]

LOG = logging.getLogger("rehearsal")
HEADER = ("X-Rehearsal", "a simulator of the Cloud TPU API, not Google")
LARGEST_BODY = 10 << 20


class Server(http.server.ThreadingHTTPServer):
    """One thread a connection. `close` ends them all."""

    daemon_threads = False  # so that close waits for them
    request_queue_size = 64

    def __init__(self, *, cloud: Cloud, methods: Methods, control: Control) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud = cloud
        self.methods = methods
        self.control = control
        self.closing = threading.Event()
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()

    def opened(self, connection: socket.socket) -> None:
        """A handler has begun."""
        with self._guard:
            self._connections.add(connection)
        if self.closing.is_set():  # it was taken before close looked, and would wait for a request for ever
            hang_up(connection)

    def closed(self, connection: socket.socket) -> None:
        """A handler has ended."""
        with self._guard:
            self._connections.discard(connection)

    def close(self) -> None:
        """Answer nobody any more; every thread has ended when this returns."""
        self.closing.set()
        self.shutdown()
        with self._guard:
            for connection in self._connections:
                hang_up(connection)
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle is no news."""
        LOG.debug("the connection from %s ended early: %s", client_address, sys.exception())
        del request

    def answer(self, http_method: str, target: str, body: bytes) -> tuple[int, Json] | None:
        """HTTP code and body; None: the connection is to end without an answer. Raises ApiError."""
        document = discovery.shipped()
        call = document.call(http_method, target, body)
        with self.cloud.lock:
            fault = self.control.take_fault(call.method.id.removeprefix(PREFIX))
            if fault is not None and fault.kind == "cut-before":
                return None
            if fault is not None and (error := fault.error()) is not None:
                raise error
            self.cloud.settle()
            answer = self.methods.carry_out(call)
        if wrong := document.wrong(call.method.response, answer):
            said = "; ".join(f"{at}: {words}" for at, words in wrong)
            raise ApiError("INTERNAL", f"the simulator's own answer to {call.method.id} is wrong: {said}")
        if fault is not None and fault.kind == "slow":
            self.closing.wait(fault.seconds)
        return None if fault is not None and fault.kind == "cut-after" else (200, answer)


class Handler(http.server.BaseHTTPRequestHandler):
    """Reads a request, has it answered, writes the answer."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "rehearsal"
    sys_version = ""
    timeout = 600  # of a connection that says nothing
    disable_nagle_algorithm = (
        True  # an answer goes out in two writes; the second would wait 40 ms for the first's receipt
    )

    def setup(self) -> None:
        self.server.opened(self.request)
        super().setup()

    def finish(self) -> None:
        try:
            super().finish()
        finally:
            self.server.closed(self.request)

    def do_GET(self) -> None:
        try:
            answered = self._answer()
        except ApiError as error:
            answered = error.http_code, error.as_answer()
        except Exception as error:
            LOG.exception("a bug of the simulator")
            bug = ApiError("INTERNAL", f"a bug of the simulator: {type(error).__name__}: {error}")
            answered = bug.http_code, bug.as_answer()
        if answered is None:
            self.close_connection = True
            hang_up(self.request)
        else:
            self._write(*answered)

    do_POST = do_PATCH = do_DELETE = do_PUT = do_GET

    def _answer(self) -> tuple[int, Json] | None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise ApiError(
                "INVALID_ARGUMENT", f"the body's length must be given and at most {LARGEST_BODY} bytes"
            )
        return self.server.answer(self.command, self.path, self.rfile.read(int(length)))

    def _write(self, code: int, answer: Json) -> None:
        content = (json.dumps(answer, indent=2, ensure_ascii=False) + "\n").encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header(*HEADER)
        self.end_headers()
        self.wfile.write(content)
        LOG.debug("%s %s %s", self.command, self.path.partition("?")[0], code)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the path as it stands can hold a token."""


def hang_up(connection: socket.socket) -> None:
    """End a connection at once, whatever its handler does."""
    with contextlib.suppress(OSError):  # the other side may have been first
        connection.shutdown(socket.SHUT_RDWR)
