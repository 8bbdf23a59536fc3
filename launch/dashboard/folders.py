"""The runs of one place, as the dashboard sees them: read again and again from their directories, which nobody vouches
for. What cannot be read is said, and keeps nothing else from being shown."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from contracts import run_directory
from contracts.files import Piece
from contracts.run_directory import ACTIVE, OWN_COMMAND, RUN_VERSION, State
from jobs.runtime.metric_definitions import finite
from launch import overview, runs
from launch.dashboard.curves import History, objects
from launch.hosts import HostError, in_thread
from launch.plan import JOIN_LIMIT_S
from launch.runs import METRICS_TAIL_BYTES, Run, RunsFolder

Json = dict[str, Any]

LARGEST_JSON_BYTES = 2**20
"""Of run.json and its like, which have some thousand bytes; a larger one is not read."""
LONGEST_TEXT = 500
MOST_PROCESSES = 4096
MOST_HISTORIES = 24
"""Runs whose curves are kept in memory: 10 MB for each 100,000 points of ten metrics."""
SETTLED_S = 120.0
"""After its result nothing of a run is written any more, and only whether it was resumed is asked for."""
TORN = "is torn, or no JSON object"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A run as it was seen last. run, state, said: None where run.json says of no run. said: of `overview.overview`.
    record: the bytes of run.json. last_lines: of metrics.jsonl."""

    name: str
    run: Run | None = None
    state: State | None = None
    said: Json | None = None
    problems: tuple[str, ...] = ()
    record: bytes = b""
    last_lines: tuple[Json, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """A folder as it was seen last. error: why it could not be read now; the runs are then those of before."""

    seen: Mapping[str, Seen] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()
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
        there = self.folder.files.list(self.folder.url)
        names = [name for name in there if runs.RUN_ID.fullmatch(name)]
        found: dict[str, Seen] = {}
        records: dict[str, tuple[Json, bytes]] = {}
        for name, piece in zip(
            names, self.pieces([(name, run_directory.RUN) for name in names]), strict=True
        ):
            before = self._look.seen.get(name)
            if (
                before is not None
                and piece is not None
                and piece.data == before.record
                and _is_settled(before)
            ):
                found[name] = before
                continue
            record, problem = parsed(piece, run_directory.RUN)
            problem = problem or ("has no run.json (yet)" if record is None else mistake(record, name))
            if record is None or problem is not None:
                found[name] = Seen(name=name, problems=(str(problem),))
            else:
                records[name] = (_tidy_record(record), piece.data if piece else b"")
        files = [(name, file) for name, (record, _) in records.items() for file in _files(record)]
        contents = iter(self.pieces(files))
        ends = iter(self.pieces([(name, run_directory.METRICS) for name in records], -METRICS_TAIL_BYTES))
        for name, (record, data) in records.items():
            pieces = {file: next(contents) for file in _files(record)}
            try:
                found[name] = self._seen(name, record, data, pieces, next(ends))
            except (
                LookupError,
                TypeError,
                ValueError,
                ArithmeticError,
                AttributeError,
                RecursionError,
            ) as error:
                # The checks are to see to it that this does not come; one run must not hide the others.
                found[name] = Seen(name=name, problems=(f"cannot be understood ({type(error).__name__})",))
        others = tuple(name for name in there if name not in found and not name.startswith("."))
        return Look(seen=found, others=others, is_read=True)

    def pieces(
        self, files: list[tuple[str, str]], offset: int = 0, limit_bytes: int = LARGEST_JSON_BYTES
    ) -> list[Piece | None]:
        """Read a piece of each of several files, by run and name in its directory.

        Raises:
            HostError, OSError: the place cannot be reached.
        """
        places = [(self.folder.directory(run).url, name) for run, name in files]
        return self.folder.files.read_inside(places, [offset] * len(places), limit_bytes)

    def _seen(
        self, name: str, record: Json, data: bytes, pieces: Mapping[str, Piece | None], end: Piece | None
    ) -> Seen:
        read = {file: parsed(piece, file) for file, piece in pieces.items()}
        problems = [problem for _, problem in read.values() if problem is not None]
        beats: list[Json | None] = []
        for file in list(read)[2:]:
            beat, _ = read[file]
            if beat is not None and not _is_heartbeat(beat):
                problems.append(f"{file}: has a state, step or time of the wrong kind")
                beat = None
            beats.append(beat)
        result, settings = (read[file][0] for file in (run_directory.RESULT, run_directory.SETTINGS))
        run = Run(
            directory=self.folder.directory(name),
            described=record,
            result=None if result is None else _flat(result),
            settings=None if settings is None else _flat(settings),
            heartbeats=tuple(beats),
        )
        if end is not None and end.error:
            problems.append(f"{run_directory.METRICS}: {end.error}")
        lines = _last_lines(end)
        given = {
            name: finite(value) for line in lines for name, value in line.items() if finite(value) is not None
        }
        latest = {name: value for name, value in given.items() if value is not None}
        steps = [beat["step"] for beat in run.current() if beat]
        progress = max([*steps, int(latest.get("step", 0)), 0]), latest
        state = state_of(run, time.time())
        said = {**overview.overview(run, state, progress), "figure": runs.figure(run, latest)}
        return Seen(
            name=name,
            run=run,
            state=state,
            said=said,
            problems=tuple(problems),
            record=data,
            last_lines=lines,
        )

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


def state_of(run: Run, now_s: float) -> State:
    """Return what a run is doing, by its directory only: while its heartbeats are fresh, it lives."""
    state = runs.state(run, (), unanswered=1, now_s=now_s)
    if state == "lost" and not any(run.current()):
        limit_s = JOIN_LIMIT_S.get(str(run.described.get("platform")), 0.0)
        is_new = now_s - runs.parse_time(run.described["attempts"][-1]["started"]) < limit_s
        return "starting" if is_new else state
    return state


def _is_settled(seen: Seen) -> bool:
    result = seen.run.current_result() if seen.run else None
    ended_s = finite((result or {}).get("time"))
    return seen.state not in ACTIVE and ended_s is not None and time.time() - ended_s > SETTLED_S


def _files(record: Json) -> list[str]:
    processes = range(record["attempts"][-1]["processes"])
    return [run_directory.RESULT, run_directory.SETTINGS, *map(run_directory.heartbeat, processes)]


def parsed(
    piece: Piece | None, name: str, most_bytes: int = LARGEST_JSON_BYTES
) -> tuple[Json | None, str | None]:
    """Return the JSON object of a file, and why there is none where there should be."""
    if piece is None:
        return None, None
    if piece.error:
        return None, f"{name}: {piece.error}"
    if piece.size > max(most_bytes, len(piece.data)):
        return None, f"{name}: has {piece.size:,} bytes, more than the {most_bytes:,} that are read"
    try:
        value = json.loads(piece.data)
    except (ValueError, RecursionError):
        value = None
    return (value, None) if isinstance(value, dict) else (None, f"{name}: {TORN}")


def _last_lines(end: Piece | None) -> tuple[Json, ...]:
    """The objects of the whole lines at the end of metrics.jsonl."""
    data = end.data if end else b""
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[1 if end and end.offset else 0 :]
    return tuple(line for line in objects(lines) if isinstance(line, dict))


def mistake(record: Json, name: str) -> str | None:
    """Return what of run.json this dashboard cannot go by."""
    if record.get("version") != RUN_VERSION:
        said = shown(record.get("version"))
        return f"run.json: has version {said}, and this tpu-stack reads version {RUN_VERSION}"
    rules: dict[str, Callable[[Any], bool]] = {
        "run_id": lambda value: value == name,
        "job": _is_text,
        "created": _is_time,
        "args": lambda value: isinstance(value, list) and bool(value or record.get("job") != OWN_COMMAND),
        "hosts": lambda value: isinstance(value, list) and all(map(_is_host, value)),
        "attempts": lambda value: isinstance(value, list) and bool(value) and all(map(_is_attempt, value)),
        **dict.fromkeys(
            ("name", "stack", "platform", "target"), lambda value: value is None or _is_text(value)
        ),
        **dict.fromkeys(("config", "code", "slice"), lambda value: value is None or isinstance(value, dict)),
    }
    wrong = [key for key, is_right in rules.items() if not is_right(record.get(key))]
    return f"run.json: {wrong[0]} is {shown(record.get(wrong[0]))}, which no run has" if wrong else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _is_time(value: object) -> bool:
    try:
        return _is_text(value) and runs.parse_time(str(value)) >= 0
    except (ValueError, OverflowError):
        return False


def _is_count(value: object, most: float = 1e15) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_host(value: object) -> bool:
    return isinstance(value, dict) and _is_text(value.get("name"))


def _is_attempt(value: object) -> bool:
    if not isinstance(value, dict) or not _is_time(value.get("started")):
        return False
    return _is_count(value.get("attempt")) and _is_count(value.get("processes"), MOST_PROCESSES)


def _is_heartbeat(beat: Json) -> bool:
    at_s = finite(beat.get("time"))
    return (
        _is_text(beat.get("state")) and _is_count(beat.get("step")) and at_s is not None and abs(at_s) < 1e11
    )


def _tidy_record(record: Json) -> Json:
    parts = {key: _flat(record[key]) for key in ("config", "slice") if record.get(key) is not None}
    code = {name: shown(value) for name, value in (record.get("code") or {}).items() if value is not None}
    return {**record, **parts, "code": code, "args": [shown(word) for word in record["args"]]}


def _flat(content: Json) -> Json:
    """The object with its texts cut, and what is nested in it as text; its warnings stay a list."""
    return {
        name[:LONGEST_TEXT]: [shown(each) for each in value[:50]]
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
