"""Finding the processes that an engine left behind by a mark in their environment: Linux's /proc, nothing elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

PROC = Path("/proc")


def marked(variable: str, value: str) -> list[int]:
    """The ids of the processes that were started with that variable set so; this one is left out."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def end_marked(variable: str, value: str) -> list[int]:
    """Kills them, and those that they start meanwhile."""
    ended: list[int] = []
    while found := [each for each in marked(variable, value) if each not in ended]:
        for process_id in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        ended += found
    return ended
