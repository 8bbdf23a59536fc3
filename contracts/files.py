"""Where the files of a run lie and how they are reached: this host's disks here; buckets and other hosts elsewhere."""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
from collections.abc import Sequence
from typing import Protocol

from contracts import atomic


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
    """Files on this host's disks, NFS among them."""

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
        atomic.write(path, data)

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
        """Copy a folder to `path`; what was there before is replaced."""
        parent, name = os.path.split(path)
        beside = os.path.join(parent, f".{name}{atomic.SUFFIX}")
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(folder, beside)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(beside, path)


def is_url(place: str) -> bool:
    """Whether a place is a bucket's or any other that fsspec knows by URL; a path otherwise."""
    return "://" in place


def beginning(offset: int, size: int) -> int:
    """Return where reading begins in a file of `size` bytes; see `Files.read_from`."""
    return max(0, size + offset) if offset < 0 else 0 if offset > size else offset
