"""The keeper as a program, which a timer starts every minute: `python -m keeper`.

    TPU_STACK_KEEPER=gs://BUCKET/control    where the stack's documents are, in place of --store

Exit codes: 0 it has looked; 1 it could not; 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

from contracts.aliases import Say
from contracts.errors import DONE, FAILED, RequestError
from infra.documents import Documents
from keeper import reclaim, submissions
from keeper.notices import Notices
from keeper.stack_store import is_noted, note_look, stack_at, store_at
from keeper.world import REFUSALS, World
from launch.control.store import Store
from launch.reconcile import AT_ONCE, LOOK_EVERY_S, Reconciler
from launch.targets import LOCAL, TargetRequest

STORE = "TPU_STACK_KEEPER"


def watch(documents: Documents, say: Say, *, every_s: float = 0.0) -> int:
    """Carry out one pass, or one every so many seconds until interrupted; FAILED where the last could not be."""
    while True:
        began_s = time.monotonic()
        code = one_pass(documents, say)
        if not every_s:
            return code
        time.sleep(max(0.0, began_s + every_s - time.monotonic()))


def one_pass(documents: Documents, say: Say) -> int:
    """Carry out a pass and what the keeper does beside it; what one cannot do does not keep the others from it."""
    store, world = store_at(documents), World(documents, say, program="the keeper")
    codes: list[int] = []

    def step(act: Callable[[], object]) -> None:
        try:
            act()
            codes.append(DONE)
        except (RequestError, *REFUSALS) as error:
            say(f"error: {error}")
            codes.append(FAILED)

    step(lambda: reconcile(store, world, say))
    step(lambda: note_look(documents))
    step(lambda: reclaim.give_back(store, world, say))
    return max(codes)


def reconcile(
    store: Store,
    world: World,
    say: Say,
    request: TargetRequest | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Bring about what people want, as far as that can be done now. request: as `World` has it; only: as `Reconciler`.

    Raises:
        DocumentsError: what is wanted cannot be read.
    """
    content = store.read()
    stack = stack_at(content, store.documents.url)
    if stack is not None:
        stack.take_environment()
    notices = Notices(store, world, say)
    on_this_machine = stack is None and (request is None or request.stack == LOCAL)
    # On this machine one thing is done after the other: a launch changes the directory of the process.
    at_once = 1 if on_this_machine else AT_ONCE
    reconciler = Reconciler(store, world, notices, say, refusals=REFUSALS, at_once=at_once, only=only)
    began_s, passes = time.monotonic(), 0

    def wait(busy: Collection[Future[None]]) -> None:
        nonlocal passes
        passes += 1
        left_s = max(0.0, began_s + passes * LOOK_EVERY_S - time.monotonic())
        if busy:
            concurrent.futures.wait(busy, left_s)
        else:
            time.sleep(left_s)

    # A lost slice is found within half a minute by a timer of a minute.
    has_slices = stack is not None and bool(stack.slices) and request is None
    is_wanted = any(run.end is None for run in content.runs.values())
    reconciler.run_pass(wait, content, min_looks=2 if has_slices and is_wanted else 1)
    if is_noted(store.documents) or request is not None:
        submissions.remove_code(store)
        store.forget_ended(store.read())
    notices.settle()


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
    options = parser.parse_args(arguments)
    if not options.store:
        parser.error(f"--store: say where the stack's documents are, or set ${STORE}")
    return watch(Documents(options.store), functools.partial(print, flush=True), every_s=options.every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
