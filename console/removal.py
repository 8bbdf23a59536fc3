"""`fab rm` and `fab prune`: run directories are removed, and none that is active or that another run began from."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from rich.filesize import decimal

from contracts import run_directory
from contracts.errors import RequestError
from contracts.run_directory import RunDirectory
from launch import runs
from launch.jobs import SERVER
from launch.launching import exclusive_launch
from launch.output import counted, printable, say, terminal
from launch.plan import JOIN_LIMIT_S
from launch.runs import Look, Run
from launch.targets import Target

YES = "yes"


def remove(target: Target, name: str, *, yes: bool, mark: Callable[[str], str | None]) -> int:
    """Remove one run. The exit code: 0, or 1 where somebody said no.

    mark: lets whoever may start a run again remove it, by its id; returns a line about that, or "". None: nobody may.

    Raises:
        RequestError: there is no such run, it has to stay, or nobody is there to be asked.
        HostError: the place cannot be reached, or refuses.
    """
    run = runs.find(target.runs, name)
    if reason := blocked(target, runs.list_runs(target.runs), [run], {}).get(run.run_id):
        raise RequestError(f"{run.run_id} is kept: {reason}")
    return _ask_and_remove(target, [run], yes=yes, mark=mark)


def prune(target: Target, *, keep: int, yes: bool, resumed_by: Mapping[str, str]) -> int:
    """Remove all runs but the newest by their last attempt and those that have to stay; say which those are.

    resumed_by: as `blocked` takes it.

    Raises:
        RequestError: nobody is there to be asked.
        HostError: the place cannot be reached, or refuses.
    """
    listing, tell = runs.survey(target.runs), say(terminal())
    everything = listing.runs
    staying = blocked(target, everything, everything[keep:], resumed_by)
    for run_id, reason in staying.items():
        tell(f"{run_id} is kept: {reason}")
    for line in runs.cannot_be_read(listing.unreadable):
        tell(printable(f"{line}; it is kept"))
    going = [run for run in everything[keep:] if run.run_id not in staying]
    if not going:
        tell(f"nothing to remove: {target.runs.url} has {counted(len(everything), 'run')}")
        return 0
    code = _ask_and_remove(target, going, yes=yes)
    if code == 0 and not listing.unreadable:
        _remove_packages(target)
    return code


def _remove_packages(target: Target) -> None:
    """Remove the packages and large folders of commands of the user's own that no run has any more."""
    folder, files = f"{target.runs.url}/{run_directory.BUNDLES}", target.runs.files
    # Listed before the runs, so that the bundles of a run that begins meanwhile are not in the list, or are needed.
    names = files.list(folder)
    described = [run.described for run in runs.list_runs(target.runs)]
    records = [(record.get("config") or {}).get("packages") or {} for record in described]
    needed = {record.get("sha256") for record in records} | {
        (record.get("code") or {}).get("folder") for record in described
    }
    for name in names:
        if name.partition(".")[0] not in needed:
            files.remove(f"{folder}/{name}")


def blocked(
    target: Target, everything: Sequence[Run], going: Sequence[Run], resumed_by: Mapping[str, str]
) -> dict[str, str]:
    """Return the ids of those of `going` that have to stay, and why.

    resumed_by: the ids of runs that somebody resumes later, and how that is ended.
    """
    look = target.backend.status(going)
    by_cluster = target.capabilities.restarts_runs
    reasons = {run.run_id: reason for run in going if (reason := _active(run, look, by_cluster=by_cluster))}
    ids = {run.run_id for run in going}
    reasons |= {run_id: reason for run_id, reason in resumed_by.items() if run_id in ids - {*reasons}}
    staying = [run for run in everything if run.run_id not in ids or run.run_id in reasons]
    while staying:  # what stays keeps what it began from, which may itself have begun from another
        child = staying.pop()
        for run in going:
            if run.run_id not in {child.run_id, *reasons} and _began_from(child, run):
                reasons[run.run_id] = f"{child.run_id} began from it"
                staying.append(run)
    return reasons


def _active(run: Run, look: Look, *, by_cluster: bool) -> str | None:
    """Why a run counts as active, if it does. Where stacks share a bucket, its hosts need not be those that were
    asked: a fresh heartbeat is enough. by_cluster: it was the cluster of the run that was asked."""
    mine, now_s = look.for_run(run), time.time()
    state = runs.state(run, mine.processes, unanswered=len(mine.errors) + 1, now_s=now_s)
    if state in run_directory.ACTIVE:
        return f"it is {state}; `fab stop {run.run_id}` stops it"
    is_silent = run.current_result() is None and not any(run.current())
    is_new = now_s - run.started_s < max(JOIN_LIMIT_S.values())
    if is_silent and is_new:
        return "it was started a moment ago; try again in 10 min"
    if by_cluster and runs.may_be_restarted(run, mine, state):
        return (
            f"whether it goes on is not known ({mine.errors[0]}); remove it when its cluster answers, or where that is "
            f"gone for good, its folder {run.directory.url} itself"
        )
    ends = any(process.get("supervised") for process in mine.processes)
    return "its processes are still ending; try again in a moment" if ends else None


def _began_from(child: Run, run: Run) -> bool:
    """Whether an option of `child` names something in the directory of `run`, by whatever path. A server that has ended
    needs nothing any more."""
    if child.described["job"] == SERVER and child.current_result() is not None:
        return False
    config, cwd = child.described.get("config") or {}, child.described.get("cwd") or "/"
    paths = [os.path.realpath(os.path.join(cwd, text)) for text in config.values() if isinstance(text, str)]
    return run.run_id in json.dumps([config, child.described["args"], paths])


def _ask_and_remove(
    target: Target, going: Sequence[Run], *, yes: bool, mark: Callable[[str], str | None] = lambda _: None
) -> int:
    tell = say(terminal())
    sizes = [run.directory.size_bytes() for run in going]
    for run, size in zip(going, sizes, strict=True):
        name = f"  {printable(run.described['name'])}" if run.described.get("name") else ""
        tell(f"{run.run_id}  {decimal(size)}  {runs.age(run)} old{name}")
    if not yes and not sys.stdin.isatty():
        raise RequestError("nobody is there to be asked, so nothing was removed; say --yes")
    question = (
        f"Remove {counted(len(going), 'run')}, {decimal(sum(sizes))}, from {target.runs.url}? Type {YES}: "
    )
    if not yes and not _says_yes(question):
        tell("nothing was removed")
        return 1
    for run in going:
        if (line := mark(run.run_id)) is not None:
            if line:
                tell(line)
            continue
        remove_directory(run.directory, run.attempt)
        tell(f"removed {run.run_id}")
        for problem in target.backend.clear(run) if run.is_own_command else ():
            tell(problem)
    return 0


def remove_directory(directory: RunDirectory, attempt: int | None) -> None:
    """Remove what there is of a run's directory. attempt: the latest, which has ended; None: it has no run.json.

    Raises:
        RequestError: another attempt has begun.
    """
    run_id = directory.url.rstrip("/").rpartition("/")[2]
    with exclusive_launch(run_id):
        now = runs.read(directory)
        if now is not None and now.attempt != attempt:
            raise RequestError(f"{run_id} was resumed meanwhile, and is kept")
        directory.remove_all()


def _says_yes(question: str) -> bool:
    try:
        return input(question).strip() == YES
    except EOFError:  # Ctrl-D
        print()
        return False
