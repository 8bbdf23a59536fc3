"""How a run failed: who was the first, and in whose words it is told."""

from __future__ import annotations

import math
import os
import re

from .files import read_json
from .protocol import is_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json

DONE, SAVED, WRONG_REQUEST, LOST_A_PEER = 0, 75, 2, 76


def heartbeats(run_dir: str | None, attempt: int) -> list[Json]:
    """The heartbeats of an attempt that can be read now, each with the rank that its name gives."""
    directory = os.path.join(run_dir or "", "heartbeats")
    found: list[Json] = []
    try:
        names = os.listdir(directory) if run_dir else []
    except OSError:
        return found
    for name in names:
        rank = re.fullmatch(r"host-(\d+)\.json", name)
        beat = read_json(os.path.join(directory, name)) if rank else {}
        if rank and beat.get("attempt") == attempt and is_number(beat.get("time"), 0, math.inf):
            found.append({**beat, "rank": int(rank.group(1))})
    return found


def culprit(beats: list[Json]) -> Json | None:
    """The first failure of those in the heartbeats; who only lost a peer is left out, unless all did."""
    failed = [beat for beat in beats if beat.get("state") == "failed"]
    return min(
        by_itself(failed) or failed, key=lambda beat: (float(beat["time"]), int(beat["rank"])), default=None
    )


def by_itself(beats: list[Json]) -> list[Json]:
    """The failures that are not another's."""
    return [beat for beat in beats if beat.get("state") == "failed" and beat.get("exit_code") != LOST_A_PEER]


def step_of(beat: Json) -> int:
    step = beat.get("step")
    return step if isinstance(step, int) else 0


def saved_step(run_dir: str | None) -> int:
    """The newest step that has a checkpoint; 0 where there is none, or where the run directory cannot be seen here."""
    try:
        names = os.listdir(os.path.join(run_dir or "", "checkpoints")) if run_dir else []
    except OSError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def stopped_result(beat: Json, steps: int) -> Json:
    """result.json of a run whose process 0 was told to stop before it had begun."""
    result = {"outcome": beat["state"], "steps": steps, "error": None, "failed_host": None}
    return {**result, "attempt": beat["attempt"], "time": beat["time"], "wall_s": None}


def failed_result(blamed: Json, steps: int, lines: list[str]) -> Json:
    """result.json of a run that failed, in the words of the host that was first to fail.

    blamed: rank, message, exit_code, attempt and time, as in a heartbeat, and outcome where it is not `failed`. The
    lines of its log are left out where its message says all.
    """
    outcome = blamed.get("outcome", "failed")
    # A hang is told of all hosts that hang; their logs have nothing to add.
    message = blamed["message"] if outcome == "hung" else f"host {blamed['rank']}: {blamed.get('message')}"
    result = {
        "outcome": outcome,
        "steps": steps,
        "error": "\n".join([str(message), *([] if blamed.get("says_all") else lines)]),
        "failed_host": blamed["rank"],
        "attempt": blamed["attempt"],
        "time": blamed["time"],
        "wall_s": None,
    }
    return {**result, "request": True} if blamed.get("exit_code") == WRONG_REQUEST else result
