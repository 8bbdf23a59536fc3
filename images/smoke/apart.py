"""Runs one check in a process of its own, so that a check that aborts the interpreter or hangs only fails.

A TPU belongs to one process at a time, so every check also gives it back before the next one starts."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from .contract import Case, CheckFailed, Framework, Platform

LIMIT_S = 600
"""A TPU's first program takes minutes to compile at worst; a framework that asks a metadata server which is not there
may wait for ever."""
TRACES_BEFORE_S = 5
LINES_OF_TRACES, LINES_SAID = 6, 12
INDENT = "\n" + 7 * " "
ANSWER, DOING, OUTPUT, TRACES, FOLDER = "answer.json", "doing", "said", "traces", "folder"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one check ended."""

    check: str
    ok: bool
    seconds: float
    finding: str

    def line(self) -> str:
        """ok   imports         1.9 s  14 modules …"""
        return f"{'ok  ' if self.ok else 'FAIL'} {self.check:<12} {self.seconds:6.1f} s  {self.finding}"


def run_here(name: str, check: Callable[[], str]) -> Verdict:
    """Run a check that loads nothing in this process."""
    started_s = time.monotonic()
    try:
        ok, finding = True, check()
    except CheckFailed as problem:
        ok, finding = False, str(problem)
    return Verdict(check=name, ok=ok, seconds=time.monotonic() - started_s, finding=finding)


def ask(framework: Framework, name: str, platform: Platform, limit_s: float = LIMIT_S) -> Verdict:
    """Run this folder again with `--check`, and judge the result."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="smoke-") as scratch:
        place = Path(scratch)
        (place / FOLDER).mkdir()
        code = _run(
            [sys.executable, str(Path(__file__).parent), "--platform", platform, "--check", name, "--in", scratch],
            {**os.environ, **framework.ENVIRONMENT[platform]}, place / OUTPUT, limit_s,
        )  # fmt: skip
        ok, finding = judge(
            code=code, limit_s=limit_s, answer=_read(place / ANSWER), doing=_read(place / DOING),
            traces=_read(place / TRACES), output=_read(place / OUTPUT),
        )  # fmt: skip
    return Verdict(check=name, ok=ok, seconds=time.monotonic() - started_s, finding=finding)


def judge(
    *, code: int | None, answer: str, doing: str, traces: str, output: str, limit_s: float
) -> tuple[bool, str]:
    """Whether the check passed, and its finding. code: None: it was not done in time. Pure."""
    result = json.loads(answer) if answer else None
    # One that held has to end well too: a framework that aborts while it is taken down spoils a job's exit code.
    if result is not None and result["ok"] and code == 0:
        return True, result["said"]
    at = f" at `{doing}`" if doing else ""
    if result is not None and not result["ok"]:
        problem = result["said"]
    elif code is None:
        problem = f"not done after {limit_s:.0f} s{at}: it hangs"
    elif code < 0:
        problem = f"{signal.Signals(-code).name} ended the interpreter{at}: native libraries that do not go together"
    else:
        problem = f"exit code {code}{at}"
    trace_lines = traces.strip().splitlines()[:LINES_OF_TRACES]
    last = output.strip().splitlines()[-LINES_SAID:]
    return False, INDENT.join([problem, *trace_lines, *(["what it printed last:"] if last else []), *last])


def answer(place: Path, framework: Framework, platform: Platform, check: Callable[[Case], str]) -> int:
    """In the new process: run the check and write its finding into `place`. Returns the exit code."""
    # Open until this process ends, however it does. One that hangs leaves its traces before it is killed.
    traces = (place / TRACES).open("w", encoding="utf-8")
    faulthandler.enable(file=traces)
    faulthandler.dump_traceback_later(LIMIT_S - TRACES_BEFORE_S, file=traces)

    def doing(step: str) -> None:
        (place / DOING).write_text(step, encoding="utf-8")

    try:
        ok, finding = (
            True,
            check(Case(framework=framework, platform=platform, folder=place / FOLDER, doing=doing)),
        )
    except CheckFailed as problem:
        ok, finding = False, str(problem)
    except Exception as error:  # a framework raises what it likes; all of it is a failed check
        lines = traceback.format_exc().strip().splitlines()[-LINES_SAID:]
        was = _read(place / DOING)
        ok, finding = False, INDENT.join([type(error).__name__ + (f" at `{was}`" if was else ""), *lines])
    (place / ANSWER).write_text(json.dumps({"ok": ok, "said": finding}), encoding="utf-8")
    return 0


def _run(command: list[str], environment: dict[str, str], output: Path, limit_s: float) -> int | None:
    """Run a command with its process group. Returns the exit code, or None if it was not done in time."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
