"""The command line: every check, a line each as it ends, and one JSON object as the last line.

A check is a process of its own, so that one that aborts the interpreter or hangs only fails.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from . import checks, lock
from .checks import Case, CheckFailed, Framework, Platform

LIMIT_S = 600
"""A TPU's first program takes minutes to compile at worst; a framework that asks a metadata server which is not there
may wait for ever."""
TRACES_BEFORE_S = 5
"""One that hangs prints its stack traces before it is killed."""
LINES_SHOWN, LINES_OF_TRACES = 12, 6
INDENT = "\n" + 7 * " "
FINDING, TRACES, FOLDER = "finding", "traces", "folder"
ONLY_HERE = ("hardware", "device")
"""Checks without which what comes next would be computed on another platform."""


class Verdict(NamedTuple):
    """How a check ended."""

    ok: bool
    finding: str


def main(arguments: list[str]) -> int:
    """0: every check held; 1: one did not; 2: the request was wrong."""
    parser = argparse.ArgumentParser(
        prog="/opt/tpu-stack/smoke", description="Whether this image does what it is for."
    )
    parser.add_argument(
        "--platform", choices=("cpu", "tpu"), required=True, help="what the framework must compute on"
    )
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--train-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    framework = cast(Framework, importlib.import_module(f"{__package__}.framework"))
    if options.train_in is not None:
        return checks.train_until_told(framework, options.train_in)
    if options.check is not None:
        return answer(all_checks(framework)[options.check], framework, options.platform, options.place)
    return everything(framework, options.platform)


def all_checks(framework: Framework) -> Mapping[str, Callable[[Case], str]]:
    """The checks of every framework, then this framework's own."""
    own = {name: lambda _, check=check: check() for name, check in framework.CHECKS.items()}
    return {**checks.SHARED, **own}


def everything(framework: Framework, platform: Platform) -> int:
    """Run all checks, also after one has failed, to show all faults of an image; but only on the requested platform."""
    began_s = time.monotonic()
    here = {
        "entry point": checks.entry_point,
        **({"hardware": checks.hardware} if platform == "tpu" else {}),
    }
    left, all_ok = [*here, *all_checks(framework)], True
    while left:
        name, check_s = left.pop(0), time.monotonic()
        verdict = run_here(here[name]) if name in here else run_apart(framework, name, platform)
        sign = "ok  " if verdict.ok else "FAIL"
        print(f"{sign} {name:<12} {time.monotonic() - check_s:6.1f} s  {verdict.finding}", flush=True)
        all_ok &= verdict.ok
        if not verdict.ok and name in ONLY_HERE:
            print(
                f"skip {', '.join(left)}: on another platform than {platform} they prove nothing", flush=True
            )
            break
    result = {
        "framework": framework.NAME,
        "platform": platform,
        "ok": all_ok,
        "seconds": round(time.monotonic() - began_s, 1),
        "versions": dict(sorted(lock.installed().items())),
    }
    print(json.dumps(result), flush=True)
    return 0 if all_ok else 1


def run_here(check: Callable[[], str]) -> Verdict:
    """Run a check that loads nothing in this process."""
    try:
        return Verdict(True, check())
    except CheckFailed as problem:
        return Verdict(False, str(problem))


def run_apart(framework: Framework, name: str, platform: Platform) -> Verdict:
    """Run this folder again with `--check`, and judge how that ends."""
    with tempfile.TemporaryDirectory(prefix="smoke-") as scratch, tempfile.TemporaryFile() as printed:
        place = Path(scratch)
        (place / FOLDER).mkdir()
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent), "--platform", platform, "--check", name, "--in", scratch],
            stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **framework.ENVIRONMENT[platform]},
        )  # fmt: skip
        try:
            code = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finding = _read(place / FINDING)
        # One that held has to end well too: a framework that aborts while it is taken down spoils a job's exit code.
        if finding and code == 0:
            return Verdict(True, finding)
        if code is None:
            problem = f"not done after {LIMIT_S} s: it hangs"
        elif code < 0:
            name = signal.Signals(-code).name
            problem = f"{name} ended the interpreter: native libraries that do not go together"
        else:
            problem = finding or f"exit code {code}"
        printed.seek(0)
        last = printed.read().decode(errors="replace").strip().splitlines()[-LINES_SHOWN:]
        traces = _read(place / TRACES).strip().splitlines()[:LINES_OF_TRACES]
        return Verdict(
            False, INDENT.join([problem, *traces, *(["what it printed last:", *last] if last else [])])
        )


def answer(check: Callable[[Case], str], framework: Framework, platform: Platform, place: Path) -> int:
    """In the new process: run the check and write its finding into `place`. Returns the exit code."""
    traces = (place / TRACES).open("w", encoding="utf-8")  # open until this process ends, however it does
    faulthandler.enable(file=traces)
    faulthandler.dump_traceback_later(LIMIT_S - TRACES_BEFORE_S, file=traces)
    try:
        finding, code = check(Case(framework=framework, platform=platform, folder=place / FOLDER)), 0
    except CheckFailed as problem:
        finding, code = str(problem), 1
    (place / FINDING).write_text(finding, encoding="utf-8")
    return code


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
