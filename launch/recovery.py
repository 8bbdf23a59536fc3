"""Recovery of a run: decides whether to resume it, restores its slice, prepares its hosts, and repeats its request.

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
from launch import runs
from launch.backend import Say
from launch.bundles import Bundle
from launch.jobs import Submitted
from launch.launch import Request
from launch.plan import HANG_FLOOR_S, HEARTBEAT_LIMIT_S
from launch.runs import Run
from launch.targets import Target

BOOT_LIMIT_S = 300.0
BOOT_POLL_S = 1.0
THERE_POLL_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether a run is to be resumed, and why or why not."""

    resume: bool
    reason: str


def decide(state: State, run: Run) -> Decision:
    """Decide whether to resume a run in this state; its hosts are there."""
    if state in run_directory.ACTIVE:
        return Decision(resume=False, reason=f"it is {state}, there is nothing to recover")
    if state == "done":
        return Decision(resume=False, reason="it is done, there is nothing left to do")
    if run.unread_result is not None:
        return Decision(resume=False, reason=f"how it ended cannot be read: {run.unread_result}")
    result = run.current_result() or {}
    if result.get("out_of_budget"):
        return Decision(resume=False, reason=f"it was stopped: {result.get('reason')}")
    if result.get("request"):
        return Decision(resume=False, reason=f"it would fail again: {result.get('error')}")
    saved, how = run.directory.checkpoint_steps(), run_directory.ENDED[state]
    if not saved and run.is_own_command:
        return Decision(
            resume=True, reason=f"it {how}; the command starts again, and finds its RUN_DIR as it was"
        )
    where = (
        f"from the checkpoint of step {saved[-1]}" if saved else "from the start, as there is no checkpoint"
    )
    return Decision(resume=True, reason=f"it {how} and goes on {where}")


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
    say(f"all {len(fresh.hosts)} hosts of {fresh.slice.name} answer")
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
