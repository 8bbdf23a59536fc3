"""Small JSON documents that several programs change: objects of a bucket, or files of a disk or share.

Each document has a version, and a write names the version that it replaces, so of two writers at once exactly one
succeeds (https://cloud.google.com/storage/docs/request-preconditions). On a disk or share a lock file does the same;
NFS v4 has locks for all hosts.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import fcntl
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contracts import atomic
from contracts.errors import RequestError, Unreachable, is_rate_limit, message_line, remedy_for
from contracts.files import is_url

GOOGLE = "https://storage.googleapis.com"
STAND_IN = "STORAGE_EMULATOR_HOST"
SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
ANSWER_LIMIT_S = 10.0
PATIENCE_S = 20.0
"""How long a request that may succeed later is retried; the longest pause between two tries is LONGEST_PAUSE_S."""
LONGEST_PAUSE_S = 4.0
CHANGES = 30
"""How often `change` starts again when others write at the same time."""
FOLDERS_AT_ONCE = 100
"""In one pattern, which is a part of a request's URL."""
LOCK_LIMIT_S = 20.0
LOCK_POLL_S = 0.02
ABSENT = 0
PRIVATE = "bundles/"
"""Documents that hold code and folders of users; on a disk only who wrote them may read them."""
PASSING = frozenset({408, 429, 500, 502, 503, 504})


class DocumentsError(RequestError):
    """The documents cannot be read or written; the message names the place, the reason and the remedy."""


class OutageError(DocumentsError, Unreachable):
    """They cannot for now: the same may succeed later."""


class MissingError(DocumentsError):
    """There is no such bucket (any more)."""


class ContentError(DocumentsError):
    """The document is there, and is none."""


class ChangedError(DocumentsError):
    """Somebody else has written or deleted the document since it was read."""


@dataclass(frozen=True, kw_only=True)
class StoredDocument:
    """A document and its version. Where there is none, value is None and version is ABSENT."""

    value: Any
    version: int


class Documents:
    """The documents in one folder. url: `gs://bucket/folder`, `file:///folder`, or a path.

    A name may have slashes. Every method raises DocumentsError where the place does not answer or refuses.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S, place: Place | None = None) -> None:
        self.url = url.rstrip("/").removeprefix("file://")
        self._place = place or (
            _Bucket(self.url, patience_s) if is_url(self.url) else _Folder(Path(self.url))
        )

    def read(self, name: str) -> StoredDocument:
        """Return the document; one that is no JSON is an error."""
        data, version = self._place.read(name)
        if data is None:
            return StoredDocument(value=None, version=ABSENT)
        try:
            return StoredDocument(value=json.loads(data), version=version)
        except ValueError as error:
            raise ContentError(
                f"{self.url}/{name} is not JSON ({error}); remove it if nobody needs it"
            ) from None

    def write(self, name: str, value: Any, *, version: int) -> int:
        """Write a document whole in place of `version` (ABSENT: there is none yet); return its new version.

        Raises:
            ChangedError: its version is another.
        """
        return self._place.write(name, json.dumps(value, indent=1).encode(), version)

    def delete(self, name: str, *, version: int) -> None:
        """Delete that version of a document; nothing happens where there is none.

        The server of buckets in a rehearsal ignores the version of a deletion, which Google's does not.

        Raises:
            ChangedError: its version is another.
        """
        self._place.delete(name, version)

    def change(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Replace the value by `function(value)`, and return that. Called again if somebody else writes meanwhile.

        function: gets None if there is no document. An exception ends the change; an unchanged value is not written.
        """
        for attempt in range(CHANGES):
            document = self.read(name)
            before = json.dumps(document.value)
            replacement = function(document.value)
            if json.dumps(replacement) == before:
                return replacement
            try:
                self.write(name, replacement, version=document.version)
            except ChangedError:
                time.sleep(random.random() * min(1.0, 0.02 * 2**attempt))
                continue
            return replacement
        raise OutageError(
            f"{self.url}/{name}: others have changed it {CHANGES} times while it was being changed; try again"
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the documents that begin so, sorted."""
        return sorted(self._place.names(prefix))

    def versions(self, prefixes: tuple[str, ...]) -> dict[str, int]:
        """Return the version of each document whose name begins with one of `prefixes`; a bucket is listed once."""
        return {
            name: version for name, version in self._place.versions().items() if name.startswith(prefixes)
        }

    def clear(self) -> None:
        """Delete every document, whatever it holds. Raises ChangedError where somebody writes meanwhile."""
        for name in self.names():
            _, version = self._place.read(name)
            self._place.delete(name, version)

    def now_s(self) -> float:
        """Return the time as the bucket's server last said it, in Unix seconds; without one that of this machine."""
        return time.time() + self._place.ahead_s

    def ages_s(self, folders: Sequence[str], names: Sequence[str]) -> dict[str, float]:
        """Return of each FOLDER/NAME that is there how long ago it was written; of a bucket by its server's clock.

        They need not be documents. A bucket is asked once for some hundred folders.
        """
        return self._place.ages_s(folders, names)


class Place(Protocol):
    """Where the bytes of documents are. ahead_s: of its clock, over this machine's."""

    ahead_s: float

    def read(self, name: str) -> tuple[bytes | None, int]: ...

    def write(self, name: str, data: bytes, version: int) -> int: ...

    def delete(self, name: str, version: int) -> None: ...

    def names(self, prefix: str) -> list[str]: ...

    def versions(self) -> dict[str, int]: ...

    def ages_s(self, folders: Sequence[str], names: Sequence[str]) -> dict[str, float]: ...


def top_level(bucket: str) -> list[str]:
    """Return the folders at the top of a bucket, each with its slash, and the objects beside them: the first thousand.

    Raises:
        MissingError: there is no such bucket.
        DocumentsError: it does not answer or refuses.
    """
    return _Bucket(f"gs://{bucket}", PATIENCE_S).top()


# --- on a disk or share ---------------------------------------------------------------------------------------------


class _Folder:
    """A file holds its version before its value. Versions grow with time, so none comes again after a deletion."""

    ahead_s = 0.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> tuple[bytes | None, int]:
        path = self._folder / name
        try:
            version, _, data = path.read_bytes().partition(b"\n")
            return data, int(version)
        except (FileNotFoundError, NotADirectoryError):
            return None, ABSENT
        except OSError as error:
            raise _disk_error(error, f"{path} cannot be read") from None
        except ValueError:
            raise ContentError(
                f"{path} has no version in its first line; remove it if nobody needs it"
            ) from None

    def write(self, name: str, data: bytes, version: int) -> int:
        path = self._folder / name
        with self._locked(path):
            self._require(name, version)
            fresh = max(version + 1, time.time_ns())
            try:
                atomic.write(path, b"%d\n" % fresh + data, mode=0o600 if name.startswith(PRIVATE) else None)
            except OSError as error:
                raise _disk_error(error, f"{path} cannot be written") from None
            return fresh

    def delete(self, name: str, version: int) -> None:
        path = self._folder / name
        if version == ABSENT or not path.exists():
            return
        with self._locked(path):
            self._require(name, version)
            path.unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        paths = (path for path in self._folder.rglob("*") if path.is_file() and path.name[0] != ".")
        names = (path.relative_to(self._folder).as_posix() for path in paths)
        return [name for name in names if name.startswith(prefix)]

    def versions(self) -> dict[str, int]:
        versions = {}
        for name in self.names(""):
            with contextlib.suppress(OSError, ValueError), open(self._folder / name, "rb") as file:
                versions[name] = int(file.readline(30))
        return versions

    def ages_s(self, folders: Sequence[str], names: Sequence[str]) -> dict[str, float]:
        ages = {}
        for name in (f"{folder}/{name}" for folder in folders for name in names):
            with contextlib.suppress(OSError):
                ages[name] = max(0.0, time.time() - (self._folder / name).stat().st_mtime)
        return ages

    def _require(self, name: str, version: int) -> None:
        if self.read(name)[1] != version:
            raise ChangedError(f"{self._folder / name}: somebody else has changed it meanwhile")

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Only one program at a time; a lock goes with the process that has it, however that ends."""
        lock = path.parent / f".{path.name}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(lock, "ab")  # noqa: SIM115 - closed below, with the lock
        except OSError as error:
            raise _disk_error(error, f"{lock} cannot be written") from None
        with file:
            deadline = time.monotonic() + LOCK_LIMIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise OutageError(
                            f"{lock} has been held by another program for {LOCK_LIMIT_S:.0f} s; see `fuser {lock}`"
                        ) from None
                    time.sleep(LOCK_POLL_S)
                except OSError as error:
                    raise _disk_error(error, f"{lock} cannot be locked") from None
            yield


def _disk_error(error: OSError, action: str) -> DocumentsError:
    is_refused = isinstance(error, PermissionError | FileExistsError | NotADirectoryError | IsADirectoryError)
    return (DocumentsError if is_refused else OutageError)(
        f"{action}: {error.strerror} → {remedy_for(error)}"
    )


# --- in a bucket ----------------------------------------------------------------------------------------------------


class _Bucket:
    """Cloud Storage's JSON API. STORAGE_EMULATOR_HOST names what stands for Google's server."""

    def __init__(self, url: str, patience_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("gs", "gcs"):
            raise DocumentsError(
                f"{url}: only buckets of Cloud Storage (gs://…) and paths can hold documents"
            )
        self._url, self._bucket, self._patience_s = url, parts.netloc, patience_s
        self._folder = f"{parts.path.strip('/')}/".lstrip("/")
        self._objects = f"/storage/v1/b/{urllib.parse.quote(self._bucket, safe='')}/o"
        self._base, self._is_stand_in = storage_server(), bool(os.environ.get(STAND_IN))
        self.ahead_s = 0.0
        self._credentials: Any = None
        self._lock = threading.Lock()

    def read(self, name: str) -> tuple[bytes | None, int]:
        status, data, headers = self._ask("GET", f"{self._object(name)}?alt=media", (200, 404))
        if status == 404 and b"bucket does not exist" not in data:
            return None, ABSENT
        if status == 404:
            raise MissingError(f"{self._url}: {refusal_message(data)}; `pulumi up` makes a stack's bucket")
        return data, int(headers["x-goog-generation"])

    def write(self, name: str, data: bytes, version: int) -> int:
        query = urllib.parse.urlencode({"uploadType": "multipart", "ifGenerationMatch": version})
        path = f"/upload{self._objects}?{query}"
        writer = uuid.uuid4().hex
        about = json.dumps({"name": self._folder + name, "metadata": {"writer": writer}}).encode()
        begin = f"--{writer}\r\nContent-Type: application/json\r\n\r\n".encode()
        body = begin + about + b"\r\n" + begin + data + f"\r\n--{writer}--\r\n".encode()
        status, answer, _ = self._ask("POST", path, (200, 412), body, f"multipart/related; boundary={writer}")
        if status == 412:
            # By somebody else's write, or because this very one got through and only its answer did not.
            about_it = f"{self._object(name)}?fields=generation,metadata"
            read_status, answer, _ = self._ask("GET", about_it, (200, 404))
            answer = answer if read_status == 200 else b"{}"
        stored = json.loads(answer)
        if status == 412 and stored.get("metadata", {}).get("writer") != writer:
            raise ChangedError(f"{self._url}/{name}: somebody else has changed it meanwhile")
        return int(stored["generation"])

    def delete(self, name: str, version: int) -> None:
        if version == ABSENT:
            return
        status, _, _ = self._ask(
            "DELETE", f"{self._object(name)}?ifGenerationMatch={version}", (200, 204, 404, 412)
        )
        if status == 412:
            raise ChangedError(f"{self._url}/{name}: somebody else has changed it meanwhile")

    def names(self, prefix: str) -> list[str]:
        return [item["name"].removeprefix(self._folder) for item in self.listed(prefix)]

    def versions(self) -> dict[str, int]:
        listed = self.listed("", "name,generation")
        return {item["name"].removeprefix(self._folder): int(item["generation"]) for item in listed}

    def ages_s(self, folders: Sequence[str], names: Sequence[str]) -> dict[str, float]:
        # What stands for Google's server knows no patterns and returns all.
        paths = {f"{folder}/{name}" for folder in folders for name in names}
        ages = {}
        for first in range(0, len(folders), FOLDERS_AT_ONCE):
            group = ",".join(folders[first : first + FOLDERS_AT_ONCE])
            glob = f"{self._folder}{{{group}}}/{{{','.join(names)}}}"
            for item in self.listed("", "name,updated", matchGlob=glob):
                name = item["name"].removeprefix(self._folder)
                if name in paths:
                    written = datetime.datetime.fromisoformat(item["updated"]).timestamp()
                    ages[name] = max(0.0, time.time() + self.ahead_s - written)
        return ages

    def listed(self, prefix: str, fields: str = "name", **more: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        query = {"prefix": self._folder + prefix, "fields": f"items({fields}),nextPageToken", **more}
        while True:
            _, data, _ = self._ask("GET", f"{self._objects}?{urllib.parse.urlencode(query)}", (200,))
            answer = json.loads(data)
            items += answer.get("items", [])
            if not (token := answer.get("nextPageToken")):
                return items
            query["pageToken"] = token

    def top(self) -> list[str]:
        query = urllib.parse.urlencode({"delimiter": "/", "fields": "prefixes,items(name)"})
        _, data, _ = self._ask("GET", f"{self._objects}?{query}", (200,))
        answer = json.loads(data)
        return sorted([*answer.get("prefixes", []), *(item["name"] for item in answer.get("items", []))])

    def _object(self, name: str) -> str:
        return f"{self._objects}/{urllib.parse.quote(self._folder + name, safe='')}"

    def _ask(
        self,
        method: str,
        path: str,
        expected: Sequence[int],
        data: bytes | None = None,
        content_type: str = "",
    ) -> tuple[int, bytes, Any]:
        """Return status, body and headers of an answer with an expected status; try again what may get better."""
        deadline, tries = time.monotonic() + self._patience_s, 0
        while True:
            try:
                status, body, headers = self._once(method, path, data, content_type)
                if date := headers.get("Date"):
                    self.ahead_s = email.utils.parsedate_to_datetime(date).timestamp() - time.time()
                if status in expected:
                    return status, body, headers
                if status == 404:
                    raise MissingError(
                        f"{self._url}: {refusal_message(body)}; `pulumi up` makes a stack's bucket"
                    )
                reason = f"it answers {status}: {refusal_message(body)}"
                passes = status in PASSING or (status == 403 and is_rate_limit(body.decode(errors="replace")))
            except UNANSWERED as error:
                reason, passes = f"it does not answer ({network_error(error)})", True
            pause_s = min(LONGEST_PAUSE_S, 0.25 * 2**tries) * (0.5 + random.random() / 2)
            if not passes or time.monotonic() + pause_s > deadline:
                if passes:
                    host = urllib.parse.urlsplit(self._base).netloc
                    raise OutageError(
                        f"{self._url}: {reason}; see that this machine reaches {host}, and try again"
                    )
                remedy = "check the name of the bucket"
                if status in (401, 403):
                    remedy = f"have roles/storage.objectUser on {self._bucket} granted to this account"
                raise DocumentsError(f"{self._url}: {reason}; {remedy}")
            tries += 1
            time.sleep(pause_s)

    def _once(self, method: str, path: str, data: bytes | None, content_type: str) -> tuple[int, bytes, Any]:
        headers = {"content-type": content_type} if content_type else {}
        request = urllib.request.Request(self._base + path, data=data, method=method, headers=headers)
        for name, value in self._authorization().items():
            request.add_header(name, value)
        return send_request(request, ANSWER_LIMIT_S)

    def _authorization(self) -> dict[str, str]:
        if self._is_stand_in:
            return {}
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests

        try:
            with self._lock:
                if self._credentials is None:
                    self._credentials, _ = google.auth.default(scopes=SCOPES)
                if not self._credentials.valid:
                    self._credentials.refresh(google.auth.transport.requests.Request())
                return {"authorization": f"Bearer {self._credentials.token}"}
        except google.auth.exceptions.TransportError as error:
            raise OSError(f"Google cannot be asked for a token: {message_line(error)}") from None
        except google.auth.exceptions.GoogleAuthError as error:
            raise DocumentsError(
                f"{self._url}: this machine has no credentials of Google's ({message_line(error)}); "
                "`gcloud auth application-default login`"
            ) from None


# --- requests to Cloud Storage ----------------------------------------------------------------------------------------


UNANSWERED = (OSError, http.client.HTTPException)
"""What `send_request` raises where there is no answer."""


def storage_server() -> str:
    """Return the URL of Cloud Storage, or of what stands for it."""
    stand_in = os.environ.get(STAND_IN)
    return (GOOGLE if not stand_in else stand_in if "://" in stand_in else f"http://{stand_in}").rstrip("/")


def send_request(request: urllib.request.Request, limit_s: float) -> tuple[int, bytes, Any]:
    """Return status, body and headers, also of a refusal. Raises UNANSWERED."""
    # What stands for Google's buckets is on this machine, whatever proxy leads to the world.
    handlers = [urllib.request.ProxyHandler({})] if os.environ.get(STAND_IN) else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=limit_s) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def network_error(error: Exception) -> str:
    """Return why there was no answer, in the words of the system."""
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or message_line(cause)


def refusal_message(body: bytes) -> str:
    """Return what Google says in a refusal, or what somebody in between says."""
    try:
        return message_line(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return message_line(body.decode(errors="replace"))
