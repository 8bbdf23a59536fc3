"""The command line: every check, a line each as it ends, and one JSON object as the last line."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from . import apart, checks, lock, signals
from .contract import Case, Framework, Platform

HARDWARE = "hardware"


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
        return signals.train_until_told(framework, options.train_in)
    if options.check is not None:
        check = all_checks(framework)[options.check]
        return apart.answer(options.place, framework, options.platform, check)
    return everything(framework, options.platform)


def all_checks(framework: Framework) -> Mapping[str, Callable[[Case], str]]:
    """The checks of every framework, then this framework's own."""
    own = {name: lambda _, check=check: check() for name, check in framework.CHECKS.items()}
    return {**checks.SHARED, **own}


def everything(framework: Framework, platform: Platform) -> int:
    """Run all checks, also after one has failed, to show all faults of an image; but only on the requested platform."""
    started_s = time.monotonic()
    verdicts = [show(apart.run_here("entry point", signals.entry_point))]
    if platform == "tpu":
        verdicts.append(show(apart.run_here(HARDWARE, checks.hardware)))
    left = list(all_checks(framework))
    while left and not elsewhere(verdicts[-1]):
        verdicts.append(show(apart.ask(framework, left.pop(0), platform)))
    if left:
        print(f"skip {', '.join(left)}: on another platform than {platform} they prove nothing", flush=True)
    ok = all(verdict.ok for verdict in verdicts)
    result = {
        "framework": framework.NAME,
        "platform": platform,
        "ok": ok,
        "seconds": round(time.monotonic() - started_s, 1),
        "versions": dict(sorted(lock.installed().items())),
    }
    print(json.dumps(result), flush=True)
    return 0 if ok else 1


def elsewhere(verdict: apart.Verdict) -> bool:
    """Whether what comes after this check would be computed on another platform."""
    return not verdict.ok and verdict.check in (HARDWARE, checks.DEVICE)


def show(verdict: apart.Verdict) -> apart.Verdict:
    print(verdict.line(), flush=True)
    return verdict
