"""The keeper as a program, which a timer starts every minute: `python -m keeper`.

    TPU_STACK_KEEPER=gs://BUCKET/keeper    where the stack's documents are, in place of --store

Exit codes: 0 it has looked; 1 it could not; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence

from contracts.errors import DONE, FAILED
from infra.documents import Documents
from keeper import idle, passes, queue_commands

STORE = "TPU_STACK_KEEPER"


def watch(documents: Documents, say: Callable[[str], None], *, every_s: float = 0.0) -> int:
    """Carry out one pass, or one every so many seconds until interrupted; FAILED where the last could not be."""
    while True:
        began_s = time.monotonic()
        code, has_slices, means = DONE, True, passes.means_of(documents, say)
        for step in ("look", "queue", "idle"):  # what one cannot do does not keep the others from it
            try:
                if step == "look":
                    has_slices = passes.run_pass(means)
                elif step == "queue":
                    queue_commands.attend(means, has_slices=has_slices)
                else:
                    idle.give_back(means)
            except passes.REFUSALS as error:
                say(f"error: {error}")
                code = FAILED
        if not every_s:
            return code
        time.sleep(max(0.0, began_s + every_s - time.monotonic()))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m keeper", description="Look at the runs that are kept, and bring back what was lost."
    )
    parser.add_argument(
        "--store",
        default=os.environ.get(STORE, ""),
        help=f"the stack's documents: gs://BUCKET/keeper, or a folder (default: ${STORE})",
    )
    parser.add_argument(
        "--every", type=float, default=0.0, help="look again every so many seconds (default: once)"
    )
    given = parser.parse_args(arguments)
    if not given.store:
        parser.error(f"--store: say where the stack's documents are, or set ${STORE}")
    return watch(Documents(given.store), functools.partial(print, flush=True), every_s=given.every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
