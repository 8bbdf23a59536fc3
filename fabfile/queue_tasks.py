"""The tasks about a stack's queue: `fab submit`, `fab sweep`, `fab queue`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contracts.errors import DONE, RequestError
from fabfile import options
from fabfile.options import SLICES, reported, task, whole, with_options_of
from fabfile.tasks import JSON, RUNS, TRAIN, asked_for, prints_help, train

if TYPE_CHECKING:
    from keeper.queue import Queue
    from keeper.queue_commands import Wishes
    from keeper.queue_worker import Open
    from launch.launch import Request
    from launch.targets import Target

SUBMIT = {
    **TRAIN,
    "slice": "the slice that it is to run on (default: any that it can run on)",
    "name": "a name of your own for the run, or the sweep",
    "priority": "entries of a higher one are taken first; may be negative (default: 0)",
}
NOT_QUEUED = ("resume", "dry_run", "detach", "keep", "keep_attempts", "keep_hours")
OF_TARGET = ("hosts", "platform", "python", "runs")


@task(help=SUBMIT, iterable=["send"])
@reported
@with_options_of(train.body, without=NOT_QUEUED)
def submit(c: Any, priority: str = "0", **given: str) -> int:
    """Put a run into the queue; it takes the options of `fab train`.

    The code is kept as it is now. The keeper, or `fab queue work`, starts the run when a slice is free.
    """
    from keeper import queue_commands

    asked, targets, wishes = _read(c, priority, given)
    if prints_help(asked):
        return DONE
    return queue_commands.submit(targets, asked, wishes)


@task(
    help={
        **SUBMIT,
        "grid": "an option of the job and its values, as learning-rate=1e-4,3e-4; may be given several times",
        "seeds": "how many seeds each combination is run with (as the job's --seed)",
    },
    iterable=["grid", "send"],
)
@reported
@with_options_of(train.body, without=NOT_QUEUED)
def sweep(
    c: Any, grid: Sequence[str] | None = None, seeds: str = "", priority: str = "0", **given: str
) -> int:
    """Put a family of runs that differ in options into the queue.

    As in: fab sweep --job flax_mlm --grid learning-rate=1e-4,3e-4 --seeds 3 -- --steps 2000
    `fab compare --sweep NAME` compares them.
    """
    from keeper import queue_commands

    asked, targets, wishes = _read(c, priority, given)
    if prints_help(asked):
        return DONE
    return queue_commands.submit_sweep(
        targets, asked, wishes, grid=grid or (), seeds=whole("--seeds", seeds, least=1)
    )


@task(
    help={
        "all": "every entry (default: those that wait or run, and the last ten that have ended)",
        "json": JSON,
        "stay": "with work: go on when the queue is empty, until Ctrl-C",
        "priority": "with move: the entry's new priority",
        "grace": "with cancel: seconds for saving a checkpoint (default: 120)",
        **SLICES,
        "runs": RUNS,
    },
    positional=[],
)
@reported
def queue(
    c: Any,
    all: bool = False,
    json: bool = False,
    stay: bool = False,
    priority: str = "",
    grace: str = "120",
    stack: str = "",
    slice: str = "",
    runs: str = "",
) -> int:
    """Show the queue, work on it, or change its order.

    fab queue; fab queue work; fab queue cancel ENTRY …; fab queue move ENTRY first (or last, before:N, --priority P)
    `work` starts what waits when a slice is free, until nothing waits or runs. Several may work at once. An ENTRY to
    cancel is a number, the name or id of a run, a sweep, or all.
    """
    from keeper import queue_commands

    action, *words = options.after_dashes(c) or ["show"]
    found, open_stack = _queue(stack, runs), _opener(stack, slice, runs)
    if action == "show" and not words:
        return queue_commands.show(found, everything=all, as_json=json)
    if action == "work" and not words:
        return queue_commands.work(found, open_stack, stay=stay)
    if action == "cancel" and words:
        grace_s = float(whole("--grace", grace, least=0) or 0)
        return queue_commands.cancel(found, open_stack, words, grace_s=grace_s)
    if action == "move" and 1 <= len(words) <= 2:
        number = whole("fab queue move", words[0], least=1) or 0
        wanted = _priority(priority) if priority else None
        return queue_commands.move(found, number, "".join(words[1:]), priority=wanted)
    raise RequestError(
        f"fab queue {' '.join([action, *words])}: write fab queue, fab queue work, fab queue cancel ENTRY …, or fab "
        "queue move ENTRY first (or last, before:N, --priority P)"
    )


def _read(c: Any, priority: str, given: Mapping[str, str]) -> tuple[Request, list[Target], Wishes]:
    """Return what is to be queued, and the targets that it may run on."""
    from backends.targets import inventory_of, of_each, resolve
    from keeper.queue_commands import Wishes
    from launch.targets import with_expected_hosts

    rest = {
        name: given[name]
        for name in given
        if name not in ("stack", "slice", "track", "max_restarts", *OF_TARGET)
    }
    asked = asked_for(c, python=given["python"], **rest)
    where = {
        name: given[name] for name in OF_TARGET if given[name] and not (name == "python" and asked.command)
    }
    wanted = options.wanted(given["stack"], given["slice"], **where)
    targets = of_each(with_expected_hosts(inventory_of(wanted)), wanted) or [resolve(wanted)]
    able = [target for target in targets if "submit" not in target.capabilities.instead]
    targets = able or [target.require("submit") for target in targets]
    restarts = whole("--max-restarts", given["max_restarts"], least=0) or 0
    return (
        asked,
        targets,
        Wishes(where=where, priority=_priority(priority), restarts=restarts, track=given["track"]),
    )


def _queue(stack: str, runs: str) -> Queue:
    """Return the queue of a stack, whether it has hosts or not."""
    from keeper.queue import Queue
    from keeper.store import documents_for

    return Queue(documents_for(options.wanted(stack, runs=runs)))


def _opener(stack: str, slice: str, runs: str) -> Open:
    from keeper.queue_commands import opened

    return lambda where: opened(options.wanted(stack, slice, **{"runs": runs, **where}))


def _priority(text: str) -> int:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    return sign * (whole("--priority", digits, least=0) or 0)
