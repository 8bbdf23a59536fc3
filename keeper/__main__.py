"""The keeper as a program, which a timer starts every minute: `python -m keeper`.

    TPU_STACK_KEEPER=gs://BUCKET/control    where the stack's documents are, in place of --store

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
from keeper import passes, queue_commands, reclaim

STORE = "TPU_STACK_KEEPER"


def watch(documents: Documents, say: Callable[[str], None], *, every_s: float = 0.0) -> int:
    """Carry out one pass, or one every so many seconds until interrupted; FAILED where the last could not be."""
    while True:
        began_s = time.monotonic()
        code = one_pass(passes.means_of(documents, say))
        if not every_s:
            return code
        time.sleep(max(0.0, began_s + every_s - time.monotonic()))


def one_pass(means: passes.Means) -> int:
    """Carry out its steps; what one cannot do does not keep the others from it."""
    codes: list[int] = []

    def step(act: Callable[[], None]) -> None:
        try:
            act()
            codes.append(DONE)
        except passes.REFUSALS as error:
            means.say(f"error: {error}")
            codes.append(FAILED)

    def rest() -> None:
        step(lambda: queue_commands.attend(means))
        step(lambda: reclaim.give_back(means))

    step(lambda: passes.run_pass(means, rest))
    if len(codes) == 1:  # what is wanted cannot be read
        rest()
    return max(codes)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m keeper", description="Look at the runs that are kept, and bring back what was lost."
    )
    parser.add_argument(
        "--store",
        default=os.environ.get(STORE, ""),
        help=f"the stack's documents: gs://BUCKET/control, or a folder (default: ${STORE})",
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
