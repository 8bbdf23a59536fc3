"""The tasks that look at runs, stop them and remove them."""

from __future__ import annotations

import dataclasses
import functools

from contracts.errors import RequestError
from fabfile.command import task
from fabfile.command_options import (
    argument,
    flag,
    group,
    option,
    options,
    port,
    positionals,
    seconds,
    trackers,
    whole_number,
)
from fabfile.selector import JSON, RUN, STACK, Selector

YES = "ask nothing"


@options
class Runs:
    all: bool = flag("every run (default: the latest 20)")
    json: bool = flag(JSON)
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab runs --stack dev")
def runs(args: Runs) -> int:
    """List the runs: state, step, metrics, age."""
    from console import status as status_command

    return status_command.list_runs(args.selector.target(), limit=None if args.all else 20, as_json=args.json)


@options
class Compare:
    sweep: str | None = option("a sweep of `fab sweep`, over its seeds")
    json: bool = flag(JSON)
    selector: Selector = group(Selector, "stack", "slice", "runs")
    runs: tuple[str, ...] = positionals("RUN …", needs="RUNs to compare", unless="sweep")


@task("fab compare latest latest:jax_hello", "fab compare --sweep rates")
def compare(args: Compare) -> int:
    """Compare runs, or a sweep: the settings, what was measured."""
    from console import status as status_command

    if not args.sweep:
        return status_command.compare(args.selector.target(), args.runs, as_json=args.json)
    if args.runs:
        raise RequestError(f"--sweep {args.sweep}: compares all its runs; leave {' '.join(args.runs)} out")
    from keeper import queue_commands

    return queue_commands.compare(args.selector.any_target(), args.sweep, as_json=args.json)


@options
class Costs:
    json: bool = flag(JSON)
    selector: Selector = group(Selector, "stack", "runs", stack=f"{STACK}; several as dev,prod")


@task("fab costs --stack dev")
def costs(args: Costs) -> int:
    """Say by month what slices did and what that cost."""
    from console import status as status_command

    places = [
        dataclasses.replace(args.selector, stack=stack) for stack in (args.selector.stack or "").split(",")
    ]
    return status_command.costs_by_month([place.any_target() for place in places], as_json=args.json)


@options
class Dashboard:
    port: int = option("the port on 127.0.0.1; 0: any that is free (default: 8760)", port, default=8760)
    selector: Selector = group(
        Selector,
        "stack",
        "slice",
        "runs",
        stack=f"{STACK}; several as local,dev",
        runs="where runs are kept (default: where `fab train` keeps them); several as FOLDER,gs://…",
    )


@task("fab dashboard --stack local,dev")
def dashboard(args: Dashboard) -> int:
    """Show runs in a browser: curves, hosts, logs, settings."""
    from console.dashboard import dashboard_server

    places = [
        dataclasses.replace(args.selector, stack=stack, runs=folder)
        for stack in (args.selector.stack or "").split(",")
        for folder in (args.selector.runs or "").split(",")
    ]
    return dashboard_server.serve([place.target() for place in places], port=args.port)


@options
class Track:
    run: str = argument(RUN)
    to: tuple[str, ...] | None = option(
        "mlflow, wandb, or both with a comma between (default: those of `fab train --track`)", trackers
    )
    limit: float = option(
        "seconds to try a tracker that is away, once the run has ended (default: 60)",
        seconds(0),
        default=60.0,
    )
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab track latest --to mlflow")
def track(args: Track) -> int:
    """Mirror a run to MLflow or Weights & Biases."""
    from console import track as tracking

    return tracking.track(args.selector.target(), args.run, args.to, limit_s=args.limit)


@options
class Notify:
    test: bool = flag("send a message to each channel")


@task("fab notify --test")
def notify(args: Notify) -> int:
    """Say to which channels a run's end is sent."""
    from console import notify

    return notify.command(test=args.test)


@options
class Rm:
    run: str = argument(RUN)
    yes: bool = flag(YES)
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab rm latest")
def rm(args: Rm) -> int:
    """Remove a run."""
    from console import removal
    from keeper import keep_commands

    target = args.selector.target()
    mark = functools.partial(keep_commands.remove, target, args.selector.request())
    return removal.remove(target, args.run, yes=args.yes, mark=mark)


@options
class Prune:
    keep: int = option("how many runs to keep (default: 20)", whole_number(0), default=20)
    yes: bool = flag(YES)
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab prune --keep 5")
def prune(args: Prune) -> int:
    """Remove all runs but the newest."""
    from console import removal
    from keeper import keep_commands

    target = args.selector.target()
    return removal.prune(target, keep=args.keep, yes=args.yes, resumed_by=keep_commands.resumed_by(target))


@options
class Stacks:
    run: str = argument(RUN, default="latest")
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab stacks latest")
def stacks(args: Stacks) -> int:
    """Show where the processes of a run are now."""
    from console import live

    return live.stacks(args.selector.target(), args.run)


@options
class Profile:
    run: str = argument(RUN, default="latest")
    steps: int = option("how many steps to trace, 100 at most (default: 5)", whole_number(1), default=5)
    limit: float = option(
        "seconds to wait until the traces are written (default: 600)", seconds(1), default=600.0
    )
    selector: Selector = group(Selector, "stack", "slice", "runs")


@task("fab profile latest --steps 5")
def profile(args: Profile) -> int:
    """Trace the next steps of a run, for XProf and Perfetto."""
    from console import live

    return live.profile(args.selector.target(), args.run, args.steps, limit_s=args.limit)
