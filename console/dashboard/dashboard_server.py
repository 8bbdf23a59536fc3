"""`fab dashboard`: a web server for a browser on this machine, with pages and the JSON that they load.

It can change nothing: every route answers GET and HEAD only. The content of runs is not trusted. It goes to the
browser as JSON, and the page puts it into text nodes.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from console import overview
from console.dashboard.folders import Look, Place, Snapshot, shown
from contracts import run_directory
from contracts.errors import RequestError
from contracts.files import DiskFiles
from contracts.run_records import parse_piece, parse_time
from jobs.runtime.monitoring import host_samples
from jobs.runtime.monitoring.host_samples import COLUMNS, HostSamples
from jobs.runtime.report import page
from jobs.runtime.report.curves import host_curves, redundant_columns
from jobs.runtime.report.render import about
from jobs.runtime.report.samples import samples
from launch.hosts import HostError, in_thread
from launch.output import printable
from launch.targets import Target

STATIC = Path(__file__).parent / "static"
PAGES = ("/", "/run/{place}/{run}", "/compare")
LOOPBACK = "127.0.0.1"
NAMES = [LOOPBACK, "localhost"]
"""Host names that are accepted; a foreign name that resolves to this machine is refused (DNS rebinding)."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
PATIENCE_S = 2.0
"""How long a place has to answer before its previous answer is shown, with its problem."""
READ_S = 0.8
"""How long curves are read before those read so far are shown."""
PERIOD_S = {"disk": 1.0, "remote": 5.0}
POINTS = 1200
"""The most points of a curve: about one for each pixel of a wide chart."""
LOG_BYTES = 64 * 1024
LARGEST_SAMPLES_BYTES = 4 * 2**20
MOST_COMPARED = 12


def serve(targets: Sequence[Target], *, port: int) -> int:
    """Serve the runs of these targets until Ctrl-C.

    Raises:
        RequestError: the port is taken.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Or each answer waits 40 ms for an acknowledgement: asyncio sets it only where a socket names its protocol.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listening.bind((LOOPBACK, port))
    except OSError as error:
        listening.close()
        raise RequestError(
            f"--port {port}: cannot be listened on ({error.strerror}); choose another, or 0 for any that is free"
        ) from None
    listening.listen(128)
    places = dashboard_places(targets)
    for place in places:
        place.look(0.0)
    print(f"dashboard: http://{LOOPBACK}:{listening.getsockname()[1]}/", flush=True)
    print(f"  of {', '.join(place.folder.url for place in places)}; Ctrl-C ends it", flush=True)
    config = uvicorn.Config(
        app(places), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    return 0


def dashboard_places(targets: Sequence[Target]) -> list[Place]:
    """Return where the targets' runs lie, each place once, with keys that an address may hold."""
    places: dict[str, Place] = {}
    for target in targets:
        is_elsewhere = target.runs_on_share and not target.capabilities.shares_files
        place_id = f"{target.name} {target.runs_url}" if is_elsewhere else target.runs_url
        key = re.sub(r"[^A-Za-z0-9]+", "-", target.name).strip("-")
        key = f"{key}-{len(places) + 1}" if key in {"", *(place.key for place in places.values())} else key
        period_s = PERIOD_S["disk" if isinstance(target.files, DiskFiles) else "remote"]
        places.setdefault(place_id, Place(key, target.name, target.runs, period_s=period_s))
    return list(places.values())


def app(places: Sequence[Place]) -> Starlette:
    """Return the web application."""
    dashboard = Dashboard(places)

    def answering(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
        return lambda request: as_json(request, answer(request))

    def run_handler(answer: Callable[[Place, Snapshot, QueryParams], Any]) -> Callable[[Request], Response]:
        def answered(request: Request) -> Response:
            content = answer(*dashboard.find(**request.path_params), request.query_params)
            return content if isinstance(content, Response) else as_json(request, content)

        return answered

    api = "/api/run/{place}/{run}"
    routes = [
        *(Route(path, lambda _: FileResponse(STATIC / "index.html")) for path in PAGES),
        Mount("/static/report", StaticFiles(directory=page.STATIC)),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/runs", answering(lambda _: dashboard.runs())),
        Route(
            "/api/compare", answering(lambda request: dashboard.compare(request.query_params.getlist("run")))
        ),
        Route(api, run_handler(dashboard.run)),
        Route(f"{api}/curves", run_handler(dashboard.curves)),
        Route(f"{api}/hosts/curves", run_handler(dashboard.host_curves)),
        Route(f"{api}/log", run_handler(dashboard.log)),
        Route(f"{api}/samples", run_handler(dashboard.samples)),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(SafeHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False),
        ],
        exception_handlers={HTTPException: _refused, HostError: _unreached, OSError: _unreached},
    )


class SafeHeaders:
    """Gives every answer HEADERS, unless it has such a header of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def as_json(request: Request, content: Any) -> Response:
    """Answer with JSON, or that it is what the browser has already."""
    body = json.dumps(content, allow_nan=False).encode()
    tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
    headers = {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = json.dumps({"error": error.detail})
    return Response(body, error.status_code, media_type="application/json")


def _unreached(_: Request, error: Exception) -> Response:
    return _refused(_, HTTPException(503, str(error)))


class Dashboard:
    """What the pages ask for."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = {place.key: place for place in places}

    def find(self, place: str, run: str) -> tuple[Place, Snapshot]:
        """Return a run by the key of its place and its id.

        Raises:
            HTTPException: there is none.
        """
        owner = self._places.get(place)
        look = owner.look(PATIENCE_S) if owner else Look()
        snapshot = look.runs.get(run)
        if owner is not None and not look.is_read:
            raise HTTPException(503, f"{owner.name}: reading {owner.folder.url} …")
        if owner is None or snapshot is None:
            raise HTTPException(404, f"there is no run {shown(f'{place}/{run}')}; it may have been removed")
        return owner, snapshot

    def runs(self) -> dict[str, Any]:
        """All runs, the one that was started or resumed last first, and what of the places could not be read."""
        folders = [(place, place.look(PATIENCE_S)) for place in self._places.values()]
        listed = [
            {**snapshot.summary, "place": place.key, "id": snapshot.name, "problems": len(snapshot.problems)}
            for place, look in folders
            for snapshot in look.runs.values()
            if snapshot.summary is not None
        ]
        return {
            "places": [
                {
                    "key": place.key,
                    "name": place.name,
                    "url": place.folder.url,
                    "is_read": look.is_read,
                    "error": look.error,
                    "others": [shown(name) for name in look.other_names[:20]],
                    "more_others": max(0, len(look.other_names) - 20),
                    "problems": [
                        {"run": snapshot.name, "says": problem, "is_shown": snapshot.summary is not None}
                        for snapshot in look.runs.values()
                        for problem in snapshot.problems
                    ][:200],
                }
                for place, look in folders
            ],
            "runs": sorted(listed, key=lambda entry: (entry["started"], entry["id"]), reverse=True),
        }

    def run(self, place: Place, snapshot: Snapshot, _: QueryParams) -> dict[str, Any]:
        """One run: what it is, its hosts, its settings."""
        run = snapshot.run
        if run is None or snapshot.summary is None:
            return {"place": place.key, "id": snapshot.name, "problems": snapshot.problems, "run": None}
        history = place.history(snapshot.name)
        if not history.is_complete:  # the page asks for it next; until then much of it has been read
            in_thread(lambda: history.read_on(READ_S))
        (pictures,) = place.pieces([(snapshot.name, run_directory.SAMPLES)], limit_bytes=4)
        result = run.current_result() or {}
        names = [host["name"] for host in run.described["hosts"]]
        sampled, unread = self._samples(place, snapshot)
        findings = overview.findings(run, snapshot.state or "lost", sampled, snapshot.last_lines)
        hosts = [
            {
                "index": index,
                "name": names[index] if index < len(names) else None,
                "beat": beat and _beat(beat),
                "sampled": samples and _sample_texts(samples),
            }
            for index, (beat, samples) in enumerate(zip(run.current(), sampled, strict=True))
        ]
        measured = snapshot.summary["metrics"]
        return {
            "place": place.key,
            "id": snapshot.name,
            "problems": [*snapshot.problems, *unread],
            "run": snapshot.summary,
            "hosts": hosts,
            "findings": [item.text for item in findings],
            "attempts": [
                {"attempt": item["attempt"], "started": item["started"], "processes": item["processes"]}
                for item in run.described["attempts"]
            ],
            "measured": [
                [metric.title, run.metrics.compared(metric, measured)]
                for metric in run.metrics.ordered(measured)
            ],
            "settings": [[name, overview.cell(value)] for name, value in overview.run_settings(run).items()],
            "warnings": result["warnings"] if isinstance(result.get("warnings"), list) else [],
            "about": about(run.described, result, run.heartbeats),
            "has_samples": pictures is not None,
        }

    def curves(self, place: Place, snapshot: Snapshot, query: QueryParams) -> dict[str, Any]:
        """A run's curves. query: axis; points, of each curve; from and to, the part of the axis."""
        if snapshot.run is None:
            raise HTTPException(404, "its run.json cannot be read")
        history = place.history(snapshot.name)
        history.read_on(READ_S)
        ends = (_number(query, "from"), _number(query, "to"))
        span = (ends[0], ends[1]) if ends[0] is not None and ends[1] is not None else None
        points = min(POINTS, max(10, int(_number(query, "points") or POINTS)))
        return history.curves(
            snapshot.run.metrics,
            query.get("axis", "step"),
            points,
            span,
            attempts=len(snapshot.run.described["attempts"]),
            baselines=(snapshot.summary or {}).get("metrics"),
            starts_s=[parse_time(item["started"]) for item in snapshot.run.described["attempts"][1:]],
        )

    def host_curves(self, place: Place, snapshot: Snapshot, _: QueryParams) -> dict[str, Any]:
        """What the hosts' samplers have read, as `curves` has a run's."""
        sampled, problems = self._samples(place, snapshot)
        return host_curves([host for host in sampled if host is not None], problems=problems)

    @staticmethod
    def _samples(place: Place, snapshot: Snapshot) -> tuple[list[HostSamples | None], list[str]]:
        """What each host's sampler has read, and what of it could not be read."""
        names = [
            run_directory.host_samples(host) for host in range(snapshot.run.processes if snapshot.run else 0)
        ]
        pieces = place.pieces([(snapshot.name, name) for name in names])
        read = [parse_piece(piece, name) for piece, name in zip(pieces, names, strict=True)]
        return [host_samples.read(file) for file, _ in read], [problem for _, problem in read if problem]

    def compare(self, paths: Sequence[str]) -> dict[str, Any]:
        """Runs side by side. paths: each PLACE/RUN."""
        entries = [
            self.find(*path.partition("/")[::2]) for path in list(dict.fromkeys(paths))[:MOST_COMPARED]
        ]
        loaded = [
            (entry.run, entry.summary) for _, entry in entries if entry.run and entry.summary is not None
        ]
        compared = overview.compare([run for run, _ in loaded], [summary for _, summary in loaded])
        return {
            "runs": [
                {**(entry.summary or {}), "place": place.key, "id": entry.name} for place, entry in entries
            ],
            **{
                part: [
                    {
                        "name": row.metric.title if row.metric else row.name,
                        "texts": row.texts(),
                        "best": row.best,
                    }
                    for row in rows
                ]
                for part, rows in (
                    ("about", compared.about),
                    ("settings", compared.settings),
                    ("metrics", compared.metrics),
                )
            },
        }

    def log(self, place: Place, snapshot: Snapshot, query: QueryParams) -> dict[str, Any]:
        """A piece of a log, of whole lines if it has any. query: attempt, host, to, and offset as of `read_from`."""
        attempt, host = (int(_number(query, name) or 0) for name in ("attempt", "host"))
        offset, to = int(_number(query, "offset") or 0), _number(query, "to")
        if min(attempt, host) < 0:
            raise HTTPException(404, "there is no such log")
        limit = LOG_BYTES if to is None else max(4, min(LOG_BYTES, int(to) - offset))
        name = run_directory.log(attempt, host)
        (piece,) = place.pieces([(snapshot.name, name)], offset, limit)
        if piece is None or piece.error:
            return {"error": f"{name}: {piece.error if piece and piece.error else 'is not there'}"}
        data, begin, end = piece.data, piece.offset, piece.next_offset
        if offset < 0 < begin:
            cut = data.find(b"\n") + 1
            data, begin = data[cut:], begin + cut
        if to is None and (end_of_lines := data.rfind(b"\n") + 1):
            data, end = data[:end_of_lines], end - (len(data) - end_of_lines)
        text = printable(data.decode("utf-8", errors="replace"))
        return {"text": text, "offset": begin, "next_offset": end, "size": piece.size}

    def samples(self, place: Place, snapshot: Snapshot, _: QueryParams) -> list[dict[str, Any]]:
        """What the model says of held-out rows, as sections of the page."""
        (piece,) = place.pieces([(snapshot.name, run_directory.SAMPLES)], limit_bytes=LARGEST_SAMPLES_BYTES)
        return samples(piece.data.decode(errors="replace") if piece and not piece.error else None)


def _beat(beat: dict[str, Any]) -> dict[str, Any]:
    message = beat.get("message")
    fields = {name: beat[name] for name in ("state", "step", "time")}
    return {**fields, "message": printable(shown(message)) if message else None}


def _sample_texts(sampled: HostSamples) -> dict[str, str]:
    """What a host's sampler has read last, by title; nothing where that was long ago."""
    latest = sampled.fresh(time.time())
    names = [name for name in COLUMNS if name in latest and name not in redundant_columns(latest)]
    return {COLUMNS[name].title: sampled.text(name, latest[name]) for name in names}


def _number(query: QueryParams, name: str) -> float | None:
    """A number of the address.

    Raises:
        HTTPException: it is none.
    """
    text = query.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"-?\d{1,15}(\.\d{1,9})?", text):
        raise HTTPException(400, f"{name}={shown(text)}: must be a number")
    return float(text)
