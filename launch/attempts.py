"""Begins the next attempt of a run whose pods start themselves: `python -m launch.attempts RUN_DIR`.

The request is JSON on stdin: {"first": the attempt that the launcher made ready, "pod": who asks, "limits": of that
attempt and all that follow, see `Limits`}. The answer on stdout is {"attempt", "budget_s"}; where nothing is left to do
{"over": exit code, "reason"}. run.json and result.json are then as after a resume by a launcher. A request with
"missing", processes that are waited for, begins nothing and is answered {"over"} where the run is done, or can never
be: one that is missing was done with its part, or the first attempt can begin no more; else {}. Of several pods that
ask at once one begins the attempt (contracts.fencing), and the others get {"over": SUPERSEDED}.

It travels with the code bundle, as does the policy that it asks, and imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from contracts import fencing, run_directory, run_records
from contracts.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    PEER_LOST,
    SUPERSEDED,
    WRONG_REQUEST,
    Superseded,
)
from contracts.goodput import measured
from contracts.run_directory import Outcome, RunDirectory, State
from contracts.run_records import amount, moment
from jobs.runtime.storage.bucket_files import files_of
from launch import policy
from launch.control import control_documents
from launch.control.control_documents import Run
from launch.policy import Cause, RunObserved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a launch allows the attempts of its pods.

    restarts: as in `control_documents.Limits`; the cluster pauses before each. budget_s: seconds of all
    attempts together; budget_reason: the message when they are spent. begin_by_s: the latest start of the first
    attempt, in Unix seconds. None: no limit.
    """

    restarts: int
    budget_s: float | None
    budget_reason: str | None
    begin_by_s: float | None

    def budget_left_s(self, attempts: Sequence[Mapping[str, Any]]) -> int | None:
        if self.budget_s is None:
            return None
        return int(self.budget_s - sum(amount(attempt.get("wall_s")) or 0 for attempt in attempts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """Why a run has no further attempt.

    code: the exit code of its pods. outcome, error: of the result that says so; None: the run's own result does.
    """

    code: int
    reason: str
    outcome: Outcome | None = None
    error: str | None = None


ON_RECORD: Mapping[Cause, int] = {
    "done": DONE, "stopped": INTERRUPTED, "over budget": INTERRUPTED, "wrong request": WRONG_REQUEST,
}  # fmt: skip
"""Ends of a run that its own result tells, and the exit codes of its pods."""


def attempt_cause(state: State, result: Mapping[str, Any] | None) -> Cause:
    """Return why an attempt on pods ended as it did."""
    if state == "failed" and result is not None and result.get("exit_code") in (None, PEER_LOST):
        return "preempted"  # a pod was lost, which is the cluster's affair
    return policy.failure_cause(state, result)


def end_of_run(
    limits: Limits,
    attempts: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
    newest_checkpoint: int | None,
    now_s: float,
) -> End | None:
    """Return why no further attempt is to begin, or None: one is. Pure.

    attempts: those of the launch that have begun, as run.json has them, each with its outcome and its cause. result: of
    the last one.
    """
    if not attempts:
        return _too_late(limits, now_s)
    result = result or {}
    error = str(result.get("reason") or result.get("error") or "")
    run, observed = replay(limits, attempts, newest_checkpoint, error)
    left_s, cause = limits.budget_left_s(attempts), observed.cause
    if left_s is not None and left_s <= 0 and cause not in ON_RECORD:
        return End(code=INTERRUPTED, reason=str(limits.budget_reason), outcome="stopped")
    action = policy.judge(run, observed, now_s)
    if action.do != "end":
        return None
    if cause in ON_RECORD:
        return End(code=ON_RECORD[cause], reason=action.reason if cause == "done" else error)
    _, _, more = error.partition("\n")
    text = "\n".join(filter(None, [action.reason, more]))
    return End(code=FAILED, reason=action.reason, outcome="failed", error=text)


def replay(
    limits: Limits, attempts: Sequence[Mapping[str, Any]], newest_checkpoint: int | None, error: str
) -> tuple[Run, RunObserved]:
    """Return the run as a reconciler's document would have it that had begun these attempts, and the end of the last
    one. error: of that."""
    run = Run(
        run_id="", stack="", runs_url="", slices=(), limits=control_documents.Limits(restarts=limits.restarts)
    )
    observed = None
    saved = [*(attempt["checkpoint"] for attempt in attempts[1:]), newest_checkpoint]
    for attempt, checkpoint in zip(attempts, saved, strict=True):
        run = policy.begin_attempt(run, observed, "", 0.0)
        assert run.attempt is not None
        latest = dataclasses.replace(
            run.attempt, number=attempt["attempt"], checkpoint=_step(attempt["checkpoint"])
        )
        run = dataclasses.replace(run, attempt=latest)
        observed = RunObserved(
            living="absent",
            state=attempt["outcome"],
            cause=attempt["cause"],
            attempt=attempt["attempt"],
            checkpoint=_step(checkpoint),
            error=error.partition("\n")[0],
        )
    assert observed is not None
    return run, observed


def _too_late(limits: Limits, now_s: float) -> End | None:
    """Return the end of a run of which no attempt has begun, if none may any more."""
    if limits.begin_by_s is None or now_s <= limits.begin_by_s:
        return None
    by = moment(limits.begin_by_s)
    reason = f"not all of its pods were there by {by}, long after --wait was over; launch it again"
    return End(code=FAILED, reason=reason, outcome="failed", error=reason)


def _step(checkpoint: int | None) -> int:
    return -1 if checkpoint is None else checkpoint


def begin(directory: RunDirectory, request: dict[str, Any], now_s: float) -> dict[str, Any]:
    """Begin an attempt, and put the end of the last one on record; return the answer.

    Raises:
        Superseded: somebody else has begun one meanwhile.
    """
    described = directory.read_json(run_directory.RUN)
    if described is None:
        return {"over": FAILED, "reason": f"{directory.path(run_directory.RUN)} is not there"}
    limits = Limits(**request["limits"])
    attempts, first = described["attempts"], request["first"]
    last, newest_taken = attempts[-1], directory.newest_attempt() or 0
    token = directory.read_json(run_directory.token(newest_taken)) or {}
    if token.get("launch", first) > first:
        return {"over": INTERRUPTED, "reason": f"attempt {newest_taken} of this run has been launched since"}
    # What is written here rests on what is known now: no newer attempt than this one has begun.
    current = max(last["attempt"], newest_taken)
    directory = directory.for_attempt(current)
    launched = [attempt for attempt in attempts if "pod" in attempt and attempt["attempt"] >= first]
    if "missing" in request:
        return look(directory, limits, launched, last["attempt"], request["missing"], now_s)
    newest = directory.newest_checkpoint()
    # The launcher has taken the token of its first attempt; of its pods one begins it.
    if not launched and (current > last["attempt"] or not fencing.begin_launched(directory)):
        last.setdefault("checkpoint", newest)  # by a pod that was lost before it could put that on record
        launched = [last]
    result = conclude(directory, last) if launched else None
    if launched:
        directory.write_json(run_directory.RUN, described)
    if (end := end_of_run(limits, launched, result, newest, now_s)) is not None:
        return close(directory, end, last["attempt"], now_s, result)
    if launched:
        directory = fencing.take(directory, current + 1, launch=first)
        last = {**last, "attempt": current + 1}
        attempts.append(last)
    last |= {
        "pod": request["pod"],
        "started": moment(now_s),
        "checkpoint": newest,
        "outcome": None,
    }
    for name in ("wall_s", "timing", "cause"):
        last.pop(name, None)
    directory.remove(run_directory.RESULT)
    directory.write_json(run_directory.RUN, described)
    return {"attempt": last["attempt"], "budget_s": limits.budget_left_s(launched)}


def conclude(directory: RunDirectory, last: dict[str, Any]) -> dict[str, Any] | None:
    """Note in the record of the last attempt how it ended; return its result."""
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
    last |= {"outcome": outcome, "cause": attempt_cause(outcome, result), **measured(last, result, beats)}
    return result


def look(
    directory: RunDirectory,
    limits: Limits,
    launched: Sequence[Mapping[str, Any]],
    attempt: int,
    missing: Sequence[int],
    now_s: float,
) -> dict[str, Any]:
    """Return the answer to a pod that waits for others; where they can come no more, put that on record."""
    written = directory.read_json(run_directory.RESULT) or {}
    if written.get("outcome") == "done" and written.get("attempt") == attempt:
        return {"over": DONE, "reason": "the run is done"}
    if not launched:
        # Pod 0 may be beginning the first attempt: this ends nothing that it may still begin.
        end = end_of_run(limits, [], None, None, now_s - run_directory.CLOCKS_DIFFER_S)
        return {} if end is None else close(directory, end, attempt, now_s, None)
    beats = directory.read_jsons([run_directory.heartbeat(index) for index in missing])
    left = [
        index
        for index, beat in zip(missing, beats, strict=True)
        if beat and beat.get("attempt") == attempt and beat.get("state") == "done"
    ]
    if not left:
        return {}
    reason = f"process {left[0]} was done when another one was lost, and its pod is not started again"
    mine = written if written.get("attempt") == attempt else {}
    error = "\n".join(filter(None, [reason, mine.get("error")]))
    end = End(code=FAILED, reason=reason, outcome="failed", error=error)
    return close(directory, end, attempt, now_s, written)


def close(
    directory: RunDirectory, end: End, attempt: int, now_s: float, result: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the answer that a run is over; write its result, where no process of the attempt could."""
    if end.outcome is not None:
        written = run_directory.result(
            end.outcome,
            attempt=attempt,
            steps=directory.newest_checkpoint() or 0,
            time=now_s,
            error=end.error,
            failed_host=(result or {}).get("failed_host") if end.outcome == "failed" else None,
            measured=run_directory.out_of_budget(str(end.reason)) if end.outcome == "stopped" else None,
        )
        directory.write_json(run_directory.RESULT, written)
    return {"over": end.code, "reason": end.reason}


def main(arguments: Sequence[str]) -> int:
    (url,) = arguments
    directory = RunDirectory(url, files_of(url))
    directory.read_text(run_directory.RUN)  # loads the bucket's library and connects, before it is asked
    try:
        answer = begin(directory, json.loads(sys.stdin.read()), time.time())
    except Superseded as error:
        answer = {"over": SUPERSEDED, "reason": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
