"""Directories that are built once on a host and then shared by every process and every later run."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from contracts.errors import RequestError, Unreachable

WAIT_SAY_S = 60.0
"""Who waits for another process says so again after this long: a process that says nothing is taken to hang."""

_LOG = logging.getLogger(__name__)


def user_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The default cache directory: `tpu-stack` under $XDG_CACHE_HOME, or under ~/.cache.

    A relative $XDG_CACHE_HOME is ignored, as the XDG base directory specification asks.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "tpu-stack"
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".cache" / "tpu-stack"


def build_once(
    directory: Path,
    build: Callable[[Path], None],
    *,
    wait_limit_s: float = 24 * 3600,
    whole: Callable[[Path], bool] = Path.is_dir,
    goes_on: bool = False,
    say: Callable[[str], None] = _LOG.info,
) -> bool:
    """Make `directory` with `build(temporary_directory)` unless it is there; True if this call built it.

    The directory appears complete or not at all: it is built under a sibling's name, flushed to the disk and
    renamed. Of several processes at once one builds and the others wait for it. What a killed builder left is
    never taken for whole, and the next builder removes it. `whole` may look closer than "it is there": a
    directory that it finds torn is removed and built again.

    goes_on: `build` goes on with what it finds in the temporary directory, so what a builder left that was killed or
    failed is kept, unless it failed because the request was wrong or the disk is full.

    Raises RequestError when another process holds the lock for longer than `wait_limit_s`, and lets out
    whatever `build` raises (OSError with ENOSPC on a full disk) after removing what it had made.
    """
    if directory.is_dir() and whole(directory):
        return False
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{directory}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is making {directory.parent.name}/{directory.name[:8]}, waiting for it")
        _wait(lock, wait_limit_s, say)
    try:
        if directory.is_dir():
            if whole(directory):
                return False
            say(f"{directory} is torn: removed, to be built again")
            shutil.rmtree(directory)
        _build(directory, build, goes_on)
        return True
    finally:
        lock.release()


def _wait(lock: FileLock, limit_s: float, say: Callable[[str], None]) -> None:
    waited_s = 0.0
    while True:
        step_s = min(WAIT_SAY_S, limit_s - waited_s)
        try:
            lock.acquire(timeout=step_s)
            return
        except Timeout:
            waited_s += step_s
        if waited_s >= limit_s:
            raise RequestError(
                f"{lock.lock_file}: another process has held this lock for more than {limit_s:.0f} s; wait "
                f"for it, or find it (`fuser -v {lock.lock_file}`) and end it: the lock goes with its process, "
                "so do not delete the file"
            )
        say(
            f"another process is still making {os.path.basename(lock.lock_file)[:8]}, after {waited_s / 60:.0f} min"
        )


def _build(directory: Path, build: Callable[[Path], None], goes_on: bool) -> None:
    """Runs under the lock, so one fixed temporary name is enough, and what lies there is no living builder's."""
    temporary = directory.with_name(directory.name + ".building")
    if temporary.exists() and not goes_on:
        shutil.rmtree(temporary)
    temporary.mkdir(exist_ok=True)
    try:
        build(temporary)
        for folder, _, names in os.walk(temporary):
            for path in [*(os.path.join(folder, name) for name in names), folder]:
                _flush(path)
        temporary.rename(directory)
        _flush(directory.parent)
    except BaseException as error:
        if not goes_on or _is_in_vain(error):
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _is_in_vain(error: BaseException) -> bool:
    """Whether the same build would fail again, or what it has made is in the way of its remedy."""
    if isinstance(error, RequestError):
        return not isinstance(error, Unreachable)
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def _flush(path: str | Path) -> None:
    """Make a file's contents, or a directory's names, outlast a power cut before the rename can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
