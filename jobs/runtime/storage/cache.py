"""Caches: directories that are built once on a host and shared by all its processes and later runs, and folders that
one host uploads and others fetch, in a bucket or on a disk that hosts share.

A remote folder is named by a hash of what it was made from, so every host uploads the same. Its MANIFEST is written
last and has the size and hash of each file: a folder without one is absent, and a file that differs is torn.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from contracts.durations import DAY_S, spoken
from contracts.errors import RequestError, Unreachable
from jobs.runtime.storage.bucket_files import is_outage, open_url, place_error, retry

WAIT_SAY_S = 60.0
"""Seconds between two reports of a process that waits for another one: a silent process counts as hung."""

MANIFEST = "manifest.json"

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


def remove_unused(folder: Path, days: float) -> None:
    """Remove what is in a folder that nobody has written, or touched when it was used, for so many days."""
    oldest_s = time.time() - days * DAY_S
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            if path.stat().st_mtime >= oldest_s:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def build_once(
    directory: Path,
    build: Callable[[Path], None],
    *,
    wait_limit_s: float = 24 * 3600,
    is_complete: Callable[[Path], bool] = Path.is_dir,
    goes_on: bool = False,
    say: Callable[[str], None] = _LOG.info,
) -> bool:
    """Make `directory` with `build(temporary_directory)` unless it exists; True if this call built it.

    The directory appears complete or not at all: it is built under another name, flushed to the disk and renamed. Of
    several processes one builds and the others wait. A directory that is not `is_complete` is removed and built again.

    goes_on: `build` continues a temporary directory, so that of a builder that was killed or failed is kept, unless
    the request was wrong or the disk is full.

    Raises:
        RequestError: another process has held the lock for longer than `wait_limit_s`.
        Exception: what `build` raises.
    """
    if directory.is_dir() and is_complete(directory):
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
            if is_complete(directory):
                return False
            say(f"{directory} is torn: removed, to be built again")
            shutil.rmtree(directory)
        _build(directory, build, goes_on)
        return True
    finally:
        lock.release()


def copy_once(
    url: str,
    folder: Path,
    choose: Callable[[Collection[str]], Iterable[str]],
    *,
    option: str,
    say: Callable[[str], None] = _LOG.info,
    is_recursive: bool = False,
) -> Path:
    """Copy files of a remote folder into a subfolder of `folder`, once for each version of them; return its path.

    choose: which of the files, by their paths in the folder. is_recursive: those of its folders too. option: what the
    URL was given for.

    Raises:
        RequestError: it cannot be read (Unreachable: now), or what `choose` raises.
    """
    try:
        files, root = open_url(url.rstrip("/"), option=option)
        root = root.rstrip("/")
        entries = {
            str(entry["name"]).removeprefix(f"{root}/"): entry
            for entry in _listed(files, root, is_recursive=is_recursive)
        }
        chosen = {name: entries[name] for name in sorted(choose(entries))}
        versions = {name: files.ukey(entry["name"]) for name, entry in chosen.items()}
        key = hashlib.sha256(json.dumps([url, versions], default=str).encode()).hexdigest()[:32]

        def fetch(temporary: Path) -> None:
            size = sum(int(entry["size"] or 0) for entry in chosen.values())
            say(f"copying {url} ({size / 2**20:,.0f} MiB)")
            for name, entry in chosen.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                files.get_file(entry["name"], str(temporary / name))

        build_once(folder / key, fetch, say=say)
        return folder / key
    except RequestError:
        raise
    except Exception as error:  # each driver has exceptions of its own
        remedy = "check the address, the network and your permission there"
        raise place_error(error, f"{option} {url}", remedy) from error


def _listed(files: Any, folder: str, *, is_recursive: bool) -> Iterator[Any]:
    """The files in a remote folder. fsspec's own `find` takes a server that is away for an empty folder."""
    for entry in files.ls(folder, detail=True):
        if entry["type"] != "directory":
            yield entry
        elif is_recursive and str(entry["name"]).rstrip("/") != folder:
            yield from _listed(files, entry["name"], is_recursive=True)


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
                f"{lock.lock_file}: another process has held this lock for more than {spoken(limit_s)}; wait "
                f"for it, or find it (`fuser -v {lock.lock_file}`) and end it: the lock goes with its process, "
                "so do not delete the file"
            )
        say(
            f"another process is still making {os.path.basename(lock.lock_file)[:8]}, after {spoken(waited_s)}"
        )


def _build(directory: Path, build: Callable[[Path], None], goes_on: bool) -> None:
    """Build under the lock: one fixed temporary name is enough, and what lies there is no living builder's."""
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
        return not isinstance(error, Unreachable | CacheRefused)
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def _flush(path: str | Path) -> None:
    """Make a file's contents, or a directory's names, outlast a power cut before the rename can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CacheRefused(RequestError):
    """A remote cache answers and refuses, or its bucket or folder is missing."""


class RemoteCache:
    """The folders under `url`, which is a path or any URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        self._url = os.path.expanduser(url).rstrip("/")

    def fetch(self, name: str, into: Path, *, say: Callable[[str], None]) -> bool:
        """Make `into` the same as folder `name`; False if that is absent.

        A torn one counts as absent: its manifest is removed, so that the next `put` replaces it.

        Raises:
            Unreachable: it does not answer.
            CacheRefused: it refuses.
        """
        files, root = open_url(self._url, option="--remote-cache")
        manifest = self._manifest(files, root, name)
        if manifest is None:
            return False
        size = sum(entry["size_bytes"] for entry in manifest.values())
        say(f"copying {self._url}/{name} ({size / 1e6:,.0f} MB)")
        try:
            for file in manifest:
                place = f"{root}/{name}/{file}"
                self._carry_out(functools.partial(files.get_file, place, str(into / file)), say)
            is_whole = all(_entry(into / file) == entry for file, entry in manifest.items())
        except FileNotFoundError:
            is_whole = False
        for path in into.iterdir():
            if not is_whole or path.name not in manifest:
                path.unlink()
        if not is_whole:
            say(f"{self._url}/{name} is not what was put there: made again")
            with contextlib.suppress(FileNotFoundError):  # another host has found it torn as well
                self._carry_out(lambda: files.rm_file(f"{root}/{name}/{MANIFEST}"), say)
        return is_whole

    def put(self, folder: Path, name: str, *, say: Callable[[str], None]) -> None:
        """Copy the files of `folder` to `name`, unless they are there.

        Raises:
            Unreachable: it does not answer.
            CacheRefused: it refuses.
        """
        files, root = open_url(self._url, option="--remote-cache")
        if self._manifest(files, root, name) is not None:
            return
        manifest = {path.name: _entry(path) for path in sorted(folder.iterdir())}
        size = sum(entry["size_bytes"] for entry in manifest.values())
        say(f"copying {size / 1e6:,.0f} MB to {self._url}/{name}")
        place = f"{root}/{name}"
        content = json.dumps(manifest, indent=2).encode()
        try:
            for file in manifest:
                self._carry_out(functools.partial(files.put_file, str(folder / file), f"{place}/{file}"), say)
            self._carry_out(lambda: files.pipe_file(f"{place}/{MANIFEST}", content), say)
        except FileNotFoundError as error:
            raise CacheRefused(
                f"--remote-cache {self._url}: cannot be written ({error}); make the bucket or folder first"
            ) from None

    def _manifest(self, files: Any, root: str, name: str) -> dict[str, Any] | None:
        try:
            content = self._carry_out(lambda: files.cat_file(f"{root}/{name}/{MANIFEST}"), lambda _: None)
        except FileNotFoundError:
            return None
        try:
            manifest: dict[str, Any] = json.loads(content)
            # Others may write to the bucket too.
            are_names = all(
                Path(name).name == name and entry["size_bytes"] >= 0 for name, entry in manifest.items()
            )
            return manifest if are_names else None
        except (ValueError, TypeError, KeyError, AttributeError):
            return None  # on a shared disk it may be half-written; whoever puts it again finishes it

    def _carry_out[Result](self, action: Callable[[], Result], say: Callable[[str], None]) -> Result:
        def attempt() -> Result | FileNotFoundError:
            try:
                return action()
            except FileNotFoundError as error:
                return error  # an answer, and nothing to try again

        try:
            result = retry(attempt, what=self._url, say=say)
        except Exception as error:  # each driver has exceptions of its own
            kind = Unreachable if is_outage(error) else CacheRefused
            raise kind(
                f"--remote-cache {self._url}: {type(error).__name__}: {error}; check the address, the network and "
                "your permission to read and write there"
            ) from error
        if isinstance(result, FileNotFoundError):
            raise result
        return result


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "size_bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }
