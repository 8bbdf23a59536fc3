"""Writes files of this host into a run directory that its agent cannot write.

`python -m jobs.runtime.storage.deliver URL`. The request is JSON on stdin: {"files": [{"name", "text"} or {"name",
"path", "limit_bytes"}], "unless_there": [names]}. The last part is delivered of a file longer than its limit; an
existing file named in `unless_there` is not replaced. "attempt": whose files they are; once a newer attempt has begun
only logs are delivered, and the exit code is SUPERSEDED. Exit code 1 and a line on stderr for each file that could not
be delivered. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Collection, Sequence
from typing import Any

from contracts.errors import SUPERSEDED, Superseded
from contracts.run_directory import LOGS, RunDirectory
from jobs.runtime.storage.bucket_files import files_of, retry

LIMIT_S = 110
"""For everything: the caller waits no longer, and nothing else would end this process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """One file to deliver: the text itself, or what lies at a path of this host, `limit_bytes` of it at most."""

    name: str
    text: str | None = None
    path: str | None = None
    limit_bytes: int | None = None

    def content(self) -> str:
        """The text, or the last part of the file.

        Raises:
            OSError: the file at the path cannot be read.
        """
        if self.path is None:
            return self.text or ""
        with open(self.path, "rb") as file:
            if self.limit_bytes is None:
                return file.read().decode(errors="replace")
            size = file.seek(0, 2)
            file.seek(max(0, size - self.limit_bytes))
            data = file.read(self.limit_bytes)
        if size > self.limit_bytes:
            data = data[data.find(b"\n") + 1 :]
        return data.decode(errors="replace")


def read_request(text: str) -> tuple[list[File], list[str], int | None]:
    """The files, the names that are not to be replaced, and the attempt. Raises ValueError, TypeError or KeyError."""
    request: dict[str, Any] = json.loads(text)
    files = [File(**fields) for fields in request["files"]]
    return files, list(request.get("unless_there") or []), request.get("attempt")


def deliver(directory: RunDirectory, files: Sequence[File], unless_there: Collection[str] = ()) -> list[str]:
    """Write the files, logs first; returns one line for each that could not be written.

    Raises:
        Superseded: a newer attempt has begun than the directory's.
    """
    problems = []

    def put(file: File) -> None:
        # The name of a log has its attempt, so it takes the place of nobody else's.
        to = directory.unfenced() if file.name.startswith(f"{LOGS}/") else directory
        if file.name not in unless_there or directory.read_text(file.name) is None:
            to.write_text(file.name, file.content())

    for file in sorted(files, key=lambda file: not file.name.startswith(f"{LOGS}/")):
        try:
            retry(lambda file=file: put(file), what=file.name, say=_complain)  # type: ignore[misc]
        except Superseded:
            raise
        except Exception as error:  # a bucket's library raises kinds of its own
            problems.append(f"{directory.path(file.name)} not delivered: {type(error).__name__}: {error}")
    return problems


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _give_up(_signum: int, _frame: object) -> None:
    _complain(f"not delivered within {LIMIT_S} s")
    sys.exit(1)


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LIMIT_S)
    (url,) = arguments
    files, unless_there, attempt = read_request(sys.stdin.read())
    directory = RunDirectory(url, files_of(url), attempt=attempt)
    try:
        problems = deliver(directory, files, unless_there)
        directory.require_newest()
    except Superseded as error:
        _complain(str(error))
        return SUPERSEDED
    for problem in problems:
        _complain(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
