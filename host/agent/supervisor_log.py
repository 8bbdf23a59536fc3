"""supervisor.log: what a supervisor has to say of itself."""

from __future__ import annotations

import contextlib
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def note(text: str) -> None:
    """A line in supervisor.log; with a full disk there is nowhere to say it."""
    with contextlib.suppress(OSError):
        print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text, file=sys.stderr, flush=True)


def tried(what: str, action: Callable[[], object]) -> bool:
    """Whether `action` went through: a full disk or a vanished run directory must not end the supervision."""
    try:
        action()
    except (OSError, ValueError) as error:
        note(f"{what}: {error}")
        return False
    return True
