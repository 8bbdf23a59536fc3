"""Stands for the gateway of a rehearsal: the timer that starts its keeper, on a machine that can lose its power."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rehearsal.state import RehearsalError

COMMAND = (sys.executable, "-m", "keeper")
PERIOD_S = 5.0
"""From the start of a pass to that of the next, which waits for its end: at Google a minute."""
ROOT = Path(__file__).resolve().parents[2]


class KeeperGateway:
    """Starts one pass of the keeper after the other, as systemd does, while it is on.

    environ: gives the environment of a pass. log: what the passes say. period_s: as PERIOD_S.
    """

    def __init__(
        self, *, environ: Callable[[], Mapping[str, str]], log: Path, period_s: float = PERIOD_S
    ) -> None:
        self._environ, self._log, self._period_s = environ, log, period_s
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self._off = threading.Event()
        self._off.set()
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether it has power."""
        return not self._off.is_set()

    def power_on(self) -> None:
        """Boot it; nothing happens where it is on."""
        with self._guard:
            if self.is_on:
                return
            self._off = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._off,), daemon=True)
            self._thread.start()

    def power_off(self) -> None:
        """Take its power: a pass that is under way is killed with all that it has started."""
        with self._guard:
            self._off.set()
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        if self._thread is not None:
            self._thread.join()

    def _run(self, off: threading.Event) -> None:
        while not off.is_set():
            began_s = time.monotonic()
            try:
                environ = self._environ()
            except RehearsalError:  # it is about to end
                return
            with self._log.open("ab") as log, self._guard:
                if off.is_set():
                    return
                self._process = subprocess.Popen(
                    COMMAND,
                    cwd=ROOT,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._process.wait()
            off.wait(max(0.0, began_s + self._period_s - time.monotonic()))
