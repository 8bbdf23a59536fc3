"""SIGTERM on its whole way: from the container's first process to Python, and in a job's loop to a saved checkpoint."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from .contract import Case, CheckFailed, Framework

TINI = "tini"
RESUME_ME = 75
"""The exit code of a job that has saved and wants to go on (EX_TEMPFAIL of sysexits.h)."""
PASSED_ON_LIMIT_S = 10
STEPPING_LIMIT_S = 300
"""The framework is imported and its first step compiled."""
SAVED_LIMIT_S = 120
JOB_LIMIT_S = 600
"""A job that nobody ends, ends itself."""
STEPPING = "stepping"


def entry_point() -> str:
    """Process 1 is tini and hands SIGTERM on to the Python that it started: that is what `docker stop` sends."""
    first = Path("/proc/1/comm").read_text(encoding="utf-8").strip()
    if first != TINI or os.getppid() != 1:
        raise CheckFailed(
            f"the container's process 1 is {first!r}; it has to be {TINI}, which hands signals on to this program and"
            " reaps: run the image with its own entry point, and without --pid and --init"
        )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        os.kill(1, signal.SIGTERM)
        arrived = signal.sigtimedwait({signal.SIGTERM}, PASSED_ON_LIMIT_S)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if arrived is None:
        raise CheckFailed(
            f"SIGTERM to process 1 did not arrive in {PASSED_ON_LIMIT_S} s: `docker stop` would end in SIGKILL"
        )
    return f"{TINI} is process 1, and SIGTERM to it arrives here"


def saved_and_left(case: Case) -> str:
    """A process that trains like a job's gets SIGTERM, saves after its step and exits with 75."""
    case.doing("start a process that trains until it is stopped")
    folder = str(Path(__file__).parent)
    command = [sys.executable, folder, "--platform", case.platform, "--train-in", str(case.folder)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        _await_line(process, STEPPING, STEPPING_LIMIT_S)
        case.doing("send it SIGTERM and wait until it has saved")
        sent_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=SAVED_LIMIT_S)
        took_s = time.monotonic() - sent_s
    except subprocess.TimeoutExpired:
        raise CheckFailed(
            f"a process that trains does not leave within {SAVED_LIMIT_S} s of SIGTERM: the framework swallows the"
            " signal or cannot save"
        ) from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code != RESUME_ME:
        raise CheckFailed(
            f"a process that trains was sent SIGTERM and exited with {code}; it has to save and exit with {RESUME_ME}"
        )
    case.doing("load what it saved")
    state = case.framework.load(case.folder)
    case.framework.step(state, 0)
    return f"saved and left with {RESUME_ME} in {took_s:.1f} s, and was loaded again"


def train_until_told(framework: Framework, folder: Path) -> int:
    """In the new process: train until SIGTERM. Returns the exit code."""
    is_stop_requested = framework.listen()
    state = framework.start()
    until_s = time.monotonic() + JOB_LIMIT_S
    number = 0
    while time.monotonic() < until_s:
        state, _ = framework.step(state, number)
        if number == 0:
            print(STEPPING, flush=True)
        if is_stop_requested(number):
            framework.save(state, folder)
            return RESUME_ME
        number += 1
    print(f"nobody sent SIGTERM in {JOB_LIMIT_S} s", file=sys.stderr, flush=True)
    return 1


def _await_line(process: subprocess.Popen[str], expected: str, limit_s: float) -> None:
    """Wait for a line. Raises CheckFailed if the process ends first, or the time is over."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.strip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    until_s = time.monotonic() + limit_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise CheckFailed(
                f"a process that trains is not at its first step after {limit_s:.0f} s"
            ) from None
        if line == expected:
            return
        if line is None:
            raise CheckFailed(f"a process that trains ended with {process.wait()} before its first step")
