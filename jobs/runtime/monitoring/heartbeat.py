"""The heartbeat of a process: its state and step in `heartbeats/host-<i>.json`, renewed by a thread of its own.

The first rank of a host writes it. Under an agent the same goes to `heartbeat.json` in the control directory on this
host's own disk, where the agent reads it whatever happens to the run directory; the last heartbeats of other ranks lie
beside it for the rank supervisor (`last_words`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from contracts.errors import SUPERSEDED, Superseded
from contracts.files import DiskFiles
from contracts.process_environment import ProcessEnvironment
from contracts.run_directory import RunDirectory, heartbeat, reserve
from jobs.runtime.storage.bucket_files import retry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from jobs.runtime.monitoring.metrics import TimeSplit

State = Literal["starting", "joined", "stepping", "saving", "done", "failed", "stopped", "preempted"]

DISK_PERIOD_S = 1.0
BUCKET_PERIOD_S = 10.0
"""Seconds between two writes; a bucket takes one write a second to an object and bills each."""
RESERVE_BYTES = 64 * 1024
"""Room that is kept for the last words of a process whose disk is full: its log, its heartbeat and the result."""
LOCAL = "heartbeat.json"


def last_words(local_rank: int) -> str:
    """The file in the control directory with the last heartbeat of one rank of a host."""
    return f"heartbeat-{local_rank}.json" if local_rank else LOCAL


MOST_WARNINGS = 20
"""Of a process: they are written with each of its heartbeats."""


class Heartbeat:
    """The latest state and step of this process, written at most once a period and at every change of state.

    `time` is when the file was written (the process lives), `step_time` when the step last moved (it works).
    """

    def __init__(self, directory: RunDirectory, environment: ProcessEnvironment) -> None:
        self._directory, self._environment = directory, environment
        self._speaks_for_host = environment.local_rank == 0
        self._state: State = "starting"
        self._step = 0
        self._step_time = time.time()
        self._timing: dict[str, int] = {}
        self.time: TimeSplit | None = None
        """Where this process's time goes, which each heartbeat says."""
        self._message: str | None = None
        self._says_all = False
        self.hangs_at_floor = False
        """Whether --hang-limit holds from the start, whatever the usual time of a step is."""
        self.joined: list[int] = []
        """Of an own command: this host's ranks that have joined their group."""
        self.warnings: list[str] = []
        """What was warned of so far, the last time in words that there were more."""
        self._changed, self._ended = threading.Event(), threading.Event()
        self._writing, self._writing_here = threading.Lock(), threading.Lock()

    def start(self) -> None:
        """Write the first heartbeat and keep it fresh from now on.

        Raises:
            OSError: the run directory cannot be written; a bucket's library has kinds of its own too.
            Superseded: a newer attempt has begun. Whenever that shows later, the thread ends this process.
        """
        if not self._speaks_for_host:
            return
        self._write_here()
        if self._directory.is_remote:
            retry(self._write, what="heartbeat not written")
        else:
            self._write()
            self._directory.write_text(self._reserve, "\0" * RESERVE_BYTES)
        threading.Thread(target=self._renew, name="heartbeat", daemon=True).start()
        if self._environment.control_dir is not None:
            # Apart from the other: a bucket or a share that hangs must not make the process look dead.
            threading.Thread(target=self._renew_here, name="heartbeat here", daemon=True).start()

    @property
    def last_step(self) -> int:
        """The last step that was reported; 0 before the first one of this attempt."""
        return self._step

    def step(self, step: int) -> None:
        """Report a computed step, which the thread writes. The first one ends the state "joined"."""
        self._step, self._step_time = step, time.time()
        if self._state == "joined":
            self.state("stepping")

    def tick(self) -> None:
        """Report progress that is no step: a batch of an evaluation, a file that was written."""
        self._step_time = time.time()

    def went_on_from(self, step: int) -> None:
        """Report the step after which this attempt goes on; 0: from the start."""
        self._timing["from_step"] = step

    def saved(self, step: int) -> None:
        """Report a step that was saved, which is progress too."""
        self._timing["saved_step"] = step
        self.tick()

    def state(self, state: State, message: str | None = None) -> None:
        """Enter `state`, written at once; to a bucket by the thread, so that nothing here waits for it.

        Raises:
            OSError: the run directory, on a disk, cannot be written.
        """
        if (state, message) == (self._state, self._message):
            return
        self._state, self._message = state, message
        if not self._speaks_for_host:
            return
        self._write_here()
        if self._directory.is_remote:
            self._changed.set()
        else:
            self._write()

    def say(self, message: str | None) -> None:
        """Report an activity within the present state; None: none."""
        self.state(self._state, message)

    def warn(self, text: str) -> None:
        """Report a warning while the process goes on; MOST_WARNINGS of them at most."""
        if len(self.warnings) < MOST_WARNINGS:
            self.warnings = [*self.warnings, text]
        elif len(self.warnings) == MOST_WARNINGS:
            self.warnings = [*self.warnings, "there were more warnings: the log has them all"]

    def end(self, state: State, message: str | None = None, *, says_all: bool = False) -> None:
        """Write the last heartbeat. says_all: the message needs no lines of the log beside it.

        Raises:
            OSError: the run directory, on a disk, cannot be written. A bucket's refusal goes to the log.
        """
        self._ended.set()
        self._changed.set()
        if message is not None and self._environment.ranks_per_host > 1:
            message = f"rank {self._environment.process_id}: {message}"
        self._state, self._message, self._says_all = state, message, says_all
        self.make_room()
        self._write_here()
        if not self._speaks_for_host:
            return
        if not self._directory.is_remote:
            self._write()
            return
        try:
            retry(self._write, what="heartbeat not written")
        except Superseded:
            raise
        except Exception as error:  # a bucket's library raises kinds of its own
            _complain(error)

    def make_room(self) -> None:
        """Free the reserved space, so that the last words fit on a full disk."""
        if not self._directory.is_remote and self._speaks_for_host:
            self._directory.remove(self._reserve)

    @property
    def _reserve(self) -> str:
        return reserve(self._environment.host)

    def _renew(self) -> None:
        period_s = BUCKET_PERIOD_S if self._directory.is_remote else DISK_PERIOD_S
        is_written = True
        while not self._ended.is_set():
            self._changed.wait(period_s)
            self._changed.clear()
            is_written = _try(lambda: self._write(unless_ended=True), complains=is_written)
            if self._directory.is_remote:
                self._ended.wait(DISK_PERIOD_S)

    def _renew_here(self) -> None:
        while not self._ended.wait(DISK_PERIOD_S):
            self._write_here(unless_ended=True)

    def _write(self, *, unless_ended: bool = False) -> None:
        with self._writing:
            if not (unless_ended and self._ended.is_set()):
                self._directory.write_json(heartbeat(self._environment.host), self._beat())

    def _write_here(self, *, unless_ended: bool = False) -> None:
        """Write the copy for the agent; a failure does not end the run."""
        control_dir = self._environment.control_dir
        if control_dir is None:
            return
        path = os.path.join(control_dir, last_words(self._environment.local_rank))
        with self._writing_here:
            if unless_ended and self._ended.is_set():
                return
            data = json.dumps(self._beat()).encode()
            try:
                DiskFiles().write(path, data)
            except OSError:
                _try(lambda: _overwrite(path, data))

    def _beat(self) -> dict[str, Any]:
        return {
            "rank": self._environment.host,
            "attempt": self._environment.attempt,
            "state": self._state,
            "step": self._step,
            "time": time.time(),
            "step_time": self._step_time,
            "pid": os.getpid(),
            "message": self._message,
            "says_all": self._says_all,
            "warnings": self.warnings,
            **({"timing": self._time()} if self.time is not None else {}),
            **({"hangs_at_floor": True} if self.hangs_at_floor else {}),
            **({"joined": self.joined} if self.joined else {}),
        }

    def _time(self) -> dict[str, Any]:
        assert self.time is not None
        return {"parts": self.time.seconds(), "open": self.time.open_part, **self._timing}


def _overwrite(path: str, data: bytes) -> None:
    """Write in place: on a full disk there is no room beside, and a process that falls silent counts as hung."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def _try(write: Callable[[], None], *, complains: bool = True) -> bool:
    """Return whether it was written. complains: of a failure, which is said once and not each second."""
    try:
        write()
    except Superseded as error:
        # From this thread: the main one may compute, or wait for other processes, for long.
        print(error, flush=True)
        os._exit(SUPERSEDED)
    except Exception as error:  # a bucket's library raises kinds of its own, and the thread has to go on
        if complains:
            _complain(error)
        return False
    return True


def _complain(error: Exception) -> None:
    with contextlib.suppress(OSError):  # the log may be on the same full disk
        print(f"heartbeat not written: {error}", flush=True)
