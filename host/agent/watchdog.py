"""How long a process has made no progress, and how long it may: the limit is learned from its own steps.

It reads no clock and no file: it is shown the process's heartbeat, and the time, once a second or so.
"""

from __future__ import annotations

import collections

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

    Phase = tuple[object, object]

FLOOR_S = 120.0
PATIENCE_S = 1800.0
"""For what is slow and done seldom: everything before the first step, compiling, saving, the export."""
TIMES_THE_MEDIAN = 20
FEWEST_GAPS = 3
GAPS_KEPT = 101
LONGEST_LOOK_S = 5.0
"""More than this between two looks, and the watcher itself was not running: that time is not held against the job."""
SILENT_S = 5.0
"""A heartbeat is renewed every second by a thread that does nothing else; compilers leave it the interpreter."""
HEARTBEAT_LIMIT_S = 300.0
LARGEST = 2**63


class Watchdog:
    """Watches one process.

    floor_s: least limit, however quick the steps are. heartbeat_limit_s: limit for silent_s, in any state.
    stood_s: seconds since the process's step, or its `tick`, last moved. silent_s: since its heartbeat was renewed.
    """

    def __init__(self, floor_s: float = FLOOR_S, heartbeat_limit_s: float = HEARTBEAT_LIMIT_S) -> None:
        self.stood_s = self.silent_s = 0.0
        self.beat: Json = {}
        self._floor_s, self._heartbeat_limit_s = floor_s, heartbeat_limit_s
        self._looked: float | None = None
        self._gaps: collections.deque[float] = collections.deque(maxlen=GAPS_KEPT)
        self._progressed: set[Phase] = set()

    def look(self, beat: Json, now: float) -> None:
        """Take in the heartbeat as it is at `now` (monotonic); an empty one is one that could not be read."""
        elapsed = 0.0 if self._looked is None else min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        self.stood_s += elapsed
        self.silent_s += elapsed
        if not beat:
            return
        before, self.beat = self.beat, beat
        if beat.get("time") != before.get("time"):
            self.silent_s = 0.0
        has_moved = _progress(beat) != _progress(before)
        if has_moved or _phase(beat) != _phase(before):
            self.stood_s = 0.0
        if has_moved and before and _phase(beat) == _phase(before):
            self._progressed.add(_phase(beat))
            self._learn(before, beat)

    def _learn(self, before: Json, beat: Json) -> None:
        steps = _number(beat, "step") - _number(before, "step")
        seconds = _number(beat, "step_time") - _number(before, "step_time")
        if beat.get("state") == "stepping" and steps > 0 and seconds > 0:
            # Quick steps are seen many at a time, and each of them counts.
            self._gaps.extend([seconds / steps] * min(int(steps), GAPS_KEPT))

    @property
    def median_s(self) -> float | None:
        """The usual time from one step to the next; None as long as too few are known."""
        if len(self._gaps) < FEWEST_GAPS:
            return None
        return sorted(self._gaps)[len(self._gaps) // 2]

    @property
    def limit_s(self) -> float:
        """How long the process may stand still in what it is doing now."""
        known = self.beat.get("state") == "stepping" and _phase(self.beat) in self._progressed
        median_s = self.median_s
        if not known or median_s is None:
            return max(PATIENCE_S, self._floor_s)
        return max(self._floor_s, TIMES_THE_MEDIAN * median_s)

    @property
    def is_hung(self) -> bool:
        """Whether a limit is over. A process that never wrote a heartbeat is not judged: there is nothing to see."""
        return bool(self.beat) and (self.stood_s > self.limit_s or self.silent_s > self._heartbeat_limit_s)

    def progress(self) -> Json:
        """What is told of this process to the others."""
        return {
            "step": int(_number(self.beat, "step")),
            "state": self.beat.get("state"),
            "stood_s": round(self.stood_s, 3),
            "silent_s": round(self.silent_s, 3),
            "is_silent": self.silent_s > SILENT_S,
            "heartbeat_limit_s": self._heartbeat_limit_s,
            "limit_s": round(self.limit_s, 3),
            "median_s": self.median_s,
        }


def _progress(beat: Json) -> tuple[object, object]:
    return beat.get("step"), beat.get("step_time")


def _phase(beat: Json) -> Phase:
    """What a process is doing: a first evaluation is compiled, though the steps before it were quick."""
    return beat.get("state"), beat.get("message")


def _number(beat: Json, name: str) -> float:
    value = beat.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < LARGEST:
        return 0.0
    return value
