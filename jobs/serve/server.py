"""The HTTP server: what may be asked, how it is answered and refused. docs/serving.md describes it for its users.

Every request is bounded in size, time and number before anything is made of it, and whatever comes is answered.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import gc
import hmac
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from h11 import ERROR, SEND_BODY, LocalProtocolError
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from contracts.errors import RequestError
from jobs.runtime.prediction import Answer, Encoded, Predictor
from jobs.serve.batching import Batcher, BatchingEndedError, Full, Shapes
from jobs.serve.config import LOOPBACK, MIB, Config

INLINE_CHARACTERS = 8192
"""Texts of a request that are made into tokens at once; longer ones in a thread, so that others need not wait."""
DRAINED = 4
"""How many times as much of a body that is too large is read, so that its sender gets to see the answer."""
MOST_BODIES = 16
"""Bodies of the largest size that are in memory at a time, at most."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
NAMES = {"inputs", "second"}

type Endpoint = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    """A request that is answered with an error. status: of HTTP; retry_after_s: when to try again."""

    def __init__(self, status: int, reason: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s

    def response(self) -> Response:
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        if self.status in (408, 413):
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return _json({"error": self.reason}, self.status, headers)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return Response(body, status, headers, "application/json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """names: of the inputs, for their answers and for messages."""

    names: tuple[str, ...]
    inputs: tuple[str | bytes, ...]
    second: str | None


def read_request(body: bytes, config: Config, takes: str) -> Asked:
    """Return what the body of a request asks. takes: as `Predictor` has it.

    Raises:
        Refused: it is no JSON, or not what docs/serving.md says; the first thing that is wrong.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, f"the body is no JSON: {error}") from None
    if not isinstance(told, dict) or "inputs" not in told or told.keys() - NAMES:
        raise Refused(
            422, 'the body must be a JSON object with "inputs", a list, and "second", a text, where needed'
        )
    inputs, second = told["inputs"], told.get("second")
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= config.most_inputs:
        raise Refused(422, f'"inputs" must be a list of 1 to {config.most_inputs} texts')
    for place, each in enumerate(inputs):
        _check_text(f"inputs[{place}]", each, None if takes == "picture" else config.most_characters)
    if second is not None:
        _check_text('"second"', second, config.most_characters)
    if takes == "text":
        return Asked(names=tuple(inputs), inputs=tuple(inputs), second=second)
    names, pictures = [], []
    for place, each in enumerate(inputs):
        names.append(f"inputs[{place}]")
        try:
            pictures.append(base64.b64decode(each, validate=True))
        except ValueError as error:
            raise Refused(422, f"inputs[{place}] must be the bytes of a picture in base64: {error}") from None
    return Asked(names=tuple(names), inputs=tuple(pictures), second=second)


def _check_text(name: str, value: object, most: int | None) -> None:
    if not isinstance(value, str):
        raise Refused(422, f"{name} must be a text")
    if most is not None and len(value) > most:
        raise Refused(422, f"{name} has {len(value):,} characters, and at most {most:,} are taken")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(422, f"{name} has half of a surrogate pair, which is no text") from None


class Figures:
    """What /metrics shows."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.answered = Counter(
            "serve_requests", "Requests by the status of their answer.", ["status"], registry=registry
        )
        self.request_s = Histogram(
            "serve_request_seconds",
            "From a request's head to its answer.",
            buckets=SECONDS,
            registry=registry,
        )
        self._rows = Histogram(
            "serve_batch_rows", "Rows of a batch.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self._padded = Counter(
            "serve_batch_shapes", "Batches by their shape.", ["size", "length"], registry=registry
        )
        self._waited_s = Histogram(
            "serve_wait_seconds",
            "That the oldest row of a batch has waited.",
            buckets=SECONDS,
            registry=registry,
        )
        self._model_s = Histogram(
            "serve_model_seconds", "Computing a batch.", buckets=SECONDS, registry=registry
        )
        Gauge("serve_waiting_rows", "Rows that wait for the model.", registry=registry).set_function(waiting)
        self.requests = self.rows = self.batches = 0

    def batch(self, rows: int, size: int, length: int, waited_s: float, took_s: float) -> None:
        self.rows, self.batches = self.rows + rows, self.batches + 1
        self._rows.observe(rows)
        self._padded.labels(size, length).inc()
        self._waited_s.observe(waited_s)
        self._model_s.observe(took_s)

    def answer(self, status: int, took_s: float) -> None:
        self.requests += 1
        self.answered.labels(status).inc()
        self.request_s.observe(took_s)


class Server:
    """One predictor behind HTTP. name: of its run. token: what requests have to name; None: nothing, on loopback."""

    def __init__(
        self, predictor: Predictor, config: Config, shapes: Shapes, *, name: str, token: str | None
    ) -> None:
        self._predictor, self._config, self._name, self._token = predictor, config, name, token
        self.figures = Figures(lambda: self.batcher.waiting)
        self.batcher = Batcher(
            predictor, shapes, most_waiting=config.most_waiting, observe=self.figures.batch
        )
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._held_bytes = self._under_way = 0
        self._stopping = threading.Event()
        routes = [
            Route("/v1/predict", self._answering(self._predict), methods=["POST"]),
            Route("/v1/models", self._answering(self._models)),
            Route("/healthz", self._answering(self._health)),
            Route("/metrics", self._answering(self._metrics)),
        ]
        plain: dict[Any, Any] = {HTTPException: _plainly}
        app = Starlette(routes=routes, exception_handlers=plain, lifespan=self._lifespan)
        self.app = Guard(app, token=token, own_host=config.address, answered=self.figures.answer)
        self._uvicorn: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # --- the process ---

    def start(self) -> tuple[str, int]:
        """Listen, in a thread of its own; return the address and the port.

        Raises:
            RequestError: it cannot be listened there.
        """
        host, port = self._config.address, self._config.port
        try:
            listening = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise RequestError(
                f"--address {host} --port {port}: cannot be listened on ({error.strerror}); choose another, or --port 0"
            ) from None
        # Connections inherit it. An answer is two writes, and the second must not wait for a delayed ACK; asyncio sets
        # it only where a socket names its protocol.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = uvicorn.Config(
            self.app,
            http=BoundedProtocol.within(self._config.receive_s),
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=self._config.most_connections,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(ours)
        self._thread = threading.Thread(target=self._uvicorn.run, args=([listening],), name="http")
        self._thread.start()
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not look through it again
        found: tuple[str, int] = listening.getsockname()[:2]
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it listens, as far as this process can tell."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        """Why it can answer no more, if something of it has ended that should not."""
        if not self.is_alive:
            return "the HTTP server has ended; the lines above say why"
        if (error := self.batcher.failure) is not None:
            return f"what forms batches has ended: {type(error).__name__}: {error}"
        return None

    @property
    def stuck_s(self) -> float:
        """How long the batch has taken that is computed now."""
        since_s = self.batcher.busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stop(self) -> None:
        """Refuse what comes from now on, end what is under way, and stop listening."""
        self._stopping.set()
        until_s = time.monotonic() + self._config.stop_s
        while self._under_way and time.monotonic() < until_s:
            time.sleep(0.02)
        assert self._uvicorn is not None and self._thread is not None
        self._uvicorn.should_exit = True
        self._thread.join(timeout=5)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.batcher.run())
        yield
        if not task.cancel():
            task.exception()  # which `failure` has

    # --- what is asked ---

    def _answering(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except Refused as refused:
                return refused.response()
            except ClientDisconnect:
                return Response(status_code=400)
            except RequestError as error:
                return Refused(422, str(error)).response()
            except BatchingEndedError:
                return Refused(503, "the server is ending after an error; its log says which").response()
            except Exception as error:  # a model's own kinds
                print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                return _json({"error": f"the model has failed: {type(error).__name__}"}, 500)

        return answer

    async def _predict(self, request: Request) -> Response:
        if self._stopping.is_set():
            raise Refused(503, "the server is stopping", retry_after_s=10)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, 'the body must be JSON, with the header "content-type: application/json"')
        self._under_way += 1
        try:
            body = await self._body(request)
            try:
                async with asyncio.timeout(self._config.wait_s):
                    return await self._answer(body)
            except TimeoutError:
                raise Refused(503, f"no answer within {self._config.wait_s:g} s", retry_after_s=5) from None
            finally:
                self._held_bytes -= len(body)
        finally:
            self._under_way -= 1

    async def _body(self, request: Request) -> bytes:
        """Read the body, which counts as held from then on."""
        most = self._config.most_body_mib * MIB
        too_large = Refused(413, f"the body has more than {most:,} bytes")
        declared = int(request.headers.get("content-length", 0))
        if declared > most and "expect" in request.headers:
            raise too_large
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self._config.receive_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    if max(size, declared) <= most:
                        chunks.append(chunk)
                    elif size > DRAINED * most:
                        break
        except TimeoutError:
            raise Refused(408, f"the request has not arrived within {self._config.receive_s:g} s") from None
        if max(size, declared) > most:
            raise too_large
        if self._held_bytes + size > MOST_BODIES * most:
            raise Refused(429, "too many large requests at a time", retry_after_s=1)
        self._held_bytes += size
        return b"".join(chunks)

    async def _answer(self, body: bytes) -> Response:
        asked = read_request(body, self._config, self._predictor.takes)
        if self._predictor.takes == "text" and len(body) <= INLINE_CHARACTERS:
            encoded = self._encoded(asked)
        else:
            encoded = await asyncio.get_running_loop().run_in_executor(self._encoder, self._encoded, asked)
        rows = [row for each in encoded for row in each.rows]
        if len(rows) > self.batcher.most_waiting:
            raise Refused(
                422,
                f"the request needs {len(rows)} rows, and at most {self.batcher.most_waiting} can wait; divide it",
            )
        try:
            outputs = await self.batcher.compute(rows)
        except Full as full:
            raise Refused(429, f"{full}; try again", retry_after_s=full.retry_after_s) from None
        answers: list[Answer] = []
        for name, each in zip(asked.names, encoded, strict=True):
            own, outputs = outputs[: len(each.rows)], outputs[len(each.rows) :]
            answers += [dataclasses.replace(answer, input=name) for answer in each.answers(own)]
        return _json({"answers": [answer.told() for answer in answers]})

    def _encoded(self, asked: Asked) -> list[Encoded]:
        found = []
        for place, each in enumerate(asked.inputs):
            try:
                encoded = self._predictor.encode(each, asked.second)
            except RequestError as error:
                said = str(error).replace("--second", '"second"')
                raise Refused(422, f"inputs[{place}]: {said}") from None
            needed = max((row.length for row in encoded.rows), default=0)
            longest = self.batcher.shapes.lengths[-1]
            if needed > longest:
                raise Refused(
                    422,
                    f"inputs[{place}]: has {needed} tokens, and this server takes at most {longest} "
                    f"(--lengths {self._config.lengths}); shorten it, or start the server with longer lengths",
                )
            found.append(encoded)
        return found

    async def _models(self, _request: Request) -> Response:
        shapes, config, predictor = self.batcher.shapes, self._config, self._predictor
        model = {
            "id": self._name,
            "job": config.job,
            "task": predictor.task,
            "takes": predictor.takes,
            "batch_sizes": shapes.sizes,
            **({"lengths": shapes.lengths} if shapes.lengths[-1] > 1 else {}),
            "limits": {
                "inputs": config.most_inputs,
                "body_bytes": config.most_body_mib * MIB,
                "waiting_rows": config.most_waiting,
                **({"characters": config.most_characters} if predictor.takes == "text" else {}),
            },
        }
        return _json({"models": [model]})

    async def _health(self, _request: Request) -> Response:
        if self._stopping.is_set():
            return _json({"status": "stopping"}, 503)
        if self.failure is not None:
            return _json({"status": self.failure}, 503)
        if self.stuck_s > self._config.wait_s:
            return _json({"status": f"the model has computed one batch for {self.stuck_s:.0f} s"}, 503)
        return _json({"status": "ok"})

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self.figures.registry), media_type=CONTENT_TYPE_LATEST)


async def _plainly(_request: Request, error: HTTPException) -> Response:
    """What the router refuses: no such path, or another method."""
    return _json({"error": error.detail}, error.status_code, dict(error.headers or {}))


class Guard:
    """Lets through requests that name the token, and without one, on loopback, those that name a host of loopback: a
    page in a browser of this machine may have its own site's name lead here. Counts all answers."""

    def __init__(
        self, app: ASGIApp, *, token: str | None, own_host: str, answered: Callable[[int, float], None]
    ) -> None:
        self._app, self._answered, self._hosts = app, answered, {*LOOPBACK, "[::1]", own_host}
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(message["status"], time.perf_counter() - began_s)
            await send(message)

        refused = self._refuses(scope["path"], dict(scope["headers"]))
        await (self._app if refused is None else refused.response())(scope, receive, count)

    def _refuses(self, path: str, headers: dict[bytes, bytes]) -> Refused | None:
        if self._token is None:
            host, _, port = headers.get(b"host", b"").decode("latin-1").rpartition(":")
            if (host if port.isdigit() else f"{host}:{port}".lstrip(":")) in self._hosts:
                return None
            return Refused(403, "without a token, only requests to 127.0.0.1 or localhost are answered")
        kind, _, named = headers.get(b"authorization", b"").partition(b" ")
        if path == "/healthz" or (
            kind.lower() == b"bearer" and hmac.compare_digest(named.strip(), self._token)
        ):
            return None
        return Refused(401, 'this server needs its token, in the header "authorization: Bearer TOKEN"')


LINGER_S = 2.0
"""How long a sender that has not sent all of its request may take to read the answer that it was refused with."""


class LingeringTransport:
    """A transport that closes its own side first while bytes may still come, which are dropped.

    Closing with bytes unread sends a reset, by which the sender can lose the answer (RFC 9112, section 9.6).
    """

    def __init__(self, transport: Any, loop: Any, is_cut_short: Callable[[], bool]) -> None:
        self._transport, self._loop, self._is_cut_short = transport, loop, is_cut_short
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or bool(self._transport.is_closing())

    def write(self, data: bytes) -> None:
        if not self.lingers:
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_cut_short():
            self._transport.close()
            return
        self.lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER_S, self._transport.close)


class BoundedProtocol(H11Protocol):
    """HTTP of one connection, of which the head of a request has to arrive within a time, and whose sender may close
    its side before the answer has come."""

    receive_s = 10.0

    @classmethod
    def within(cls, receive_s: float) -> type[BoundedProtocol]:
        return type("BoundedProtocol", (cls,), {"receive_s": receive_s})

    _overdue: asyncio.TimerHandle | None = None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(LingeringTransport(transport, self.loop, self._is_cut_short))  # type: ignore[arg-type]
        self._overdue = self.loop.call_later(self.receive_s, self._too_late)

    def _is_cut_short(self) -> bool:
        return self.conn.their_state in (SEND_BODY, ERROR) or bool(self.conn.trailing_data[0])

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._is_answering or self.transport.is_closing():
            self._in_time()
        elif self._overdue is None and self.conn.trailing_data[0]:
            self._overdue = self.loop.call_later(self.receive_s, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def eof_received(self) -> Any:
        if self.transport.is_closing():
            return None
        if self._is_answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return True
        if self.conn.trailing_data[0] or (self._is_answering and not self.cycle.response_started):
            self._end(400, "the request is cut off")
        return None

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # its answer has gone out before the rest of it came
            self.transport.close()

    def _in_time(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _too_late(self) -> None:
        self._overdue = None
        if not self._is_answering and not self.transport.is_closing():
            self._end(408, f"the request has not arrived within {self.receive_s:g} s")

    def _end(self, status: int, reason: str) -> None:
        body = json.dumps({"error": reason}).encode()
        phrase = {400: "Bad Request", 408: "Request Timeout"}[status]
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def shapes_of(config: Config, predictor: Predictor) -> Shapes:
    """Return the shapes that the options ask for; the last length is the model's longest at most."""
    from jobs.runtime.prediction import lengths
    from jobs.serve.config import numbers

    asked = (
        numbers(config.lengths) if config.lengths and predictor.longest > 1 else lengths(predictor.longest)
    )
    kept = tuple(each for each in asked if each < predictor.longest)
    longest = predictor.longest if asked[-1] >= predictor.longest or not kept else asked[-1]
    return Shapes(sizes=numbers(config.batch_sizes), lengths=tuple(dict.fromkeys((*kept, longest))))


def warm(predictor: Predictor, shapes: Shapes, tick: Callable[[], None]) -> None:
    """Compute a batch of each shape, so that nothing is compiled while somebody waits. tick: called after each."""
    rows: Sequence[Any] = predictor.encode(*predictor.example).rows[:1]
    for size, length in shapes.all:
        if rows[0].length <= length:
            predictor.compute(rows, size, length)
            tick()
