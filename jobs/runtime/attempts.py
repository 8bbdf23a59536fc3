"""Begins the next attempt of a run whose pods start themselves: `python -m jobs.runtime.attempts RUN_DIR`.

The request is JSON on stdin: {"first": the attempt that the launcher made ready, "pod": who asks, "budget_s",
"budget_reason": of that attempt and all that follow, "needs_progress": whether attempts without a new checkpoint come
to nothing}. The answer on stdout is {"attempt", "budget_s"}; where nothing is left to do {"over": exit code, "reason"}.
run.json and result.json are then as after a resume by a launcher. The request {"look": true, "missing": processes}
begins nothing and is answered {"over"} where the run is done, or can never be, as one that is missing was done with its
part; else {}. Imports nothing heavy.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from contracts import run_directory, run_records
from contracts.errors import DONE, FAILED, INTERRUPTED, UNAVAILABLE, WRONG_REQUEST, is_final
from contracts.run_costs import MOMENT, number, wall_s
from contracts.run_directory import RunDirectory
from jobs.runtime.bucket_files import files_of

MOST_WITHOUT_PROGRESS = 3
"""Attempts in a row that saved nothing new; another one would save nothing either. Those that ended because something
outside was away do not count: the cluster limits them by the Job's restarts, with growing pauses."""


def begin(directory: RunDirectory, request: dict[str, Any], now_s: float) -> dict[str, Any]:
    """Begin an attempt, and put the end of the last one on record; return the answer."""
    described = directory.read_json(run_directory.RUN)
    if described is None:
        return {"over": FAILED, "reason": f"{directory.path(run_directory.RUN)} is not there"}
    attempts = described["attempts"]
    last = attempts[-1]
    if request.get("look"):
        return look(directory, last["attempt"], request.get("missing", ()), now_s)
    first = request["first"]
    if "pod" in last and last["attempt"] >= first:
        newest, _ = run_records.result(directory.read_json(run_directory.RESULT) or {}, run_directory.RESULT)
        result = newest if newest.get("attempt") == last["attempt"] else None
        names = [run_directory.heartbeat(index) for index in range(last["processes"])]
        read = [run_records.heartbeat(beat or {}, "")[0] for beat in directory.read_jsons(names)]
        beats = [beat for beat in read if beat is not None and beat.get("attempt") == last["attempt"]]
        outcome = run_directory.state(
            started_s=0.0,
            result=result,
            heartbeats=beats,
            processes=[],
            knowing=last["processes"],
            now_s=float("inf"),
        )
        last |= {"outcome": outcome, "wall_s": wall_s(last, result, beats)}
        if (result or {}).get("exit_code") == UNAVAILABLE:
            last["was_outage"] = True
        directory.write_json(run_directory.RUN, described)
        if outcome == "done":
            return {"over": DONE, "reason": "the run is done"}
        if result is not None and result.get("out_of_budget"):
            return {"over": INTERRUPTED, "reason": str(result.get("reason"))}
        # A Job ends with such a failure; a JobSet may have started all of it again before it knew.
        if result is not None and outcome == "failed" and is_final(code := result.get("exit_code")):
            return {"over": WRONG_REQUEST if code == WRONG_REQUEST else FAILED, "reason": result.get("error")}
        if (over := given_up(directory, request, described, result, now_s)) is not None:
            return over
        last = {**last, "attempt": last["attempt"] + 1}
        attempts.append(last)
    left_s = budget_left_s(request, attempts[:-1])
    saved = directory.checkpoint_steps()
    last |= {
        "pod": request["pod"],
        "started": time.strftime(MOMENT, time.gmtime(now_s)),
        "checkpoint": saved[-1] if saved else None,
        "outcome": None,
    }
    for name in ("wall_s", "was_outage"):
        last.pop(name, None)
    directory.remove(run_directory.RESULT)
    directory.write_json(run_directory.RUN, described)
    return {"attempt": last["attempt"], "budget_s": left_s}


def look(directory: RunDirectory, attempt: int, missing: Sequence[int], now_s: float) -> dict[str, Any]:
    """Return the answer to whoever waits for other pods; where they have left for good, put that on record."""
    found = directory.read_json(run_directory.RESULT) or {}
    if found.get("outcome") == "done" and found.get("attempt") == attempt:
        return {"over": DONE, "reason": "the run is done"}
    beats = directory.read_jsons([run_directory.heartbeat(index) for index in missing])
    left = [
        index
        for index, beat in zip(missing, beats, strict=True)
        if beat and beat.get("attempt") == attempt and beat.get("state") == "done"
    ]
    if not left:
        return {}
    reason = f"process {left[0]} was done when another one was lost, and its pod is not started again"
    error = "\n".join(filter(None, [reason, found.get("error") if found.get("attempt") == attempt else None]))
    write_end(directory, "failed", attempt, now_s, error=error, failed_host=found.get("failed_host"))
    return {"over": FAILED, "reason": reason}


def of_pods(request: dict[str, Any], attempts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The attempts that pods have begun since the launcher made the first of them ready."""
    return [each for each in attempts if "pod" in each and each["attempt"] >= request["first"]]


def budget_left_s(request: dict[str, Any], before: Sequence[dict[str, Any]]) -> int | None:
    if request["budget_s"] is None:
        return None
    return int(
        request["budget_s"] - sum(number(each.get("wall_s")) or 0 for each in of_pods(request, before))
    )


def given_up(
    directory: RunDirectory,
    request: dict[str, Any],
    described: dict[str, Any],
    result: dict[str, Any] | None,
    now_s: float,
) -> dict[str, Any] | None:
    """Say that the run ends here, and why, where another attempt would be of no use; None where it goes on."""
    begun, last = of_pods(request, described["attempts"]), described["attempts"][-1]
    left_s, saved = budget_left_s(request, begun), directory.checkpoint_steps()
    newest = saved[-1] if saved else None
    if left_s is not None and left_s <= 0:
        spent = run_directory.out_of_budget(request["budget_reason"])
        write_end(directory, "stopped", last["attempt"], now_s, measured=spent)
        return {"over": INTERRUPTED, "reason": request["budget_reason"]}
    tried = [each for each in begun if not each.get("was_outage")][-MOST_WITHOUT_PROGRESS:]
    is_in_vain = len(tried) == MOST_WITHOUT_PROGRESS and all(each["checkpoint"] == newest for each in tried)
    if not request["needs_progress"] or not is_in_vain:
        return None
    since = (
        "there is no checkpoint" if newest is None else f"the last checkpoint is still that of step {newest}"
    )
    reason = f"given up after {len(tried)} attempts: {since}"
    said, host = (result or {}).get("error"), (result or {}).get("failed_host")
    error = f"{reason}\nthe last of them: {said or 'nothing is known of its end'}"
    write_end(directory, "failed", last["attempt"], now_s, error=error, failed_host=host)
    return {"over": FAILED, "reason": reason}


def write_end(directory: RunDirectory, outcome: str, attempt: int, now_s: float, **more: Any) -> None:
    """Write a result that no process of the attempt could. more: as `run_directory.result` takes it."""
    saved = directory.checkpoint_steps()
    ended = run_directory.result(
        outcome, attempt=attempt, steps=saved[-1] if saved else 0, time=now_s, **more
    )
    directory.write_json(run_directory.RESULT, ended)


def main(arguments: Sequence[str]) -> int:
    (url,) = arguments
    directory = RunDirectory(url, files_of(url))
    directory.read_text(run_directory.RUN)  # loads the bucket's library and connects, before it is asked
    print(json.dumps(begin(directory, json.loads(sys.stdin.read()), time.time())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
