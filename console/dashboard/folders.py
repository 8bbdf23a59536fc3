"""The runs of a folder as the dashboard shows them, read repeatedly from their directories, which are not trusted.

What cannot be read is named, and hides nothing else.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import threading
import time
from collections.abc import Mapping

from console import overview
from contracts import run_directory, run_records
from contracts.aliases import Json
from contracts.files import Piece
from contracts.run_directory import ACTIVE, RunDirectory, State
from contracts.run_records import LARGEST_JSON_BYTES, LONGEST_TEXT
from jobs.runtime.monitoring.metric_definitions import finite
from jobs.runtime.report.curves import History
from launch import runs
from launch.hosts import HostError, in_thread
from launch.plan import JOIN_LIMIT_S
from launch.runs import METRICS_TAIL_BYTES, Run, RunsFolder

MOST_HISTORIES = 24
"""Runs whose curves are kept in memory: 10 MB for each 100,000 points of ten metrics."""
SETTLED_S = 120.0
"""After its result nothing of a run is written any more, and only whether it was resumed is asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run as it was read last. run, state, summary: None if run.json describes no run. summary: as
    `overview.overview` has it. record: the bytes of run.json. last_lines: of metrics.jsonl."""

    name: str
    run: Run | None = None
    state: State | None = None
    summary: Json | None = None
    problems: tuple[str, ...] = ()
    record: bytes = b""
    last_lines: tuple[Json, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """A folder as it was read last. error: why it could not be read now; the runs are then the previous ones."""

    runs: Mapping[str, Snapshot] = dataclasses.field(default_factory=dict)
    other_names: tuple[str, ...] = ()
    error: str | None = None
    is_read: bool = False
    took_s: float = 0.0


class Place:
    """The runs of a folder, under a key that an address may hold. Safe to use from several threads.

    period_s: how old a look may be that is answered with.
    """

    def __init__(self, key: str, name: str, folder: RunsFolder, *, period_s: float) -> None:
        self.key, self.name, self.folder = key, name, folder
        self._period_s, self._lock, self._look = period_s, threading.Lock(), Look()
        self._reading: concurrent.futures.Future[None] | None = None
        self._read_s = -float("inf")
        self._histories: collections.OrderedDict[str, History] = collections.OrderedDict()

    def look(self, patience_s: float) -> Look:
        """Return the last look. One that is too old is renewed in a thread, which is waited for so long."""
        with self._lock:
            is_due = time.monotonic() - self._read_s > max(self._period_s, 5 * self._look.took_s)
            if is_due and (self._reading is None or self._reading.done()):
                self._reading = in_thread(self._renew)
            reading = self._reading
        if reading is not None:
            concurrent.futures.wait([reading], patience_s)
        return self._look

    def _renew(self) -> None:
        began_s = time.monotonic()
        try:
            look = self._read_all()
        except (HostError, OSError) as error:
            look = dataclasses.replace(self._look, error=str(error), is_read=True)
        self._read_s = time.monotonic()
        self._look = dataclasses.replace(look, took_s=self._read_s - began_s)

    def _read_all(self) -> Look:
        names_present = self.folder.files.list(self.folder.url)
        names = [name for name in names_present if runs.RUN_ID.fullmatch(name)]
        directories = [self.folder.directory(name) for name in names]
        snapshots: dict[str, Snapshot] = {}
        described: dict[str, tuple[RunDirectory, Json, bytes]] = {}
        for name, directory, record in zip(
            names, directories, runs.read_records(directories, names), strict=True
        ):
            before = self._look.runs.get(name)
            if before is not None and record.data and record.data == before.record and _is_settled(before):
                snapshots[name] = before
            elif record.described is None:
                snapshots[name] = Snapshot(name=name, problems=(record.problem or "has no run.json (yet)",))
            else:
                described[name] = directory, record.described, record.data
        loaded = runs.read_runs([(directory, record) for directory, record, _ in described.values()])
        ends = self.pieces([(name, run_directory.METRICS) for name in described], -METRICS_TAIL_BYTES)
        for name, run, end in zip(described, loaded, ends, strict=True):
            try:
                snapshots[name] = _snapshot(name, run, described[name][2], end)
            except (
                LookupError,
                TypeError,
                ValueError,
                ArithmeticError,
                AttributeError,
                RecursionError,
            ) as error:
                # The checks are to see to it that this does not come; one run must not hide the others.
                snapshots[name] = Snapshot(
                    name=name, problems=(f"cannot be understood ({type(error).__name__})",)
                )
        other_names = tuple(
            name for name in names_present if name not in snapshots and not name.startswith(".")
        )
        return Look(runs=snapshots, other_names=other_names, is_read=True)

    def pieces(
        self, files: list[tuple[str, str]], offset: int = 0, limit_bytes: int = LARGEST_JSON_BYTES
    ) -> list[Piece | None]:
        """Read a piece of each of several files, by run and name in its directory.

        Raises:
            HostError, OSError: the place cannot be reached.
        """
        places = [(self.folder.directory(run).url, name) for run, name in files]
        return self.folder.files.read_inside(places, [offset] * len(places), limit_bytes)

    def history(self, name: str) -> History:
        """Return the curves of a run, as far as they have been read."""

        def read(offset: int, limit_bytes: int) -> Piece | None:
            return self.pieces([(name, run_directory.METRICS)], offset, limit_bytes)[0]

        with self._lock:
            history = self._histories.pop(name, None) or History(read)
            self._histories[name] = history
            while len(self._histories) > MOST_HISTORIES:
                self._histories.popitem(last=False)
        return history


def _snapshot(name: str, run: Run, data: bytes, end: Piece | None) -> Snapshot:
    run, problems = _bounded(run), [*run.problems]
    if end is not None and end.error:
        problems.append(f"{run_directory.METRICS}: {end.error}")
    lines = _last_lines(end)
    latest = {name: value for line in lines for name, value in line.items() if value is not None}
    steps = [beat["step"] for beat in run.current() if beat]
    progress = max([*steps, int(latest.get("step", 0))]), latest
    state = dashboard_state(run, time.time())
    summary = {**overview.overview(run, state, progress), "figure": runs.figure(run, latest)}
    return Snapshot(
        name=name,
        run=run,
        state=state,
        summary=summary,
        problems=tuple(problems),
        record=data,
        last_lines=lines,
    )


def dashboard_state(run: Run, now_s: float) -> State:
    """Return what a run is doing, by its directory only: while its heartbeats are fresh, it lives."""
    state = runs.state(run, (), unanswered=1, now_s=now_s)
    if state == "lost" and not any(run.current()):
        limit_s = JOIN_LIMIT_S.get(str(run.described.get("platform")), 0.0)
        is_new = now_s - run.started_s < limit_s
        return "starting" if is_new else state
    return state


def _is_settled(snapshot: Snapshot) -> bool:
    result = snapshot.run.current_result() if snapshot.run else None
    ended_s = finite((result or {}).get("time"))
    return snapshot.state not in ACTIVE and ended_s is not None and time.time() - ended_s > SETTLED_S


def _last_lines(end: Piece | None) -> tuple[Json, ...]:
    """What the whole lines at the end of metrics.jsonl measure."""
    data = end.data if end else b""
    return tuple(
        run_records.metrics(data[: data.rfind(b"\n") + 1].split(b"\n")[1 if end and end.offset else 0 :])
    )


def _bounded(run: Run) -> Run:
    """The run with texts of bounded length, and what is nested in its options and results as text."""
    record = run.described
    parts = {key: _flat(record[key]) for key in ("config", "slice") if record.get(key) is not None}
    code = {name: shown(value) for name, value in (record.get("code") or {}).items() if value is not None}
    return dataclasses.replace(
        run,
        described={**record, **parts, "code": code, "args": [shown(word) for word in record["args"]]},
        result=None if run.result is None else _flat(run.result),
        settings=None if run.settings is None else _flat(run.settings),
    )


def _flat(content: Json) -> Json:
    """The object with its texts cut, and what is nested in it as text; its warnings stay a list."""
    return {
        name[:LONGEST_TEXT]: [shown(item) for item in value[:50]]
        if name == "warnings" and isinstance(value, list)
        else value
        if value is None or isinstance(value, bool | int | float)
        else shown(value)
        for name, value in content.items()
    }


def shown(value: object) -> str:
    """A value as text of bounded length."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        text = "…"
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
