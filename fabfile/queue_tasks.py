"""The tasks about a stack's queue: `fab submit`, `fab sweep`, `fab queue`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from contracts.errors import DONE, RequestError
from contracts.host_interface import STOP_GRACE_S
from fabfile.command import task
from fabfile.command_options import (
    flag,
    group,
    option,
    options,
    positionals,
    repeatable,
    seconds,
    whole_number,
)
from fabfile.selector import JSON, Selector
from fabfile.train_tasks import Training, prints_help

if TYPE_CHECKING:
    from keeper.queue_commands import Wishes
    from launch.request.run_request import Request
    from launch.targets import Target


@options
class Queued:
    """A run that is to wait in the queue."""

    priority: int = option(
        "entries of a higher one are taken first; may be negative (default: 0)", whole_number(), default=0
    )
    run: Training = group(
        Training,
        slice="the slice that it is to run on (default: any that it can run on)",
        name="a name of your own for the run, or the sweep",
    )

    def targets(self, request: Request) -> list[Target]:
        """Return the targets that it may run on. Raises RequestError: none of them has a queue."""
        from backends.resolve import read_inventory, resolve, slice_targets, with_expected_hosts

        place = self.run.place(request).request()
        targets = slice_targets(with_expected_hosts(read_inventory(place)), place) or [resolve(place)]
        able = [target for target in targets if "submit" not in target.capabilities.instead]
        return able or [target.require("submit") for target in targets]

    def wishes(self, request: Request) -> Wishes:
        from keeper.queue_commands import Wishes

        place = dataclasses.asdict(self.run.place(request))
        selector = {name: text for name, text in place.items() if text and name not in ("stack", "slice")}
        restarts = self.run.max_restarts or 0
        return Wishes(where=selector, priority=self.priority, restarts=restarts, track=self.run.track)


@options
class Submit:
    entry: Queued = group(Queued)


@task("fab submit --job flax_mlm --priority 1 -- --steps 2000")
def submit(args: Submit) -> int:
    """Put a run into the queue; it takes the options of `fab train`.

    The code is kept as it is now. The keeper, or `fab queue work`, starts the run when a slice is free.
    """
    from keeper import queue_commands

    request = args.entry.run.request()
    if prints_help(request):
        return DONE
    return queue_commands.submit(args.entry.targets(request), request, args.entry.wishes(request))


@options
class Sweep:
    grid: tuple[str, ...] = repeatable(
        "an option of the job and its values, as learning-rate=1e-4,3e-4; may be given several times"
    )
    seeds: int | None = option(
        "how many seeds each combination is run with (as the job's --seed)", whole_number(1)
    )
    entry: Queued = group(Queued)


@task("fab sweep --job flax_mlm --grid learning-rate=1e-4,3e-4 --seeds 3 -- --steps 2000")
def sweep(args: Sweep) -> int:
    """Put a family of runs that differ in options into the queue.

    `fab compare --sweep NAME` compares them.
    """
    from keeper import queue_commands

    request = args.entry.run.request()
    if prints_help(request):
        return DONE
    targets, wishes = args.entry.targets(request), args.entry.wishes(request)
    return queue_commands.submit_sweep(targets, request, wishes, grid=args.grid, seeds=args.seeds)


@options
class Queue:
    all: bool = flag("every entry (default: those that wait or run, and the last ten that have ended)")
    json: bool = flag(JSON)
    stay: bool = flag("with work: go on when the queue is empty, until Ctrl-C")
    priority: int | None = option("with move: the entry's new priority", whole_number())
    grace: float = option(
        "with cancel: seconds for saving a checkpoint (default: 120)", seconds(0), default=STOP_GRACE_S
    )
    selector: Selector = group(Selector, "stack", "slice", "runs")
    positionals: tuple[str, ...] = positionals("[WORDS]", needs="")


@task("fab queue", "fab queue work", "fab queue cancel 3", "fab queue move 3 first")
def queue(args: Queue) -> int:
    """Show the queue, work on it, or change its order.

    WORDS are work, cancel ENTRY …, or move ENTRY first (or last, before:N, --priority P). `work` starts what waits when
    a slice is free, until nothing waits or runs; several may work at once. An ENTRY to cancel is a number, the name or
    id of a run, a sweep, or all.
    """
    from keeper import queue_commands
    from keeper.stack_store import documents_for

    action, *names = args.positionals or ("show",)
    # A queue is there whether the stack has hosts or not.
    stack = args.selector.request()
    entries = documents_for(dataclasses.replace(stack, slice=None))
    if action == "show" and not names:
        return queue_commands.show(entries, everything=args.all, as_json=args.json)
    if action == "work" and not names:
        return queue_commands.work(entries, stack, stay=args.stay)
    if action == "cancel" and names:
        return queue_commands.cancel(entries, stack, names, grace_s=args.grace)
    if action == "move" and 1 <= len(names) <= 2:
        number = whole_number(1)("fab queue move", names[0])
        return queue_commands.move(entries, number, "".join(names[1:]), priority=args.priority)
    raise RequestError(
        f"fab queue {' '.join([action, *names])}: write fab queue, fab queue work, fab queue cancel ENTRY …, or fab "
        "queue move ENTRY first (or last, before:N, --priority P)"
    )
