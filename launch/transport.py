"""How a command gets to a host: one interface, here for this machine's own processes."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completed:
    """What a command came to. `exit_code` is None where it did not end in time."""

    exit_code: int | None
    stdout: str
    stderr: str


class Transport(Protocol):
    """One host, as a launcher sees it. Arguments are lists; quoting is the transport's own business."""

    def run(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Completed:
        """Run a command on the host.

        Raises:
            OSError: the host cannot be reached or has no such command.
        """
        ...

    def put(self, source: Path, target: str) -> None:
        """Copy a file of this machine to `target` on the host.

        Raises:
            OSError: it could not be copied.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LocalTransport:
    """This machine as a host: a command is a process of its own, apart from the launcher's terminal."""

    def run(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Completed:
        try:
            done = subprocess.run(
                list(argv),
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                start_new_session=True,  # Ctrl-C in the launcher's terminal is not meant for the host
            )
        except subprocess.TimeoutExpired as expired:
            return Completed(exit_code=None, stdout="", stderr=str(expired))
        return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def put(self, source: Path, target: str) -> None:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
