"""`fab submit`, `sweep` and `queue`: one function a command, each returning its exit code.

A queue is the runs that wait for a slice, in order: what they are and when they start is `launch.policy`'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import getpass
import json
import os
import random
import re
import time
from collections.abc import Collection, Mapping, Sequence

from console import follow
from console import track as tracking
from console.compiler import compile_ahead
from contracts.durations import spoken
from contracts.errors import DONE, FAILED, RequestError, Unreachable
from contracts.files import is_url
from contracts.run_records import moment
from infra.documents import Documents
from keeper import submissions, sweep
from keeper.__main__ import reconcile
from keeper.stack_store import neglected, stack_documents, store_at
from keeper.submissions import pending
from keeper.world import World
from launch import launching, policy, runs
from launch.code.bundles import Bundle, left_out_lines
from launch.control.control_documents import Limits, Run, Submission
from launch.hosts import HostError, HostsError
from launch.jobs import Submitted
from launch.output import printable, say, table, terminal
from launch.request.run_request import Request, work_out
from launch.targets import Target, TargetRequest

POLL_S = 3.0
BUCKET_POLL_S = 15.0
"""Every look at a bucket is billed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is said of an entry besides its request. where: of its target besides stack and slice, as it is typed."""

    where: Mapping[str, str]
    priority: int
    restarts: int
    track: Sequence[str] | None


def submit(targets: Sequence[Target], request: Request, wishes: Wishes) -> int:
    """Put a run into the queue of a stack. targets: of the slices that it may run on.

    Raises:
        RequestError: it could be carried out on none of them.
    """
    _check_name(targets[0], request.name)
    return _add(targets, [request], wishes)


def _check_name(target: Target, name: str | None) -> None:
    """Check a name where that can be done without hosts, or they answer; it is checked again when the run starts."""
    if is_url(target.runs_url) or target.hosts[0].internal_address:
        with contextlib.suppress(HostError):
            runs.check_name(target.runs, name)


def submit_sweep(
    targets: Sequence[Target], template: Request, wishes: Wishes, *, grid: Sequence[str], seeds: int | None
) -> int:
    """Put a family of runs into the queue, all or none.

    Raises:
        RequestError: the grid is none, its name is taken, or a member could not be carried out.
    """
    follow.require_job(template)
    now = datetime.datetime.now(datetime.UTC)
    name = template.name or f"{template.job or 'sweep'}-{now:%Y%m%d-%H%M%S}"
    members = [*sweep.requests(template, name, sweep.members(grid, seeds))]
    _check_name(targets[0], members[0].name)
    queued = store_at(stack_documents(targets[0])).read().runs.values()
    names = {run.submission.sweep for run in queued if run.submission}
    if name in names or name in _sweeps(targets[0]):
        raise RequestError(f"--name {name}: is a sweep already; choose another name")
    code = _add(targets, members, wishes)
    option = targets[0].stack_option
    say(terminal())(f"sweep {name}: {len(members)} runs; `fab compare --sweep {name}{option}` compares them")
    return code


def _sweeps(target: Target) -> set[str]:
    """The names of the sweeps that runs are of; none where no host answers that could read them."""
    if not is_url(target.runs_url) and not target.hosts[0].internal_address:
        return set()
    try:
        return {str(sweep.sweep_record(run).get("name")) for run in runs.list_runs(target.runs)}
    except HostError:
        return set()


def _add(targets: Sequence[Target], requests: Sequence[Request], wishes: Wishes) -> int:
    track = tracking.selected(wishes.track, os.environ, None)
    documents = stack_documents(targets[0])
    store, added = store_at(documents), list[Run]()
    bundles: dict[str, Bundle] = {}
    left_out: dict[str, None] = {}
    content, now = store.read(), datetime.datetime.now(datetime.UTC)
    names = {run.name: run for run in pending(content.runs.values())}
    for request in requests:
        follow.require_job(request)
        submitted, fitting = _checked(targets, request)
        if request.name is not None and (neighbour := names.get(request.name)) and neighbour.submission:
            raise RequestError(
                f"--name {request.name}: entry {neighbour.submission.number} of the queue has it; choose another"
            )
        submission = Submission(
            number=0,
            what=_label(submitted),
            **submissions.described(dataclasses.replace(request, job=submitted.name, track=track), submitted),
            where=wishes.where,
            by=getpass.getuser(),
            added=moment(now.timestamp()),
        )
        added.append(
            Run(
                run_id=_new_run_id(submitted.name, now, {run.run_id for run in added}),
                stack=targets[0].inventory.stack,
                runs_url=targets[0].runs_url,
                slices=fitting,
                project=targets[0].inventory.project,
                name=request.name,
                limits=Limits(restarts=wishes.restarts, max_usd=request.max_usd),
                submission=submission,
                priority=wishes.priority,
                added_s=store.now_s(),
            )
        )
        bundles |= {bundle.sha256: bundle for bundle in submitted.bundles}
        left_out |= dict.fromkeys(left_out_lines(submitted.bundles))
    submissions.require_small(bundles.values())
    submissions.keep_code(documents, bundles.values())
    added = store.add_runs(added)
    # Whoever removed it before the runs were there looks whether it is needed now.
    submissions.keep_code(documents, bundles.values())
    before = sum(run.slice is None for run in pending(content.runs.values()))
    first, last = (run.submission.number for run in (added[0], added[-1]) if run.submission)
    numbers = f"entry {first}" + (f" to {last}" if len(added) > 1 else "")
    option, tell = targets[0].stack_option, say(terminal())
    for line in left_out:
        tell(line)
    tell(f"{numbers} of the queue, {before} waiting before; `fab queue work{option}` or the keeper starts it")
    if not any(target.hosts[0].internal_address for target in targets):
        tell(f"{targets[0].slice.name} has no hosts now; `pulumi up --refresh` or its keeper asks for them")
    first_target = next(target for target in targets if target.slice.name in added[0].slices)
    if first_target.platform == "tpu":
        compile_ahead.begin(requests[0], first_target, tell, is_submitted=True)
    return DONE


def _new_run_id(job: str, now: datetime.datetime, taken: Collection[str]) -> str:
    while (run_id := runs.new_run_id(job, now, random.Random())) in taken:
        pass
    return run_id


def _checked(targets: Sequence[Target], request: Request) -> tuple[Submitted, tuple[str, ...]]:
    """Return what is run, and the slices that it can run on.

    Raises:
        RequestError: there is none.
    """
    fitting, problems, submission = [], [], None
    for target in targets:
        try:  # a name is checked once, and not for each slice and member
            planned = work_out(dataclasses.replace(request, name=None), target, say(terminal()))
            submission = launching.submitted(planned)
            fitting.append(target.slice.name)
        except RequestError as error:
            problems.append(str(error) if len(targets) == 1 else f"{target.slice.name}: {error}")
    if submission is None:
        raise RequestError("\n".join(problems))
    return submission, tuple(fitting)


def _label(submitted: Submitted) -> str:
    arguments = (
        [str(word) for word in submitted.options["words"]] if submitted.is_own_command else [submitted.name]
    )
    return next((word for word in arguments if word.endswith((".py", ".sh"))), arguments[0]).rpartition("/")[
        2
    ]


def work(documents: Documents, request: TargetRequest, *, stay: bool) -> int:
    """Bring about what is wanted, until no submitted run waits or runs; with `stay` until Ctrl-C.

    FAILED if a run ended otherwise than done.
    """
    tell, store = say(terminal()), store_at(documents)
    world = World(documents, tell, program="fab queue work", request=request)
    unfinished = {run.run_id for run in pending(store.read().runs.values())}
    ended: dict[str, str] = {}
    problem = ""
    try:
        while True:
            try:
                reconcile(store, world, tell, request)
                content, problem = store.read(), ""
            except (HostError, HostsError, Unreachable) as error:  # the bucket may be away, or a host
                if str(error) != problem:
                    tell(problem := str(error))
                _pause(documents)
                continue
            unfinished |= {run.run_id for run in pending(content.runs.values())}
            ended |= {
                run.run_id: run.end.outcome
                for run in content.runs.values()
                if run.run_id in unfinished and run.end is not None
            }
            if not stay and not pending(content.runs.values()):
                break
            _pause(documents)
    except KeyboardInterrupt:
        left = [run for run in pending(store.read().runs.values()) if run.slice is not None]
        goes_on = f"; {len(left)} of its runs go on" if left else ""
        tell(f"no longer working{goes_on}; `fab queue work` works on, `fab queue cancel NUMBER` ends one")
        return DONE
    done = [run_id for run_id, outcome in ended.items() if outcome == "done"]
    tell(f"{len(done)} of {len(ended)} done; nothing waits or runs" if ended else "the queue is empty")
    return DONE if len(done) == len(ended) else FAILED


def _pause(documents: Documents) -> None:
    time.sleep(BUCKET_POLL_S if is_url(documents.url) else POLL_S)


def queue_state(run: Run) -> str:
    """Return what a submitted run is doing, in a word."""
    if run.end is not None:
        return run.end.outcome
    if run.is_unwanted:
        return "removing" if run.desired == "removed" else "stopping"
    if run.slice is None or run.attempt is None:
        return "waiting"
    return "running" if run.seen else "waiting" if run.attempt.has_joined else "starting"


def show(documents: Documents, *, everything: bool, as_json: bool) -> int:
    """Print the runs that wait or run, in their order, then some that have ended."""
    store = store_at(documents)
    content = store.read()
    entries = [run for run in content.runs.values() if run.submission is not None]
    waiting = policy.in_order(pending(entries))
    ended = sorted((run for run in entries if run.end), key=lambda run: run.end.at_s if run.end else 0.0)
    console = terminal()
    if as_json:
        print(json.dumps({"entries": [_described(run) for run in (*waiting, *ended)]}))
        return DONE
    for problem in content.unreadable.values():
        say(console)(printable(problem))
    if not entries:
        say(console)("the queue is empty; `fab submit` takes the options of `fab train`")
        return DONE
    shown = [*waiting, *(ended if everything else ended[-MOST_SHOWN:])]
    headings = ("entry", "name", "run", "priority", "state", "slice", "by", "age", "says")
    rows = table(*headings, right=("entry", "priority", "age"))
    for run in shown:
        assert run.submission is not None
        rows.add_row(
            str(run.submission.number),
            printable(run.name or run.submission.what),
            run.run_id if run.attempt else "-",
            str(run.priority),
            queue_state(run),
            printable(run.slice or " or ".join(run.slices)),
            printable(run.submission.by),
            _age(run.submission.added),
            printable(" ".join(" ".join(run.reason.splitlines()[:2]).split())),
        )
    console.print(rows)
    for slice_ in content.slices.values() if waiting else ():
        if slice_.requested and slice_.reason:
            say(console)(printable(f"{slice_.name}: {slice_.reason}"))
    if waiting and (line := neglected(store)):
        say(console)(line)
    if len(shown) < len(entries):
        say(console)(f"{len(entries) - len(shown)} more that have ended: `fab queue --all`")
    return DONE


def _described(run: Run) -> dict[str, object]:
    assert run.submission is not None
    submission = run.submission
    return {
        "number": submission.number, "what": submission.what, "name": run.name, "sweep": submission.sweep,
        "run_id": run.run_id if run.attempt else None, "state": queue_state(run), "slice": run.slice,
        "slices": list(run.slices), "priority": run.priority, "restarts": run.limits.restarts, "by": submission.by,
        "added": submission.added, "reason": run.reason, "where": dict(submission.where),
    }  # fmt: skip


MOST_SHOWN = 10


def _age(added: str) -> str:
    return spoken(max(0.0, time.time() - runs.parse_time(added)), units=1)


def cancel(documents: Documents, stack: TargetRequest, entries: Sequence[str], *, grace_s: float) -> int:
    """Take runs out of the queue; one that has started is stopped, with a checkpoint.

    Raises:
        RequestError: there is no such entry, or it has ended.
    """
    store, tell = store_at(documents), say(terminal())
    chosen = [run for entry in entries for run in chosen_by([*store.read().runs.values()], entry)]
    reason = f"by {getpass.getuser()}"

    def stopped(now: Run | None) -> Run | None:
        if now is None or now.end is not None:
            return now
        return dataclasses.replace(now.to_be("stopped"), stop_grace_s=grace_s, reason=reason)

    started = set[str]()
    for run in chosen:
        now = store.edit_run(run.run_id, stopped)
        if now is not None and now.attempt is not None and now.submission is not None:
            started.add(now.run_id)
            text = f"stopping entry {now.submission.number} ({now.run_id})"
            tell(f"{text}, up to {spoken(grace_s)} to save a checkpoint")
    world = World(documents, tell, program="fab queue cancel", request=stack)
    for _ in range(2):  # the second look sees that what was stopped is gone
        reconcile(store, world, tell, stack, [run.run_id for run in chosen])
    now_runs, code = store.read().runs, DONE
    ended = [run for run in chosen if (now := now_runs.get(run.run_id)) is None or now.end is not None]
    if cancelled := [
        str(run.submission.number) for run in ended if run.submission and run.run_id not in started
    ]:
        tell(f"cancelled: {', '.join(cancelled)}")
    for run in (run for run in chosen if run not in ended and run.submission):
        number = run.submission.number if run.submission else 0
        tell(
            f"entry {number} is not stopped yet: the keeper or the `fab queue work` that started it does so; "
            f"`fab queue` shows it, `fab queue cancel {number}` tries again"
        )
        code = FAILED
    return code


def move(documents: Documents, number: int, place: str, *, priority: int | None) -> int:
    """Change a run's place among those of its priority, or its priority. place: first, last, before:N or "".

    Raises:
        RequestError: there is no such entry or place, or the entry does not wait.
    """
    if place and not re.fullmatch(r"first|last|before:\d{1,9}", place):
        raise RequestError(f"{place}: is no place; choose first, last, or before:NUMBER")
    if not place and priority is None:
        raise RequestError(f"{number}: say where to, first, last or before:NUMBER, or give a --priority")
    store = store_at(documents)
    entries = [*store.read().runs.values()]
    run = numbered(entries, number)
    if queue_state(run) != "waiting":
        raise RequestError(f"{number}: is {queue_state(run)}; only entries that wait can be moved")
    waiting = [
        entry
        for entry in policy.in_order(pending(entries))
        if entry.run_id != run.run_id and entry.slice is None
    ]
    order, new_priority = run.order, run.priority if priority is None else priority
    if place == "first" and waiting:
        new_priority = max(entry.priority for entry in waiting)
        order = min(entry.order for entry in waiting) - 1.0
    elif place == "last" and waiting:
        new_priority = min(entry.priority for entry in waiting)
        order = max(entry.order for entry in waiting) + 1.0
    elif place:
        neighbour = (
            numbered(entries, int(place.removeprefix("before:"))) if place.startswith("before:") else run
        )
        earlier = [
            entry.order
            for entry in waiting
            if entry.priority == neighbour.priority and entry.order < neighbour.order
        ]
        new_priority, order = (
            neighbour.priority,
            (max(earlier, default=neighbour.order - 2.0) + neighbour.order) / 2,
        )

    def moved(now: Run | None) -> Run | None:
        if now is None or now.slice is not None:
            return now
        return dataclasses.replace(now, priority=new_priority, order=order, failed_starts=0)

    now = store.edit_run(run.run_id, moved)
    left = [
        entry.run_id for entry in policy.in_order(pending(store.read().runs.values())) if entry.slice is None
    ]
    is_waiting = now is not None and now.run_id in left
    text = f"number {left.index(run.run_id) + 1} of {len(left)} that wait" if is_waiting else "taken just now"
    say(terminal())(f"entry {number} is {text}")
    return DONE


def numbered(entries: Sequence[Run], number: int) -> Run:
    """Return the run with a number. Raises RequestError: there is none."""
    for run in entries:
        if run.submission is not None and run.submission.number == number:
            return run
    raise RequestError(f"{number}: the queue has no such entry; `fab queue --all` lists them")


def chosen_by(entries: Sequence[Run], text: str) -> list[Run]:
    """Return the submitted runs that have not ended and that a number, a sweep, the name or the id of a run means, or
    all of them by "all".

    Raises:
        RequestError: there is none.
    """
    waiting = pending(entries)
    if text == "all":
        return [*waiting]
    if text.isascii() and text.isdigit():
        run = numbered(entries, int(text))
        if run.end is not None:
            raise RequestError(f"{text}: the entry is {run.end.outcome} already")
        return [run]
    matching = [
        run for run in waiting if run.submission and text in (run.submission.sweep, run.name, run.run_id)
    ]
    if not matching:
        raise RequestError(f"{text}: no entry that waits or runs has this name; `fab queue` lists them")
    return matching


def compare(target: Target, name: str, *, as_json: bool) -> int:
    """Print what came of a sweep."""
    return sweep.compare(target, store_at(stack_documents(target)), name, as_json=as_json)
