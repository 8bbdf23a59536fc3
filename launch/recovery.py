"""What starting a run again takes: its end as the policy sees it, its slice and hosts as they were, its request.

`fab recover`, `fab train --max-restarts` and the keeper use it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from contracts import run_directory
from contracts.durations import spoken
from contracts.errors import RequestError
from contracts.run_directory import CODE, FOLDER, State
from jobs.runtime.metric_definitions import finite
from launch import control, costs, policy, runs
from launch.backend import Say
from launch.bundles import Bundle
from launch.control import Limits
from launch.jobs import Submitted
from launch.launch import Request
from launch.plan import HANG_FLOOR_S, HEARTBEAT_LIMIT_S
from launch.policy import Action, Presence, RunObserved
from launch.runs import Run
from launch.targets import Target

BOOT_LIMIT_S = 300.0
BOOT_POLL_S = 1.0
THERE_POLL_S = 10.0


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


def repaired(target: Target, reopen: Callable[[], Target], say: Say) -> Target:
    """Return the target with all its hosts: unchanged if they all answer, else once its slice was made again.

    reopen: returns it as it is then.

    Raises:
        RequestError: hosts do not answer and nothing here can make them again, or they cannot be prepared.
    """
    silent = runs.look_at_all(target.agents).errors
    if not silent:
        return target
    if not target.capabilities.hosts_outlive_runs:  # their nodes are the cluster's, which brings them back
        raise silent[0]
    for error in silent:
        say(f"no answer from {error}")
    target.backend.ensure(target, say)
    return prepared(reopen, say)


def prepared(
    reopen: Callable[[], Target], say: Say, require_there: Callable[[], None] = lambda: None
) -> Target:
    """Return a target whose slice is new, once all its hosts answer and can run something.

    require_there: raises, now and then, when the slice is lost while its hosts are waited for.

    Raises:
        RequestError: some do not answer, or cannot be prepared.
    """
    fresh = reopen()
    wait_for_hosts(fresh, require_there)
    say(f"{fresh.slice.name}: all hosts answer ({len(fresh.hosts)})")
    if not fresh.backend.prepare(fresh):
        raise RequestError("not every host could be prepared; fix what is listed, then `fab recover` again")
    return reopen()  # what deploying has changed, as the user's groups, is so from the next log-in on


def wait_for_hosts(target: Target, require_there: Callable[[], None]) -> None:
    """Wait until the SSH servers of new hosts answer.

    Raises:
        RequestError: some do not answer within BOOT_LIMIT_S.
    """
    deadline = time.monotonic() + BOOT_LIMIT_S
    looked_s = time.monotonic()
    while silent := runs.look_at_all(target.agents).errors:
        if time.monotonic() - looked_s > THERE_POLL_S:
            require_there()
            looked_s = time.monotonic()
        if time.monotonic() > deadline:
            raise RequestError(
                "\n  ".join(
                    [
                        f"hosts do not answer {spoken(BOOT_LIMIT_S)} after their slice was there:",
                        *map(str, silent),
                    ]
                )
                + f"\nGoogle says that {target.slice.name} is there. To make it anew: `pulumi stack --show-urns` "
                f"names it, `pulumi up --stack {target.pulumi_stack} --replace URN` gives it back and asks for another"
            )
        time.sleep(BOOT_POLL_S)


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
