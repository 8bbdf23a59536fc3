"""Where the files of a run lie: on this host's disks (NFS among them), or in a bucket. Whole or not there, never half.

Imports nothing heavy: the launching side reads runs through this file too, and has a third place, another host's disk.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol


class Files(Protocol):
    """Reading and writing by full path or URL. A file that is not there is None, a folder that is not there is empty.

    Raises (on any call):
        OSError: the place cannot be reached, or refuses.
    """

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        """What each of several files holds; asked for together, where that saves a journey."""
        ...

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        """What the file holds from byte `offset` on (negative: from so far before its end), and where that begins.

        An offset behind the end means that the file is another one now: it is read from its beginning.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write the file whole; the folders above it are made."""
        ...

    def remove(self, path: str) -> None: ...

    def list(self, path: str) -> builtins.list[str]:
        """The names in a folder, in order."""
        ...


class DiskFiles:
    """This host's disks. A file is written beside and renamed."""

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        found: builtins.list[bytes | None] = []
        for path in paths:
            try:
                with open(path, "rb") as file:
                    found.append(file.read())
            except (FileNotFoundError, NotADirectoryError):
                found.append(None)
        return found

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        try:
            with open(path, "rb") as file:
                start = beginning(offset, os.fstat(file.fileno()).st_size)
                file.seek(start)
                return file.read(), start
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, data: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(beside, 0o644)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def list(self, path: str) -> builtins.list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def move(self, path: str, to: str) -> None:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        os.replace(path, to)

    def put_file(self, file: str, path: str) -> None:
        with open(file, "rb") as source:
            self.write(path, source.read())

    def put_folder(self, folder: str, path: str) -> None:
        parent, name = os.path.split(path)
        beside = os.path.join(parent, f".{name}.part")
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(folder, beside)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(beside, path)


class BucketFiles:
    """Whatever fsspec knows by URL: gs:// above all. A file is one object, and an object is put whole."""

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        if not paths:
            return []
        bucket = _bucket(paths[0])
        found: dict[str, Any] = bucket.cat([*paths], on_error="return", recursive=False)
        answers: builtins.list[bytes | None] = []
        for path in paths:
            answer = found[bucket._strip_protocol(path)]
            if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
                raise answer
            answers.append(None if isinstance(answer, Exception) else bytes(answer))
        return answers

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        bucket = _bucket(path)
        try:
            size = int(bucket.size(path))
            start = beginning(offset, size)
            return (bytes(bucket.cat_file(path, start=start)) if start < size else b""), start
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, data: bytes) -> None:
        _bucket(path).pipe_file(path, data)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            _bucket(path).rm_file(path)

    def list(self, path: str) -> builtins.list[str]:
        try:
            entries = _bucket(path).ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for entry in entries if (name := str(entry).rstrip("/").rpartition("/")[2]))

    def move(self, path: str, to: str) -> None:
        _bucket(path).mv(path, to, recursive=True)

    def put_file(self, file: str, path: str) -> None:
        _bucket(path).put_file(file, path)

    def put_folder(self, folder: str, path: str) -> None:
        bucket = _bucket(path)
        with contextlib.suppress(FileNotFoundError):
            bucket.rm(path, recursive=True)
        bucket.put(f"{folder}/", f"{path}/", recursive=True)


def is_url(place: str) -> bool:
    """Whether a place is a bucket's or any other that fsspec knows by URL; a path otherwise."""
    return "://" in place


def here(url: str) -> DiskFiles | BucketFiles:
    """The files that `url`, seen from this host, means."""
    return BucketFiles() if is_url(url) else DiskFiles()


def beginning(offset: int, size: int) -> int:
    """Where reading begins in a file of `size` bytes."""
    return max(0, size + offset) if offset < 0 else 0 if offset > size else offset


def _bucket(url: str) -> Any:
    import fsspec

    # Other hosts write to the same bucket: a listing that is kept is a listing that is wrong.
    return fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
