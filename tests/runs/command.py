"""A `fab` command as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
END_LIMIT_S = 90.0


class Ended(NamedTuple):
    """A finished command: its exit code and all that it said."""

    code: int
    said: str


class Command:
    """A `fab` command that runs, its two outputs in one file."""

    def __init__(self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, prefix="said-")
        self._output = Path(path)
        with os.fdopen(handle, "wb") as output:
            # Tests that run in the background of a shell have inherited that SIGINT is ignored; a command must not.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            self._process = subprocess.Popen(
                [Path(sys.executable).parent / "fab", *arguments],
                cwd=CHECKOUT,
                env={**os.environ, **environ, "NO_COLOR": "1", "COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            signal.signal(signal.SIGINT, before)

    def said(self) -> str:
        return self._output.read_text()

    def has_said(self, words: str) -> bool:
        assert self._process.poll() is None or words in self.said(), self.said()
        return words in self.said()

    def ended(self) -> Ended:
        return Ended(self._process.wait(timeout=END_LIMIT_S), self.said())

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
