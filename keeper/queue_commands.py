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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from backends.targets import inventory_of, of_each
from console import follow
from console import track as tracking
from contracts.durations import spoken
from contracts.errors import DONE, FAILED, RequestError
from contracts.files import is_url
from contracts.inventory import Slice
from infra.cloud_tpu.retry import CloudTpuError
from infra.documents import Documents
from infra.lease import Lease, LeaseHeldError, held, myself
from keeper import slices, store, sweep
from keeper.passes import Means
from keeper.queue import AT_WORK, Entry, Queue, State, describe, require
from keeper.queue_worker import Hold, Open, Opened, Worker
from keeper.queue_worker import work as work_on
from keeper.store import Stack, find_stack, neglected, read_wanted, store_of
from launch import launch as launching
from launch import runs
from launch.bundles import Bundle, left_out_lines
from launch.hosts import HostError
from launch.jobs import Submitted
from launch.launch import Request
from launch.output import printable, say, terminal
from launch.targets import Target, Wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is said of an entry besides its request. where: of its target besides stack and slice, as it is typed."""

    where: Mapping[str, str]
    priority: int
    restarts: int
    track: Sequence[str] | None


def submit(targets: Sequence[Target], asked: Request, wishes: Wishes) -> int:
    """Put a run into the queue of a stack. targets: of the slices that it may run on.

    Raises:
        RequestError: it could be carried out on none of them.
    """
    _check_name(targets[0], asked.name)
    return _add(targets, [asked], wishes)


def _check_name(target: Target, name: str | None) -> None:
    """Check a name where that can be done without hosts, or they answer; it is checked again when the run starts."""
    if is_url(target.runs_url) or target.hosts[0].internal_address:
        with contextlib.suppress(HostError):
            runs.check_name(target.runs, name)


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
    _check_name(targets[0], members[0].name)
    there = {entry.sweep for entry in _queue(targets[0]).entries()}
    if name in there or name in _sweeps(targets[0]):
        raise RequestError(f"--name {name}: is a sweep already; choose another name")
    code = _add(targets, members, wishes)
    where = targets[0].stack_option
    say(terminal())(f"sweep {name}: {len(members)} runs; `fab compare --sweep {name}{where}` compares them")
    return code


def _sweeps(target: Target) -> set[str]:
    """The names of the sweeps that runs are of; none where no host answers that could read them."""
    if not is_url(target.runs_url) and not target.hosts[0].internal_address:
        return set()
    try:
        return {str(sweep.of_run(run).get("name")) for run in runs.list_runs(target.runs)}
    except HostError:
        return set()


def _add(targets: Sequence[Target], several: Sequence[Request], wishes: Wishes) -> int:
    track = tracking.asked_for(wishes.track, os.environ, None)
    queue, entries = _queue(targets[0]), []
    bundles: dict[str, Bundle] = {}
    left_out: dict[str, None] = {}
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
        left_out |= dict.fromkeys(left_out_lines(submitted.bundles))
    added = queue.add(entries, [*bundles.values()])
    before = sum(entry.state == "waiting" for entry in queue.entries()) - len(added)
    numbers = f"entry {added[0].number}" + (f" to {added[-1].number}" if len(added) > 1 else "")
    where = targets[0].stack_option
    tell = say(terminal())
    for line in left_out:
        tell(line)
    tell(f"{numbers} of the queue, {before} waiting before; `fab queue work{where}` or the keeper starts it")
    if not any(target.hosts[0].internal_address for target in targets):
        tell(f"{targets[0].slice.name} has no hosts now; `pulumi up --refresh` or its keeper asks for them")
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


def work(queue: Queue, open_stack: Open, *, stay: bool) -> int:
    """Take entries of the queue to the slices that are free, until none waits or runs; with `stay` until Ctrl-C."""
    tell, documents = say(terminal()), queue.documents
    worker = Worker(queue, open_stack, leases_of(documents, "fab queue work"), tell)
    try:
        return work_on(worker, queue, tell, stay=stay)
    except KeyboardInterrupt:
        left = [entry for entry in queue.entries() if entry.state in AT_WORK]
        goes_on = f"; {len(left)} of its runs go on" if left else ""
        tell(f"no longer working{goes_on}; `fab queue work` works on, `fab queue cancel NUMBER` ends one")
        return DONE


def opened(asked: Wanted) -> Opened:
    """Return a stack, or this machine, as it is now, as a Worker wants it.

    Raises:
        RequestError: there is no such stack.
    """
    inventory = inventory_of(asked)
    names = frozenset(each.name for each in inventory.slices)
    return Opened(slices=names, targets=of_each(inventory, asked))


def attend(means: Means) -> None:
    """Do for the queue what a look of the keeper does: have its slices, see to what runs, start what waits.

    Raises:
        RequestError: the stack cannot be read.
    """
    documents, hosts, say = means.documents, means.hosts, means.say
    queue = Queue(documents)
    pending = [entry for entry in queue.entries() if entry.is_pending]
    if not pending and not any(each.for_queue for each in means.wanted.values()):
        return
    stack = find_stack(documents)
    if stack is not None:
        stack = slices.with_newest(stack, documents)
        stack.take_environment()
        if any(entry.state == "waiting" for entry in pending):
            stack = _with_hosts(means, stack)
        _want_slices(means, stack, slices_needed(pending, stack))
    if not pending:
        return

    def open_stack(where: Mapping[str, str]) -> Opened:
        if stack is None:
            return opened(Wanted(**where))  # type: ignore[arg-type]  # texts alone
        names = [each.name for each in stack.inventory.slices if each.hosts]
        return Opened(
            slices=frozenset(each.name for each in stack.inventory.slices),
            targets=[hosts.on(stack, name, where.get("runs")) for name in names],
        )

    Worker(queue, open_stack, leases_of(documents, "the keeper"), say).step()


def slices_needed(pending: Sequence[Entry], stack: Stack) -> set[str]:
    """Return the queued slices that are needed: where entries run, and one for those that wait. Pure."""
    there = {each.name for each in stack.inventory.slices if each.hosts}
    needed = {each.slice for each in pending if each.state in AT_WORK and each.slice is not None}
    for each in pending:
        if each.state == "waiting" and needed.isdisjoint(each.slices):
            needed.add(next((name for name in each.slices if name in there), each.slices[0]))
    return needed & {*stack.slices}


def _want_slices(means: Means, stack: Stack, needed: Collection[str]) -> None:
    """Let the keeper have the slices that the queue needs, and these alone.

    One that was refused is not asked for again until somebody has brought it back.
    """
    before = {each.slice: each for each in read_wanted(means.documents).values() if each.for_queue}
    now_s = means.documents.now_s()

    def fresh(name: str, **more: Any) -> store.Wanted:
        known = next(each for each in stack.inventory.slices if each.name == name)
        return store.Wanted(
            run_id=f"{FOR_QUEUE}{name}",
            stack=stack.inventory.stack,
            slice=name,
            runs_url="",
            added_s=now_s,
            project=stack.project,
            origin=known.origin,
            reason="entries of the queue need it",
            for_queue=True,
            **more,
        )

    for name in {*needed} - {*before}:
        one = fresh(name)
        store.change_wanted(means.documents, one.run_id, lambda found, one=one: found or one)  # type: ignore[misc]
    for name, each in before.items():
        if name not in needed:
            store.change_wanted(means.documents, each.run_id, lambda _: None)
        elif each.state == "ended" and _seen(means, stack, name) is not None:
            back = fresh(name, state="recovering", slice_lost=True)  # its hosts are new, and not prepared
            store.change_wanted(means.documents, each.run_id, lambda _, back=back: back)  # type: ignore[misc]


def _seen(means: Means, stack: Stack, name: str) -> Slice | None:
    """A slice as Google has it; None where it is not there, or that cannot be seen now, which is said."""
    try:
        return slices.seen(means.client(), means.backoff, stack, name)
    except CloudTpuError as error:
        means.say(f"{name}: {error}")
        return None


FOR_QUEUE = "queue/"
"""What the id of a slice that is kept for the queue begins with, where others have the id of a run."""


def _with_hosts(means: Means, stack: Stack) -> Stack:
    """The stack with the hosts that its slices have now: what `pulumi up` wrote for the keeper names none."""
    now = {each.name: each for each in stack.inventory.slices}
    for name in stack.slices:
        fresh = _seen(means, stack, name)
        if fresh is not None and fresh != now[name]:
            slices.record(means.documents, fresh)
        now[name] = fresh or dataclasses.replace(now[name], hosts=())
    inventory = dataclasses.replace(stack.inventory, slices=tuple(now.values()))
    return dataclasses.replace(stack, inventory=inventory)


def leases_of(documents: Documents, program: str) -> Hold:
    """Return what holds the lease of a slice, as a Worker wants it; None too while its hosts are not prepared yet."""

    @contextlib.contextmanager
    def hold(slice_name: str) -> Iterator[Callable[[], object] | None]:
        with contextlib.ExitStack() as block:
            try:
                mine = block.enter_context(held(Lease(documents, slice_name, myself(program))))
            except LeaseHeldError:
                yield None
                return
            is_awaited = any(
                each.for_queue and each.slice == slice_name and each.state in ("waiting", "recovering")
                for each in read_wanted(documents).values()
            )
            yield None if is_awaited else mine.require

    return hold


def show(queue: Queue, *, everything: bool, as_json: bool) -> int:
    """Print the entries that wait or run, in their order, then some that have ended."""
    entries = queue.entries()
    console = terminal()
    if as_json:
        left_out = ("request", "submitted", "bundles")
        listed = [
            {name: value for name, value in dataclasses.asdict(each).items() if name not in left_out}
            | {"name": each.request["name"], "sweep": each.sweep}
            for each in entries
        ]
        print(json.dumps({"entries": listed}))
        return DONE
    if not entries:
        say(console)("the queue is empty; `fab submit` takes the options of `fab train`")
        return DONE
    pending = [each for each in entries if each.is_pending]
    ended = [each for each in entries if not each.is_pending]
    shown = [*pending, *(ended if everything else ended[-MOST_SHOWN:])]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("entry", "name", "run", "priority", "state", "slice", "by", "age", "says"):
        right = heading in ("entry", "priority", "age")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for each in shown:
        table.add_row(
            str(each.number),
            printable(each.request["name"] or each.what),
            each.run_id or "-",
            str(each.priority),
            each.state,
            printable(
                " or ".join(each.slices) if each.slice is None or each.state == "waiting" else each.slice
            ),
            printable(each.by),
            _age(each.added),
            printable(" ".join(" ".join(each.reason.splitlines()[:2]).split())),
        )
    console.print(table)
    for kept in read_wanted(queue.documents).values() if pending else ():
        if kept.for_queue and kept.state != "watched":
            say(console)(printable(f"{kept.slice}: {kept.reason}"))
    if pending and (line := neglected(queue.documents)):
        say(console)(line)
    if len(shown) < len(entries):
        say(console)(f"{len(entries) - len(shown)} more that have ended: `fab queue --all`")
    return DONE


MOST_SHOWN = 10


def _age(added: str) -> str:
    return spoken(max(0.0, time.time() - runs.parse_time(added)), units=1)


def cancel(queue: Queue, open_stack: Open, wanted: Sequence[str], *, grace_s: float) -> int:
    """Take entries out of the queue; a run that has started is stopped, with a checkpoint.

    Raises:
        RequestError: there is no such entry, or it has ended.
    """
    chosen = [entry for text in wanted for entry in chosen_by(queue.entries(), text)]
    numbers = {entry.number for entry in chosen}

    def end(each: Entry) -> Entry:
        if each.number not in numbers or not each.is_pending:
            return each
        state: State = "stopping" if each.state in AT_WORK else "cancelled"
        return dataclasses.replace(each, state=state, reason=f"by {getpass.getuser()}")

    now = queue.change_all(lambda entries: [end(each) for each in entries])
    tell, code = say(terminal()), DONE
    if ended := [str(each.number) for each in now if each.number in numbers and each.state == "cancelled"]:
        tell(f"cancelled: {', '.join(ended)}")
    hold = leases_of(queue.documents, "fab queue cancel")
    worker = Worker(queue, open_stack, hold, tell, stop_grace_s=grace_s)
    for entry in (each for each in now if each.number in numbers and each.state == "stopping"):
        tell(f"stopping entry {entry.number} ({entry.run_id}), up to {spoken(grace_s)} to save a checkpoint")
        if not worker.stop(entry):
            tell(
                f"entry {entry.number} is not stopped yet: the keeper or the `fab queue work` that started it does so; "
                f"`fab queue` shows it, `fab queue cancel {entry.number}` tries again"
            )
            code = FAILED
    return code


def move(queue: Queue, number: int, place: str, *, priority: int | None) -> int:
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
    queue.change_all(moved)
    waiting = [each.number for each in queue.entries() if each.state == "waiting"]
    said = (
        f"number {waiting.index(number) + 1} of {len(waiting)} that wait"
        if number in waiting
        else "taken just now"
    )
    say(terminal())(f"entry {number} is {said}")
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
