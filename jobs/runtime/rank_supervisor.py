"""One host's part of an own command: its ranks as child processes, their heartbeat, and how they ended.

`python -m jobs.runtime.rank_supervisor SPEC`, where SPEC is a `contracts.ranks.Spec`. To the agent it is the process of
a job like any other; the command needs to know nothing of it. Exit codes: 0 all ranks ended with 0; 75 they were told
to stop, or one of them ended with 75; otherwise the exit code of the first rank that failed, and 1 for one that a
signal ended.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from contracts import process as process_environment
from contracts import run_directory
from contracts.errors import DONE, FAILED, RESUME_ME
from contracts.process import ProcessEnvironment
from contracts.ranks import OF_LOG, Spec, decoded, rank_variables
from contracts.run_directory import RunDirectory
from jobs.runtime import process
from jobs.runtime.bucket_files import files_of
from jobs.runtime.heartbeat import Heartbeat

LOOK_PERIOD_S = 0.1
SIBLINGS_GRACE_S = 5.0
"""For ranks that lost a sibling, before they are killed."""
SAVING_GRACE_S = 60.0
"""The same where the first ended with 75: the others save too."""
METRICS_PERIOD_S = {False: 1.0, True: 10.0}
"""Between two looks into metrics.jsonl; True: it is in a bucket."""
LONGEST_PIECE = 64 * 1024
FOLDER_STAMP = ".tpu-stack-folder"
OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Set for this process, and not for the command."""


def main(text: str) -> int:
    faulthandler.enable()
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: told.set())
    environment = process_environment.read(os.environ)
    spec = decoded(text)
    stacks = process.answer_sigusr1(environment.control_dir)
    directory = RunDirectory(environment.run_dir, files_of(environment.run_dir))
    run = process.Run(
        environment=environment, directory=directory, heartbeat=Heartbeat(directory, environment)
    )
    run.heartbeat.hangs_at_floor = spec.progress is not None
    with stacks or contextlib.nullcontext():
        try:
            run.heartbeat.start()
            lay_out(spec)
            return _carry_out(run, spec, told)
        except OSError as error:
            process.end_as_failed(
                run, f"{error.filename or spec.work}: {error.strerror or error}", says_all=True
            )
            return FAILED


def lay_out(spec: Spec) -> None:
    """Copy the folder to where the command runs. What an earlier attempt left there stays."""
    stamp = os.path.join(spec.work, FOLDER_STAMP)
    name = os.path.basename(spec.folder)
    with contextlib.suppress(FileNotFoundError), open(stamp, encoding="ascii") as file:
        if file.read() == name:
            return
    shutil.copytree(spec.folder, spec.work, dirs_exist_ok=True)
    with open(stamp, "w", encoding="ascii") as file:
        file.write(name)


def variables(
    spec: Spec, environment: ProcessEnvironment, local_rank: int, inherited: Mapping[str, str], cpus: int
) -> dict[str, str]:
    """The whole environment of one rank. cpus: those that the ranks of this host share."""
    found = {name: value for name, value in inherited.items() if name not in OURS}
    found["PYTHONUNBUFFERED"] = "1"
    if spec.python is not None:
        found["PATH"] = os.pathsep.join([os.path.dirname(spec.python), found.get("PATH", os.defpath)])
    if spec.ranks.per_host > 1:  # each rank would start as many threads as there are processors
        found.setdefault("OMP_NUM_THREADS", str(max(1, cpus // spec.ranks.per_host)))
    return {**found, **rank_variables(environment, spec.ranks, local_rank)}


class Rank:
    """One child process. Its output goes to this process's own, which is the host's log."""

    def __init__(
        self, number: int, argv: Sequence[str], environment: Mapping[str, str], work: str, tag: bytes
    ) -> None:
        self.number, self._tag = number, tag
        self.printed = 0
        """Bytes so far."""
        self._child = subprocess.Popen(
            argv,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._copy, daemon=True)
        self._reader.start()

    def _copy(self) -> None:
        pipe = self._child.stdout
        while pipe is not None:
            piece = pipe.readline(LONGEST_PIECE) if self._tag else pipe.read1(LONGEST_PIECE)  # type: ignore[attr-defined]
            if not piece:
                return
            self.printed += len(piece)
            with contextlib.suppress(OSError):  # the log's disk is full; the command goes on
                os.write(1, self._tag + piece)

    def code(self) -> int | None:
        """Its exit code, negative for a signal's number; None while it lives."""
        return self._child.poll()

    def send(self, signum: int) -> None:
        self._child.send_signal(signum)

    def drain(self) -> None:
        """Wait for the end of its output; what it started may hold that open."""
        self._reader.join(1.0)

    def how(self) -> str:
        code = self.code() or 0
        try:
            words = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
        except ValueError:
            words = f"was killed by signal {-code}"
        return f"rank {self.number} {words}"


def start(spec: Spec, environment: ProcessEnvironment) -> list[Rank]:
    """Start this host's ranks.

    Raises:
        OSError: there is no such program, or it may not be executed; those that were started have been killed.
    """
    program = spec.words[0]
    if spec.python is not None and program in ("python", "python3"):
        program = spec.python
    cpus = len(os.sched_getaffinity(0))
    ranks: list[Rank] = []
    try:
        for local_rank in range(spec.ranks.per_host):
            number = environment.process_id * spec.ranks.per_host + local_rank
            tag = f"[{number}] ".encode() if spec.ranks.per_host > 1 else b""
            told = variables(spec, environment, local_rank, os.environ, cpus)
            ranks.append(Rank(number, [program, *spec.words[1:]], told, spec.work, tag))
    except OSError:
        for rank in ranks:
            rank.send(signal.SIGKILL)
        raise
    return ranks


def _carry_out(run: process.Run, spec: Spec, told: threading.Event) -> int:
    ranks = start(spec, run.environment)
    run.heartbeat.state("joined")
    progress = Progress(run, spec, ranks)
    run.heartbeat.state("stepping")
    first = wait(ranks, told, progress.look)
    for rank in ranks:
        rank.drain()
    progress.look(at_end=True)
    if told.is_set() or (first is not None and first.code() == RESUME_ME):
        process.finish_early(run, progress.step)
        return RESUME_ME
    if first is not None:
        run.heartbeat.make_room()
        process.end_as_failed(run, first.how())
        code = first.code() or 0
        return code if code > 0 else FAILED
    if run.environment.is_first and not _others_are_done(run, told):
        process.finish_early(run, progress.step)
        return RESUME_ME
    process.finish(run, "done", progress.final())
    return DONE


def wait(ranks: Sequence[Rank], told: threading.Event, look: Any) -> Rank | None:
    """Wait until all ranks have ended; return the first that ended with anything but 0.

    One that fails takes its siblings along. A SIGTERM that this process got (`told`) is passed on to all.
    """
    first: Rank | None = None
    were_told, deadline = False, float("inf")
    while True:
        alive = [rank for rank in ranks if rank.code() is None]
        if first is None:
            first = next((rank for rank in ranks if rank.code()), None)
            if first is not None and not told.is_set():  # whoever told all to stop has a limit of its own
                grace_s = SAVING_GRACE_S if first.code() == RESUME_ME else SIBLINGS_GRACE_S
                deadline = time.monotonic() + grace_s
        if not alive:
            return first
        if not were_told and (first is not None or told.is_set()):
            were_told = True
            _send(alive, signal.SIGTERM)
        if time.monotonic() > deadline:
            _send(alive, signal.SIGKILL)
        look()
        time.sleep(LOOK_PERIOD_S)


def _send(ranks: Sequence[Rank], signum: int) -> None:
    for rank in ranks:
        rank.send(signum)


def _others_are_done(run: process.Run, told: threading.Event) -> bool:
    """Wait until every other host says that it is done, and then return True; False: told to stop meanwhile.

    The result says "done" of all hosts. One that fails has this process ended by its agent.
    """
    others = [run_directory.heartbeat(index) for index in range(1, run.environment.num_processes)]
    while not told.is_set():
        beats: Sequence[dict[str, Any] | None] = [None]
        try:
            beats = run.directory.read_jsons(others) if others else []
        except Exception as error:  # a bucket's library raises kinds of its own
            _asked_again("whether the other hosts are done", error)
        run.heartbeat.tick()
        if all(
            beat is not None and (beat.get("state"), beat.get("attempt")) == ("done", run.environment.attempt)
            for beat in beats
        ):
            return True
        told.wait(METRICS_PERIOD_S[run.directory.is_remote])
    return False


def _asked_again(what: str, error: Exception) -> None:
    print(f"tpu-stack: {what} is not known now, and is asked again: {error}", flush=True)


class Progress:
    """What the heartbeat says of a command: the step of its newest line of metrics, and whether it goes on."""

    def __init__(self, run: process.Run, spec: Spec, ranks: Sequence[Rank]) -> None:
        self._run, self._spec, self._ranks = run, spec, ranks
        self._looked_s = float("-inf")
        self._size: object = None
        lines, self._offset = run.directory.read_new_metrics(0) if run.environment.is_first else ([], 0)
        self._latest: dict[str, Any] = {name: value for line in lines for name, value in line.items()}

    @property
    def step(self) -> int:
        step = self._latest.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else 0

    def look(self, *, at_end: bool = False) -> None:
        now_s = time.monotonic()
        if not at_end and now_s - self._looked_s < METRICS_PERIOD_S[self._run.directory.is_remote]:
            return
        self._looked_s = now_s
        size = self._measure()
        if self._spec.progress is None or size != self._size:
            self._run.heartbeat.tick()
        self._size = size
        if not self._run.environment.is_first:
            return
        try:
            lines, self._offset = self._run.directory.read_new_metrics(self._offset)
        except Exception as error:  # a bucket's library raises kinds of its own
            _asked_again("what the metrics say", error)
            return
        for line in lines:
            self._latest |= line
        if lines:
            self._run.heartbeat.step(self.step)

    def _measure(self) -> object:
        if self._spec.progress == OF_LOG:
            return sum(rank.printed for rank in self._ranks)
        if self._spec.progress is None:
            return None
        with contextlib.suppress(OSError):
            found = os.stat(os.path.join(self._spec.work, self._spec.progress))
            return found.st_size, found.st_mtime_ns
        return None

    def final(self) -> dict[str, Any]:
        """The newest value of each number in the metrics, for result.json."""
        numbers = collections.ChainMap({"steps": self.step} if self._latest else {}, self._latest)
        return {
            name: value
            for name, value in numbers.items()
            if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
