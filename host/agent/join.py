"""The verb join: waits on this host until its process has entered the group, or never will."""

from __future__ import annotations

import select

from .files import tail_of
from .process import known_process
from .status import entry
from .waiting import wait_until

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

LOOK_PERIOD_S = 0.05
UNDER_WAY = ("joined", "stepping", "saving")


def join(request: Json) -> Json:
    """What the process says of itself once it has joined, or has ended, or the limit is over.

    A process that says that it has failed or is done is waited for, so that its exit code is in the answer.
    """
    process = known_process(request)
    found: Json = {}

    def is_decided() -> bool:
        found.update(entry(process))
        has_ended = found["state"] in ("exited", "lost")
        return has_ended or (found["beat"] or {}).get("state") in UNDER_WAY or is_unheard(1)

    wait_until(is_decided, request["limit_s"], LOOK_PERIOD_S)
    has_ended = found["state"] in ("exited", "lost")
    silent = found["state"] if has_ended else "starting"
    lines = tail_of(found["log_path"]) if has_ended else []
    return {
        "state": (found["beat"] or {}).get("state", silent),
        "beat": found["beat"],
        "process": {**found, "tail": lines},
    }


def is_unheard(descriptor: int) -> bool:
    """Whether nobody is left to read what is written there: the launcher is gone."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
