"""A run's directory: the names of what lies in it, and reading and writing it on a disk or in a bucket.

Imports nothing heavy: the launching side reads runs through this file too.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

RUN = "run.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
EXPORT = "export"
HEARTBEATS = "heartbeats"
LOGS = "logs"


def heartbeat(process_id: int) -> str:
    """The heartbeat file of one process, relative to the run directory."""
    return f"{HEARTBEATS}/host-{process_id}.json"


def reserve(process_id: int) -> str:
    """Room on the disk that one process keeps for its last words; the agent knows the name too."""
    return f"{HEARTBEATS}/.host-{process_id}.reserve"


def log(attempt: int, process_id: int) -> str:
    """The log file of one process of one attempt, relative to the run directory."""
    return f"{LOGS}/{attempt}/host-{process_id}.log"


class RunDirectory:
    """Files of one run under `url`: a path on this host (a disk, NFS), or a URL that fsspec knows (gs://).

    A file is seen whole or not at all: written beside and renamed on a disk, put as one object in a bucket.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.is_remote = "://" in url

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read_text(self, name: str) -> str | None:
        """The file's text; None where there is no such file."""
        try:
            if self.is_remote:
                return bytes(_bucket(self.url).cat_file(self.path(name))).decode()
            with open(self.path(name), encoding="utf-8", errors="replace") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_text(self, name: str, text: str) -> None:
        """Write the file whole.

        Raises:
            OSError: the disk is full, or the directory cannot be written.
        """
        if self.is_remote:
            _bucket(self.url).pipe_file(self.path(name), text.encode())
            return
        target = self.path(name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(beside, 0o644)
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The file's JSON object; None where there is no such file or it holds no object."""
        text = self.read_text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Remove the file; nothing happens where there is none."""
        with contextlib.suppress(FileNotFoundError):
            if self.is_remote:
                _bucket(self.url).rm_file(self.path(name))
            else:
                os.unlink(self.path(name))

    def list(self, name: str) -> builtins.list[str]:
        """The names in a folder; none where there is no such folder."""
        try:
            if self.is_remote:
                entries = _bucket(self.url).ls(self.path(name), detail=False)
                return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries)
            return sorted(os.listdir(self.path(name)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def move(self, name: str, to: str) -> None:
        """Move a file or a folder inside the run directory."""
        if self.is_remote:
            _bucket(self.url).mv(self.path(name), self.path(to), recursive=True)
            return
        os.makedirs(os.path.dirname(self.path(to)), exist_ok=True)
        os.replace(self.path(name), self.path(to))

    def put_folder(self, folder: str, name: str) -> None:
        """Copy a folder of this host to `name`; what was there before is replaced."""
        if self.is_remote:
            bucket = _bucket(self.url)
            with contextlib.suppress(FileNotFoundError):
                bucket.rm(self.path(name), recursive=True)
            bucket.put(f"{folder}/", f"{self.path(name)}/", recursive=True)
            return
        beside = self.path(f".{name}.part")
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(folder, beside)
        shutil.rmtree(self.path(name), ignore_errors=True)
        os.replace(beside, self.path(name))

    def read_metrics(self) -> builtins.list[dict[str, Any]]:
        """The lines of metrics.jsonl in order; a torn line (its writer was killed) is left out."""
        return list(_objects(self.read_text(METRICS) or ""))

    def read_new_metrics(self, offset: int) -> tuple[builtins.list[dict[str, Any]], int]:
        """The whole lines of metrics.jsonl from byte `offset` on (negative: from so far before its end), and the
        offset after them. A file that has become shorter is read from its beginning.
        """
        try:
            if self.is_remote:
                bucket = _bucket(self.url)
                size = int(bucket.size(self.path(METRICS)))
                start = _start(offset, size)
                data = bytes(bucket.cat_file(self.path(METRICS), start=start)) if start < size else b""
            else:
                with open(self.path(METRICS), "rb") as file:
                    start = _start(offset, os.fstat(file.fileno()).st_size)
                    file.seek(start)
                    data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return [], 0
        whole = data[: data.rfind(b"\n") + 1]
        return list(_objects(whole.decode("utf-8", errors="replace"))), start + len(whole)


def _start(offset: int, size: int) -> int:
    return max(0, size + offset) if offset < 0 else 0 if offset > size else offset


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _bucket(url: str) -> Any:
    import fsspec

    return fsspec.core.url_to_fs(url)[0]
