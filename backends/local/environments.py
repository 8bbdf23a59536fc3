"""Environments of frameworks and trackers on this machine: made once from a lock, and shared by all checkouts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from contracts.aliases import Say
from contracts.durations import DAY_S, spoken
from contracts.errors import WRONG_REQUEST, RequestError
from jobs.runtime.storage.cache import user_cache_dir
from launch.code.dependencies import uv as _uv
from launch.hosts import HostError
from launch.jobs import CHECKOUT
from launch.output import last_line, printable
from launch.targets import OWN_FRAMEWORK

MAKE_LIMIT_S = 3600.0
COMPLETE = "whole"
"""The file that says of an environment that everything was installed, and by its time when it was last used."""
UNUSED_DAYS = 30
OWN = OWN_FRAMEWORK
STUBS = CHECKOUT / "images" / "cuda_free" / "stubs.py"
STUBS_NEED = ("gcc", "objdump", "nm")
TORCH_BACKEND, TORCH_INDEX = "UV_TORCH_BACKEND", "TORCH_CPU_INDEX"
"""As in the build of an image: `cpu` has PyTorch's own wheels for CPUs taken from PyTorch's index, which uv knows; the
other names another index that has them."""
UNREACHABLE = 2
"""The exit code of uv where it cannot reach an index; where that has no such package, it is 1."""


def environment_python(framework: str) -> Path:
    """Return the interpreter of a framework's environment, which `ensure` makes.

    Raises:
        RequestError: there is no lock of that framework for CPUs.
    """
    return Path(sys.executable) if framework == OWN else _home(framework) / "bin" / "python"


def run_module(
    framework: str,
    arguments: Sequence[str],
    request: Mapping[str, Any],
    *,
    variables: Mapping[str, str],
    limit_s: float,
    late: str,
    failed: str,
    remedy: str = "",
) -> Any:
    """Return what a module of this checkout answers in a framework's environment, which is there.

    arguments: the module and its arguments. It is given the request as JSON, and its last line is the answer as JSON.
    late: the message if it takes too long. failed: what stands before its last line if it ends otherwise.

    Raises:
        RequestError: the request cannot be carried out; the module's own words.
        HostError: it took too long, or ended otherwise.
    """
    try:
        done = subprocess.run(
            [str(environment_python(framework)), "-P", "-m", *arguments],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            env={**os.environ, **variables, "PYTHONPATH": str(CHECKOUT)},
        )
    except subprocess.TimeoutExpired:
        raise HostError(host="here", reason=late) from None
    message = printable(last_line(done.stderr, ""))
    if done.returncode == WRONG_REQUEST:
        raise RequestError(message.removeprefix("error: "))
    if done.returncode != 0:
        raise HostError(host="here", reason=failed + message, remedy=remedy)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def is_made(framework: str) -> bool:
    """Whether the environment of a framework is there. Raises RequestError: there is no lock of it."""
    return framework == OWN or (_home(framework) / COMPLETE).exists()


def ensure(framework: str, say: Say) -> None:
    """Make the environment of a framework where it is missing; remove those of other locks that nobody uses any more.

    Raises:
        RequestError: it could not be made; the message has what the installer said.
    """
    if framework == OWN:
        return
    home, lock = _home(framework), _lock(framework)
    torch = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "torch"
    version = re.search(r"^torch==(\S+)", lock.read_text(), re.MULTILINE)
    is_whole = (home / COMPLETE).exists()
    wheel = cpu_wheel(f"torch=={version[1]}+cpu") if version and not is_whole else []
    needs_stubs = (CHECKOUT / "images" / framework / "build").exists() and not wheel
    if needs_stubs and not is_whole:
        missing = [name for name in STUBS_NEED if shutil.which(name) is None]
        if missing:
            raise RequestError(
                f"--framework {framework}: the environment needs {', '.join(missing)} to be made; install gcc and "
                f"binutils, or set {TORCH_BACKEND}=cpu for PyTorch's own wheels, or use --runtime docker"
            )
    then = [[str(home / "bin" / "python"), str(STUBS), str(torch)]] if needs_stubs else []
    if wheel:
        then = [[*_pip(home), "--reinstall", "--no-deps", *wheel]]
    if not is_whole:
        say(f"making the environment of {framework} in {home}, once for this machine …")
        began_s = time.monotonic()
        make(home, lock, then)
        bytes_there = sum(path.lstat().st_size for path in home.rglob("*"))
        say(
            f"the environment of {framework} is made: {bytes_there / 1e9:.1f} GB, {spoken(time.monotonic() - began_s)}"
        )
    (home / COMPLETE).touch()
    _remove_unused(framework, say)


def cpu_wheel(requirement: str) -> list[str]:
    """Return the words for uv that install PyTorch's own wheel for CPUs.

    Empty: nobody asks for it, or its index cannot be reached; NVIDIA's libraries then have stand-ins.

    Raises:
        RequestError: the index does not have it.
    """
    index, backend = os.environ.get(TORCH_INDEX), os.environ.get(TORCH_BACKEND)
    if not index and backend != "cpu":
        return []
    arguments = [*(["--default-index", index] if index else ["--torch-backend", "cpu"]), requirement]
    probe = [_uv(), "pip", "install", "--dry-run", "--no-deps", "--python", sys.executable, *arguments]
    done = subprocess.run(
        probe, capture_output=True, text=True, timeout=MAKE_LIMIT_S, check=False, env=_without_backend()
    )
    if done.returncode not in (0, UNREACHABLE):
        named = f"{TORCH_INDEX} {index}" if index else f"{TORCH_BACKEND} cpu"
        raise RequestError(f"{named}: {requirement} is not there:\n{done.stderr.strip()[-2000:]}")
    return arguments if done.returncode == 0 else []


def _without_backend() -> dict[str, str]:
    """Return this process's variables without uv's choice of PyTorch's builds, which no lock has the hashes of."""
    return {name: value for name, value in os.environ.items() if name != TORCH_BACKEND}


def _remove_unused(framework: str, say: Say) -> None:
    """Remove the framework's environments, gigabytes each, that have not been used for UNUSED_DAYS nor are now."""
    for home in sorted(_home(framework).parent.glob(f"{framework}-*/")):
        with contextlib.suppress(Timeout), FileLock(f"{home}.lock", timeout=0):
            last = home / COMPLETE if (home / COMPLETE).exists() else home
            if time.time() - last.stat().st_mtime < UNUSED_DAYS * DAY_S or _is_in_use(home.resolve()):
                continue
            (home / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(home, ignore_errors=True)
            say(f"removed {home}, which has not been used for {UNUSED_DAYS} days")


def _is_in_use(home: Path) -> bool:
    """Whether a process has loaded a library of it; without /proc nobody can tell, and it counts as used."""
    maps = [*Path("/proc").glob("[0-9]*/maps")]
    for path in maps:
        with contextlib.suppress(OSError):
            if f" {home}/".encode() in path.read_bytes():
                return True
    return not maps


def make(home: Path, lock: Path, then: Sequence[Sequence[str]] = ()) -> None:
    """Make an environment of this interpreter's version from a hashed lock, where it is not there whole.

    then: commands that complete it. The lock has to be complete: what its packages ask for besides is not installed.

    Raises:
        RequestError: a step failed.
    """
    home.parent.mkdir(parents=True, exist_ok=True)
    uv = _uv()
    steps = [
        [uv, "venv", "--quiet", "--python", sys.executable, str(home)],
        [*_pip(home), "--no-deps", "--require-hashes", "--requirement", str(lock)],
        *then,
    ]
    try:
        with FileLock(f"{home}.lock", timeout=MAKE_LIMIT_S):
            if (home / COMPLETE).exists():
                return
            shutil.rmtree(home, ignore_errors=True)
            for step in steps:
                done = subprocess.run(
                    step,
                    capture_output=True,
                    text=True,
                    timeout=MAKE_LIMIT_S,
                    check=False,
                    env=_without_backend(),
                )
                if done.returncode != 0:
                    output = (done.stderr or done.stdout).strip()[-2000:]
                    raise RequestError(f"{home}: the environment could not be made:\n{output}")
            (home / COMPLETE).touch()
    except Timeout:
        raise RequestError(f"{home}: another process has been making it for {spoken(MAKE_LIMIT_S)}") from None


def _pip(home: Path) -> list[str]:
    return [_uv(), "pip", "install", "--quiet", "--python", str(home / "bin" / "python")]


def _lock(framework: str) -> Path:
    folder = CHECKOUT / "images" / framework
    locks = (
        folder / "requirements-cpu.txt",
        folder / "requirements.txt",
        CHECKOUT / "requirements" / f"{framework}.txt",
    )
    lock_file = next((lock for lock in locks if lock.exists()), None)
    if lock_file is None:
        raise RequestError(f"--framework {framework}: {folder} has no lock")
    return lock_file


def _home(framework: str) -> Path:
    lock = _lock(framework).read_bytes()
    text = hashlib.sha256(lock + sys.version.encode() + STUBS.read_bytes()).hexdigest()[:12]
    return user_cache_dir(os.environ) / "environments" / f"{framework}-{text}"
