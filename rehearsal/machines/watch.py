"""Removes a rehearsal's containers when the process that made them is gone, however it ended.

    python -m rehearsal.machines.watch NAME      waits on its standard input

The input is a pipe from the maker: "done" means that all is removed, an end without that word that the maker died."""

from __future__ import annotations

import signal
import sys
import time

from rehearsal.machines.errors import MachinesError
from rehearsal.machines.guardian import DONE, READY
from rehearsal.machines.removal import remove_everything

TRIES = 5
PAUSE_S = 10


def main(rehearsal: str) -> int:
    # What ends the maker's whole group or terminal must not end this before its work is done.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.stdout.buffer.write(READY + b"\n")
    sys.stdout.buffer.flush()
    if sys.stdin.buffer.read() == DONE:
        return 0
    for left in reversed(range(TRIES)):
        try:
            remove_everything(rehearsal)
            return 0
        except MachinesError as problem:  # Docker is being started again, say
            print(f"rehearsal {rehearsal}: {problem}", file=sys.stderr)
            if left:
                time.sleep(PAUSE_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
