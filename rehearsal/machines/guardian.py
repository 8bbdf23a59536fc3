"""Starts, and at the end dismisses, the process that removes a rehearsal when its maker is gone (watch.py)."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

from rehearsal.machines.errors import MachinesError

ROOT = Path(__file__).resolve().parents[2]
READY = b"ready"
DONE = b"done"
START_LIMIT_S = 60
END_LIMIT_S = 10
TAKE_OVER_LIMIT_S = 600


class Guardian:
    """The maker's end of the pipe. The other process is in a session of its own, which no Ctrl-C reaches."""

    def __init__(self, rehearsal: str) -> None:
        """Returns when it watches. Raises MachinesError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rehearsal.machines.watch", rehearsal],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], START_LIMIT_S)
        if not heard or self._process.stdout.readline().strip() != READY:
            self._process.kill()
            self._process.communicate()
            raise MachinesError(
                "the guardian, which removes a rehearsal whose maker has died, does not start; try"
                f" `{sys.executable} -m rehearsal.machines.watch {rehearsal}` in {ROOT}"
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """All is removed. Raises MachinesError where it has died, so that nobody relied on it in vain."""
        self._end(DONE, END_LIMIT_S)

    def take_over(self) -> None:
        """It removes what is left, as if the maker had died. Raises MachinesError where it cannot."""
        self._end(b"", TAKE_OVER_LIMIT_S)

    def _end(self, word: bytes, limit_s: float) -> None:
        try:
            self._process.communicate(word, timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        if self._process.returncode != 0:
            raise MachinesError(f"the guardian of the rehearsal ended with {self._process.returncode}")
