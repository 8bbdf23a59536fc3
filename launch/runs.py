"""Runs on the launching side: their names, their directories, and what state each is in."""

from __future__ import annotations

import dataclasses
import datetime
import random
import re
import shlex
import string
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from contracts import goodput, run_directory, run_records
from contracts.durations import spoken
from contracts.errors import WRONG_REQUEST, RequestError
from contracts.files import Files, Piece
from contracts.goodput import Goodput
from contracts.run_directory import RunDirectory, State
from contracts.run_records import Unread
from contracts.run_records import parse_time as parse_time
from contracts.suggestions import did_you_mean
from jobs.runtime.monitoring.metric_definitions import Metrics, finite, of_run
from launch.code.bundles import Bundle
from launch.hosts import HostError

RUN_ID = re.compile(r"^[a-z][a-z0-9_]*-\d{8}-\d{6}-[a-z]{4}$")
NAME = re.compile(r"^\w(?:[\w. -]{0,98}\w)?\Z")
MOST_UNREADABLE = 20
"""Runs that cannot be read of which each is named."""
LATEST = "latest"
LATEST_JOB = "latest:"

METRICS_TAIL_BYTES = 16 * 1024
"""Enough of the end of metrics.jsonl to hold a training line among the lines of evaluations."""


def new_run_id(job: str, now: datetime.datetime, rng: random.Random) -> str:
    """Return a run id: job, UTC time and four letters; unique in practice, and sorted by time within a job."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=4))
    return f"{job}-{now.astimezone(datetime.UTC):%Y%m%d-%H%M%S}-{letters}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its directory tells it."""

    directory: RunDirectory
    described: dict[str, Any]
    result: dict[str, Any] | None
    heartbeats: tuple[dict[str, Any] | None, ...]
    settings: dict[str, Any] | None = None
    """What its job has decided of what the options leave open."""
    problems: tuple[str, ...] = ()
    """What of its files could not be read."""

    @property
    def run_id(self) -> str:
        return str(self.described["run_id"])

    @property
    def latest_attempt(self) -> dict[str, Any]:
        """What run.json has of it."""
        attempt: dict[str, Any] = self.described["attempts"][-1]
        return attempt

    @property
    def attempt(self) -> int:
        """The number of the latest attempt."""
        return int(self.latest_attempt["attempt"])

    @property
    def processes(self) -> int:
        return int(self.latest_attempt["processes"])

    @property
    def started_s(self) -> float:
        """When its latest attempt was started, in Unix seconds."""
        return parse_time(self.latest_attempt["started"])

    @property
    def slice_record(self) -> Mapping[str, Any]:
        """What run.json has of its slice; empty where it has nothing."""
        return self.described.get("slice") or {}

    @property
    def machines(self) -> int:
        """How many hosts it is on; several of its processes may be on one."""
        return len({host["name"] for host in self.described["hosts"]})

    def process(self, index: int) -> dict[str, Any]:
        """Return the keys that name one process of the latest attempt to its agent."""
        return {"run_id": self.run_id, "attempt": self.attempt, "process_id": index}

    @property
    def begins_again(self) -> bool:
        """Whether its processes, where they are lost, are started again without a launcher."""
        return "pods" in self.described

    @property
    def has_begun(self) -> bool:
        """Whether a process has begun the latest attempt, which those that wait for a node have not."""
        return not self.begins_again or "pod" in self.latest_attempt

    @property
    def is_own_command(self) -> bool:
        """Whether it is a run of a user's own command, and of no job."""
        return bool(self.described["job"] == run_directory.OWN_COMMAND)

    @property
    def what(self) -> str:
        """The name of its job; of an own command its script, or its program where it has none."""
        if not self.is_own_command:
            return str(self.described["job"])
        arguments = [str(word) for word in self.described["args"]]
        script = next((word for word in arguments if word.endswith((".py", ".sh"))), arguments[0])
        return script.rpartition("/")[2]

    @property
    def metrics(self) -> Metrics:
        """What its job says of the metrics."""
        return of_run(self.described)

    @property
    def total_steps(self) -> int | None:
        """Return how many steps were asked for, or made of the epochs that were."""
        for options in (self.described.get("config"), self.settings):
            if options is not None and run_records.is_count(steps := options.get("steps")):
                return steps
        return None

    @property
    def wall_s(self) -> float | None:
        """Of the latest attempt: what its result says, else until its last heartbeat, or until it was
        ended without one; None where nothing is known of it."""
        wall_s: float | None = self.measured()["wall_s"]
        return wall_s

    @property
    def total_wall_s(self) -> float | None:
        """Return what all attempts took so far; None where one of them left no word of it."""
        return goodput.total_wall_s(self.described["attempts"], self.wall_s)

    def measured(self) -> dict[str, Any]:
        """What run.json keeps of its latest attempt's time, once another one begins."""
        if not self.has_begun:
            return {"wall_s": 0.0}
        return goodput.measured(self.latest_attempt, self.current_result(), self.current())

    @property
    def goodput(self) -> Goodput | None:
        """Where the time of its attempts went; None where nothing is known of it."""
        return goodput.run_goodput(self.described, self.result, self.heartbeats)

    def current(self) -> list[dict[str, Any] | None]:
        """Each process's heartbeat of the latest attempt; None where it has not written one yet."""
        return [
            beat if beat is not None and beat.get("attempt") == self.attempt else None
            for beat in self.heartbeats
        ]

    def current_result(self) -> dict[str, Any] | None:
        """Return the result of the latest attempt."""
        return self.result if self.result is not None and self.result.get("attempt") == self.attempt else None

    @property
    def unread_result(self) -> str | None:
        """Why its result cannot be read, where there is one that cannot."""
        problems = (problem for problem in self.problems if problem.startswith(f"{run_directory.RESULT}: "))
        return next(problems, None) if self.result is None else None


def stored_folder(run: Run) -> Bundle | None:
    """Return the folder of a command as it was last sent, from the run directory or from beside it; None: neither."""
    sha256 = run.described["code"]["folder"]
    if (bundle := Bundle.from_text(run.directory.read_text(run_directory.FOLDER), sha256)) is not None:
        return bundle
    (content,) = run.directory.files.read([run_directory.large_folder(run.directory.url, sha256)])
    return Bundle.from_text(content.decode() if content else None, sha256)


class AtWorkError(RequestError):
    """The run is at work, or somebody else is starting it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsFolder:
    """The folder that runs lie in, one folder each: a path or a URL, and how its files are reached."""

    url: str
    files: Files

    def directory(self, run_id: str) -> RunDirectory:
        return RunDirectory(f"{self.url}/{run_id}", self.files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A run.json as it was read. described: None where there is none. problem: why it cannot be read."""

    described: dict[str, Any] | None = None
    problem: str | None = None
    data: bytes = b""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listing:
    """The runs of a folder. runs: the one that was started or resumed last first. unreadable: why, by id."""

    runs: list[Run]
    unreadable: Mapping[str, str]


def read(directory: RunDirectory, run_id: str | None = None) -> Run | None:
    """Read the run in `directory`; None if there is none. run_id: what it has to be; None: any.

    Raises:
        RequestError: its run.json cannot be read, or is of a version that this code cannot read.
    """
    (record,) = read_records([directory], [] if run_id is None else [run_id])
    if record.problem is not None:
        raise RequestError(f"{directory.url}/{record.problem}; `fab runs` lists the runs that can be read")
    if record.described is None:
        return None
    (run,) = read_runs([(directory, record.described)])
    return run


def read_records(directories: Sequence[RunDirectory], run_ids: Sequence[str] = ()) -> list[Record]:
    """Read run.json in each of several directories of one place. run_ids: what each has to be; none: any."""
    pieces = _read_together([(directory, run_directory.RUN) for directory in directories])
    records = []
    expected: Sequence[str | None] = run_ids or [None] * len(pieces)
    for piece, run_id in zip(pieces, expected, strict=True):
        described, problem = run_records.parse_piece(piece, run_directory.RUN)
        problem = problem or (None if described is None else run_records.mistake(described, run_id))
        data = piece.data if piece is not None else b""
        records.append(Record(described=None if problem else described, problem=problem, data=data))
    return records


def read_runs(described: Sequence[tuple[RunDirectory, dict[str, Any]]]) -> list[Run]:
    """Read the other files of runs of one place, given what their run.json holds."""
    files = [(directory, name) for directory, record in described for name in _files(record)]
    pieces = iter(_read_together(files))
    return [_run(directory, record, pieces) for directory, record in described]


def _files(described: Mapping[str, Any]) -> list[str]:
    processes = range(int(described["attempts"][-1]["processes"]))
    return [run_directory.RESULT, run_directory.SETTINGS, *map(run_directory.heartbeat, processes)]


def _read_together(files: Sequence[tuple[RunDirectory, str]]) -> list[Piece | None]:
    """Read files of one place in one journey, by directory and name in it."""
    if not files:
        return []
    places = [(directory.url, name) for directory, name in files]
    return files[0][0].files.read_inside(places, [0] * len(places), run_records.LARGEST_JSON_BYTES)


def _run(directory: RunDirectory, described: dict[str, Any], pieces: Iterator[Piece | None]) -> Run:
    """Return the run of which `pieces` yields what _files names."""
    problems: list[str | None] = []
    values: list[dict[str, Any] | None] = []
    checks: dict[str, Check] = {run_directory.RESULT: run_records.result, run_directory.SETTINGS: _unchecked}
    for name in _files(described):
        value, problem = run_records.parse_piece(next(pieces), name)
        problems.append(problem)
        if value is not None:
            value, problem = checks.get(name, run_records.heartbeat)(value, name)
            problems.append(problem)
        values.append(value)
    result, settings, *beats = values
    return Run(
        directory=directory,
        described=described,
        result=result,
        settings=settings,
        heartbeats=tuple(beats),
        problems=tuple(problem for problem in problems if problem is not None),
    )


Check = Callable[[dict[str, Any], str], tuple[dict[str, Any] | None, str | None]]


def _unchecked(value: dict[str, Any], _: str) -> tuple[dict[str, Any], None]:
    return value, None


def survey(folder: RunsFolder) -> Listing:
    """Read all runs in `folder`, and why those cannot be read that cannot."""
    names = [name for name in folder.files.list(folder.url) if RUN_ID.match(name)]
    # Two journeys for all of them, not two for each.
    directories = [folder.directory(name) for name in names]
    records = read_records(directories, names)
    described = [
        (directory, record.described)
        for directory, record in zip(directories, records, strict=True)
        if record.described is not None
    ]
    return Listing(
        runs=sorted(
            read_runs(described),
            key=lambda run: (run.started_s, run.run_id),
            reverse=True,
        ),
        unreadable={
            name: record.problem
            for name, record in zip(names, records, strict=True)
            if record.problem is not None
        },
    )


def list_runs(folder: RunsFolder) -> list[Run]:
    """Return all runs in `folder` that can be read, the one that was started or resumed last first."""
    return survey(folder).runs


def cannot_be_read(unreadable: Mapping[str, str]) -> list[str]:
    """Return what is said of runs that cannot be read: a line for each, and one for what would be too many."""
    lines = [f"{run_id} cannot be read: {reason}" for run_id, reason in unreadable.items()]
    more = len(lines) - MOST_UNREADABLE
    return [*lines[:MOST_UNREADABLE], *([f"and {more} others cannot be read"] if more > 0 else [])]


def find(folder: RunsFolder, name: str) -> Run:
    """Return the run that `name` means: an id, the beginning or end of one, a name given with --name, "latest", or
    "latest:JOB".

    Raises:
        RequestError: no run fits, or more than one does.
    """
    exact = read(folder.directory(name), name) if RUN_ID.match(name) else None
    if exact is not None:
        return exact
    listing = survey(folder)
    runs, unreadable = listing.runs, listing.unreadable
    is_a_name = any(run.described.get("name") == name for run in runs)
    if not RUN_ID.match(name) and not is_a_name and name in folder.files.list(folder.url):
        problem = read_records([folder.directory(name)], [name])[0].problem
        if problem is not None:
            raise RequestError(f'"{name}" cannot be read: {problem}')
    if not runs:
        none = f'"{name}": there is no run in {folder.url}; start one with `fab train --job flax_mlm`'
        raise RequestError(none + "".join(f"\n  {line}" for line in cannot_be_read(unreadable)))
    if name == LATEST:
        return newest(listing, name) or runs[0]
    if name.startswith(LATEST_JOB):
        return _latest_of_job(folder, listing, name)
    fitting = [run for run in runs if run.described.get("name") == name]
    fitting = fitting or [run for run in runs if name and _fits(run.run_id, name)]
    if not fitting and name and (bad := [run_id for run_id in unreadable if _fits(run_id, name)]):
        raise RequestError(f'"{name}": {bad[0]} cannot be read: {unreadable[bad[0]]}')
    if not fitting:
        newest_ids = ", ".join(run.run_id for run in runs[:5])
        raise RequestError(f'"{name}" is not a run in {folder.url}; the newest are {newest_ids}')
    if len(fitting) > 1:
        raise RequestError(
            f'"{name}" fits {len(fitting)} runs: {", ".join(run.run_id for run in fitting[:5])}'
        )
    return fitting[0]


def newest(
    listing: Listing, name: str, *, jobs: Collection[str] = (), fits: Callable[[Run], bool] = lambda _: True
) -> Run | None:
    """Return the newest run that fits, or None; print which unreadable run may be newer.

    name: what the user typed for it. jobs: those that count; none: any.
    """
    run = next(
        (run for run in listing.runs if (not jobs or run.described["job"] in jobs) and fits(run)), None
    )
    if run is None:
        return None
    started = re.sub("[^0-9]", "", run.latest_attempt["started"])
    for run_id, reason in listing.unreadable.items():
        job, day, second, _ = run_id.rsplit("-", 3)
        if day + second > started and (not jobs or job in jobs):
            text = f"{name} is {run.run_id}; {run_id} may be newer, and cannot be read: {reason}"
            print(text, file=sys.stderr, flush=True)
    return run


def _fits(run_id: str, name: str) -> bool:
    return run_id.startswith(name) or run_id.endswith(name)


def find_export(folder: RunsFolder, name: str) -> str | None:
    """Return the export of the run that "latest:JOB" or the id of a run means; None where `name` is neither.

    Raises:
        RequestError: there is no such run, or it has no export yet.
    """
    if name.startswith(LATEST_JOB):
        run = _latest_of_job(folder, survey(folder), name)
    elif RUN_ID.match(name):
        run = find(folder, name)
    else:
        return None
    require_export(run)
    return run.directory.path(run_directory.EXPORT)


def _latest_of_job(folder: RunsFolder, listing: Listing, name: str) -> Run:
    """Return the newest complete run of the job in "latest:JOB", of all runs in the folder.

    Raises:
        RequestError: there is none.
    """
    job = name.removeprefix(LATEST_JOB)
    run = newest(listing, name, jobs=[job], fits=lambda run: (run.result or {}).get("outcome") == "done")
    if run is None:
        from launch import jobs  # only here: `fab runs` does without

        job_names = jobs.names()
        raise RequestError(
            f"{name}: no run of {job} in {folder.url} is done; start one with `fab train --job {job}`"
            if job in job_names
            else f'{name}: "{job}" is not a job; choose one of {", ".join(job_names)}{did_you_mean(job, job_names)}'
        )
    return run


def require_export(run: Run) -> None:
    """Make sure that a run has an export.

    Raises:
        RequestError: it has none yet.
    """
    if run.directory.list(run_directory.EXPORT):
        return
    if (run.current_result() or {}).get("outcome") == "done":
        raise RequestError(
            f"{run.run_id} is done and has no export: {run.what} writes none; name another run"
        )
    raise RequestError(
        f"{run.run_id} has no export yet: it is written when the last step has been taken; `fab status` tells how "
        "far it is"
    )


def check_name(folder: RunsFolder, name: str | None, own: str | None = None) -> None:
    """Check that a name would mean one run. own: the id of the run that is to have it, if it exists already.

    Raises:
        RequestError: it means something else already, or cannot be typed as a name.
    """
    if name is None:
        return
    if name == LATEST:
        raise RequestError(f"--name {name}: means the run that was started last; choose another name")
    if RUN_ID.match(name):
        raise RequestError(f"--name {name}: looks like the id of a run; choose another name")
    if not NAME.match(name):
        raise RequestError(
            f"--name {name!r}: a name has 1 to 100 letters, digits, dots, dashes, underlines and blanks, and begins "
            "and ends with a letter or a digit"
        )
    namesakes = [run for run in list_runs(folder) if run.described.get("name") == name and run.run_id != own]
    if namesakes:
        raise RequestError(
            f"--name {name}: {namesakes[0].run_id} has this name already; choose another one, or go on with that run: "
            f"`fab train --resume {shlex.quote(name)}`"
        )


def state(
    run: Run, processes: Sequence[Mapping[str, Any]], *, unanswered: int = 0, knowing: int = 0, now_s: float
) -> State:
    """Return what a run is doing; see `contracts.run_directory.state`."""
    # A pod that was started again may not have begun its attempt: what an earlier pod said is not its own. And one that
    # has failed may be about to be started again: only when the cluster has ended it is that the run's end.
    pods = {entry["process_id"]: entry for entry in processes if "pod" in entry}
    beats = [
        None if beat and rank in pods and not _holds(pods[rank], beat) else beat
        for rank, beat in enumerate(run.current())
    ]
    return run_directory.state(
        started_s=run.started_s,
        result=run.current_result(),
        heartbeats=beats,
        processes=processes,
        unanswered=unanswered,
        knowing=knowing,
        now_s=now_s,
    )


def _holds(pod: Mapping[str, Any], beat: Mapping[str, Any]) -> bool:
    if pod["state"] == "running":
        return beat["state"] != "failed" and float(beat["time"]) >= float(pod["started"])
    return bool(pod["state"] != "starting")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conclusion:
    """Why a run has ended that could not say so itself. exit_code: of a process that could not be started, which tells
    the kind of the failure; None: all could be, or it is not known."""

    error: str
    exit_code: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """What is said of processes, and the hosts that said nothing. knowing: see contracts.run_directory.state.

    restarting: the ids of runs of which a cluster starts lost processes again.
    """

    processes: tuple[dict[str, Any], ...]
    errors: tuple[HostError, ...]
    knowing: int = 0
    restarting: frozenset[str] = frozenset()

    def for_run(self, run: Run) -> Look:
        """Return the part that is about the latest attempt of one run."""
        return dataclasses.replace(
            self,
            processes=tuple(
                entry
                for entry in self.processes
                if entry["run_id"] == run.run_id and entry["attempt"] in (None, run.attempt)
            ),
        )

    @property
    def begins_again(self) -> bool:
        """Whether what holds these processes starts them again and ends them, and no launcher."""
        return any("pod" in entry for entry in self.processes)


def state_by(run: Run, look: Look) -> State:
    """Return what the run is doing now."""
    return state(
        run, look.for_run(run).processes, unanswered=len(look.errors), knowing=look.knowing, now_s=time.time()
    )


def may_be_restarted(run: Run, look: Look, state: State) -> bool:
    """Return whether a run that seems to have ended may go on: what starts it again is not heard now."""
    code = (run.current_result() or {}).get("exit_code")
    is_over = state in ("done", "stopped") or (state == "failed" and code == WRONG_REQUEST)
    return not is_over and bool(look.errors) and run.begins_again


def progress(run: Run, unread: Unread | None = None) -> tuple[int, dict[str, Any]]:
    """Return the latest step of any process, and the latest value of each metric at the end of metrics.jsonl. unread:
    is told what of that could not be read."""
    steps = [beat["step"] for beat in run.current() if beat]
    lines, _ = run.directory.read_new_metrics(-METRICS_TAIL_BYTES, unread)
    latest = {name: value for line in lines for name, value in line.items()}
    return max([*steps, int(latest.get("step", 0))]), latest


def figure(run: Run, latest: Mapping[str, Any]) -> str:
    """Return the main number of a run: its headline metric once it has ended, its first progress metric before."""
    result, shown = run.current_result(), run.metrics.progress[:1]
    order = (run.metrics.headline, *shown) if result else (*shown, run.metrics.headline)
    values = {**latest, **(result or {})}
    figures = ((name, finite(values.get(name))) for name in order)
    return next((run.metrics.get(name).named(value) for name, value in figures if value is not None), "")


def age(run: Run, now_s: float | None = None) -> str:
    """Return how long ago the run was created: "42 s", "7 min", "3 h", "12 d"."""
    seconds = (time.time() if now_s is None else now_s) - parse_time(run.described["created"])
    return spoken(seconds, units=1)
