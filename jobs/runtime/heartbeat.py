"""What a process says of itself while it lives: `heartbeats/host-<i>.json`, renewed by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Literal

from jobs.runtime.environment import ProcessEnvironment
from jobs.runtime.run_directory import RunDirectory, heartbeat, reserve

State = Literal["starting", "joined", "stepping", "saving", "done", "failed", "stopped", "preempted"]

DISK_PERIOD_S = 1.0
BUCKET_PERIOD_S = 10.0
"""Seconds between two writes; a bucket takes one write a second to an object and bills each."""
RESERVE_BYTES = 64 * 1024
"""Room that is kept for the last words of a process whose disk is full: its log, its heartbeat and the result."""


class Heartbeat:
    """The latest state and step of this process, written at most once a period and at every change of state.

    `time` is when the file was written (the process lives), `step_time` when the step last moved (it works).
    """

    def __init__(self, directory: RunDirectory, environment: ProcessEnvironment) -> None:
        self._directory, self._environment = directory, environment
        self._state: State = "starting"
        self._step = 0
        self._step_time = time.time()
        self._message: str | None = None
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat and keep it fresh from now on.

        Raises:
            OSError: the run directory cannot be written.
        """
        self._write()
        if not self._directory.is_remote:
            self._directory.write_text(self._reserve, "\0" * RESERVE_BYTES)
        self._thread.start()

    def step(self, step: int) -> None:
        """The step that has been computed; costs nothing, the thread writes it."""
        self._step, self._step_time = step, time.time()

    def state(self, state: State, message: str | None = None) -> None:
        """Enter `state`, written at once."""
        if (state, message) != (self._state, self._message):
            self._state, self._message = state, message
            self._write()

    def say(self, message: str) -> None:
        """What is being done within the present state, for whoever watches."""
        self.state(self._state, message)

    def end(self, state: State, message: str | None = None) -> None:
        """The last heartbeat: nothing is written after it."""
        self._ended.set()
        self._state, self._message = state, message
        self.make_room()
        self._write()

    def make_room(self) -> None:
        """Give back the room that was kept, so that what went wrong can be said on a disk that is full."""
        if not self._directory.is_remote:
            self._directory.remove(self._reserve)

    @property
    def _reserve(self) -> str:
        return reserve(self._environment.process_id)

    def _renew(self) -> None:
        period_s = BUCKET_PERIOD_S if self._directory.is_remote else DISK_PERIOD_S
        while not self._ended.wait(period_s):
            try:
                self._write(unless_ended=True)
            except OSError as error:
                with contextlib.suppress(OSError):  # the log may be on the same full disk
                    print(f"heartbeat not written: {error}", flush=True)

    def _write(self, *, unless_ended: bool = False) -> None:
        with self._writing:
            if unless_ended and self._ended.is_set():
                return
            self._directory.write_json(
                heartbeat(self._environment.process_id),
                {
                    "rank": self._environment.process_id,
                    "attempt": self._environment.attempt,
                    "state": self._state,
                    "step": self._step,
                    "time": time.time(),
                    "step_time": self._step_time,
                    "pid": os.getpid(),
                    "message": self._message,
                },
            )
