"""The HTTP server. docs/serving.md describes it for its users.

Connections, time-outs and malformed HTTP are uvicorn's, the size of a body is Starlette's. What is here is what the
model needs: a token, valid inputs, and a bound on the rows that wait for it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import gc
import hmac
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import uvicorn
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
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.errors import RequestError
from jobs.runtime.prediction import Encoded, Predictor, lengths
from jobs.serve.batching import Batcher, BatchingEndedError, Full, Shapes
from jobs.serve.config import LOOPBACK, MIB, Config, numbers

INLINE_BYTES = 8192
"""A body up to this size is tokenized at once; a larger one in a thread, so that other requests need not wait."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
KEYS = {"inputs", "second"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a request asks. names: of the values, in answers and messages."""

    names: tuple[str, ...]
    values: tuple[str | bytes, ...]
    second: str | None


def read_inputs(body: bytes, config: Config, takes: str) -> Inputs:
    """Return what the body of a request asks. takes: as `Predictor` has it.

    Raises:
        RequestError: it is not what docs/serving.md says; the first mistake.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    if not isinstance(content, dict) or "inputs" not in content or content.keys() - KEYS:
        raise RequestError(
            'the body must be a JSON object with "inputs", a list, and "second", a text, where needed'
        )
    inputs, second = content["inputs"], content.get("second")
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= config.most_inputs:
        raise RequestError(f'"inputs" must be a list of 1 to {config.most_inputs} texts')
    places = tuple(f"inputs[{index}]" for index in range(len(inputs)))
    for place, text in zip(places, inputs, strict=True):
        _check_text(place, text, config.most_characters if takes == "text" else None)
    if second is not None:
        _check_text('"second"', second, config.most_characters)
    if takes == "text":
        return Inputs(names=tuple(inputs), values=tuple(inputs), second=second)
    pictures = []
    for place, text in zip(places, inputs, strict=True):
        try:
            pictures.append(base64.b64decode(text, validate=True))
        except ValueError as error:
            raise RequestError(f"{place} must be the bytes of a picture in base64: {error}") from None
    return Inputs(names=places, values=tuple(pictures), second=second)


def _check_text(name: str, value: object, most_characters: int | None) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a text")
    if most_characters is not None and len(value) > most_characters:
        raise RequestError(f"{name} has {len(value):,} characters, and at most {most_characters:,} are taken")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} has half of a surrogate pair, which is no text") from None


class Figures:
    """The metrics of /metrics, and the totals of the run's result."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def histogram(name: str, title: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(f"serve_{name}", title, buckets=buckets, registry=registry)

        self._responses = Counter("serve_requests", "Requests by status.", ["status"], registry=registry)
        self._request_s = histogram("request_seconds", "From a request's head to its response.")
        self._rows = histogram("batch_rows", "Rows of a batch.", (1, 2, 4, 8, 16, 32, 64))
        self._shapes = Counter(
            "serve_batch_shapes", "Batches by shape.", ["size", "length"], registry=registry
        )
        self._waited_s = histogram("wait_seconds", "Wait of a batch's oldest row.")
        self._model_s = histogram("model_seconds", "Computing a batch.")
        Gauge("serve_waiting_rows", "Rows that wait for the model.", registry=registry).set_function(waiting)
        self.requests = self.rows = self.batches = 0

    def observe_batch(self, rows: int, size: int, length: int, waited_s: float, model_s: float) -> None:
        self.rows, self.batches = self.rows + rows, self.batches + 1
        self._rows.observe(rows)
        self._shapes.labels(size, length).inc()
        self._waited_s.observe(waited_s)
        self._model_s.observe(model_s)

    def observe_response(self, status: int, request_s: float) -> None:
        self.requests += 1
        self._responses.labels(status).inc()
        self._request_s.observe(request_s)


class Server:
    """One predictor behind HTTP. name: of its run. token: what requests have to name; None: nothing, on loopback."""

    def __init__(
        self, predictor: Predictor, config: Config, shapes: Shapes, *, name: str, token: str | None
    ) -> None:
        self._predictor, self._config, self._name = predictor, config, name
        self.figures = Figures(lambda: self.batcher.waiting)
        self.batcher = Batcher(
            predictor, shapes, most_waiting=config.most_waiting, observe=self.figures.observe_batch
        )
        # Without a token: a page in a browser of this machine may have its own site's name lead here.
        hosts = [*LOOPBACK, "[::1]", config.address] if token is None else ["*"]
        app = Starlette(
            routes=[
                Route("/v1/predict", self._predict, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/healthz", self._health),
                Route("/metrics", self._metrics),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
            exception_handlers={
                HTTPException: _refusal,
                RequestError: _unprocessable,
                ClientDisconnect: _incomplete,
                Exception: _failure,
            },
            lifespan=self._lifespan,
            max_body_size=config.most_body_mib * MIB,
        )
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                Gate(app, token, self.figures.observe_response),
                host=config.address,
                port=config.port,
                ws="none",
                lifespan="on",
                log_level="error",
                access_log=False,
                server_header=False,
                limit_concurrency=config.most_connections,
                timeout_graceful_shutdown=config.stop_s,
            )
        )
        self._thread = threading.Thread(target=self._uvicorn.run, name="http")

    # --- the process ---

    def start(self) -> tuple[str, int]:
        """Listen, in a thread of its own; return the address and the port.

        Raises:
            RequestError: the address cannot be listened on.
        """
        self._thread.start()
        while not self._uvicorn.started:
            if not self.is_alive:
                raise RequestError(
                    f"--address {self._config.address} --port {self._config.port}: cannot be listened on, as the line "
                    "above says; choose another, or --port 0"
                )
            time.sleep(0.01)
        gc.collect()
        gc.freeze()  # what is there now stays: the collector need not look through it again
        address: tuple[str, int] = self._uvicorn.servers[0].sockets[0].getsockname()[:2]
        return address

    @property
    def is_alive(self) -> bool:
        """Whether it listens, as far as this process can tell."""
        return self._thread.is_alive()

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
        """Stop listening, and answer the requests under way for `stop_s` at most."""
        self._uvicorn.should_exit = True
        self._thread.join(timeout=self._config.stop_s + 5)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.batcher.run())
        yield
        if not task.cancel():
            task.exception()  # which `failure` has

    # --- requests ---

    async def _predict(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(
                415, 'the body must be JSON, with the header "content-type: application/json"'
            )
        body = await request.body()
        inputs = read_inputs(body, self._config, self._predictor.takes)
        if self._predictor.takes == "text" and len(body) <= INLINE_BYTES:
            encoded = self._encode(inputs)
        else:
            encoded = await run_in_threadpool(self._encode, inputs)
        outputs = iter(await self._compute([row for encoding in encoded for row in encoding.rows]))
        answers = [
            dataclasses.replace(answer, input=name).as_json()
            for name, encoding in zip(inputs.names, encoded, strict=True)
            for answer in encoding.answers([next(outputs) for _ in encoding.rows])
        ]
        return JSONResponse({"answers": answers})

    def _encode(self, inputs: Inputs) -> list[Encoded]:
        """Return the rows of each input.

        Raises:
            RequestError: an input cannot be answered, or has more tokens than the longest shape.
        """
        encoded, longest = [], self.batcher.shapes.lengths[-1]
        for index, value in enumerate(inputs.values):
            try:
                encoded.append(self._predictor.encode(value, inputs.second))
            except RequestError as error:
                reason = str(error).replace("--second", '"second"')
                raise RequestError(f"inputs[{index}]: {reason}") from None
            length = max((row.length for row in encoded[-1].rows), default=0)
            if length > longest:
                raise RequestError(
                    f"inputs[{index}]: has {length} tokens, and this server takes at most {longest} "
                    f"(--lengths {self._config.lengths}); shorten it, or start the server with longer lengths"
                )
        return encoded

    async def _compute(self, rows: Sequence[Any]) -> list[Any]:
        """Return what the model computes of each row.

        Raises:
            RequestError: there are more rows than can wait, or the model refuses one.
            HTTPException: there is no room now, or the model takes too long.
            Exception: the model failed.
        """
        limit, wait_s = self.batcher.most_waiting, self._config.wait_s
        if len(rows) > limit:
            raise RequestError(f"the request needs {len(rows)} rows, and at most {limit} can wait; divide it")
        try:
            async with asyncio.timeout(wait_s):
                return await self.batcher.compute(rows)
        except Full as full:
            raise HTTPException(429, f"{full}; try again", {"retry-after": str(full.retry_after_s)}) from None
        except TimeoutError:
            raise HTTPException(503, f"no answer within {wait_s:g} s", {"retry-after": "5"}) from None
        except BatchingEndedError:
            raise HTTPException(503, "the server is ending after an error; its log says which") from None

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
        return JSONResponse({"models": [model]})

    async def _health(self, _request: Request) -> Response:
        status = self.failure
        if self.stuck_s > self._config.wait_s:
            status = status or f"the model has computed one batch for {self.stuck_s:.0f} s"
        return JSONResponse({"status": status or "ok"}, 200 if status is None else 503)

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self.figures.registry), media_type=CONTENT_TYPE_LATEST)


async def _refusal(_request: Request, error: Any) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _unprocessable(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 422)


async def _incomplete(_request: Request, _error: Exception) -> Response:
    return JSONResponse({"error": "the body is incomplete"}, 400)


async def _failure(_request: Request, error: Exception) -> Response:
    """The error goes on to uvicorn, which logs it."""
    return JSONResponse({"error": f"the model has failed: {type(error).__name__}"}, 500)


class Gate:
    """Lets through only requests that name the token, if there is one. Counts all responses."""

    def __init__(self, app: ASGIApp, token: str | None, observe: Callable[[int, float], None]) -> None:
        self._app, self._observe = app, observe
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observe(message["status"], time.perf_counter() - began_s)
            await send(message)

        app = self._app if self._is_open_to(scope) else _unauthorized
        await app(scope, receive, send_counted)

    def _is_open_to(self, scope: Scope) -> bool:
        if self._token is None or scope["path"] == "/healthz":
            return True
        kind, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return bool(kind.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token))


_unauthorized = JSONResponse(
    {"error": 'this server needs its token, in the header "authorization: Bearer TOKEN"'},
    401,
    {"www-authenticate": "Bearer"},
)


def batch_shapes(config: Config, predictor: Predictor) -> Shapes:
    """Return the shapes that the options ask for; the last length is the model's longest at most."""
    longest = predictor.longest
    desired = numbers(config.lengths) if config.lengths and longest > 1 else lengths(longest)
    shorter = tuple(length for length in desired if length < longest)
    return Shapes(
        sizes=numbers(config.batch_sizes),
        lengths=(*shorter, longest) if desired[-1] >= longest or not shorter else shorter,
    )


def warm(predictor: Predictor, shapes: Shapes, tick: Callable[[], None]) -> None:
    """Compute a batch of each shape, so that nothing is compiled while a request waits. tick: called after each."""
    rows: Sequence[Any] = predictor.encode(*predictor.example).rows[:1]
    for size, length in shapes.all:
        if rows[0].length <= length:
            predictor.compute(rows, size, length)
            tick()
