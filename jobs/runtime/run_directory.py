"""A run's directory: the names of what lies in it, and reading and writing them wherever the directory is.

Imports nothing heavy: the launching side reads runs through this file too.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobs.runtime.files import Files, here, is_url
from jobs.runtime.patience import PAUSES_S

RUN = "run.json"
SETTINGS = "settings.json"
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


COMMITTED = "commit_success.txt"
"""What Orbax writes last into a checkpoint where a folder cannot be renamed, as in a bucket."""


class RunDirectory:
    """Files of one run under `url`: a path on this host (a disk, NFS), or a URL that fsspec knows (gs://).

    files: how they are reached where that is not from this host itself.
    """

    def __init__(self, url: str, files: Files | None = None) -> None:
        self.url = url.rstrip("/")
        self.is_remote = is_url(url)
        self._own = here(self.url)
        self._files: Files = files or self._own

    @property
    def pauses_s(self) -> tuple[float, ...]:
        """Between tries to write: a bucket may refuse for a moment; a disk that is full stays full."""
        return PAUSES_S if self.is_remote else ()

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read_text(self, name: str) -> str | None:
        """The file's text; None where there is no such file."""
        return self.read_texts([name])[0]

    def read_texts(self, names: Sequence[str]) -> builtins.list[str | None]:
        """The text of each of several files, read together."""
        found = self._files.read([self.path(name) for name in names])
        return [None if data is None else data.decode("utf-8", errors="replace") for data in found]

    def write_text(self, name: str, text: str) -> None:
        """Write the file whole.

        Raises:
            OSError: the disk is full, or the directory cannot be written.
        """
        self._files.write(self.path(name), text.encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The file's JSON object; None where there is no such file or it holds no object."""
        return self.read_jsons([name])[0]

    def read_jsons(self, names: Sequence[str]) -> builtins.list[dict[str, Any] | None]:
        """The JSON object of each of several files, read together."""
        return [None if text is None else _object(text) for text in self.read_texts(names)]

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def remove(self, name: str) -> None:
        """Remove the file; nothing happens where there is none."""
        self._files.remove(self.path(name))

    def list(self, name: str) -> builtins.list[str]:
        """The names in a folder; none where there is no such folder."""
        return self._files.list(self.path(name))

    def move(self, name: str, to: str) -> None:
        """Move a file or a folder inside the run directory, on a host that has it itself."""
        self._own.move(self.path(name), self.path(to))

    def put_file(self, file: str, name: str) -> None:
        """Copy a file of this host to `name`."""
        self._own.put_file(file, self.path(name))

    def put_folder(self, folder: str, name: str) -> None:
        """Copy a folder of this host to `name`; what was there before is replaced."""
        self._own.put_folder(folder, self.path(name))

    def checkpoint_steps(self) -> builtins.list[int]:
        """Steps that have a complete checkpoint, in order."""
        steps = sorted(int(name) for name in self.list(CHECKPOINTS) if name.isdigit())
        if not self.is_remote:
            return steps  # the folder has its name from the moment on that it is whole
        signs = self.read_texts([f"{CHECKPOINTS}/{step}/{COMMITTED}" for step in steps])
        return [step for step, sign in zip(steps, signs, strict=True) if sign is not None]

    def read_metrics(self) -> builtins.list[dict[str, Any]]:
        """The lines of metrics.jsonl in order; a torn line (its writer was killed) is left out."""
        return list(_objects(self.read_text(METRICS) or ""))

    def read_new_metrics(self, offset: int) -> tuple[builtins.list[dict[str, Any]], int]:
        """The whole lines of metrics.jsonl from byte `offset` on (negative: from so far before its end), and the
        offset after them. A file that has become shorter is read from its beginning.
        """
        found = self._files.read_from(self.path(METRICS), offset)
        if found is None:
            return [], 0
        data, start = found
        whole = data[: data.rfind(b"\n") + 1]
        return list(_objects(whole.decode("utf-8", errors="replace"))), start + len(whole)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        value = _object(line)
        if value is not None:
            yield value


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
