"""Where an attempt's time goes: every second of this process belongs to one part, and the parts add up to all of it.

    start        joining the group, reading the data, restoring, compiling, up to the end of the first step
    compute      the loop of steps, but for what follows: handing steps to the devices and waiting for their results
    input_wait   making a batch while the devices had nothing to do
    evaluation   evaluations, with what the first one compiles
    checkpoint   the host held up by a checkpoint; most of the writing goes on beside the steps and is not seen here
    logging      writing metrics
    profile      writing a trace
    finish       what comes after the last step: the export, a last look

The host's time is what is told. With steps in flight the host makes a batch while the devices still compute: that is
part of compute, as nobody waited for it. Where host and devices share processors (a CPU), such a batch slows the steps
down, and no clock can tell that apart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

Part = Literal["start", "compute", "input_wait", "evaluation", "checkpoint", "logging", "profile", "finish"]


class TimeSplit:
    """Begins with the part "start". Of parts within parts the inner one counts. For one thread alone.

    clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_s = self._since_s = clock()
        self._open: list[Part] = ["start"]
        self._spent_s: dict[Part, float] = {}

    def enter(self, part: Part) -> None:
        """From now on what is in no other part is this one's."""
        self._count()
        self._open[0] = part

    @contextlib.contextmanager
    def part(self, part: Part, *, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """What happens inside is `part`'s; where `unless`, asked at its end, is true it is that of the part around."""
        self._count()
        self._spent_s.setdefault(part, 0.0)
        around = self._open[-1]
        self._open.append(part)
        try:
            yield
        finally:
            self._count(around if unless() else part)
            self._open.pop()

    def spent_s(self, *parts: Part) -> float:
        """Seconds of these parts so far."""
        self._count()
        return sum(self._spent_s.get(part, 0.0) for part in parts)

    def seconds(self) -> dict[Part, float]:
        """Seconds of every part that there was, in the order in which they began."""
        self._count()
        return {part: round(spent_s, 3) for part, spent_s in self._spent_s.items()}

    def wall_s(self) -> float:
        """All seconds since the beginning."""
        self._count()
        return self._since_s - self._began_s

    def _count(self, part: Part | None = None) -> None:
        """What has passed since the last count is `part`'s; None: that of the part which is open."""
        now_s = self._clock()
        part = part or self._open[-1]
        self._spent_s[part] = self._spent_s.get(part, 0.0) + now_s - self._since_s
        self._since_s = now_s
