"""Contract 3, the run directory: what lies in it, who writes which file, and what state its run is in.

    attempts/<n>.json        the launcher, or the first pod, that begins attempt n: its fencing token; contracts.fencing
    .unfinished/<n>/         attempt n: files and checkpoints before they get their names
    run.json                 the launcher, before anything starts: RUN_VERSION, job, options, code, hosts, attempts
    code.tar.gz.base64       the launcher: the code bundle of the latest attempt
    folder.tar.gz.base64     the launcher, where a command of the user's own runs: its folder as it was last sent
    settings.json            process 0: every option with the value that it had in the end
    metrics.jsonl            process 0: one object a log step
    heartbeats/host-<i>.json each process, renewed while it lives; its host's agent once it has ended badly
    hosts/host-<i>.json      each host's sampler: what the host and its devices did over time; see below
    logs/<attempt>/host-<i>.log    the agent, from what the process prints
    stacks/<attempt>/host-<i>.txt  the agent, where a run hung: what its processes were doing
    checkpoints/<step>/      all processes together: complete or absent
    tensorboard/, export/, profile/, trouble/      process 0; tensorboard/hosts/<i>/ each host's sampler
    samples.json             process 0 at the end, any of: confusion {labels, counts} (rows: truth, columns:
                             prediction), pictures [{png, truth, prediction, probability}] (png: base64), questions
                             [{question, context, truth, answer, probability}], texts [{texts, truth, prediction,
                             probability}]; the report shows them
    trackers/<name>.json     the mirror of `--track`: how far a tracker is
    serving.json             process 0 of a server, once it answers: address, port, task, takes, example
    notices.json             whoever has told a person how an attempt ended, after that: ATTEMPT/KIND/CHANNEL →
                             when, in Unix seconds
    keeper.jsonl             the keeper: what it did about the run and why: {time, act, reason}
    stop.json                `fab stop`, where nothing ran just then: {attempt} after which nobody starts it again
    report.html              process 0, or the launcher when the run ended without it
    result.json              written last, once an attempt: process 0, else the agent of the first host that is left,
                             else the launcher; see `result`

A heartbeat has rank, attempt, state (`jobs.runtime.monitoring.heartbeat.State`), step, time (when it was written),
step_time (when the step moved), pid, message, says_all (the message needs no lines of the log), warnings,
hangs_at_floor (the hang limit holds from the start), joined (of an own command: the host's ranks that have joined their
group), timing (where the process's time went: `contracts.goodput`); exit_code where the agent has written it.

hosts/host-<i>.json is one object, of all attempts of the run:
    {"host": 0, "interval_s": 20.0, "samples_per_point": 2, "samples_in_last": 1,
     "capacity": {"memory_mib": 15999, …},           the most that a column can be, where there is a most
     "latest": {"time": 1795413276.2, "cpu_pct": 87.5, "devices": [{"duty_pct": 91.0, …}, …], …},  the last sample
     "points": {"time": […], "cpu_pct": […], …}}     columns of one length, null where a value was not there
The columns, their titles and units are `jobs.runtime.monitoring.host_samples.COLUMNS`; a host has those that it has
values for. There are at most MOST_POINTS of them: when these are full, each two become one, so that a point is of
interval_s. Read it with `jobs.runtime.monitoring.host_samples.read`, which answers for every file, torn or foreign.

The agent imports this file at each start, so it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import json
import math
import os

from contracts import run_records
from contracts.errors import PEER_LOST, Superseded
from contracts.run_records import METRICS as METRICS
from contracts.run_records import OWN_COMMAND as OWN_COMMAND
from contracts.run_records import RUN as RUN
from contracts.run_records import RUN_VERSION as RUN_VERSION

TYPE_CHECKING = False  # the agent starts on every host for every launch, and `typing` is a fifth of its start
if TYPE_CHECKING:
    import builtins
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal

    from contracts.aliases import Json
    from contracts.files import Files, Piece
    from contracts.run_records import Unread

    Outcome = Literal["done", "failed", "stopped", "preempted", "hung"]
    State = Literal["starting", "running", "saving", "done", "failed", "stopped", "preempted", "hung", "lost"]
else:
    Outcome = State = str

BUNDLES = ".packages"
"""A folder beside the runs of a place: packages, and folders that are too large for every run to have a copy."""
CODE, FOLDER = "code.tar.gz.base64", "folder.tar.gz.base64"
"""Text, because what is written through the hosts of a stack is text. Only their owner may read them, by their ending
(`contracts.files.PRIVATE_ENDING`)."""
SETTINGS = "settings.json"
RESULT = "result.json"
REPORT = "report.html"
SAMPLES = "samples.json"
KEEPER = "keeper.jsonl"
SERVING = "serving.json"
NOTICES = "notices.json"
STOP = "stop.json"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
HOST_EVENTS = f"{TENSORBOARD}/hosts"
EXPORT = "export"
HEARTBEATS = "heartbeats"
HOSTS = "hosts"
LOGS = "logs"
STACKS = "stacks"
PROFILE = "profile"
ATTEMPTS = "attempts"
UNFINISHED = ".unfinished"

OUTCOMES: tuple[Outcome, ...] = ("done", "failed", "stopped", "preempted", "hung")
STATES_ENDED = ("done", "failed", "stopped", "preempted")
ENDED = {
    "done": "is done",
    "failed": "failed",
    "stopped": "was stopped",
    "preempted": "was preempted",
    "hung": "hung",
    "lost": "was lost",
}
"""Describes a run in a final state, after "it"."""
ACTIVE: tuple[State, ...] = ("starting", "running", "saving")
FINISHING_LIMIT_S = 10.0
"""Seconds after its processes ended in which a run's result may still be on its way."""
SILENCE_LIMIT_S = 60.0
"""Seconds without a heartbeat after which a process on a host that does not answer counts as gone. The liveness
server of the run has by then stopped whatever was left of it."""
CLOCKS_DIFFER_S = 3600.0
"""How much the clocks of a launcher, a host and a reader of a run may differ."""
PIECE_BYTES = 4 * 2**20
"""Of metrics.jsonl that are read at once."""
COMMITTED = "commit_success.txt"
"""What is written last into a checkpoint where a folder cannot be renamed, as in a bucket; by Orbax everywhere."""
CHECKPOINT_NOTES, CHECKSUMS = "notes.json", "crc32"
"""In a checkpoint of PyTorch or TensorFlow: its JSON file, and what that has as the checksums of all other files, by
their names."""


def heartbeat(process_id: int) -> str:
    """The heartbeat file of one process, relative to the run directory."""
    return f"{HEARTBEATS}/host-{process_id}.json"


def token(attempt: int) -> str:
    """The fencing token of an attempt, relative to the run directory."""
    return f"{ATTEMPTS}/{attempt}.json"


def unfinished(attempt: int, name: str) -> str:
    """A new name, relative to the run directory, for what attempt `attempt` will give the name `name`."""
    return f"{UNFINISHED}/{attempt}/{os.urandom(6).hex()}-{name.rpartition('/')[2]}"


def tracker(name: str) -> str:
    """The file about the run's mirror in one tracker, relative to the run directory."""
    return f"trackers/{name}.json"


def reserve(process_id: int) -> str:
    """Room on the disk that one process keeps for its last words; the agent gives it back for one that was killed."""
    return f"{HEARTBEATS}/.host-{process_id}.reserve"


def host_samples(host: int) -> str:
    """The file with what one host's sampler has read, relative to the run directory."""
    return f"{HOSTS}/host-{host}.json"


def log(attempt: int, process_id: int) -> str:
    """The log file of one process of one attempt, relative to the run directory."""
    return f"{LOGS}/{attempt}/host-{process_id}.log"


def packages(run_dir: str, sha256: str) -> str:
    """The bundle of the packages that a command of the user's own needs, beside all runs of its place: by its hash, and
    for all users there, unlike what may have files of their own."""
    return f"{run_dir.rpartition('/')[0]}/{BUNDLES}/{sha256}.base64"


def large_folder(run_dir: str, sha256: str) -> str:
    """The bundle of a command's folder that is not in the run directory, because it is large; only for its owner."""
    return f"{run_dir.rpartition('/')[0]}/{BUNDLES}/{sha256}.tar.gz.base64"


def stacks(attempt: int, process_id: int) -> str:
    """The file with the stack traces of one process of a hung attempt, relative to the run directory."""
    return f"{STACKS}/{attempt}/host-{process_id}.txt"


def live_stacks(taken: str, process_id: int) -> str:
    """The file with the stack traces of one host of a running attempt, relative to the run directory. taken: when."""
    return f"{STACKS}/{taken}/host-{process_id}.txt"


def result(
    outcome: str,
    *,
    attempt: int,
    steps: int | None,
    time: float,
    wall_s: float | None = None,
    error: str | None = None,
    failed_host: int | None = None,
    measured: Mapping[str, Any] | None = None,
) -> Json:
    """The content of result.json.

    time: Unix seconds. wall_s: of the attempt, as long as its process 0 lived. failed_host: the one that failed first.
    measured: the job's final metrics, and what else is said of its end (warnings, time_s; exit_code of the host that
    failed first, null where it was lost); numbers that are not finite become null, as JSON knows no nan.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in (measured or {}).items()
    }
    return {
        "outcome": outcome,
        "steps": steps,
        **finite,
        "wall_s": wall_s,
        "error": error,
        "failed_host": failed_host,
        "attempt": attempt,
        "time": time,
    }


def out_of_budget(reason: str) -> Json:
    """The extra fields of the result of a run that was stopped because its budget was spent."""
    return {"out_of_budget": True, "reason": reason}


def own_failures(heartbeats: Sequence[Json]) -> list[Json]:
    """The heartbeats of processes that failed, without those that only lost a peer."""
    return [
        beat for beat in heartbeats if beat.get("state") == "failed" and beat.get("exit_code") != PEER_LOST
    ]


def first_failure(heartbeats: Sequence[Json]) -> Json | None:
    """The heartbeat of the process that failed first; one that only lost a peer is left out, unless all did."""
    failed = own_failures(heartbeats) or [beat for beat in heartbeats if beat.get("state") == "failed"]
    return min(failed, key=lambda beat: (float(beat["time"]), int(beat["rank"])), default=None)


def state(
    *,
    started_s: float,
    result: Mapping[str, Any] | None,
    heartbeats: Sequence[Mapping[str, Any] | None],
    processes: Sequence[Mapping[str, Any]],
    unanswered: int = 0,
    knowing: int = 0,
    now_s: float,
) -> State:
    """The state of a run, from its directory and from the agents' answers about its latest attempt's processes.

    started_s: when the attempt was started. result, heartbeats: of the latest attempt, None where there is none yet.
    processes: the agents' status entries of that attempt. unanswered: hosts that could not be asked; what they do is
    told by heartbeats only, as long as those are fresh. So is that of a run that no agent has a record of: agents keep
    theirs by user, and somebody else may have started it, such as the keeper. knowing: hosts of which all is known:
    those that there are no more, and this machine, where runs are one user's.
    """
    alive = [process for process in processes if process["state"] in ("starting", "running")]
    if result is not None and not alive:
        outcome = result.get("outcome")
        return next((known_outcome for known_outcome in OUTCOMES if known_outcome == outcome), "failed")
    states = [beat["state"] if beat else "starting" for beat in heartbeats]
    if "failed" in states:
        return "failed"
    if alive or ((unanswered or not (processes or knowing)) and _is_fresh(heartbeats, now_s)):
        if "saving" in states:
            return "saving"
        return (
            "running"
            if all(process_state not in ("starting", "joined") for process_state in states)
            else "starting"
        )
    if "stopped" in states:
        return "stopped"
    since_s = max([started_s, *(process["ended"] for process in processes if process.get("ended"))])
    # A supervisor that is still there is about to say what happened, which takes longer to a bucket than to a disk.
    if now_s - since_s >= FINISHING_LIMIT_S and not any(process.get("supervised") for process in processes):
        return "lost"
    return "saving" if any(heartbeats) else "starting"


def _is_fresh(heartbeats: Sequence[Mapping[str, Any] | None], now_s: float) -> bool:
    """Whether some process said within SILENCE_LIMIT_S that it lives, and none that it has ended."""
    heard_s = [beat["time"] for beat in heartbeats if beat is not None and beat["state"] not in STATES_ENDED]
    return bool(heard_s) and now_s - max(heard_s) < SILENCE_LIMIT_S


class RunDirectory:
    """Files of one run under `url`: a path on this host (a disk, NFS), or a URL that fsspec knows (gs://).

    files: how they are reached where that is not from this host's own disks. attempt: the one that writes through this
    object: every write raises Superseded once a newer attempt has begun (contracts.fencing). None: writes are not
    fenced.
    """

    def __init__(self, url: str, files: Files | None = None, *, attempt: int | None = None) -> None:
        from contracts.files import DiskFiles, is_url

        self.url = url.rstrip("/")
        self.is_remote = is_url(url)
        if files is None and self.is_remote:
            raise ValueError(f"{url} is not on this host's disks; say how its files are reached")
        self.files: Files = files or DiskFiles()
        self.attempt = attempt

    def for_attempt(self, attempt: int) -> RunDirectory:
        """This directory, for writes by attempt `attempt`."""
        return RunDirectory(self.url, self.files, attempt=attempt)

    def unfenced(self) -> RunDirectory:
        """This directory as it is written by what belongs to no attempt."""
        return RunDirectory(self.url, self.files)

    def newest_attempt(self) -> int | None:
        """The newest attempt that has a token; None where there is none, as in directories made by older code."""
        numbers = [name.partition(".")[0] for name in self.list(ATTEMPTS)]
        return max((int(number) for number in numbers if number.isdigit()), default=None)

    def require_newest(self) -> None:
        """Check that no newer attempt has begun; one read of a small file that is not there.

        Raises:
            Superseded: one has.
        """
        if self.attempt is not None and self.read_text(token(self.attempt + 1)) is not None:
            raise Superseded(
                f"attempt {self.newest_attempt()} of this run has begun since; attempt {self.attempt} ends"
            )

    def commit(self, temporary_name: str, name: str) -> None:
        """Give a file in the folder of `unfinished` its final name. An existing file of that name is replaced.

        Raises:
            Superseded: a newer attempt has begun; nothing has changed.
        """
        self.require_newest()
        try:
            self.files.move(self.path(temporary_name), self.path(name))
        except Exception:  # each driver has exceptions of its own
            self.require_newest()  # it has removed the file
            raise

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read_text(self, name: str) -> str | None:
        """The file's text; None where there is no such file."""
        return self.read_texts([name])[0]

    def read_texts(self, names: Sequence[str]) -> builtins.list[str | None]:
        """The texts of several files, read together."""
        contents = self.files.read([self.path(name) for name in names])
        return [None if data is None else data.decode("utf-8", errors="replace") for data in contents]

    def write_text(self, name: str, text: str) -> None:
        """Write the file whole.

        Raises:
            OSError: the disk is full, or the directory cannot be written.
            Superseded: a newer attempt than this object's has begun.
        """
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write the file whole; see `write_text`."""
        if self.attempt is None:
            self.files.write(self.path(name), data)
            return
        temporary_name = unfinished(self.attempt, name)
        try:
            self.files.write_new(self.path(temporary_name), data)
            self.commit(temporary_name, name)
        except Exception:
            with contextlib.suppress(Exception):  # the first failure says why
                self.files.remove(self.path(temporary_name))
            self.require_newest()
            raise

    def read_json(self, name: str) -> Json | None:
        """The file's JSON object; None where there is no such file or it holds no object."""
        return self.read_jsons([name])[0]

    def read_jsons(self, names: Sequence[str]) -> builtins.list[Json | None]:
        """The JSON object of each of several files, read together."""
        return [None if text is None else run_records.parse_object(text) for text in self.read_texts(names)]

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Remove the file; nothing happens where there is none. Raises Superseded: as `write_text`."""
        self.require_newest()
        self.files.remove(self.path(name))

    def list(self, name: str) -> builtins.list[str]:
        """The names in a folder; none where there is no such folder."""
        return self.files.list(self.path(name))

    def size_bytes(self) -> int:
        return self.files.folder_bytes(self.url)

    def remove_all(self) -> None:
        """Remove the directory. run.json goes first: without it, what an interrupted removal has left is no run."""
        self.files.remove_folder(self.url, RUN)

    def checkpoint_steps(self) -> builtins.list[int]:
        """Steps that have a complete checkpoint, in order."""
        steps = sorted(int(name) for name in self.list(CHECKPOINTS) if name.isdigit())
        if not self.is_remote:
            return steps  # the folder has its name from the moment on that it is whole
        signs = self.read_texts([f"{CHECKPOINTS}/{step}/{COMMITTED}" for step in steps])
        unsigned = [step for step, sign in zip(steps, signs, strict=True) if sign is None]
        notes = self.read_jsons([f"{CHECKPOINTS}/{step}/{CHECKPOINT_NOTES}" for step in unsigned])
        torn = {step for step, noted in zip(unsigned, notes, strict=True) if not self._has_all(step, noted)}
        return [step for step in steps if step not in torn]

    def newest_checkpoint(self) -> int | None:
        """The newest step that has a complete checkpoint; None where none has."""
        return max(self.checkpoint_steps(), default=None)

    def _has_all(self, step: int, notes: Json | None) -> bool:
        """Whether the files are there that the notes of a checkpoint name, as where it was copied from a disk."""
        files = (notes or {}).get(CHECKSUMS)
        return isinstance(files, dict) and {*files} <= {*self.list(f"{CHECKPOINTS}/{step}")}

    def read_objects(self, names: Sequence[str], unread: Unread | None = None) -> builtins.list[Json | None]:
        """The JSON object of each of several files that nobody vouches for; None also where one cannot be read, of
        which `unread` is told.

        Raises:
            OSError: the place itself cannot be reached.
        """
        most_bytes = run_records.LARGEST_JSON_BYTES
        pieces = self.files.read_inside([(self.url, name) for name in names], [0] * len(names), most_bytes)
        parsed = [run_records.parse_piece(piece, name) for piece, name in zip(pieces, names, strict=True)]
        for _, problem in parsed:
            if problem is not None and unread is not None:
                unread.add(problem)
        return [value for value, _ in parsed]

    def read_log(self, attempt: int, process_id: int, offset: int, limit_bytes: int) -> Piece | None:
        """A part of a process's log, of whole lines where it has any; None where it is not there. offset: as of
        `Files.read_inside`.

        Raises:
            OSError: the place itself cannot be reached.
        """
        from contracts.files import Piece

        places = [(self.url, log(attempt, process_id))]
        (piece,) = self.files.read_inside(places, [offset], limit_bytes)
        if piece is None or piece.error:
            return None
        begin = piece.data.find(b"\n") + 1 if offset < 0 < piece.offset else 0
        end = piece.data.rfind(b"\n") + 1 if piece.next_offset < piece.size else 0
        end = end if end > begin else len(piece.data)
        unread = len(piece.data) - end
        return Piece(
            data=piece.data[begin:end],
            offset=piece.offset + begin,
            next_offset=piece.next_offset - unread,
            size=piece.size,
        )

    def read_metrics(self) -> builtins.list[Json]:
        """The lines of metrics.jsonl in order, as `run_records.metrics` reads them; a torn line (its writer was killed)
        is left out.
        """
        (data,) = self.files.read([self.path(METRICS)])
        return run_records.metrics((data or b"").split(b"\n"))

    def read_new_metrics(self, offset: int, unread: Unread | None = None) -> tuple[builtins.list[Json], int]:
        """The whole lines of metrics.jsonl from byte `offset` on (negative: from so far before its end), as
        `run_records.metrics` reads them, and the offset after them. A file that has become shorter is read from its
        beginning. unread: is told what could not be read.

        Raises:
            OSError: the place itself cannot be reached.
        """
        data, at, begin = b"", offset, 0
        while True:
            (piece,) = self.files.read_inside([(self.url, METRICS)], [at], PIECE_BYTES)
            if piece is None:
                return [], 0
            if piece.error:
                if unread is not None:
                    unread.add(f"{METRICS}: {piece.error}")
                return [], offset
            if piece.size < at:
                data, at = b"", 0
                continue
            begin = begin if data else piece.offset
            data, at = data + piece.data, piece.next_offset
            if at >= piece.size or not piece.data:
                break
        *lines, last = data.split(b"\n")
        if offset < 0 < begin:
            lines = lines[1:]  # it begins within it
        if run_records.is_whole(last):
            lines, last = [*lines, last], b""
        return run_records.metrics(lines, unread), at - len(last)
