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

    def folder_bytes(self, path: str) -> int:
        """The bytes of all files in a folder; links are not followed."""
        ...

    def remove_folder(self, path: str, first: str) -> None:
        """Remove a folder with all that is in it, the file `first` of it before all others: whoever is interrupted
        leaves a folder without it. A link is removed, not followed."""
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

    def folder_bytes(self, path: str) -> int:
        found = ((folder, name) for folder, _, names in os.walk(path) for name in names)
        return sum(os.lstat(os.path.join(folder, name)).st_size for folder, name in found)

    def remove_folder(self, path: str, first: str) -> None:
        if os.path.islink(path):
            os.unlink(path)
        elif os.path.isdir(path):
            self.remove(os.path.join(path, first))
            shutil.rmtree(path)

    def move(self, path: str, to: str) -> None:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        os.replace(path, to)

    def put_file(self, file: str, path: str) -> None:
        with open(file, "rb") as source:
            self.write(path, source.read())

    def put_folder(self, folder: str, path: str) -> None:
        """Copy a folder to `path`, with modes by the umask; what was there before is replaced."""
        parent, name = os.path.split(path)
        beside = os.path.join(parent, f".{name}{atomic.SUFFIX}")
        shutil.rmtree(beside, ignore_errors=True)
        for place, _, names in os.walk(folder):
            to = os.path.normpath(os.path.join(beside, os.path.relpath(place, folder)))
            os.makedirs(to)
            for each in names:
                # What was made in a temporary folder is for its owner only.
                shutil.copyfile(os.path.join(place, each), os.path.join(to, each))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(beside, path)


def is_url(place: str) -> bool:
    """Whether a place is a bucket's or any other that fsspec knows by URL; a path otherwise."""
    return "://" in place


def beginning(offset: int, size: int) -> int:
    """Return where reading begins in a file of `size` bytes; see `Files.read_from`."""
    return max(0, size + offset) if offset < 0 else 0 if offset > size else offset
