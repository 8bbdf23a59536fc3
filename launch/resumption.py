"""What starting a run again takes: its end as the policy sees it, and its request.

`fab recover`, `fab train --max-restarts` and the keeper use it.
"""

from __future__ import annotations

import dataclasses
import time

from contracts import run_directory
from contracts.errors import RequestError
from contracts.run_directory import CODE, FOLDER, State
from jobs.runtime.metric_definitions import finite
from launch import control, costs, policy, runs
from launch.bundles import Bundle
from launch.control import Limits
from launch.jobs import Submitted
from launch.launching import Request
from launch.plan import HANG_FLOOR_S, HEARTBEAT_LIMIT_S
from launch.policy import Action, Presence, RunObserved
from launch.runs import Run
from launch.targets import Target


def observed(run: Run, state: State, *, living: Presence = "absent", silent: int = 0) -> RunObserved:
    """Return what the policy has to know of a run in this state. living: whether its processes are. silent: hosts that
    do not answer.

    Raises:
        RequestError: how it ended cannot be read.
    """
    if run.unread_result is not None:
        raise RequestError(f"{run.run_id}: how it ended cannot be read: {run.unread_result}")
    result = run.current_result() or {}
    saved = [] if living == "present" else run.directory.checkpoint_steps()
    cause = policy.cause_of(state, result)
    error = str(result.get("reason") or result.get("error") or "").partition("\n")[0]
    if cause == "done":
        _, latest = runs.progress(run)
        error = runs.figure(run, latest)
    return RunObserved(
        living=living,
        state=state,
        cause=cause,
        attempt=run.attempt,
        silent=silent,
        checkpoint=saved[-1] if saved else -1,
        error=error,
        cost_usd=costs.least_usd(run),
        max_usd=finite(run.described.get("max_usd")),
        is_own_command=run.is_own_command,
    )


def desired(run: Run, target: Target, restarts: int | None = None) -> control.Run:
    """Return a run as its launcher wants it, who looks after it himself. restarts: how often it may be started again
    after failures; None: as often as the policy says."""
    return control.Run(
        run_id=run.run_id,
        stack=target.inventory.stack,
        runs_url=target.runs_url,
        slices=(target.slice.name,),
        slice=target.slice.name,
        limits=Limits(restarts=restarts),
    )


def decide(state: State, run: Run) -> Action:
    """Decide whether `fab recover` resumes a run in this state; its hosts are there. A run that was stopped goes on, as
    somebody asks for that now."""
    if state in run_directory.ACTIVE:
        return Action(do="wait", reason=f"it is {state}, there is nothing to recover")
    if state == "done":
        return Action(do="end", outcome="done", reason="it is done, there is nothing left to do")
    if run.unread_result is not None:
        return Action(do="end", reason=f"how it ended cannot be read: {run.unread_result}")
    seen = observed(run, state)
    if seen.cause == "stopped":
        seen = dataclasses.replace(seen, cause="lost")
    return policy.judge(control.Run(run_id=run.run_id, stack="", runs_url="", slices=()), seen, time.time())


def asked_to_stop(run: Run) -> bool:
    """Return whether `fab stop` was told to stop a run when nothing of it ran, after its latest attempt had begun."""
    return (run.directory.read_json(run_directory.STOP) or {}).get("attempt") == run.attempt


def ask_to_stop(run: Run) -> None:
    """Let whoever is starting a run again leave that."""
    run.directory.write_json(run_directory.STOP, {"attempt": run.attempt})


def resuming(run: Run) -> Request:
    """Return the request that resumes a run as it began."""
    return Request(
        job=run.described["job"],
        arguments=(),
        name=None,
        track=tuple(run.described.get("track", ())),
        resume=run,
        hang_floor_s=float(run.described.get("hang_limit_s", HANG_FLOOR_S)),
        heartbeat_limit_s=float(run.described.get("heartbeat_limit_s", HEARTBEAT_LIMIT_S)),
    )


def as_it_was(run: Run) -> Submitted | None:
    """Return a run with the code and folder of its latest attempt; None where its directory does not have them."""
    code = run.described["code"]
    wanted = {CODE: code["bundle"], **({FOLDER: code["folder"]} if "folder" in code else {})}
    texts = run.directory.read_texts([*wanted])
    bundles = map(Bundle.of_text, texts, wanted.values())
    found = tuple(bundle for bundle in bundles if bundle is not None)
    if len(found) < len(wanted):
        return None
    return Submitted(
        name=run.described["job"],
        framework=run.described["stack"],
        options=run.described["config"],
        arguments=tuple(run.described["args"]),
        metric_definitions=run.described["metric_definitions"],
        code={name: code[name] for name in ("git_commit", "git_dirty")},
        cwd=run.described["cwd"],
        bundles=found,
    )
