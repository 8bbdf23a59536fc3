"""Waiting for something that comes soon, with a limit."""

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], limit_s: float = 20.0, *, pause_s: float = 0.01) -> None:
    """Returns when it holds. An AssertionError where it never does. pause_s: between two looks."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"it has not come to be within {limit_s} s"
        time.sleep(pause_s)
