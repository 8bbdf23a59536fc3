"""Runs on the launching side: their names, their directories, and what state each is in."""

from __future__ import annotations

import dataclasses
import datetime
import random
import re
import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jobs.runtime import run_directory
from jobs.runtime.errors import RequestError
from jobs.runtime.run_directory import RunDirectory

RUN_VERSION = 1
RUN_ID = re.compile(r"^[a-z][a-z0-9_]*-\d{8}-\d{6}-[a-z]{4}$")

State = Literal["starting", "running", "saving", "done", "failed", "stopped", "preempted", "hung", "lost"]
ACTIVE: tuple[State, ...] = ("starting", "running", "saving")
FINISHING_LIMIT_S = 10.0
"""Seconds after its processes ended in which a run's result may still be on its way."""


METRICS_TAIL_BYTES = 16 * 1024
"""Enough of the end of metrics.jsonl to hold a training line among the lines of evaluations."""


def new_run_id(job: str, now: datetime.datetime, rng: random.Random) -> str:
    """Job, UTC time and four letters: unique in practice, and sorted by time within a job."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=4))
    return f"{job}-{now.astimezone(datetime.UTC):%Y%m%d-%H%M%S}-{letters}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its directory tells it."""

    directory: RunDirectory
    described: dict[str, Any]
    result: dict[str, Any] | None
    heartbeats: tuple[dict[str, Any] | None, ...]

    @property
    def run_id(self) -> str:
        return str(self.described["run_id"])

    @property
    def attempt(self) -> int:
        return int(self.described["attempts"][-1]["attempt"])

    @property
    def processes(self) -> int:
        return int(self.described["attempts"][-1]["processes"])

    @property
    def total_steps(self) -> int | None:
        steps = self.described.get("config", {}).get("steps")
        return steps if isinstance(steps, int) else None

    def current(self) -> list[dict[str, Any] | None]:
        """Each process's heartbeat of the latest attempt; None where it has not written one yet."""
        return [
            beat if beat is not None and beat.get("attempt") == self.attempt else None
            for beat in self.heartbeats
        ]

    def current_result(self) -> dict[str, Any] | None:
        """The result of the latest attempt."""
        return self.result if self.result is not None and self.result.get("attempt") == self.attempt else None


def read(directory: RunDirectory) -> Run | None:
    """The run in `directory`; None where there is none."""
    described = directory.read_json(run_directory.RUN)
    if described is None or not described.get("attempts"):
        return None
    processes = int(described["attempts"][-1]["processes"])
    return Run(
        directory=directory,
        described=described,
        result=directory.read_json(run_directory.RESULT),
        heartbeats=tuple(directory.read_json(run_directory.heartbeat(index)) for index in range(processes)),
    )


def list_runs(runs_dir: Path) -> list[Run]:
    """All runs under `runs_dir`, the one that was started or resumed last first."""
    if not runs_dir.is_dir():
        return []
    found = (read(RunDirectory(str(path))) for path in runs_dir.iterdir() if RUN_ID.match(path.name))
    return sorted(
        (run for run in found if run is not None),
        key=lambda run: (run.described["attempts"][-1]["started"], run.run_id),
        reverse=True,
    )


def find(runs_dir: Path, wanted: str) -> Run:
    """The run that `wanted` means: an id, the beginning or end of one, a name given with --name, or "latest".

    Raises:
        RequestError: no run fits, or more than one does.
    """
    runs = list_runs(runs_dir)
    if not runs:
        raise RequestError(
            f'"{wanted}": there is no run in {runs_dir}; start one with `fab train --job flax_mlm`'
        )
    if wanted == "latest":
        return runs[0]
    fitting = [run for run in runs if run.run_id == wanted]
    fitting = fitting or [run for run in runs if run.described.get("name") == wanted]
    fitting = fitting or [
        run for run in runs if wanted and (run.run_id.startswith(wanted) or run.run_id.endswith(wanted))
    ]
    if not fitting:
        newest = ", ".join(run.run_id for run in runs[:5])
        raise RequestError(f'"{wanted}" is not a run in {runs_dir}; the newest are {newest}')
    if len(fitting) > 1:
        raise RequestError(
            f'"{wanted}" fits {len(fitting)} runs: {", ".join(run.run_id for run in fitting[:5])}'
        )
    return fitting[0]


def state(run: Run, processes: Sequence[Mapping[str, Any]], *, now_s: float) -> State:
    """What a run is doing, from its directory and from what the agents say of its latest attempt's processes.

    processes: the agents' status entries of the latest attempt.
    """
    alive = [p for p in processes if p["state"] in ("starting", "running")]
    result = run.current_result()
    if result is not None and not alive:
        return _outcome(result)
    beats = run.current()
    states = [beat["state"] if beat else "starting" for beat in beats]
    if "failed" in states:
        return "failed"
    if alive:
        if "saving" in states:
            return "saving"
        return "running" if all(s not in ("starting", "joined") for s in states) else "starting"
    if "stopped" in states:
        return "stopped"
    ended = [p["ended"] for p in processes if p.get("ended")]
    since_s = max([parse_time(run.described["attempts"][-1]["started"]), *ended])
    if now_s - since_s >= FINISHING_LIMIT_S:
        return "lost"
    return "saving" if any(beats) else "starting"


def _outcome(result: Mapping[str, Any]) -> State:
    outcome = result.get("outcome")
    known: tuple[State, ...] = ("done", "failed", "stopped", "preempted", "hung")
    return next((name for name in known if name == outcome), "failed")


def progress(run: Run) -> tuple[int, float | None]:
    """The latest step that some process reached, and the latest training loss."""
    steps = [beat["step"] for beat in run.current() if beat]
    lines, _ = run.directory.read_new_metrics(-METRICS_TAIL_BYTES)
    losses = [line for line in lines if "loss" in line]
    step = max([*steps, *(int(line["step"]) for line in losses[-1:]), 0])
    return step, losses[-1]["loss"] if losses else None


def parse_time(text: str) -> float:
    """Seconds since 1970 of a moment in run.json."""
    return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC).timestamp()


def age(run: Run, now_s: float | None = None) -> str:
    """How long ago the run was created, for people: "42 s", "7 min", "3 h", "12 d"."""
    seconds = (time.time() if now_s is None else now_s) - parse_time(run.described["created"])
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
