"""Files of runs that lie elsewhere, as this machine reaches them: in buckets, and on hosts through their agents.

The client library for buckets tries again for a minute, prints tracebacks while it does, and in the end raises what
names no bucket. So a bucket is first asked for one name in it, within a limit; what the library does afterwards has a
limit too."""

from __future__ import annotations

import builtins
import concurrent.futures
import dataclasses
import functools
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from contracts.errors import first_line, is_rate_limit, message_line
from contracts.files import Piece, beginning
from infra.documents import (
    UNANSWERED,
    network_error,
    refusal_message,
    send_request,
    storage_server,
)
from jobs.runtime.storage.bucket_files import BucketFiles, is_outage
from launch.hosts import ANSWER_LIMIT_S as HOST_LIMIT_S
from launch.hosts import Agent, HostError, in_thread

SCHEMES = ("gs", "gcs")
REACH_LIMIT_S = 12.0
"""For all of `reach`: with the start of the program an answer comes within 15 s."""
ANSWER_LIMIT_S = 6.0
CREDENTIALS_LIMIT_S = 6.0
"""To look for them; where there are none, a metadata server that is not there either is waited for."""
FOLDER_LIMIT_S = 1800.0
"""To remove or write a folder: a run may have hundreds of gigabytes."""
WORK_LIMIT_S = 60.0
"""For one reading or writing in a bucket that has been reached: that of the files of some hundred runs."""
BYTES_PER_S = 2**20
"""Of a slow link: what is written may take longer by that."""
ROLE = "roles/storage.objectUser"
LOG_IN = "`gcloud auth application-default login`"


def reach(url: str, label: str | None = None, *, one_object: bool = False) -> None:
    """Check that this machine can read in the bucket of `url`; other kinds of URL are not checked.

    label: how the message begins (default: the URL). one_object: it is enough that the object itself can be read, where
    the bucket's names cannot.

    Raises:
        HostError: the bucket cannot be reached, is not there, or this machine may not read in it, and what to do.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme in SCHEMES:
        import google.auth.transport.requests  # noqa: F401 - outside the limit: where much else runs, it takes its time

        # What it prints while it tries again is in the message when it has given up.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        names = [parts.path.strip("/")] if one_object else []
        with_time_limit(REACH_LIMIT_S, label or url, lambda: _reach(parts.netloc, names, label or url))


def with_time_limit[Result](
    limit_s: float, label: str, action: Callable[[], Result], *, server: str | None = None
) -> Result:
    """Return what `action` returns, or raise what it raises. server: which one is asked; None: that of Cloud Storage.

    Raises:
        HostError: it has done neither within the limit; its thread is left behind.
    """
    future = in_thread(action)
    if future not in concurrent.futures.wait([future], limit_s).done:
        remedy = f"see whether this machine reaches {server or _host()}"
        raise HostError(host=label, reason=f"no answer within {limit_s:.0f} s", remedy=remedy, is_outage=True)
    return future.result()


def _host() -> str:
    return urllib.parse.urlsplit(storage_server()).netloc


class Answer(NamedTuple):
    """What Cloud Storage says: an HTTP status, and what it says of it."""

    status: int
    message: str

    @property
    def refuses(self) -> bool:
        return self.status in (401, 403)

    @property
    def is_outage(self) -> bool:
        return self.status in (408, 429) or self.status >= 500


def _reach(bucket: str, objects: Sequence[str], label: str) -> None:
    """First without credentials: whether there is a network, a bucket, and whether it is public, shows without them."""
    place = f"{storage_server()}/storage/v1/b/{urllib.parse.quote(bucket, safe='')}/o"
    names = f"{place}?maxResults=1&fields=kind"
    answer = _ask(names, {}, label)
    if answer.refuses:
        headers = _credentials(bucket, label)
        answer = _ask(names, headers, label)
        for name in objects if answer.refuses else ():
            if not _ask(f"{place}/{urllib.parse.quote(name, safe='')}?fields=kind", headers, label).refuses:
                return
    if answer.status == 404:
        remedy = "check its name; `pulumi up` makes the one of a stack"
        raise HostError(host=label, reason=f"there is no bucket {bucket}", remedy=remedy)
    if answer.refuses:
        reason = f"no permission in the bucket {bucket}: {answer.message}"
        raise HostError(host=label, reason=reason, remedy=f"have {ROLE} on it granted to that account")
    if answer.status >= 400:
        reason = f"{_host()} answers {answer.status}: {answer.message}"
        raise HostError(host=label, reason=reason, remedy="try again in a moment", is_outage=answer.is_outage)


def _ask(url: str, headers: Mapping[str, str], label: str) -> Answer:
    try:
        status, body, _ = send_request(urllib.request.Request(url, headers=dict(headers)), ANSWER_LIMIT_S)
    except UNANSWERED as error:
        raise HostError(
            host=label,
            reason=f"{_host()} cannot be reached from this machine ({network_error(error)})",
            remedy="look at its network, and at $HTTPS_PROXY where it needs a proxy",
            is_outage=True,
        ) from None
    passes = status == 403 and is_rate_limit(body.decode(errors="replace"))
    return Answer(429 if passes else status, refusal_message(body))


def _credentials(bucket: str, label: str) -> dict[str, str]:
    """Return the header with the application default credentials, which the client library takes too."""
    import google.auth
    import google.auth.exceptions
    import google.auth.transport.requests

    scopes = ["https://www.googleapis.com/auth/devstorage.read_only"]
    request = functools.partial(google.auth.transport.requests.Request(), timeout=ANSWER_LIMIT_S)
    none = f"the bucket {bucket} is not public, and this machine has no credentials of Google's"
    try:
        credentials, _ = with_time_limit(
            CREDENTIALS_LIMIT_S, label, lambda: google.auth.default(scopes=scopes)
        )
        credentials.refresh(request)  # type: ignore[no-untyped-call]
        headers: dict[str, str] = {}
        credentials.apply(headers)  # type: ignore[no-untyped-call]
        return headers
    except (google.auth.exceptions.DefaultCredentialsError, HostError) as error:
        cause = (
            message_line(error)
            if isinstance(error, google.auth.exceptions.DefaultCredentialsError)
            else "none found in time"
        )
        raise HostError(host=label, reason=f"{none} ({cause})", remedy=LOG_IN) from None
    except google.auth.exceptions.RefreshError as error:
        reason = f"Google refuses this machine's credentials ({message_line(error)})"
        raise HostError(host=label, reason=reason, remedy=LOG_IN) from None
    except google.auth.exceptions.TransportError as error:
        reason = f"Google cannot be asked for a token ({message_line(error)})"
        raise HostError(
            host=label,
            reason=reason,
            remedy="see that this machine reaches oauth2.googleapis.com",
            is_outage=True,
        ) from None


class Buckets:
    """`contracts.files.Files` in buckets, from this machine.

    Raises (on any call):
        HostError: the bucket cannot be reached, or refuses.
    """

    def __init__(self) -> None:
        self._files = BucketFiles()
        self._reached: set[str] = set()

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        return self._carry_out(paths[0], lambda: self._files.read(paths)) if paths else []

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        return self._carry_out(path, lambda: self._files.read_from(path, offset))

    def read_inside(
        self, places: Sequence[tuple[str, str]], offsets: Sequence[int], limit_bytes: int
    ) -> builtins.list[Piece | None]:
        if not places:
            return []
        return self._carry_out(places[0][0], lambda: self._files.read_inside(places, offsets, limit_bytes))

    def write(self, path: str, data: bytes) -> None:
        limit_s = WORK_LIMIT_S + len(data) / BYTES_PER_S
        self._carry_out(path, lambda: self._files.write(path, data), limit_s)

    write_new = write

    def create(self, path: str, data: bytes) -> bool:
        return self._carry_out(path, lambda: self._files.create(path, data))

    def move(self, path: str, to: str) -> None:
        self._carry_out(path, lambda: self._files.move(path, to))

    def remove(self, path: str) -> None:
        self._carry_out(path, lambda: self._files.remove(path))

    def list(self, path: str) -> builtins.list[str]:
        return self._carry_out(path, lambda: self._files.list(path))

    def folder_bytes(self, path: str) -> int:
        return self._carry_out(path, lambda: self._files.folder_bytes(path))

    def remove_folder(self, path: str, first: str) -> None:
        self._carry_out(path, lambda: self._files.remove_folder(path, first), FOLDER_LIMIT_S)

    def put_folder(self, folder: str, path: str) -> None:
        """Copy a folder of this machine to `path`; what was there before is replaced."""
        self._carry_out(path, lambda: self._files.put_folder(folder, path), FOLDER_LIMIT_S)

    def get(self, path: str, to: Path, *, limit_s: float) -> None:
        """Copy a file or a folder to this machine."""
        self._carry_out(path, lambda: self._files.get(path, str(to)), limit_s)

    def _carry_out[Result](
        self, url: str, action: Callable[[], Result], limit_s: float = WORK_LIMIT_S
    ) -> Result:
        bucket = "/".join(url.split("/", 3)[:3])
        if bucket not in self._reached:
            reach(url, bucket)
            self._reached.add(bucket)
        try:
            return with_time_limit(limit_s, bucket, action)
        except HostError:
            raise
        except ImportError as error:
            reason = f"no driver for this kind of URL ({message_line(error)})"
            raise HostError(host=url, reason=reason, remedy="gs://… is known") from None
        except Exception as error:  # each driver has exceptions of its own
            reason = first_line(error)
            is_away = is_outage(error)
            remedy = "try again later" if is_away else "check the address, and your permission there"
            raise HostError(host=url, reason=reason, remedy=remedy, is_outage=is_away) from None


CHUNK_BYTES = 4 * 2**20
"""Of each file, in one answer."""
PIECE_BYTES = 32 * 2**20
"""Of a file, in one request."""


@dataclasses.dataclass(frozen=True)
class HostFiles:
    """`contracts.files.Files` of hosts that share them: the first that answers is asked.

    Text only: what a run's directory holds for its readers is text.

    Raises (on any call):
        HostError: no host answers, or the first that does refuses.
    """

    agents: tuple[Agent, ...]

    def read(self, paths: Sequence[str]) -> builtins.list[bytes | None]:
        if not paths:
            return []
        answer = self._ask("read", {"paths": [*paths], "offsets": None, "limit_bytes": CHUNK_BYTES})
        return [self._file_part(path, file) for path, file in zip(paths, answer["files"], strict=True)]

    def _file_part(self, path: str, file: dict[str, Any]) -> bytes | None:
        """Return a whole file, the first piece of which has been read."""
        if file["text"] is None:
            return None
        pieces = [file["text"].encode()]
        while file["next_offset"] < file["size"]:
            file = self._piece(path, file["next_offset"])
            if not file["text"]:
                break
            pieces.append(file["text"].encode())
        return b"".join(pieces)

    def read_from(self, path: str, offset: int) -> tuple[bytes, int] | None:
        file = self._piece(path, offset)
        if file["text"] is not None and offset > file["size"]:
            file = self._piece(path, beginning(offset, file["size"]))
        return None if file["text"] is None else (file["text"].encode(), int(file["offset"]))

    def read_inside(
        self, places: Sequence[tuple[str, str]], offsets: Sequence[int], limit_bytes: int
    ) -> builtins.list[Piece | None]:
        pieces: dict[int, Piece | None] = {}
        left = [*range(len(places))]
        while left:
            request = {
                "paths": ["/".join(places[index]) for index in left],
                "folders": [places[index][0] for index in left],
                "offsets": [offsets[index] for index in left],
                "limit_bytes": limit_bytes,
            }
            for index, file in zip(left, self._ask("read", request)["files"], strict=True):
                pieces[index] = _piece(file)
            # One answer has room for so much; what was last in it may have got none.
            cut = [index for index in left if _is_cut(pieces[index], limit_bytes)]
            left = cut if len(cut) < len(left) else []
        return [pieces[index] for index in range(len(places))]

    def write(self, path: str, data: bytes) -> None:
        text, limit_s = data.decode(), HOST_LIMIT_S + min(len(data), PIECE_BYTES) / BYTES_PER_S
        if len(data) <= PIECE_BYTES:
            self._ask("write", {"path": path, "text": text}, limit_s)
            return
        folder, _, name = path.rpartition("/")
        unfinished, offset = f"{folder}/.{os.urandom(6).hex()}-{name}", 0
        try:
            for begin in range(0, len(text), PIECE_BYTES):
                piece = text[begin : begin + PIECE_BYTES]
                self._ask("write", {"path": unfinished, "text": piece, "offset": offset}, limit_s)
                offset += len(piece.encode())
            self.move(unfinished, path)
        except BaseException:
            self.remove(unfinished)
            raise

    write_new = write

    def create(self, path: str, data: bytes) -> bool:
        return bool(self._ask("create", {"path": path, "text": data.decode()})["created"])

    def move(self, path: str, to: str) -> None:
        self._ask("move", {"path": path, "to": to})

    def remove(self, path: str) -> None:
        self._ask("remove", {"path": path})

    def list(self, path: str) -> builtins.list[str]:
        return [str(name) for name in self._ask("list", {"path": path})["names"]]

    def folder_bytes(self, path: str) -> int:
        return int(self._ask("folder_bytes", {"path": path}, WORK_LIMIT_S)["bytes"])

    def remove_folder(self, path: str, first: str) -> None:
        self._ask("remove_folder", {"path": path, "first": first}, FOLDER_LIMIT_S)

    def _ask(self, verb: str, request: dict[str, Any], timeout_s: float = HOST_LIMIT_S) -> dict[str, Any]:
        first: HostError | None = None
        for agent in self.agents:
            try:
                return agent.ask(verb, request, timeout_s=timeout_s)
            except HostError as error:
                first = first or error
        raise first or HostError(host="", reason="there is no host to ask")

    def _piece(self, path: str, offset: int) -> dict[str, Any]:
        answer = self._ask("read", {"paths": [path], "offsets": [offset], "limit_bytes": CHUNK_BYTES})
        piece: dict[str, Any] = answer["files"][0]
        return piece


def _piece(file: Mapping[str, Any]) -> Piece | None:
    if file["text"] is None:
        return Piece(error=str(file["error"])) if file.get("error") else None
    offset, end, size = (int(file[name]) for name in ("offset", "next_offset", "size"))
    return Piece(data=file["text"].encode(errors="replace"), offset=offset, next_offset=end, size=size)


def _is_cut(piece: Piece | None, limit_bytes: int) -> bool:
    """Whether there is more of the file, by more than a character that is half written."""
    if piece is None or piece.error:
        return False
    return piece.next_offset + 4 <= min(piece.size, piece.offset + limit_bytes)
