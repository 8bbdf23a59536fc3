"""The tasks about TPUs: which there are, where they can be had, and which the project holds."""

from __future__ import annotations

from pathlib import Path

from contracts.errors import RequestError
from fabfile.command import task
from fabfile.command_options import flag, group, option, options, positionals, whole_number
from fabfile.run_tasks import YES
from fabfile.selector import JSON, Selector


@options
class Accelerators:
    zone: str | None = option("only types in this zone, at its prices")
    generation: str | None = option("only this generation, such as v5e")
    max_chips: int | None = option("the largest number of chips (default: 64)", whole_number(1))
    grant: str | None = option(
        "only types that the grant in this configuration file covers, such as Pulumi.dev.yaml"
    )


@task("fab accelerators --generation v5e --zone us-central1-a")
def accelerators(args: Accelerators) -> int:
    """List the TPU types: hosts, chips, memory, zones, prices."""
    from console.accelerators import list_accelerators, list_granted

    if args.grant:
        return list_granted(Path(args.grant), zone=args.zone, generation=args.generation)
    return list_accelerators(zone=args.zone, generation=args.generation, max_chips=args.max_chips)


@options
class Fit:
    job: str | None = option("the job whose step is compiled (a JAX job, see `fab jobs`)")
    args: str = option("the job's own options in one word, instead of after --", default="")
    accelerator: str | None = option("the type of the slice, such as v5litepod-16 (see `fab accelerators`)")
    slices: int = option("how many such slices train together (default: 1)", whole_number(1), default=1)
    compare: str | None = option("other types, such as v6e-8,v5p-8: a table of all of them")
    keep: bool = flag("keep the program: `fab train` of the same code, options and slice takes it along")
    json: bool = flag(JSON)
    positionals: tuple[str, ...] = positionals("[-- OPTIONS OF THE JOB, or a script]", owner="job")


@task(
    "fab fit --job flax_mlm --accelerator v5litepod-16 -- --model base --batch-size 512",
    "fab fit --accelerator v5litepod-16 -- examples/jax/train.py",
)
def fit(args: Fit) -> int:
    """Estimate a job's memory, speed and cost on a slice, without it.

    The TPU compiler compiles the job's own step on this machine. The job's options come after --, or a script
    of your own, which hands over its step (docs/fit.md).
    """
    from console import follow
    from console import status as status_command
    from console.compiler import fit
    from launch import jobs

    if {"-h", "--help"} & {*args.positionals}:
        return status_command.list_jobs(args.job)
    arguments = follow.job_arguments(args.args, args.positionals)
    is_script = args.job is None and bool(arguments) and not arguments[0].startswith("-")
    for name, value in (
        ("--job", arguments[0] if is_script else args.job),
        ("--accelerator", args.accelerator),
    ):
        if value is None:
            raise RequestError(f"{name}: is needed; as in: fab fit --job flax_mlm --accelerator v5litepod-16")
    return fit.fit(
        fit.Script(path=arguments[0]) if is_script else jobs.find(args.job or ""),
        arguments[1:] if is_script else arguments,
        args.accelerator or "",
        slices=args.slices,
        compare=[name for name in (args.compare or "").split(",") if name],
        as_json=args.json,
        keep=args.keep,
    )


@options
class Capacity:
    selector: Selector = group(Selector, "stack")
    days: int | None = option("how far back (default: 30)", whole_number(1))
    json: bool = flag("for programs: every hour that is known")


@task("fab capacity --stack dev --days 7")
def capacity(args: Capacity) -> int:
    """Show which zones had capacity for the stack's slices, and when."""
    from keeper import capacity_history as capacities
    from launch.output import terminal

    days = args.days or capacities.DAYS
    return capacities.capacity(terminal(), args.selector.request(), days=days, as_json=args.json)


@options
class Zombies:
    selector: Selector = group(Selector, "stack")
    remove: bool = flag("remove those of the stack that neither Pulumi nor the inventory knows of")
    yes: bool = flag(YES)


@task("fab zombies --stack dev")
def zombies(args: Zombies) -> int:
    """List all TPUs of the project, and those left over."""
    from keeper import zombies

    return zombies.command(args.selector.request(), remove=args.remove, yes=args.yes)
