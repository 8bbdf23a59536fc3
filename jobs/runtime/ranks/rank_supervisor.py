"""One host's ranks as child processes, of an own command or of a job, and how they ended.

`python -m jobs.runtime.ranks.rank_supervisor SPEC`, where SPEC is a `contracts.ranks.Spec`. To the agent it is the
process of a job like any other. Exit codes: 0 all ranks ended with 0; 75 they were told to stop, or one of them ended
with 75; 81 a newer attempt has begun; otherwise the exit code of the first rank that failed, and 128 + N for one that
signal N ended, as a shell would.

A command needs to know nothing of it: the heartbeat and the result are written here. The ranks of a job write their own
and agree by themselves on where they stop; here they are started, told to stop, and killed when one of them is lost.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import faulthandler
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from contracts import atomic, causes, run_directory
from contracts import process_environment as process_environment
from contracts.errors import (
    DONE,
    FAILED,
    PEER_LOST,
    RESUME_ME,
    SUPERSEDED,
    RequestError,
    Superseded,
    exit_code_for,
)
from contracts.host_interface import SECRET_NAMES, SECRETS_FILE
from contracts.process_environment import ProcessEnvironment
from contracts.ranks import FROM_LOG, Spec, decoded, rank_variables
from jobs.runtime import process
from jobs.runtime.monitoring import sampler
from jobs.runtime.monitoring.heartbeat import Heartbeat, last_words
from jobs.runtime.ranks import command_environment, secret_values
from jobs.runtime.ranks.joining import Joining
from jobs.runtime.ranks.secret_values import Masker

LOOK_PERIOD_S = 0.1
LAST_WORDS_S = 1.0
"""For a job's ranks that lost a sibling, to say so, before they are killed; for a command's, to say why they have
ended, where the first that did had lost one of them."""
SIBLINGS_GRACE_S = 5.0
"""The same for the ranks of a command, which are told to stop."""
SAVING_GRACE_S = 60.0
"""The same where the first ended with 75: the others save too."""
SIGNALLED_TOGETHER_S = 0.01
"""A machine that shuts down signals the ranks too, and one may have ended before this process sees its own signal."""
METRICS_PERIOD_S = {False: 1.0, True: 10.0}
"""Between two looks into metrics.jsonl; True: it is in a bucket."""
LONGEST_PIECE = 64 * 1024
LAST_BYTES = 32 * 1024
"""Of what each rank prints, to tell by why it ended."""
MOST_COMPLETED = 8 * 1024
"""Of that, what a log on a full disk gets in the end: the room that was kept is for other files too."""
EVENT_FILES = "events.out.tfevents."
FOLDER_STAMP = ".tpu-stack-folder"
OURS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Set for this process, and not for the command; of PYTHONPATH the first folder."""


class StopRequest(threading.Event):
    """Set by SIGTERM; came_s: when, in monotonic seconds."""

    came_s = math.inf

    def set(self) -> None:
        self.came_s = min(self.came_s, time.monotonic())
        super().set()


def main(text: str) -> int:
    faulthandler.enable()
    stop_requested = StopRequest()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop_requested.set())
    environment = process_environment.read(os.environ)
    spec = decoded(text)
    if spec.folder is None:
        return _run_job(spec, environment, stop_requested)
    stacks = process.answer_sigusr1(environment.control_dir)
    directory = process.fenced_directory(environment)
    run = process.Run(
        environment=environment, directory=directory, heartbeat=Heartbeat(directory, environment)
    )
    run.heartbeat.hangs_at_floor = spec.progress is not None
    with stacks or contextlib.nullcontext():
        try:
            run.heartbeat.start()
            sampler.start(environment)
            lay_out(spec)
            if spec.layer is not None:
                command_environment.ensure(spec.layer, spec.python or sys.executable, spec.packages)
            return _carry_out(run, spec, stop_requested)
        except Superseded as error:  # the agent ends the ranks with this process
            print(error, flush=True)
            return SUPERSEDED
        except RequestError as error:
            return process.end_as_refused(run, error)
        except OSError as error:
            message = f"{error.filename or spec.work}: {error.strerror or error}"
            explanation = causes.cause(
                message, coordinator=environment.coordinator, places=_places(run, spec)
            )
            process.end_as_failed(run, explanation or message, says_all=True)
            return FAILED


def _run_job(spec: Spec, environment: ProcessEnvironment, stop_requested: threading.Event) -> int:
    """Start a job's ranks and wait for their end."""
    # Ignored by a rank until it answers by itself (`process.answer_sigusr1`): it would die of the signal before that.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        ranks = start(spec, environment)
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if environment.control_dir is not None:
            _speak_for(str(error), 0, environment.control_dir)
        return exit_code_for(error)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: _send(ranks, signal.SIGUSR1))
    first = wait(ranks, stop_requested, lambda: None, is_job=True)
    for rank in ranks:
        rank.drain()
    if first is None:
        return DONE
    code = first.code() or 0
    if code == -signal.SIGTERM and stop_requested.is_set():
        # No rank had begun: this process ends as a job would that gets SIGTERM so early.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if code != RESUME_ME and environment.control_dir is not None:
        places = [environment.run_dir, environment.cache_dir, environment.control_dir]
        explanation = causes.cause(first.last_lines(), coordinator=environment.coordinator, places=places)
        ending = first.ending() if explanation is None else f"{first.ending()}: {explanation}"
        _speak_for(ending, ranks.index(first), environment.control_dir)
    return code if code >= 0 else 128 - code


def _speak_for(ending: str, local_rank: int, control_dir: str) -> None:
    """Give the agent the last words of the rank that failed, in place of those of the host's first.

    ending: what is said where it left none.
    """
    beats: list[dict[str, Any]] = []
    for name in (last_words(0), last_words(local_rank)):
        with contextlib.suppress(OSError, ValueError), open(os.path.join(control_dir, name), "rb") as file:
            beats.append(json.load(file))
    if not beats or beats[-1].get("state") != "failed" or (local_rank and len(beats) == 1):
        beats.append({**(beats[0] if beats else {}), "state": "failed", "message": ending, "says_all": False})
    with contextlib.suppress(OSError):  # the log has them too
        atomic.write_json(os.path.join(control_dir, last_words(0)), beats[-1])


def lay_out(spec: Spec) -> None:
    """Copy the folder to where the command runs. What an earlier attempt left there stays."""
    assert spec.folder is not None and spec.work is not None
    stamp = os.path.join(spec.work, FOLDER_STAMP)
    name = os.path.basename(spec.folder)
    with contextlib.suppress(FileNotFoundError), open(stamp, encoding="ascii") as file:
        if file.read() == name:
            return
    try:
        shutil.copytree(spec.folder, spec.work, dirs_exist_ok=True)
    except shutil.Error as error:  # of each file that could not be copied: from, to, why
        _, to, reason = error.args[0][0]
        raise OSError(0, reason, to) from None
    with open(stamp, "w", encoding="ascii") as file:
        file.write(name)


def variables(
    spec: Spec, environment: ProcessEnvironment, local_rank: int, inherited: Mapping[str, str], cpus: int
) -> dict[str, str]:
    """The whole environment of one rank. cpus: those that the ranks of this host share."""
    is_command = spec.folder is not None
    result = {name: value for name, value in inherited.items() if not (is_command and name in OURS)}
    _, _, user_path = inherited.get("PYTHONPATH", "").partition(os.pathsep)
    if is_command and user_path:
        result["PYTHONPATH"] = user_path
    result.pop(SECRETS_FILE, None)
    result["PYTHONUNBUFFERED"] = "1"
    if spec.layer is not None:
        path = result.get("PATH", os.defpath)
        result |= command_environment.variables(spec.layer, spec.python or sys.executable, path)
    elif spec.python is not None:
        result["PATH"] = os.pathsep.join([os.path.dirname(spec.python), result.get("PATH", os.defpath)])
    if spec.ranks.per_host > 1:  # each rank would start as many threads as there are processors
        result.setdefault("OMP_NUM_THREADS", str(max(1, cpus // spec.ranks.per_host)))
    return {**result, **rank_variables(environment, spec.ranks, local_rank)}


class Rank:
    """One child process. Its output goes to this process's own, which is the host's log."""

    def __init__(
        self,
        number: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        work: str | None,
        tag: bytes,
        masker: Masker,
    ) -> None:
        self.number, self._tag, self._masker = number, tag, masker
        self.ended_s = math.inf
        """When its output ended, in monotonic seconds: when it did, unless what it started holds that open."""
        self.printed = 0
        """Bytes so far."""
        self.last = b""
        """The last of what it printed."""
        self.unwritten = 0
        """Bytes that the log could not take, as its disk is full."""
        self._was_drained = False
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
        self._copy_output()
        self.ended_s = time.monotonic()

    def _copy_output(self) -> None:
        pipe = self._child.stdout
        while pipe is not None:
            piece = pipe.readline(LONGEST_PIECE) if self._tag else pipe.read1(LONGEST_PIECE)  # type: ignore[attr-defined]
            is_over = not piece
            piece = self._masker.flush() if is_over else self._masker.mask(piece)
            if is_over and not piece:
                return
            self.printed += len(piece)
            self.last = (self.last + self._tag + piece)[-LAST_BYTES:]
            self.unwritten += _written_short(self._tag + piece)  # where the disk is full the command goes on

    def code(self) -> int | None:
        """Its exit code, negative for a signal's number; None while it lives."""
        return self._child.poll()

    def send(self, signum: int) -> None:
        self._child.send_signal(signum)

    def lost_a_peer(self) -> bool:
        """Whether it says that another rank was gone. One that ended with 75 has saved for whatever reason."""
        self.drain()
        return self.code() != RESUME_ME and causes.may_have_lost_a_peer(self.last_lines())

    def failed_before(self, moment_s: float) -> bool:
        """Whether it failed before a moment in monotonic seconds, and not for want of a peer that had left."""
        has_failed = self.code() not in (None, DONE, RESUME_ME, -signal.SIGTERM, 128 + signal.SIGTERM)
        return has_failed and self.ended_s < moment_s and not self.lost_a_peer()

    def drain(self) -> None:
        """Wait for the end of its output, once; what it started may hold that open."""
        if not self._was_drained:
            self._reader.join(1.0)
        self._was_drained = True

    @property
    def pid(self) -> int:
        return self._child.pid

    def complete_log(self) -> None:
        """Write the last of what the log could not take, once there is room."""
        if self.unwritten:
            _written_short(b"\n" + self.last[-min(self.unwritten, MOST_COMPLETED) :])

    def last_lines(self) -> str:
        """What it printed last, which may tell why it ended."""
        lines = self.last.decode(errors="replace").splitlines()[-causes.lines_before(self.code() or 0) :]
        return "\n".join([*lines, os.strerror(errno.ENOSPC)] if self.unwritten else lines)

    def ending(self) -> str:
        code = self.code() or 0
        try:
            text = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
        except ValueError:
            text = f"was killed by signal {-code}"
        return f"rank {self.number} {text}" if self._tag else f"the command {text}"


def _written_short(data: bytes) -> int:
    """Write to the log; return how many bytes it did not take."""
    left = len(data)
    with contextlib.suppress(OSError):
        while left:
            left -= os.write(1, data[-left:])
    return left


def start(spec: Spec, environment: ProcessEnvironment) -> list[Rank]:
    """Start this host's ranks.

    Raises:
        RequestError: a secret of the run cannot be read.
        OSError: there is no such program, or it may not be executed; those that were started have been killed.
    """
    program = spec.words[0]
    python = spec.python if spec.layer is None else command_environment.interpreter(spec.layer)
    if python is not None and program in ("python", "python3"):
        program = python
    cpus = len(os.sched_getaffinity(0))
    secrets = secret_values.take(spec.secrets, os.environ)
    ranks: list[Rank] = []
    try:
        for local_rank in range(spec.ranks.per_host):
            number = environment.process_id * spec.ranks.per_host + local_rank
            tag = f"[{number}] ".encode() if spec.ranks.per_host > 1 else b""
            rank_environment = variables(spec, environment, local_rank, os.environ, cpus)
            rank_environment |= {**secrets, **({SECRET_NAMES: ",".join(secrets)} if secrets else {})}
            masker = Masker(secrets.values())
            ranks.append(Rank(number, [program, *spec.words[1:]], rank_environment, spec.work, tag, masker))
    except OSError:
        for rank in ranks:
            rank.send(signal.SIGKILL)
        raise
    return ranks


def _carry_out(run: process.Run, spec: Spec, stop_requested: StopRequest) -> int:
    run.time.enter("command")
    if run.environment.is_first and not run.directory.is_remote:
        _end_last_line(run.directory.path(run_directory.METRICS))
    ranks = start(spec, run.environment)
    run.heartbeat.state("joined")
    progress = Progress(run, spec, ranks)
    joining = Joining(run, spec, {rank.number: rank.pid for rank in ranks})
    run.heartbeat.state("stepping")

    def look() -> None:
        progress.look()
        joining.look()

    first = wait(ranks, stop_requested, look, is_job=False)
    for rank in ranks:
        rank.drain()
    progress.look(at_end=True)
    has_saved = first is not None and first.code() == RESUME_ME
    is_own_fault = first is not None and first.failed_before(stop_requested.came_s - SIGNALLED_TOGETHER_S)
    if has_saved or (stop_requested.is_set() and not is_own_fault):
        process.finish_early(run, progress.step)
        return RESUME_ME
    if first is not None:
        run.heartbeat.make_room()
        for rank in ranks:
            rank.complete_log()
        code = first.code() or 0
        explanation = _cause(first, joining, run, spec)
        message = first.ending() if explanation is None else f"{first.ending()}: {explanation}"
        # What a program prints that a signal ends is the stack trace of a library.
        process.end_as_failed(run, message, says_all=explanation is not None and code < 0)
        return code if code >= 0 else 128 - code
    if run.environment.is_first and not _others_are_done(run, stop_requested):
        process.finish_early(run, progress.step)
        return RESUME_ME
    events = event_files(run.environment.run_dir) if run.environment.is_first else None
    process.finish(run, "done", progress.final() | ({} if events is None else {"tensorboard": events}))
    return DONE


def _end_last_line(path: str) -> None:
    """End a line that a killed attempt began, so that the first one of this attempt does not become part of it."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _cause(rank: Rank, joining: Joining, run: process.Run, spec: Spec) -> str | None:
    """Why a rank has failed, as far as its last words and this host tell."""
    return causes.cause(
        rank.last_lines(),
        coordinator=run.environment.coordinator,
        places=_places(run, spec),
        absent=joining.absent(rank.number),
        waited=joining.waited(rank.number),
    )


def _places(run: process.Run, spec: Spec) -> list[str]:
    return [run.environment.run_dir, spec.work or "/", run.environment.cache_dir, tempfile.gettempdir()]


def event_files(run_dir: str) -> str | None:
    """Return the folder of a run directory in which all TensorBoard event files lie; None where there are none."""
    folders, host_events = [], os.path.join(run_dir, run_directory.HOST_EVENTS)
    for folder, inner, names in os.walk(run_dir):  # nothing, where it is a URL
        inner[:] = (
            [] if folder == host_events else [name for name in inner if name != run_directory.CHECKPOINTS]
        )
        if any(name.startswith(EVENT_FILES) for name in names):
            folders.append(folder)
    return os.path.relpath(os.path.commonpath(folders), run_dir) if folders else None


def wait(
    ranks: Sequence[Rank], stop_requested: threading.Event, look: Callable[[], None], *, is_job: bool
) -> Rank | None:
    """Wait until all ranks have ended; return the first that ended with anything but 0.

    One that fails ends its siblings. A SIGTERM is passed on to all. Of a job, the order is: a rank that failed by
    itself, one that lost a peer, one that has saved, one that was stopped before it had begun. Of a command: one that
    ended by itself, one that lost a peer.
    """
    first: Rank | None = None
    were_told, failed_s, deadline = False, math.inf, math.inf
    while True:
        alive = [rank for rank in ranks if rank.code() is None]
        now_s = time.monotonic()
        if first is None or (now_s < deadline if is_job else not were_told):
            failed = [rank for rank in (first, *ranks) if rank is not None and rank.code()]
            worst = min(failed, key=_order if is_job else Rank.lost_a_peer, default=None)
            if worst is not None and worst is not first:
                first, failed_s = worst, min(failed_s, now_s)
                deadline = now_s + _grace_s(worst, is_told=stop_requested.is_set(), is_job=is_job)
        if not alive:
            return first
        is_saving = first is not None and first.code() == RESUME_ME
        # SIGTERM would have a job's ranks agree on where to stop, which they cannot without the one that failed.
        is_judged = False
        if first is not None and not is_job and not were_told:
            is_judged = now_s > failed_s + LAST_WORDS_S or not first.lost_a_peer()
        if not were_told and (stop_requested.is_set() or is_saving or is_judged):
            were_told = True
            _send(alive, signal.SIGTERM)
            if is_judged and first is not None:
                deadline = time.monotonic() + _grace_s(first, is_told=stop_requested.is_set(), is_job=False)
        if now_s > deadline:
            _send(alive, signal.SIGKILL)
        look()
        time.sleep(LOOK_PERIOD_S)


def _order(rank: Rank) -> int:
    return {PEER_LOST: 1, RESUME_ME: 2, -signal.SIGTERM: 3}.get(rank.code() or 0, 0)


def _grace_s(first: Rank, *, is_told: bool, is_job: bool) -> float:
    """How long the siblings of the first that ended may still take."""
    is_saving = first.code() == RESUME_ME
    if is_job:
        return math.inf if is_saving else LAST_WORDS_S
    if is_told:  # the agent has a limit of its own
        return math.inf
    return SAVING_GRACE_S if is_saving else SIBLINGS_GRACE_S


def _send(ranks: Sequence[Rank], signum: int) -> None:
    for rank in ranks:
        rank.send(signum)


def _others_are_done(run: process.Run, stop_requested: threading.Event) -> bool:
    """Wait until every other host is done, and return True; False: this process got SIGTERM.

    The result says "done" of all hosts. One that fails has this process ended by its agent.
    """
    names = [run_directory.heartbeat(index) for index in range(1, run.environment.num_processes)]
    while not stop_requested.is_set():
        beats: Sequence[dict[str, Any] | None] = [None]
        try:
            beats = run.directory.read_jsons(names) if names else []
        except Exception as error:  # a bucket's library raises kinds of its own
            _asked_again("whether the other hosts are done", error)
        run.heartbeat.tick()
        if all(
            beat is not None and (beat.get("state"), beat.get("attempt")) == ("done", run.environment.attempt)
            for beat in beats
        ):
            return True
        stop_requested.wait(METRICS_PERIOD_S[run.directory.is_remote])
    return False


def _asked_again(question: str, error: Exception) -> None:
    print(f"tpu-stack: {question} is not known now, and is asked again: {error}", flush=True)


class Progress:
    """The progress of a command, for the heartbeat: the step of its newest line of metrics, and whether it moves."""

    def __init__(self, run: process.Run, spec: Spec, ranks: Sequence[Rank]) -> None:
        self._run, self._spec, self._ranks = run, spec, ranks
        self._looked_s = float("-inf")
        self._size: object = None
        lines, self._offset = run.directory.read_new_metrics(0) if run.environment.is_first else ([], 0)
        self._latest: dict[str, Any] = {name: value for line in lines for name, value in line.items()}

    @property
    def step(self) -> int:
        return int(self._latest.get("step", 0))

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
        steps = [step for line in lines if (step := line.get("step")) is not None]
        for line in lines:
            self._latest |= line
        if lines:
            self._run.heartbeat.step(self.step)
        if steps and self._run.time.open_part == "command":
            self._run.heartbeat.went_on_from(int(steps[0]))
            self._run.time.enter("compute")

    def _measure(self) -> object:
        if self._spec.progress == FROM_LOG:
            return sum(rank.printed for rank in self._ranks)
        if self._spec.progress is None:
            return None
        with contextlib.suppress(OSError):
            status = os.stat(os.path.join(self._spec.work or "", self._spec.progress))
            return status.st_size, status.st_mtime_ns
        return None

    def final(self) -> dict[str, Any]:
        """The newest value of each number in the metrics, for result.json."""
        numbers = collections.ChainMap({"steps": self.step} if self._latest else {}, self._latest)
        return {
            name: value
            for name, value in numbers.items()
            if name not in ("step", "time", "outcome") and value is not None
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
