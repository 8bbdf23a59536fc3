"""Waiting until hosts let us in: a fresh one does so some time after it has an address."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from launch.errors import HostError, HostsError
from launch.target import Target
from launch.transport import Completed, Transport

LIMIT_S = 180.0
AGAIN_S = 5.0
ONE_TRY_S = 30.0
LASTING = ("host key", "no SSH key", "OS Login", "is not installed", "is not known")
"""In the reason of what waiting does not mend, for it is this machine or the inventory that has to change."""
Say = Callable[[str], None]


def reach(target: Target, tell: Say, *, limit_s: float = LIMIT_S) -> list[HostError | None]:
    """Wait until every host lets us in, as a fresh one does after a while; the error of each that does not.

    Raises:
        HostsError: none does.
    """
    deadline = time.monotonic() + limit_s
    found: list[HostError | None] = [None] * len(target.hosts)
    waiting = list(range(len(target.hosts)))
    told: dict[int, str] = {}
    while True:
        begun = [(index, _begin(target.transports[index])) for index in waiting]
        for index, future in begun:
            found[index] = _refusal(target.hosts[index].name, future)
        waiting = [index for index in waiting if (error := found[index]) is not None and may_pass(error)]
        for index in waiting:
            if told.get(index) != (reason := str(found[index])):
                told[index] = reason
                tell(f"waiting up to {max(0, deadline - time.monotonic()):.0f} s for {reason}")
        if not waiting or time.monotonic() + AGAIN_S > deadline:
            break
        time.sleep(AGAIN_S)
    errors = [error for error in found if error is not None]
    if errors and len(errors) == len(found):
        raise HostsError("no host could be reached, nothing was changed:", errors)
    return found


def _begin(transport: Transport) -> Future[Completed]:
    try:
        return transport.begin(["true"], "", timeout_s=ONE_TRY_S)
    except (OSError, HostError) as error:
        future: Future[Completed] = Future()
        future.set_exception(error)
        return future


def _refusal(host: str, future: Future[Completed]) -> HostError | None:
    try:
        done = future.result()
    except HostError as error:
        return HostError(host=host, reason=error.reason, remedy=error.remedy)
    except OSError as error:
        return HostError(host=host, reason=str(error))
    return (
        None
        if done.exit_code is not None
        else HostError(host=host, reason=f"no answer within {ONE_TRY_S:.0f} s")
    )


def may_pass(error: HostError) -> bool:
    """Whether a host that cannot be reached may be one that is still booting."""
    return not any(sign in error.reason for sign in LASTING)
