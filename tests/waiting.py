"""Waiting for something that comes soon, with a limit."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], limit_s: float = 20.0, *, pause_s: float = 0.02) -> None:
    """Return when it holds. Raises AssertionError where it never does. pause_s: between two looks."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(pause_s)
