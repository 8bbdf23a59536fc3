"""The files of a run in a bucket, by way of fsspec."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Sequence
from typing import Any

from contracts.files import DiskFiles, beginning, is_url


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


def files_of(url: str) -> DiskFiles | BucketFiles:
    """The files that `url`, seen from this host, means."""
    return BucketFiles() if is_url(url) else DiskFiles()


def _bucket(url: str) -> Any:
    import fsspec

    # Other hosts write to the same bucket: a listing that is kept is a listing that is wrong.
    return fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
