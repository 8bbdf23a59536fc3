"""Fencing of attempts: of two attempts of a run, whatever their clocks say, only the newer one writes.

An attempt's number is its fencing token. Whoever begins attempt n first creates `attempts/<n>.json` (`take`), which
succeeds for one of several who try. Numbers follow each other, so attempt n is superseded from the moment on that
`attempts/<n + 1>.json` is there. Processes get their number as RUN_ATTEMPT, agents with the start request.

A check before each write (`RunDirectory.require_newest`) is not enough: a process may be frozen between the check and
the write, and thaw an hour later. So what an attempt writes first gets a name below `.unfinished/<its number>/`, and:

    the attempt:    1. writes the file there     2. checks the token     3. moves it to its name
    the next one:   1. creates its token         2. removes `.unfinished/`

Either the check comes after the creation, and finds the token; or it came before, then so did the file, and that is
removed: the move, however late, finds nothing to move. A move is one step for the file system, or for the bucket's
server (a copy of an object that is not there fails). This holds for result.json, run.json, heartbeats, each checkpoint
of a disk, and all else that `RunDirectory.write_text` writes.

Lines of metrics.jsonl are appended on a disk. For each line the attempt opens the file, checks the token, and writes;
the next attempt puts a copy in the file's place after it has created its token. So a line that comes late is written
to a file that has no name any more.
"""

from __future__ import annotations

import json
import os

from contracts.errors import Superseded
from contracts.run_directory import ATTEMPTS, METRICS, RUN, UNFINISHED, token

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contracts.run_directory import RunDirectory

REMOVALS = 10
"""Of `.unfinished/`: an attempt that still lives may write there until it has found the new token."""


def begin_launched(directory: RunDirectory) -> bool:
    """Begin the attempt of `directory`, whose token a launcher has taken; whether nobody else has done so before.

    Raises:
        Superseded: a newer attempt has begun.
    """
    is_first = _create(directory, f"{ATTEMPTS}/{directory.attempt}.begun", os.urandom(16).hex())
    directory.require_newest()
    return is_first


def _create(directory: RunDirectory, name: str, text: str) -> bool:
    # Where the answer of a creation was lost, the file is there and its own.
    return directory.files.create(directory.path(name), text.encode()) or directory.read_text(name) == text


def take(directory: RunDirectory, attempt: int, *, launch: int) -> RunDirectory:
    """Take the token of attempt `attempt`, before anything of it is written or started, and end what older attempts
    have not finished; return the directory as this attempt writes it.

    launch: the first attempt of the launch that it belongs to; pods begin several by themselves.

    Raises:
        Superseded: somebody else has taken it, or a newer one.
    """
    mine = directory.for_attempt(attempt)
    written = json.dumps({"attempt": attempt, "launch": launch, "id": os.urandom(16).hex()}) + "\n"
    if not _create(directory, token(attempt), written):
        raise Superseded(f"attempt {attempt} of this run has been begun by somebody else")
    mine.require_newest()
    for removal in range(1, REMOVALS + 1):
        try:
            directory.files.remove_folder(directory.path(UNFINISHED), RUN)
            break
        except Exception:  # each driver has exceptions of its own
            if removal == REMOVALS:
                raise
    if not directory.is_remote:
        (lines,) = directory.files.read([directory.path(METRICS)])
        if lines is not None:
            mine.write_bytes(METRICS, lines)
    return mine
