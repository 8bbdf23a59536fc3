"""Trying again what a bucket refused for a moment: it was busy (503, 429), or the network was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from contracts.run_directory import RunDirectory

PAUSES_S = (1.0, 4.0)
"""Between three tries; the bucket's own library has tried several times within each."""


def pauses_s(directory: RunDirectory) -> Sequence[float]:
    """Between tries to write there: a bucket may refuse for a moment; a disk that is full stays full."""
    return PAUSES_S if directory.is_remote else ()


def patiently[Result](
    action: Callable[[], Result],
    *,
    what: str,
    pauses_s: Sequence[float] = PAUSES_S,
    say: Callable[[str], None] = print,
) -> Result:
    """What `action` returns, at the first try that goes through; each failed one is said.

    Raises:
        Exception: that of the last try.
    """
    for pause_s in pauses_s:
        try:
            return action()
        except Exception as error:  # fsspec's file systems raise kinds of their own, not OSError alone
            with contextlib.suppress(OSError):  # the log may be on a disk that is full
                say(f"{what}: {type(error).__name__}: {error}; trying again in {pause_s:g} s")
            time.sleep(pause_s)
    return action()
