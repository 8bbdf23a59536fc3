"""The daemon: opens a room, answers at its door, and takes everything down when it is told to, or after a day."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import filelock

from rehearsal import state
from rehearsal.machines import Kind
from rehearsal.room import repertoire
from rehearsal.room.acts import Acts, Asked
from rehearsal.room.begin import NOOK, PROBLEM
from rehearsal.room.door import Caller, Door
from rehearsal.room.room import Room
from rehearsal.state import RehearsalError

LIFE_S = 24 * 3600.0  # one that was forgotten goes by itself
OWNER_POLL_S = 0.5
LOCK_LIMIT_S = 5.0  # somebody may just be looking whether it is free


class Answers:
    """What is asked at the door. `done`: the daemon is to end."""

    def __init__(self, room: Room) -> None:
        self.done = threading.Event()
        self.acts = Acts(room)
        self._room = room

    def __call__(self, do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        if do == "pulumi":
            return self._room.pulumi(list(arguments["arguments"]), caller)
        if do == "act":
            return repertoire.carry_out(self.acts, str(arguments["name"]), Asked(**arguments["asked"]))
        if do == "status":
            return self._room.status()
        if do == "destroy":
            self._room.destroy(caller)
            return None
        if do == "end":
            self.done.set()
            return None
        raise RehearsalError(f'"{do}" is not asked at this door; pulumi, act, status, destroy or end are')


def say(line: str) -> None:
    print(line, flush=True)


def serve(folder: Path, hosts: int, kind: Kind, owner: int | None) -> int:
    """Returns the exit code when it is over: 0, or 2 where the rehearsal could not be had; its last words say why."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(folder / state.LOCK, timeout=LOCK_LIMIT_S).acquire()
    except filelock.Timeout:
        say(f"a rehearsal is up in {folder} already; `fab rehearsal status`, or `fab rehearsal down`")
        return 2
    # The path of a socket may not be longer than some 100 characters, and that of the folder may.
    nook = tempfile.mkdtemp(prefix=NOOK)
    try:
        with lock:
            return _serve(folder, hosts, kind, owner, Path(nook) / "door")
    finally:
        shutil.rmtree(nook, ignore_errors=True)


def _serve(folder: Path, hosts: int, kind: Kind, owner: int | None, path: Path) -> int:
    try:
        with Room(folder=folder, hosts=hosts, kind=kind, door=path, say=say) as room:
            answers = Answers(room)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: answers.done.set())
            with Door(path, answers):
                if owner is not None:
                    threading.Thread(target=_end_with, args=(owner, answers.done), daemon=True).start()
                opening = threading.Thread(target=_open, args=(room, answers), daemon=True)
                opening.start()
                answers.done.wait(LIFE_S)
                answers.acts.close()
    finally:
        (folder / state.FILE).unlink(missing_ok=True)
    if room.problem:
        say(f"{PROBLEM}{room.problem}")
        return 2
    say("the rehearsal is over; nothing of it is left")
    return 0


def _open(room: Room, answers: Answers) -> None:
    """In a thread of its own, so that the daemon can be ended meanwhile."""
    try:
        room.open()
    except RehearsalError as error:
        room.problem = str(error)
    except Exception as error:
        room.problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        if room.problem:
            answers.done.set()


def _end_with(process_id: int, done: threading.Event) -> None:
    """Sets `done` when that process is gone, however it ended."""
    while not done.wait(OWNER_POLL_S):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            done.set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rehearsal.room", description="The rehearsal's daemon.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kind", choices=get_args(Kind), default="plain", help="of the hosts")
    parser.add_argument("--owner", type=int, metavar="PID", help="end when that process does")
    given = parser.parse_args()
    os.umask(0o077)
    try:
        return serve(given.folder.absolute(), given.hosts, given.kind, given.owner)
    except RehearsalError as error:
        say(f"{PROBLEM}{error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
