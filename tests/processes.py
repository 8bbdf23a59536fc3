"""Programs that a test runs to their end, and whether processes that must not outlive their time have ended."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def run_program(
    argv: Sequence[str | Path],
    environ: Mapping[str, str],
    *,
    cwd: Path | None = None,
    input: str | None = None,
    limit_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """How a program ended, and what it said. environ: all of its environment."""
    return subprocess.run(
        argv, env=environ, cwd=cwd, input=input, capture_output=True, text=True, timeout=limit_s, check=False
    )


def is_alive(pid: int) -> bool:
    """Whether it runs; one that is killed and waits for its parent has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids: Iterable[int], limit_s: float = 30) -> bool:
    """Wait until they have ended. One that does not is killed, and this is False."""
    until_s = time.monotonic() + limit_s
    while left := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > until_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True
