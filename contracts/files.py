"""Where the files of a run lie and how they are reached: this host's disks here; buckets and other hosts elsewhere."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import os
import re
import shutil
import stat
from collections.abc import Sequence
from typing import Protocol

from contracts import atomic

PRIVATE_ENDING = ".tar.gz.base64"
"""Of files that only their owner may read, such as the folder of an own command."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a file of `size` bytes: what is from `offset` up to `next_offset`. error: why it could not be read."""

    data: bytes = b""
    offset: int = 0
    next_offset: int = 0
    size: int = 0
    error: str | None = None


class Files(Protocol):
    """Reading and writing by full path or URL. A file that is not there is None, a folder that is not there is empty.

    Raises (on any call):
        OSError: the place cannot be reached, or refuses.
    """

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        """The contents of several files, read in one request where that is possible; None for a missing file."""
        ...

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        """The contents from byte `offset` on (negative: counted from the end), and the offset where they begin.

        An offset beyond the end means that the file was replaced: it is read from its beginning.
        """
        ...

    def read_inside(
        self, places: Sequence[tuple[str, str]], offsets: Sequence[int], limit_bytes: int
    ) -> builtins.list[Piece | None]:
        """At most `limit_bytes` of each of several untrusted files, by folder and path in it.

        Links that lead out of the folder are not followed. Offsets are as in `read_from`, but one behind the end
        gives nothing. A file that cannot be read does not keep the others from it.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write the file whole; the folders above it are made."""
        ...

    def write_new(self, path: str, data: bytes) -> None:
        """Write a file of a name that nobody else knows yet: it need not be whole at once. The folders are made."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Write the file whole, unless there is one: of several who do so at once one gets True, the others False."""
        ...

    def move(self, path: str, to: str) -> None:
        """Give a file another name in one step; the place of a file of that name is taken. One that is not there (any
        more) is an error."""
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
        contents: builtins.list[bytes | None] = []
        for path in paths:
            try:
                with open(path, "rb") as file:
                    contents.append(file.read())
            except (FileNotFoundError, NotADirectoryError):
                contents.append(None)
        return contents

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        try:
            with open(path, "rb") as file:
                start = beginning(offset, os.fstat(file.fileno()).st_size)
                file.seek(start)
                return file.read(), start
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_inside(
        self, places: Sequence[tuple[str, str]], offsets: Sequence[int], limit_bytes: int
    ) -> builtins.list[Piece | None]:
        real = {folder: os.path.realpath(folder) for folder, _ in places}
        return [
            _piece(real[folder], name, offset, limit_bytes)
            for (folder, name), offset in zip(places, offsets, strict=True)
        ]

    def write(self, path: str, data: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        atomic.write(path, data, mode=0o600 if path.endswith(PRIVATE_ENDING) else None)

    def write_new(self, path: str, data: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        mode = 0o600 if path.endswith(PRIVATE_ENDING) else 0o666
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)

    def create(self, path: str, data: bytes) -> bool:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            atomic.write(path, data, replace=os.link)
        except FileExistsError:
            return False
        return True

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def list(self, path: str) -> builtins.list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def folder_bytes(self, path: str) -> int:
        entries = ((folder, name) for folder, _, names in os.walk(path) for name in names)
        return sum(os.lstat(os.path.join(folder, name)).st_size for folder, name in entries)

    def remove_folder(self, path: str, first: str) -> None:
        if os.path.islink(path):
            os.unlink(path)
        elif os.path.isdir(path):
            self.remove(os.path.join(path, first))
            shutil.rmtree(path)

    def move(self, path: str, to: str) -> None:
        os.makedirs(os.path.dirname(to), exist_ok=True)
        os.replace(path, to)

    move_folder = move

    def put_file(self, file: str, path: str) -> None:
        with open(file, "rb") as source:
            self.write(path, source.read())

    def put_folder(self, folder: str, path: str) -> None:
        """Copy a folder to `path`, with modes by the umask; what was there before is replaced."""
        parent, name = os.path.split(path)
        temporary = os.path.join(parent, f".{name}{atomic.SUFFIX}")
        shutil.rmtree(temporary, ignore_errors=True)
        for place, _, names in os.walk(folder):
            to = os.path.normpath(os.path.join(temporary, os.path.relpath(place, folder)))
            os.makedirs(to)
            for file_name in names:
                # What was made in a temporary folder is for its owner only.
                shutil.copyfile(os.path.join(place, file_name), os.path.join(to, file_name))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)


def _piece(folder: str, name: str, offset: int, limit: int) -> Piece | None:
    try:
        # Without O_NONBLOCK the opening of a named pipe waits for somebody who writes.
        descriptor = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return Piece(error=getattr(error, "strerror", None) or str(error))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return Piece(error="is not a file")
        if not is_inside(descriptor, folder):
            return Piece(error="leads out of the run directory")
        size = os.fstat(descriptor).st_size
        begin = max(0, size + offset) if offset < 0 else min(offset, size)
        data = os.pread(descriptor, limit, begin)
        return Piece(data=data, offset=begin, next_offset=begin + len(data), size=size)
    except OSError as error:
        return Piece(error=error.strerror or str(error))
    finally:
        os.close(descriptor)


def is_inside(descriptor: int, folder: str) -> bool:
    """Whether an open file lies in a folder, of which this is the path without links, whatever path led to it."""
    return os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/")


def is_url(place: str) -> bool:
    """Whether a place is a bucket's or any other that fsspec knows by URL; a path otherwise."""
    return "://" in place


STORES = ("gs", "gcs", "file")
"""The kinds of URLs that files are written to; file: a disk that stands in for a bucket."""


def unwritable(place: str) -> str | None:
    """Return why no files are kept at a path or URL, and what is supported; None if they can be."""
    scheme, separator, location = place.partition("://")
    if not separator and (near := re.match(r"(gs|gcs|s3|https?):/*", place)):
        if near[1] in STORES:
            return f"is no URL; write {near[1]}://{place[near.end() :]}"
        scheme, separator = near[1], "://"
    if separator and scheme not in STORES:
        return f"must be a folder, or a bucket of Cloud Storage (gs://BUCKET/…), not {scheme}://"
    if separator and scheme != "file" and not location.partition("/")[0]:
        return f"names no bucket; write {scheme}://BUCKET/…"
    return None


def beginning(offset: int, size: int) -> int:
    """Return where reading begins in a file of `size` bytes; see `Files.read_from`."""
    return max(0, size + offset) if offset < 0 else 0 if offset > size else offset
