"""`fab submit`, `sweep` and `queue`: one function a command, each returning its exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import getpass
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table

from contracts.errors import DONE, FAILED, RequestError
from infra.documents import Documents
from infra.lease import Lease, LeaseHeldError, held, myself
from keeper import slices, sweep
from keeper.passes import Means
from keeper.queue import AT_WORK, Entry, Queue, describe, require
from keeper.queue_worker import Open, Worker
from keeper.queue_worker import work as work_on
from keeper.store import Stack, find_stack, read_wanted, store_of
from launch import follow, runs
from launch import launch as launching
from launch.commands import console as consoles
from launch.commands import track as tracking
from launch.display import printable, say, terminal
from launch.jobs import Bundle, Submitted
from launch.launch import Request
from launch.targets import Target, Wanted, resolve_each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is said of an entry besides its request. where: of its target besides stack and slice, as it is typed."""

    where: Mapping[str, str]
    priority: int
    restarts: int
    track: str


def submit(targets: Sequence[Target], asked: Request, wishes: Wishes) -> int:
    """Put a run into the queue of a stack. targets: of the slices that it may run on.

    Raises:
        RequestError: it could be carried out on none of them.
    """
    runs.check_name(targets[0].runs, asked.name)
    return _add(targets, [asked], wishes)


def submit_sweep(
    targets: Sequence[Target], asked: Request, wishes: Wishes, *, grid: Sequence[str], seeds: int | None
) -> int:
    """Put a family of runs into the queue, all or none.

    Raises:
        RequestError: the grid is none, its name is taken, or a member could not be carried out.
    """
    follow.require_job(asked)
    now = datetime.datetime.now(datetime.UTC)
    name = asked.name or f"{asked.job or 'sweep'}-{now:%Y%m%d-%H%M%S}"
    members = [*sweep.requests(asked, name, sweep.members(grid, seeds))]
    runs.check_name(targets[0].runs, members[0].name)
    there = {entry.sweep for entry in _queue(targets[0]).entries()}
    if name in there or any(sweep.of_run(run).get("name") == name for run in runs.list_runs(targets[0].runs)):
        raise RequestError(f"--name {name}: is a sweep already; choose another name")
    code = _add(targets, members, wishes)
    where = "" if targets[0].is_local else f" --stack {targets[0].name}"
    say(terminal())(f"sweep {name}: {len(members)} runs; `fab compare --sweep {name}{where}` compares them")
    return code


def _add(targets: Sequence[Target], several: Sequence[Request], wishes: Wishes) -> int:
    track = tracking.asked_for(wishes.track, os.environ, None)
    queue, entries = _queue(targets[0]), []
    bundles: dict[str, Bundle] = {}
    for asked in several:
        follow.require_job(asked)
        submitted, fitting = _checked(targets, asked)
        entries.append(
            Entry(
                number=0,
                what=_what(submitted),
                **describe(dataclasses.replace(asked, job=submitted.name, track=track), submitted),
                where=wishes.where,
                slices=fitting,
                by=getpass.getuser(),
                added=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                priority=wishes.priority,
                restarts=wishes.restarts,
            )
        )
        bundles |= {bundle.sha256: bundle for bundle in submitted.bundles}
    added = queue.add(entries, [*bundles.values()])
    before = sum(entry.state == "waiting" for entry in queue.entries()) - len(added)
    numbers = f"entry {added[0].number}" + (f" to {added[-1].number}" if len(added) > 1 else "")
    where = "" if targets[0].is_local else f" --stack {targets[0].name}"
    say(terminal())(
        f"{numbers} of the queue, {before} waiting before; `fab queue work{where}` or the keeper starts it"
    )
    return DONE


def _checked(targets: Sequence[Target], asked: Request) -> tuple[Submitted, tuple[str, ...]]:
    """Return what is run, and the slices that it can run on.

    Raises:
        RequestError: there is none.
    """
    fitting, problems, found = [], [], None
    for target in targets:
        try:  # a name is checked once, and not for each slice and member
            found = launching.submitted(launching.work_out(dataclasses.replace(asked, name=None), target))
            fitting.append(target.slice.name)
        except RequestError as error:
            problems.append(str(error) if len(targets) == 1 else f"{target.slice.name}: {error}")
    if found is None:
        raise RequestError("\n".join(problems))
    return found, tuple(fitting)


def _what(submitted: Submitted) -> str:
    words = (
        [str(word) for word in submitted.options["words"]] if submitted.is_own_command else [submitted.name]
    )
    return next((word for word in words if word.endswith((".py", ".sh"))), words[0]).rpartition("/")[2]


def work(target: Target, open_targets: Open, *, stay: bool) -> int:
    """Take entries of the queue to the slices that are free, until none waits or runs; with `stay` until Ctrl-C."""
    documents = store_of(target)
    queue, tell = Queue(documents), say(terminal())
    worker = Worker(
        queue, open_targets, leases_of(documents, "fab queue work"), tell, lambda: kept_runs(documents)
    )
    try:
        return work_on(worker, queue, tell, stay=stay)
    except KeyboardInterrupt:
        left = [entry for entry in queue.entries() if entry.state in AT_WORK]
        goes_on = f"; {len(left)} of its runs go on" if left else ""
        tell(f"no longer working{goes_on}; `fab queue work` works on, `fab queue cancel NUMBER` ends one")
        return DONE


def attend(means: Means) -> None:
    """Do for the queue what a look of the keeper does: see to what runs, start what waits.

    Raises:
        RequestError: the stack cannot be read.
        CloudTpuError: Google does not tell which hosts there are.
    """
    documents, hosts, say = means.documents, means.hosts, means.say
    queue = Queue(documents)
    pending = [entry for entry in queue.entries() if entry.is_pending]
    if not pending:
        return
    stack = find_stack(documents)
    if stack is not None:
        stack = slices.with_newest(stack, documents)
        stack.take_environment()
        if any(entry.state == "waiting" for entry in pending):
            stack = _with_hosts(means, stack)

    def targets_of(where: Mapping[str, str]) -> list[Target]:
        if stack is None:
            return resolve_each(Wanted(**where))  # type: ignore[arg-type]  # texts alone
        names = [each.name for each in stack.inventory.slices if each.hosts]
        return [hosts.on(stack, name, where.get("runs")) for name in names]

    hold = leases_of(documents, "the keeper")
    Worker(queue, targets_of, hold, say, lambda: kept_runs(documents)).step()


def _with_hosts(means: Means, stack: Stack) -> Stack:
    """The stack with the hosts that its slices have now: what `pulumi up` wrote for the keeper names none."""
    now = {each.name: each for each in stack.inventory.slices}
    for name in stack.slices:
        fresh = slices.seen(means.client(), means.backoff, stack, name)
        if fresh is not None and fresh != now[name]:
            slices.record(means.documents, fresh)
        now[name] = fresh or dataclasses.replace(now[name], hosts=())
    inventory = dataclasses.replace(stack.inventory, slices=tuple(now.values()))
    return dataclasses.replace(stack, inventory=inventory)


def kept_runs(documents: Documents) -> set[str]:
    """Return the runs that the keeper resumes, which a worker leaves to it."""
    return {run_id for run_id, each in read_wanted(documents).items() if each.state != "ended"}


def leases_of(documents: Documents, program: str) -> Callable[[str], contextlib.AbstractContextManager[bool]]:
    """Return what holds the lease of a slice, as a Worker wants it."""

    @contextlib.contextmanager
    def hold(slice_name: str) -> Iterator[bool]:
        with contextlib.ExitStack() as block:
            try:
                block.enter_context(held(Lease(documents, slice_name, myself(program))))
            except LeaseHeldError:
                yield False
                return
            yield True

    return hold


def show(target: Target, *, everything: bool, as_json: bool) -> int:
    """Print the entries that wait or run, in their order, then some that have ended."""
    entries = _queue(target).entries()
    console = terminal()
    if as_json:
        left_out = ("request", "submitted", "bundles")
        listed = [
            {k: v for k, v in dataclasses.asdict(each).items() if k not in left_out} for each in entries
        ]
        print(
            json.dumps(
                {"entries": [{**each, "sweep": e.sweep} for each, e in zip(listed, entries, strict=True)]}
            )
        )
        return DONE
    if not entries:
        say(console)("the queue is empty; `fab submit` takes the options of `fab train`")
        return DONE
    pending = [each for each in entries if each.is_pending]
    ended = [each for each in entries if not each.is_pending]
    shown = [*pending, *(ended if everything else ended[-MOST_SHOWN:])]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("entry", "run", "priority", "state", "slice", "by", "age", "says"):
        right = heading in ("entry", "priority", "age")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for each in shown:
        table.add_row(
            str(each.number),
            printable(each.run_id or each.request["name"] or each.what),
            str(each.priority),
            each.state,
            printable(each.slice or " or ".join(each.slices)),
            printable(each.by),
            _age(each.added),
            printable(each.reason.partition("\n")[0]),
        )
    console.print(table)
    if len(shown) < len(entries):
        say(console)(f"{len(entries) - len(shown)} more that have ended: `fab queue --all`")
    return DONE


MOST_SHOWN = 10


def _age(added: str) -> str:
    from contracts.durations import spoken

    return spoken(max(0.0, time.time() - runs.parse_time(added)), units=1)


def cancel(target: Target, open_targets: Open, wanted: Sequence[str], *, grace_s: float) -> int:
    """Take entries out of the queue; a run that has started is stopped, with a checkpoint.

    Raises:
        RequestError: there is no such entry, or it has ended.
    """
    queue = _queue(target)
    chosen = [entry for text in wanted for entry in chosen_by(queue.entries(), text)]
    numbers = {entry.number for entry in chosen}
    stopping: list[Entry] = []

    def end(entries: list[Entry]) -> list[Entry]:
        stopping[:] = [each for each in entries if each.number in numbers and each.state == "running"]
        return [
            dataclasses.replace(each, state="cancelled", reason=f"by {getpass.getuser()}")
            if each.number in numbers and each.is_pending
            else each
            for each in entries
        ]

    queue.change_all(end)
    tell, code = say(terminal()), DONE
    tell(f"cancelled: {', '.join(str(number) for number in sorted(numbers))}")
    for entry in stopping:
        where = next((each for each in open_targets(entry.where) if each.slice.name == entry.slice), None)
        stopped = FAILED if where is None else consoles.stop(where, entry.run_id, grace_s=grace_s)
        if stopped != DONE:
            tell(
                f"{entry.run_id} may go on: `fab status --run {entry.run_id}`, `fab stop --run {entry.run_id}`"
            )
            code = FAILED
    return code


def move(target: Target, number: int, place: str, *, priority: int | None) -> int:
    """Change an entry's place among those of its priority, or its priority. place: first, last, before:N or "".

    Raises:
        RequestError: there is no such entry or place, or the entry does not wait.
    """

    def moved(entries: list[Entry]) -> list[Entry]:
        entry = require(entries, number)
        if entry.state != "waiting":
            raise RequestError(f"{number}: is {entry.state}; only entries that wait can be moved")
        others = [each for each in entries if each is not entry]
        wanted = entry.priority if priority is None else priority
        index = entries.index(entry)
        if place == "first":
            index, wanted = (
                0,
                max([each.priority for each in others if each.state == "waiting"], default=wanted),
            )
        elif place == "last":
            index = len(others)
            wanted = min([each.priority for each in others if each.state == "waiting"], default=wanted)
        elif place:
            before = require(others, int(place.removeprefix("before:")))
            index, wanted = others.index(before), before.priority
        fresh = dataclasses.replace(entry, priority=wanted, starts=0)
        return [*others[:index], fresh, *others[index:]]

    if place and not re.fullmatch(r"first|last|before:\d{1,9}", place):
        raise RequestError(f"{place}: is no place; choose first, last, or before:NUMBER")
    if not place and priority is None:
        raise RequestError(f"{number}: say where to, first, last or before:NUMBER, or give a --priority")
    queue = _queue(target)
    queue.change_all(moved)
    waiting = [each.number for each in queue.entries() if each.state == "waiting"]
    say(terminal())(f"entry {number} is number {waiting.index(number) + 1} of {len(waiting)} that wait")
    return DONE


def chosen_by(entries: Sequence[Entry], text: str) -> list[Entry]:
    """Return the pending entries that a number, a sweep, the name or the id of a run means, or all of them by "all".

    Raises:
        RequestError: there is none.
    """
    pending = [each for each in entries if each.is_pending]
    if text == "all":
        found = pending
    elif text.isascii() and text.isdigit():
        entry = require(entries, int(text))
        if not entry.is_pending:
            raise RequestError(f"{text}: the entry is {entry.state} already")
        found = [entry]
    else:
        found = [each for each in pending if text in (each.sweep, each.request["name"], each.run_id)]
    if not found and text != "all":
        raise RequestError(f"{text}: no entry that waits or runs has this name; `fab queue` lists them")
    return found


def compare(target: Target, name: str, *, as_json: bool) -> int:
    """Print what came of a sweep."""
    return sweep.compare(target, _queue(target), name, as_json=as_json)


def _queue(target: Target) -> Queue:
    return Queue(store_of(target))
