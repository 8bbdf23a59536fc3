"""What a process of a run must not outlive: its supervisor. A second process waits for nothing but that one's end."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

ALL_IS_WELL = b"."


def stand_guard(avenge: Callable[[], object], inherited: list[int]) -> Callable[[], None]:
    """Fork a process that calls `avenge` if this one ends without having called what is returned.

    Called while this process has no threads. inherited: descriptors that the guard must not keep open.
    """
    reading, writing = os.pipe()
    standing, stands = os.pipe()
    if os.fork():
        os.close(reading)
        os.close(stands)
        os.read(standing, 1)  # until the guard is out of this session, or has failed and ended
        os.close(standing)
        return lambda: dismiss(writing)
    try:
        os.setsid()  # whoever ends the supervisor with its whole session does not end this one
        for descriptor in [writing, standing, stands, *inherited]:
            os.close(descriptor)
        if os.read(reading, 1) != ALL_IS_WELL:
            avenge()
    finally:
        os._exit(0)


def dismiss(writing: int) -> None:
    with contextlib.suppress(OSError):  # somebody has ended the guard: nothing is left to dismiss
        os.write(writing, ALL_IS_WELL)
    os.close(writing)
