"""Files in a bucket, through fsspec, and retries of what a bucket refused for a moment."""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from contracts.errors import RequestError, Superseded, Unreachable, is_rate_limit
from contracts.files import DiskFiles, Piece, beginning, is_url
from contracts.run_directory import RunDirectory

PAUSES_S = (1.0, 4.0)
"""Between three tries; the bucket's own library has tried several times within each."""

READERS = 16
"""Objects that are read at the same time."""


class BucketFiles:
    """Files of any URL that fsspec knows, above all gs://. A file is one object, and an object is put whole."""

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        if not paths:
            return []
        bucket = _bucket(paths[0])
        contents: dict[str, Any] = bucket.cat([*paths], on_error="return", recursive=False)
        answers: builtins.list[bytes | None] = []
        for path in paths:
            answer = contents[bucket._strip_protocol(path)]
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

    def read_inside(
        self, places: Sequence[tuple[str, str]], offsets: Sequence[int], limit_bytes: int
    ) -> builtins.list[Piece | None]:
        """An object has one name and is no link, so none leads out of its folder."""
        paths = [f"{folder}/{name}" for folder, name in places]
        pieces: builtins.list[Piece | Exception | None]
        if paths and not any(offsets):  # one request each; the size of an object takes two more
            ends = [limit_bytes] * len(paths)
            data = _bucket(paths[0]).cat_ranges(paths, [*offsets], ends, on_error="return")
            pieces = [_beginning(path, head, limit_bytes) for path, head in zip(paths, data, strict=True)]
        elif len(paths) == 1:  # in another thread, its library would connect anew
            pieces = [_piece_or_refusal(paths[0], offsets[0], limit_bytes)]
        else:
            with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
                pieces = list(pool.map(_piece_or_refusal, paths, offsets, [limit_bytes] * len(paths)))
        refusals = [piece for piece in pieces if isinstance(piece, Exception)]
        if refusals and len(refusals) == len(pieces):
            raise refusals[0]  # the place refuses, and not one of its objects
        return [
            Piece(error=str(piece).partition("\n")[0] or type(piece).__name__)
            if isinstance(piece, Exception)
            else piece
            for piece in pieces
        ]

    def write(self, path: str, data: bytes) -> None:
        _bucket(path).pipe_file(path, data)

    write_new = write

    def create(self, path: str, data: bytes) -> bool:
        try:
            _bucket(path).pipe_file(path, data, mode="create")  # with ifGenerationMatch=0
        except FileExistsError:
            return False
        return True

    def move(self, path: str, to: str) -> None:
        """The copy is made by the bucket's server, in one step, and fails where the object has been removed."""
        bucket = _bucket(path)
        bucket.cp_file(path, to)
        self.remove(path)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            _bucket(path).rm_file(path)

    def list(self, path: str) -> builtins.list[str]:
        try:
            entries = _bucket(path).ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for entry in entries if (name := str(entry).rstrip("/").rpartition("/")[2]))

    def folder_bytes(self, path: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return int(_bucket(path).du(path))
        return 0

    def remove_folder(self, path: str, first: str) -> None:
        self.remove(f"{path}/{first}")
        with contextlib.suppress(FileNotFoundError):
            _bucket(path).rm(path, recursive=True)

    def move_folder(self, path: str, to: str) -> None:
        bucket = _bucket(path)
        bucket.copy(path, to, recursive=True)
        bucket.rm(path, recursive=True)

    def get(self, path: str, to: str) -> None:
        """Copy a file, or a folder with all that is in it, to a place of this host where nothing is yet."""
        _bucket(path).get(path, to, recursive=True)

    def put_file(self, file: str, path: str) -> None:
        _bucket(path).put_file(file, path)

    def put_folder(self, folder: str, path: str) -> None:
        bucket = _bucket(path)
        with contextlib.suppress(FileNotFoundError):
            bucket.rm(path, recursive=True)
        bucket.put(f"{folder}/", f"{path}/", recursive=True)


def files_of(url: str) -> DiskFiles | BucketFiles:
    """How this host reads and writes files under `url`."""
    return BucketFiles() if is_url(url) else DiskFiles()


def open_url(url: str, *, option: str) -> tuple[Any, str]:
    """The file system that knows `url`, and its path there. option: what the URL was given for, as --data.

    Raises:
        RequestError: nothing here knows this kind of URL, or its server cannot be spoken to (Unreachable: now).
    """
    import fsspec

    # Other hosts write to the same bucket: a listing that is kept is a listing that is wrong.
    options = (
        {"use_listings_cache": False}
        if is_url(url) and not url.startswith("file://")
        else {"auto_mkdir": True}
    )
    if problem := unreadable(url):
        raise RequestError(f"{option} {url}: {problem}")
    try:
        file_system, path = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # some drivers connect here (ftp, sftp), each with exceptions of its own
        raise place_error(error, f"{option} {url}", "check the address and your permission there") from error
    return file_system, str(path)


def unreadable(url: str) -> str | None:
    """Return why a kind of URL cannot be read here, and what can be; None if it can be."""
    import fsspec

    scheme, separator, _ = url.partition("://")
    try:
        fsspec.get_filesystem_class(scheme if separator else "file")
    except (ImportError, ValueError) as error:
        return f"no driver for this kind of URL ({error}); name a path, gs://… or https://…"
    return None


def is_outage(error: BaseException) -> bool:
    """Whether a server did not answer, or could not for now; False where it answered and refused.

    Each driver of fsspec has its own exceptions; those of gcsfs are aiohttp's, requests' and google-auth's, and an
    HttpError with the status of the answer.
    """
    if isinstance(error, FileNotFoundError):  # fsspec's HTTP file system says so of a server that is away
        return error.__cause__ is not None and is_outage(error.__cause__)
    status = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(status, int) and status != 403:
        return status in (408, 429) or status >= 500
    if status == 403 or str(error).startswith("Forbidden"):  # what gcsfs makes of it
        return is_rate_limit(str(error))
    library = type(error).__module__.partition(".")[0]
    if library in ("aiohttp", "requests", "urllib3") or type(error).__name__ == "TransportError":
        return True
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or (
        isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
    )


def place_error(error: BaseException, place: str, remedy: str) -> RequestError:
    """Return the error to raise where reading a place has raised `error`: Unreachable in an outage.

    place: the option and what was given for it. remedy: what to do where it answers.
    """
    if is_outage(error):
        cause = (error.__cause__ if isinstance(error, FileNotFoundError) else None) or error
        return Unreachable(f"{place}: does not answer now ({_reason(cause)}); try again later")
    return RequestError(f"{place}: {_reason(error)}; {remedy}")


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return os.strerror(errno.ENOENT)
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def _piece_or_refusal(path: str, offset: int, limit: int) -> Piece | Exception | None:
    """A piece of an object, or why the bucket refuses this object while it answers.

    Raises:
        Exception: the bucket does not answer.
    """
    bucket = _bucket(path)
    try:
        size = int(bucket.size(path))
        begin = max(0, size + offset) if offset < 0 else min(offset, size)
        end = min(size, begin + limit)
        data = bytes(bucket.cat_file(path, start=begin, end=end)) if begin < end else b""
    except Exception as error:  # each driver has exceptions of its own
        return _none_or_refusal(error)
    return Piece(data=data, offset=begin, next_offset=begin + len(data), size=size)


def _beginning(path: str, data: bytes | Exception, limit: int) -> Piece | Exception | None:
    """The same of the beginning of an object. data: its first `limit` bytes, or why there are none."""
    if isinstance(data, Exception):
        if getattr(data, "code", None) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return Piece()  # it is empty
        return _none_or_refusal(data)
    if len(data) < limit:
        return Piece(data=bytes(data), next_offset=len(data), size=len(data))
    return _piece_or_refusal(path, 0, limit)


def _none_or_refusal(error: Exception) -> Exception | None:
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not is_outage(error):
        return None
    if is_outage(error):
        raise error
    return error


def _bucket(url: str) -> Any:
    import fsspec

    # A disk that stands in for a bucket has no folders to be made first either.
    options = {"auto_mkdir": True} if url.startswith("file://") else {}
    return fsspec.core.url_to_fs(url, use_listings_cache=False, **options)[0]


def pauses_s(directory: RunDirectory) -> Sequence[float]:
    """Pauses between tries to write there: a bucket may refuse for a moment; a disk that is full stays full."""
    return PAUSES_S if directory.is_remote else ()


def retry[Result](
    action: Callable[[], Result],
    *,
    what: str,
    pauses_s: Sequence[float] = PAUSES_S,
    say: Callable[[str], None] = print,
) -> Result:
    """Call `action` until it succeeds, and say each failure.

    Raises:
        Exception: that of the last try.
        Superseded: at once.
    """
    for pause_s in pauses_s:
        try:
            return action()
        except Superseded:
            raise
        except Exception as error:  # fsspec's file systems raise kinds of their own, not only OSError
            with contextlib.suppress(OSError):  # the log may be on a disk that is full
                say(f"{what}: {type(error).__name__}: {error}; trying again in {pause_s:g} s")
            time.sleep(pause_s)
    return action()
