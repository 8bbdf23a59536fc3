"""The daemon's process: opens a rehearsal, answers at its socket, takes all down when told to, or after a day."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import get_args

import filelock

from rehearsal import state
from rehearsal.daemon.cli import PROBLEM, SOCKET_FOLDER
from rehearsal.daemon.control_socket import ControlSocket
from rehearsal.daemon.daemon import Daemon
from rehearsal.machines import Kind
from rehearsal.state import RehearsalError

LIFE_S = 24 * 3600.0  # one that was forgotten goes by itself
OWNER_POLL_S = 0.5
LOCK_LIMIT_S = 5.0  # somebody may just be looking whether it is free


def say(line: str) -> None:
    print(line, flush=True)


def serve(folder: Path, hosts: int, kind: Kind, owner: int | None) -> int:
    """Returns the exit code when it is over: 0, or 2 if the rehearsal could not be started; its last words say why."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(folder / state.LOCK, timeout=LOCK_LIMIT_S).acquire()
    except filelock.Timeout:
        say(f"a rehearsal is up in {folder} already; `fab rehearsal status`, or `fab rehearsal down`")
        return 2
    # The path of a socket may not be longer than some 100 characters, and that of the folder may.
    socket_folder = tempfile.mkdtemp(prefix=SOCKET_FOLDER)
    try:
        with lock:
            return _serve(folder, hosts, kind, owner, Path(socket_folder) / "control")
    finally:
        shutil.rmtree(socket_folder, ignore_errors=True)


def _serve(folder: Path, hosts: int, kind: Kind, owner: int | None, path: Path) -> int:
    try:
        with Daemon(folder=folder, hosts=hosts, kind=kind, socket_path=path, say=say) as daemon:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: daemon.done.set())
            with ControlSocket(path, daemon.answer):
                if owner is not None:
                    threading.Thread(target=_end_with, args=(owner, daemon.done), daemon=True).start()
                opening = threading.Thread(target=_open, args=(daemon,), daemon=True)
                opening.start()
                daemon.done.wait(LIFE_S)
    finally:
        (folder / state.FILE).unlink(missing_ok=True)
    if daemon.problem:
        say(f"{PROBLEM}{daemon.problem}")
        return 2
    say("the rehearsal is over; nothing of it is left")
    return 0


def _open(daemon: Daemon) -> None:
    """In a thread of its own, so that the daemon can be ended meanwhile."""
    try:
        daemon.open()
    except RehearsalError as error:
        daemon.problem = str(error)
    except Exception as error:
        daemon.problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        if daemon.problem:
            daemon.done.set()


def _end_with(process_id: int, done: threading.Event) -> None:
    """Sets `done` when that process is gone, however it ended."""
    while not done.wait(OWNER_POLL_S):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            done.set()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rehearsal.daemon", description="The rehearsal's daemon.")
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
