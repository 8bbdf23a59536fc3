"""The simulator as an HTTP server on loopback.

Any bearer token is taken, and none too; none is ever logged. Every answer says in a header that it is a simulator's.
"""

import http.server
import json
import logging
import sys
import threading
from types import TracebackType
from typing import Protocol

from contracts.aliases import Json
from rehearsal.tpu_api import discovery
from rehearsal.tpu_api.api_error import ApiError
from rehearsal.tpu_api.capacity import ChipPool, Offers
from rehearsal.tpu_api.cloud import Clock, Cloud, Delays
from rehearsal.tpu_api.control import Control
from rehearsal.tpu_api.methods import PREFIX, Methods
from rehearsal.tpu_api.resources import Hardware, NoHardware

LOG = logging.getLogger("rehearsal")
HEADER = ("X-Rehearsal", "a simulator of the Cloud TPU API, not Google")


class TpuApi:
    """The simulator, from `with` to the end of its block. `url` is the API's endpoint, `control` the other side.

    capacity, quota: chips by pool, "ZONE:PREFIX:TIER"; all other pools are without end.
    hardware: what stands behind the workers; None: nothing.
    """

    def __init__(
        self,
        *,
        capacity: dict[str, int] | None = None,
        quota: dict[str, int] | None = None,
        delays: Delays | None = None,
        clock: Clock | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        has = {ChipPool.parse(pool): chips for pool, chips in (capacity or {}).items()}
        may = {ChipPool.parse(pool): chips for pool, chips in (quota or {}).items()}
        self.cloud = Cloud(
            clock=clock or Clock(),
            delays=delays or Delays(),
            capacity=has,
            quota=may,
            hardware=hardware or NoHardware(),
        )
        self.control = Control(self.cloud)
        self.offers = Offers(has)
        self._tpu = _TpuService(Methods(self.cloud, self.offers))
        self._services: dict[str, ApiService] = {}
        self.closing = threading.Event()
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="tpu-api", daemon=True
        )

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT"""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "TpuApi":
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

    def add(self, prefix: str, service: "ApiService") -> None:
        """Answer for another API too. prefix: of its paths."""
        self._services[prefix] = service

    def _service(self, target: str) -> "ApiService":
        return next(
            (service for prefix, service in self._services.items() if target.startswith(prefix)), self._tpu
        )

    def error_body(self, target: str, error: ApiError) -> tuple[int, Json]:
        """HTTP code and body of a refusal."""
        return self._service(target).error_body(error)

    def answer(self, http_method: str, target: str, body: bytes) -> tuple[int, Json] | None:
        """HTTP code and body; None: the connection is to end without an answer. Raises ApiError."""
        if self.closing.is_set():
            return None
        service = self._service(target)
        document = service.document(target)
        call = document.call(http_method, target, body)
        with self.cloud.lock:
            fault = self.control.take_fault(call.method.id.removeprefix(PREFIX))
            if fault is not None and fault.kind == "cut-before":
                return None
            if fault is not None and (error := fault.error()) is not None:
                raise error
            self.cloud.settle()
            answer = service.carry_out(call)
        if wrong := document.wrong(call.method.response, answer):
            details = "; ".join(f"{at}: {text}" for at, text in wrong)
            raise ApiError("INTERNAL", f"the simulator's own answer to {call.method.id} is wrong: {details}")
        if fault is not None and fault.kind == "slow":
            self.closing.wait(fault.seconds)
        return None if fault is not None and fault.kind == "cut-after" else (200, answer)


class ApiService(Protocol):
    """One API of the simulated cloud; whoever calls `carry_out` holds its lock and has settled it."""

    def document(self, target: str) -> discovery.Document: ...
    def carry_out(self, call: discovery.Call) -> Json: ...
    def error_body(self, error: ApiError) -> tuple[int, Json]: ...


class _TpuService:
    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def document(self, target: str) -> discovery.Document:
        return discovery.shipped("v2alpha1" if target.startswith("/v2alpha1/") else "v2")

    def carry_out(self, call: discovery.Call) -> Json:
        return self._methods.carry_out(call)

    def error_body(self, error: ApiError) -> tuple[int, Json]:
        return error.http_code, error.as_answer()


class _Server(http.server.ThreadingHTTPServer):
    """A server with one thread for each connection; the process does not wait for them at its end."""

    request_queue_size = 64

    def __init__(self, api: TpuApi) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api = api

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
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            answered = self.server.api.answer(self.command, self.path, body)
        except ApiError as error:
            answered = self.server.api.error_body(self.path, error)
        except Exception as error:
            LOG.exception("a bug of the simulator")
            bug = ApiError("INTERNAL", f"a bug of the simulator: {type(error).__name__}: {error}")
            answered = self.server.api.error_body(self.path, bug)
        if answered is None:
            self.close_connection = True
        else:
            self._write(*answered)

    do_POST = do_PATCH = do_DELETE = do_PUT = do_GET

    def _write(self, code: int, answer: Json) -> None:
        content = (json.dumps(answer, indent=2, ensure_ascii=False) + "\n").encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header(*HEADER)
        self.end_headers()
        self.wfile.write(content)
        LOG.debug("%s %s %s", self.command, self.path.partition("?")[0], code)

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The cloud's time, not this machine's: it is how a client learns what Google's clock says."""
        return super().date_time_string(self.server.api.cloud.clock.now() if timestamp is None else timestamp)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the raw path can hold a token."""
