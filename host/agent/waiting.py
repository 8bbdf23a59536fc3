"""Waiting for something, never without a limit."""

from __future__ import annotations

import json
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Json


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.02) -> bool:
    """Whether `condition` came to hold within the time limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        select.select(
            [], [], [], pause_s
        )  # time.sleep goes by a clock that libfaketime may have moved, and fails
    return True


def in_time(look: Callable[[], Json], timeout_s: float) -> Json | None:
    """What `look` finds, or None if it takes longer than the limit.

    It looks in a process of its own: one that waits for a network file system whose server is gone cannot be
    interrupted, and not always be killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # The answer's pipe alone stays open: whoever waits for the end of the others' is not to wait for this one.
        os.closerange(0, writing)
        try:
            found = look()
        except Exception as error:
            found = {"bug": repr(error)}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    said = b""
    deadline = time.monotonic() + timeout_s
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 65536)
            if not piece:
                break
            said += piece
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 0.2, 0.002)
    found = json.loads(said) if said else {}
    if "bug" in found:
        raise RuntimeError(found["bug"])
    return found or None
