"""The tasks that let a run go on after a loss: `fab recover`, and those about a stack's keeper."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from contracts.errors import RequestError
from fabfile.command import task
from fabfile.command_options import argument, flag, group, option, options, seconds
from fabfile.selector import RUN, Selector
from fabfile.train_tasks import KeepLimits

if TYPE_CHECKING:
    from launch.targets import Target


@options
class Recover:
    run: str = argument(RUN)
    selector: Selector = group(Selector, "stack", "slice", "hosts", "runs", "platform", "python")
    detach: bool = flag("return when the run has started")


@task("fab recover latest --stack dev", outlives_signals=True)
def recover(args: Recover) -> int:
    """Restore the slice of a run, then resume the run."""
    from console import follow

    return follow.go_on(args.selector.target, args.run, detach=args.detach)


@options
class Keep:
    run: str = argument(RUN)
    limits: KeepLimits = group(KeepLimits)
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab keep latest --stack dev --keep-hours 48")
def keep(args: Keep) -> int:
    """Let the stack's keeper resume a run after a loss."""
    from keeper import keep_commands

    def on(name: str) -> Target:
        return dataclasses.replace(args.selector, slice=args.selector.slice or name).target()

    return keep_commands.keep(args.selector.any_target(), on, args.run, args.limits.hand_over())


@options
class Unkeep:
    run: str = argument(RUN)
    selector: Selector = group(Selector, "stack", "runs")


@task("fab unkeep latest --stack dev")
def unkeep(args: Unkeep) -> int:
    """Keep a run no more; if it runs, it goes on."""
    from keeper import keep_commands
    from keeper.stack_store import documents_for

    return keep_commands.unkeep(documents_for(args.selector.request()), args.run)


@options
class Keeper:
    action: str = argument(
        "status: what it did and will do; run: a pass now, from here; install: put it on the gateway"
    )
    every: float = option("with `run`: a pass every so many seconds, until Ctrl-C", seconds(1), default=0.0)
    here: bool = flag("with `install`: put it on this machine, as a timer of this user")
    selector: Selector = group(Selector, "stack", "runs")


@task("fab keeper status --stack dev")
def keeper(args: Keeper) -> int:
    """Show what the keeper does, carry out a pass, or install it."""
    from keeper import installation, keep_commands
    from keeper.__main__ import watch
    from keeper.stack_store import documents_for

    if args.action == "install":
        return installation.install(args.selector.inventory(), on_this_machine=args.here)
    if args.action not in ("status", "run"):
        raise RequestError(f'"{args.action}" is none of status, run, install')
    documents = documents_for(args.selector.request())
    if args.action == "status":
        return keep_commands.status(documents)
    return watch(documents, functools.partial(print, flush=True), every_s=args.every)
