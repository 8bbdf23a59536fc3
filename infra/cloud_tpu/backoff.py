"""The clock of the provider, which a test can replace to go through a day in a second, and the pauses between tries."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

from infra.cloud_tpu.refusal import AbandonedError

LONGEST_RETRY_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backoff:
    """now, sleep: seconds. jitter: 0 to 1. is_awaited: whether somebody still waits for it. say: a line to the user."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
    is_awaited: Callable[[], bool] = lambda: True
    say: Callable[[str], None] = print

    def pause(self, seconds: float) -> None:
        """Sleep. Raises AbandonedError when nobody waits for the result any more."""
        self.require_awaited()
        self.sleep(seconds)
        self.require_awaited()

    def require_awaited(self) -> None:
        """Before anything is changed at Google: a killed `pulumi up` must not delete what the next one adopts."""
        if not self.is_awaited():
            raise AbandonedError("nobody waits for this any more: Pulumi has ended")

    def retry_pause_s(self, failures: int) -> float:
        """Before the next try: doubling from 1 s, half of it by chance so that many slices do not come back at once."""
        return float(min(LONGEST_RETRY_S, 2.0 ** min(failures, 10)) * (0.5 + 0.5 * self.jitter()))


def poll_pause_s(waited_s: float) -> float:
    """Between two looks: 5 s at first, then a tenth of the time waited, at most half a minute.

    Twenty slices in a queue then ask 40 times a minute; the API allows hundreds.
    """
    return min(30.0, max(5.0, waited_s / 10))
