"""A process's siblings, where its attempt has no lifeline: watched through their heartbeats on a shared disk."""

from __future__ import annotations

import os
import time

from .files import tail_of
from .verdict import culprit, failed_result, heartbeats, step_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

SETTLE_S = 1.5


class Siblings:
    """The other processes of an attempt: whether one has failed, and what the run's result is when this one has."""

    def __init__(self, request: Json) -> None:
        self._run_dir: str | None = request["run_dir"]
        self._attempt, self._rank = request["attempt"], request["process_id"]
        self._settle_s = SETTLE_S if request["settle_s"] is None else request["settle_s"]

    def start(self) -> None:
        """Nothing has to be done: the others need not know that they are watched."""

    def look(self) -> Json | None:
        """The order to stop, when another process has failed."""
        others = [beat for beat in heartbeats(self._run_dir, self._attempt) if beat["rank"] != self._rank]
        failed = culprit(others)
        if failed is None:
            return None
        reason = f"host {failed['rank']} failed: {failed.get('message')}"
        return {"outcome": "failed", "rank": failed["rank"], "reason": reason}

    def tell(self, ending: Json) -> None:
        """Nothing: its heartbeat tells the others."""

    def result(self, ending: Json) -> Json | None:
        """result.json, unless it is the job's or the launcher's to write."""
        if ending["is_good"] or ending["was_asked"]:
            return None
        time.sleep(self._settle_s)  # a sibling that died a moment earlier may not have said so yet
        return verdict(self._run_dir, ending["beat"], ending["lines"])


def verdict(run_dir: str | None, mine: Json, lines: list[str]) -> Json:
    """The run's result by what all hosts say; `mine` and its lines where nothing can be read any more."""
    beats = heartbeats(run_dir, mine["attempt"])
    blamed = culprit(beats) or mine
    if blamed["rank"] != mine["rank"]:
        lines = log_of(run_dir, mine["attempt"], blamed["rank"])
    return failed_result(blamed, max(map(step_of, beats or [mine])), lines)


def log_of(run_dir: str | None, attempt: int, rank: int) -> list[str]:
    """The end of another host's log, where it lies on a shared disk."""
    return tail_of(os.path.join(run_dir, "logs", str(attempt), f"host-{rank}.log")) if run_dir else []
