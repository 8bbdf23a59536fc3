"""The time of the simulated cloud: a clock that can be frozen and advanced, and the events that wait for it."""

import datetime
import heapq
import itertools
import time
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Unix seconds: real time, or, where it is frozen, only what it is advanced by."""

    def __init__(self, frozen_at: float | None = None) -> None:
        self._frozen_at = frozen_at
        self._ahead_s = 0.0

    def now(self) -> float:
        """The time in unix seconds."""
        return (time.time() if self._frozen_at is None else self._frozen_at) + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Jump forward, frozen or not. Raises ValueError for a jump back: what has happened has happened."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds}: time goes forward only; give 0 or more")
        self._ahead_s += seconds


class Timeline:
    """Events that wait for their time. They run when someone looks (`settle`), in order, each at its own moment."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.moment = clock.now()
        self._events: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        """Run `action` that long after the present moment."""
        self.at(self.moment + seconds, action)

    def at(self, moment: float, action: Action) -> None:
        """Run `action` at that moment, or at the next look if it has passed."""
        heapq.heappush(self._events, (max(moment, self.moment), next(self._order), action))

    def settle(self) -> None:
        """Run everything that is due; afterwards the present moment is the clock's."""
        now = self.clock.now()
        while self._events and self._events[0][0] <= now:
            due, _, action = heapq.heappop(self._events)
            self.moment = max(self.moment, due)
            action()
        self.moment = max(self.moment, now)


def timestamp(moment: float) -> str:
    """Unix seconds as Google writes them: 2026-11-20T21:45:00.250000Z."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat().replace("+00:00", "Z")


def from_timestamp(text: str) -> float:
    """The other way round. Raises ValueError where the text is no RFC 3339 time with its zone."""
    moment = datetime.datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; end it with Z")
    return moment.timestamp()
