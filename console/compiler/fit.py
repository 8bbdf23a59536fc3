"""`fab fit`: what the TPU compiler says of a job's training step on a slice, before anybody asks for the slice.

The compiler runs on this machine, in an environment that has libtpu (jobs/runtime/jax/aot.py). What it says is an
estimate: its own cycles of each operation, at the chip's clock. What it says nothing of is counted here by the chip's
figures, as if nothing but its memory, its matrix units or its links were in the way. So a step takes at least as long.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from backends.local import environments
from contracts.durations import HOUR_S, spoken
from contracts.errors import DONE, FAILED, RequestError
from contracts.inventory import Capacity
from infra import catalogue
from infra.catalogue import Accelerator, CatalogueError
from jobs.runtime.storage.cache import user_cache_dir
from launch import jobs, output
from launch.code import precompiled
from launch.code.precompiled import Step
from launch.hosts import HostError
from launch.jobs import CHECKOUT, Job
from launch.output import counted, say, terminal
from launch.request.run_request import Planned
from launch.targets import Target, in_catalogue

FRAMEWORK = "jax"
ENVIRONMENT = "tpu"
LIMIT_S = 3600.0
"""For one program. On two busy cores a large one takes minutes."""
COMPILER = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "TPU_SKIP_MDS_QUERY": "1",  # or it waits for the metadata server of a TPU VM
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is opened, so none is locked
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "",
    "JAX_FORCE_TPU_INIT": "1",  # as on a TPU VM, JAX adds to LIBTPU_INIT_ARGS, which the program is compiled with
    "XLA_FLAGS": "",  # those of this machine are not the hosts'
}
MOST_SLICES = 64
TRACED_OTHERWISE = ("keras_glue",)
"""Jobs whose training is the same computation as the step that they hand over, and not the same program to the letter:
Keras traces it among others, and numbers its parts."""
HOOK = b"\ndef lower_step("
ROWS = 10
"""Of what the time goes to."""
MOST_TRIES = 6
"""Changes that are tried for a step that does not fit."""
GIB = 2**30

type Arguments = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step is to run: one slice, or several that train together. hosts: of a slice, where they are other than
    the catalogue has them, such as two nodes of GKE with four chips of a v6e-8 each."""

    accelerator: Accelerator
    slices: int
    hosts: int | None = None

    @property
    def name(self) -> str:
        name = self.accelerator.type_name + (f" of {self.hosts} hosts" if self.hosts else "")
        return f"{self.slices} × {name}" if self.slices > 1 else name

    @property
    def devices(self) -> int:
        return self.slices * self.accelerator.devices

    @property
    def sides(self) -> list[int]:
        """Chips along each direction of a slice."""
        return [int(side) for side in self.accelerator.topology.split("x")]

    @property
    def topology(self) -> dict[str, Any]:
        """How libtpu calls it."""
        accelerator = self.accelerator
        return precompiled.topology(
            accelerator.generation.name, accelerator.topology, self.hosts or accelerator.hosts, self.slices
        )

    @property
    def links_in_use(self) -> float:
        """The share of a chip's links that lead to another chip of the slice: one along two chips, else two."""
        return sum(min(size - 1, 2) for size in self.sides) / (2 * len(self.sides))

    def usd_per_hour(self, capacity: Capacity) -> float | None:
        """The list price in the cheapest zone; None where there is none."""
        prices = [
            catalogue.price_usd_per_hour(self.accelerator, zone, capacity) for zone in self.accelerator.zones
        ]
        known_prices = [price for price in prices if price is not None]
        return min(known_prices) * self.slices if known_prices else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the compiler says of a step, and what follows from it with the chip's figures. answer: as aot.py has it."""

    place: Place
    answer: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        return bool(self.answer["fits"])

    @property
    def memory_limit(self) -> int:
        """Of a device: what the compiler names where it is not enough, or else what the chip has."""
        generation = self.place.accelerator.generation
        return int(
            self.answer["memory"]["limit"] or generation.hbm_gib_per_chip * GIB // generation.devices_per_chip
        )

    @property
    def core_s(self) -> float:
        """Of all that the compiler has an estimate for."""
        return float(self.answer["cycles"] / (self.place.accelerator.generation.clock_mhz * 1e6))

    @property
    def kernels_s(self) -> float:
        generation = self.place.accelerator.generation
        peak = generation.peak_bf16_flops_per_s_per_chip / generation.devices_per_chip
        bandwidth = generation.hbm_gb_per_s_per_chip * 1e9 / generation.devices_per_chip
        return math.fsum(
            max(kernel["operations"] / peak, kernel["bytes"] / bandwidth) for kernel in self.answer["kernels"]
        )

    @property
    def collectives_s(self) -> float:
        """Of all that the core waits for others, at the rate of the networks."""
        return math.fsum(self.wait_s(collective) for collective in self.answer["collectives"])

    def wait_s(self, collective: Mapping[str, Any]) -> float:
        """How long the core waits for a collective: as long as its bytes take, but for what is computed meanwhile."""
        rate = self._sent_per_s(collective["reach"])
        overlapped_s = collective["overlapped_cycles"] / (self.place.accelerator.generation.clock_mhz * 1e6)
        return max(0.0, collective["sent_bytes"] / rate - overlapped_s) if rate else 0.0

    def useful_overlap(self, collective: Mapping[str, Any]) -> int:
        """How many of the cycles of what is computed meanwhile shorten the wait."""
        rate = self._sent_per_s(collective["reach"])
        cycles = (
            self.place.accelerator.generation.clock_mhz * 1e6 * collective["sent_bytes"] / rate if rate else 0
        )
        return int(min(collective["overlapped_cycles"], cycles))

    def _sent_per_s(self, reach: str) -> float:
        """The bytes that a device sends in a second; 0 where nobody publishes that."""
        generation = self.place.accelerator.generation
        if reach == "between slices":
            return (generation.dcn_gb_per_s_per_chip or 0) * 1e9 / generation.devices_per_chip
        return generation.ici_gb_per_s_per_chip * 1e9 / generation.devices_per_chip * self.place.links_in_use

    @property
    def step_s(self) -> float:
        return self.core_s + self.kernels_s + self.collectives_s

    @property
    def per_s(self) -> float:
        return float(self.answer["per_step"] / self.step_s)

    @property
    def mfu(self) -> float | None:
        """The job's own count of operations over the peak of all chips; None where it has none."""
        operations = self.answer["model_operations"]
        peak = self.place.accelerator.peak_bf16_flops_per_s * self.place.slices
        return None if operations is None else operations / self.step_s / peak

    def usd_per_million(self, capacity: Capacity) -> float | None:
        price = self.place.usd_per_hour(capacity)
        return None if price is None else price / HOUR_S / self.per_s * 1e6

    @property
    def run_s(self) -> float | None:
        steps = self.answer["steps"]
        return None if steps is None else steps * self.step_s

    def sent_bytes(self, is_counted: Callable[[Mapping[str, Any]], bool]) -> int:
        """What a device sends in a step, in the collectives that are counted."""
        return sum(
            collective["sent_bytes"] for collective in self.answer["collectives"] if is_counted(collective)
        )

    def as_json(self) -> dict[str, Any]:
        place = {"slice": self.place.name, "chips": self.place.slices * self.place.accelerator.chips}
        if not self.fits:
            return {**place, **self.answer}
        return {
            **place,
            **self.answer,
            "step_s": self.step_s,
            f"{self.answer['unit']}_per_s": self.per_s,
            "mfu": self.mfu,
            "usd_per_hour": {name: self.place.usd_per_hour(name) for name in CAPACITIES},
            "usd_per_million": {name: self.usd_per_million(name) for name in CAPACITIES},
            "run_s": self.run_s,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A script of the user's own, in the place of a job: its options are words that only it can read."""

    path: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    def parse(self, arguments: Sequence[str]) -> ScriptArguments:
        return ScriptArguments(arguments=tuple(arguments))

    def arguments(self, config: ScriptArguments) -> list[str]:
        return [*config.arguments]

    def problems(self, _config: ScriptArguments, *, devices: int) -> list[str]:  # noqa: ARG002 - it says so itself
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptArguments:
    """What comes after a script's name."""

    arguments: tuple[str, ...]


CAPACITIES: tuple[Capacity, ...] = ("on-demand", "spot")


def fit(
    job: Job | Script,
    arguments: Sequence[str],
    accelerator: str,
    *,
    slices: int,
    compare: Sequence[str],
    as_json: bool,
    keep: bool = False,
) -> int:
    """Print what the compiler says of a job's or a script's step on a slice; of others too, in a table.

    keep: the program, for `fab train` of the same code, options and slice to take along. Exit code 1: it does not fit.

    Raises:
        RequestError: no such option or slice, or the job cannot run on so many devices; nothing was compiled.
        HostError: the compiler failed.
    """
    if isinstance(job, Script):
        require_script(job)
        if keep:
            raise RequestError(
                f"--keep: only jobs load a program that was kept, and {job.path} is a script; leave it out"
            )
    else:
        require_hook(job)
        if keep and not can_keep(job):
            raise RequestError(
                f"--keep: what is compiled here of {job.name} is not what it trains with; leave it out"
            )
    options = ["--accelerator", *(["--compare"] * len(compare))]
    places = [
        parse_place(option, name, slices)
        for option, name in zip(options, (accelerator, *compare), strict=True)
    ]
    config = job.parse(arguments)
    wrong = [job.problems(config, devices=place.devices) for place in places]
    if wrong[0]:
        raise RequestError("\n".join(f"{places[0].name}: {text}" for text in wrong[0]))
    note = (lambda _: None) if as_json else say(terminal())
    environments.ensure(ENVIRONMENT, note)
    estimates: list[Estimate | str] = []
    for place, problems in zip(places, wrong, strict=True):
        if problems:
            estimates.append(problems[0])
            continue
        note(f"compiling {job.name}'s step for {place.name} …")
        estimates.append(measure(job, config, place, keep=keep and place is places[0]))
    first = estimates[0]
    assert isinstance(first, Estimate)
    changed = None if first.fits or compare else change(job, config, first, note)
    if as_json:
        print(json.dumps(_as_json(estimates, places, changed)))
    else:
        for line in [*lines(job, first), *([] if first.fits or compare else change_lines(changed))]:
            note(line)
        if keep and isinstance(job, Job):
            note(record_program(job, config, first))
        if compare:
            terminal().print(table(places, estimates))
            for place, estimate in zip(places, estimates, strict=True):
                if isinstance(estimate, str):
                    note(f"{place.name}: {estimate}")
            note(
                f"USD at list prices of {catalogue.PRICES_READ_IN} in the cheapest zone; all of it is an estimate"
            )
    return DONE if first.fits else FAILED


def require_hook(job: Job) -> None:
    """Make sure that a job hands over its step. Raises RequestError: it does not, and which jobs do."""
    able = [name for name in jobs.names() if has_hook(jobs.find(name))]
    if job.name not in able:
        reason = "hands over no step" if job.framework == FRAMEWORK else f"runs on {job.framework}"
        raise RequestError(
            f"--job {job.name}: {reason}, and only the step of a JAX job can be compiled here; choose one of "
            f"{', '.join(able)}"
        )


def has_hook(job: Job) -> bool:
    """Whether a job hands over its step."""
    files = [CHECKOUT / "jobs" / job.name / name for name in ("step.py", "train.py")]
    return job.framework == FRAMEWORK and any(HOOK in path.read_bytes() for path in files if path.exists())


def can_keep(job: Job) -> bool:
    """Whether a job's training can load what is compiled here."""
    return has_hook(job) and job.name not in TRACED_OTHERWISE


def require_script(script: Script) -> None:
    """Make sure that a script hands over its step. Raises RequestError: it does not."""
    try:
        content = Path(script.path).read_bytes()
    except OSError as error:
        raise RequestError(
            f"-- {script.path}: cannot be read ({error.strerror}); name a file in Python"
        ) from None
    if HOOK not in b"\n" + content:
        raise RequestError(
            f"-- {script.path}: hands over no step; it needs a function `lower_step(devices)` as "
            "examples/jax/train.py has one (docs/fit.md)"
        )


def record_program(job: Job, config: Any, estimate: Estimate) -> str:
    """Keep the note of a program that was kept; return what to say of it."""
    note = estimate.answer["note"]
    if note is None:
        return "nothing is kept" if estimate.fits else "nothing is kept, as it does not fit"
    step = Step(
        job=job.name,
        words=tuple(job.arguments(config)),
        code=jobs.bundle(CHECKOUT).sha256,
        topology=estimate.place.topology,
    )
    precompiled.record(step, note)
    mib = precompiled.program_path(note).stat().st_size / 2**20
    return f"kept      {mib:,.1f} MiB, which `fab train` takes along to such a slice with this code and these options"


def parse_place(option: str, name: str, slices: int) -> Place:
    """Return the slices of that type. Raises RequestError: there is no such type, or too many slices."""
    try:
        accelerator = catalogue.accelerator(name, "any")
    except CatalogueError as error:
        raise RequestError(f"{option}: {error}") from None
    if not 1 <= slices <= MOST_SLICES:
        raise RequestError(f"--slices {slices}: must be between 1 and {MOST_SLICES}")
    return Place(accelerator=accelerator, slices=slices)


def measure(
    job: Job | Script, config: Any, place: Place, *, keep: bool = False, limit_s: float = LIMIT_S
) -> Estimate:
    """Compile a job's step for a place; keep: its program too.

    Raises:
        RequestError: the options cannot work there; the job's own words.
        HostError: the compiler failed, or took too long.
    """
    subject = {"script": os.path.abspath(job.path)} if isinstance(job, Script) else {"job": job.name}
    request = {**subject, "words": job.arguments(config), "keep": keep, **place.topology}
    return Estimate(place=place, answer=cached_answer(request, place.name, limit_s))


def cached_answer(request: Mapping[str, Any], name: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Return the compiler's answer to a request, as aot.py takes it. name: of the slice. Raises as `measure`."""
    answer: dict[str, Any] = environments.run_module(
        ENVIRONMENT,
        ["jobs.runtime.jax.aot"],
        {**request, "cache_dir": str(user_cache_dir(os.environ))},
        variables=COMPILER,
        limit_s=limit_s,
        late=f"{name}: the compiler was not done within {spoken(limit_s)}",
        failed=f"{name}: the compiler failed: ",
    )
    return answer


# --- a run's -----------------------------------------------------------------------------------------------------

DRY_RUN_LIMIT_S = 120.0


def dry_run_lines(planned: Planned, target: Target) -> Iterator[str]:
    """Return what the compiler says of a run's step on its TPU slice, where it is here and soon done; else the command.

    Raises:
        RequestError: the options cannot work there; the job's own words.
    """
    entry = in_catalogue(target.slice.accelerator_type)
    if planned.step is None or entry is None:
        return
    job = jobs.find(planned.step.job)
    if not has_hook(job):
        return
    command = f"`{fit_command(planned.step, target)}`"
    if not environments.is_made(ENVIRONMENT):
        yield f"whether it fits: {command} gets the TPU compiler, and says so"
        return
    place = Place(accelerator=entry, slices=target.slice.count)
    yield f"compiling {job.name}'s step for {place.name}, for at most {spoken(DRY_RUN_LIMIT_S)} …"
    try:
        estimate = measure(job, job.parse(planned.step.words), place, limit_s=DRY_RUN_LIMIT_S)
    except HostError as error:
        yield f"whether it fits: {error.reason}; {command} takes its time"
        return
    yield from itertools.takewhile(lambda line: not line.startswith("time goes to"), lines(job, estimate))
    yield f"more of it: {command}"


def fit_command(step: Step, target: Target, *options: str) -> str:
    """Return the `fab fit` of a run's step."""
    slices = ["--slices", str(target.slice.count)] if target.slice.count > 1 else []
    arguments = ["--job", step.job, "--accelerator", target.slice.accelerator_type, *slices, *options]
    return shlex.join(["fab", "fit", *arguments, *(["--", *step.words] if step.words else [])])


# --- what would fit --------------------------------------------------------------------------------------------------


def change(
    job: Job | Script, config: Any, first: Estimate, note: Callable[[str], None]
) -> tuple[Arguments, Estimate] | None:
    """Return the first change of options with which the step fits, by trying; None where none of those tried does."""
    if isinstance(job, Script):
        return None  # nobody knows its options
    for index, arguments in enumerate(changes(job, config, first)):
        if index == MOST_TRIES:
            return None
        note(f"it does not fit; trying {' '.join(arguments)} …")
        estimate = measure(job, job.parse(arguments, base=config), first.place)
        if estimate.fits:
            return arguments, estimate
    return None


def changes(job: Job, config: Any, first: Estimate) -> Iterator[Arguments]:
    """Return changes of options that take less memory, what costs the least time first; only those that the job has and
    that suit the devices.

    Parts of a batch cost next to nothing, a layer that is computed twice a third of the step, parameters that are
    shared out their collection; where the parameters and the optimizer's state are too much by themselves, only that
    helps. A smaller batch is another training.
    """
    names = {field.name for field in dataclasses.fields(config)}
    memory, limit = first.answer["memory"], first.memory_limit
    state = memory["parameters"] + memory["optimizer"]

    def suits(*arguments: str) -> bool:
        return not job.problems(job.parse(arguments, base=config), devices=first.place.devices)

    def doubled(option: str, now: int) -> Iterator[Arguments]:
        for power in range(1, 13):
            arguments = (f"--{option}", str(now * 2**power))
            if suits(*arguments):
                yield arguments

    def shared() -> Iterator[Arguments]:
        if "fsdp" in names:
            yield from (
                arguments
                for arguments in doubled("fsdp", config.fsdp)
                if state * config.fsdp / int(arguments[1]) < limit
            )

    if state >= limit:
        yield from shared()
        return
    if "accumulate" in names:
        fewest_parts = memory["temporaries"] / (limit - state)
        yield from (
            arguments
            for arguments in doubled("accumulate", config.accumulate)
            if int(arguments[1]) / config.accumulate >= fewest_parts / 2
        )
    if "remat" in names and not config.remat:
        yield ("--remat",)
        if "accumulate" in names:
            yield from (("--remat", *arguments) for arguments in doubled("accumulate", config.accumulate))
    yield from shared()
    size = config.batch_size
    while (size := size // 2) >= first.place.devices:
        if suits("--batch-size", str(size)):
            yield ("--batch-size", str(size))


# --- what is printed -------------------------------------------------------------------------------------------------


def lines(job: Job | Script, estimate: Estimate) -> Iterator[str]:
    """Return what is printed of one slice."""
    place, answer = estimate.place, estimate.answer
    accelerator = place.accelerator
    hosts = counted(place.slices * accelerator.hosts, "host")
    yield (
        f"{job.name} on {place.name} ({accelerator.topology}, {hosts}, {counted(place.devices, 'device')}): an "
        f"estimate by the TPU compiler ({answer['compiler']}); nothing was run"
    )
    memory = answer["memory"]
    parts = ["parameters", "optimizer", "batch", "temporaries", "program"]
    names = {"temporaries": "activations and temporaries"}
    split = ", ".join(f"{names.get(part, part)} {_gib(memory[part])}" for part in parts if part in memory)
    yield (
        f"memory    {'fits' if estimate.fits else 'does not fit'}: {_gib(memory['total'])} of "
        f"{_gib(estimate.memory_limit)} GiB a device ({split})"
    )
    if not estimate.fits:
        yield _compiled(estimate)
        return
    yield f"step      at least {_ms(estimate.step_s)}: {'; '.join(_parts(estimate))}"
    mfu = "" if estimate.mfu is None else f", MFU {100 * estimate.mfu:.0f} %"
    yield f"rate      at most {estimate.per_s:,.0f} {answer['unit']}/s{mfu}"
    yield f"cost      {_cost(estimate)}"
    yield f"sent      {_sent(estimate)}"
    yield f"time goes to, of {answer['cycles'] / 1e6:,.1f} M cycles that the compiler estimates:"
    for row in answer["spent"][:ROWS]:
        share = row["cycles"] / max(answer["cycles"], 1)
        yield f"  {100 * share:5.1f} %  {row['scope']}: {row['operation']}"
    yield _compiled(estimate)


def _parts(estimate: Estimate) -> Iterator[str]:
    answer, generation = estimate.answer, estimate.place.accelerator.generation
    yield f"{_ms(estimate.core_s)} by the compiler's cycles at {generation.clock_mhz / 1000:g} GHz"
    if answer["kernels"]:
        count = sum(kernel["count"] for kernel in answer["kernels"])
        yield (
            f"{_ms(estimate.kernels_s)} for {counted(count, 'kernel')}, counted by their operations and bytes, as it "
            "estimates none"
        )
    if estimate.collectives_s:
        yield f"{_ms(estimate.collectives_s)} of waiting for other devices, at the rate of the links"
    if estimate.place.slices > 1 and generation.dcn_gb_per_s_per_chip is None:
        yield f"not in it: what slices send each other, as nobody publishes how fast a {generation.name} does"
    if answer["without_estimate"]:
        names = ", ".join(f"{count} {name}" for name, count in answer["without_estimate"].items())
        yield f"not in it: {names}"


def _cost(estimate: Estimate) -> str:
    price, usd = estimate.place.usd_per_hour("on-demand"), estimate.usd_per_million("on-demand")
    if price is None or usd is None:
        return f"not known: no list price of {estimate.place.accelerator.generation.name}"
    spot, unit = estimate.usd_per_million("spot"), estimate.answer["unit"]
    text = f"at least {_usd(usd)} USD per million {unit}" + (f", {_usd(spot)} on spot" if spot else "")
    if estimate.run_s is not None:
        total_usd = price * estimate.run_s / HOUR_S
        text += (
            f"; {counted(estimate.answer['steps'], 'step')}: {spoken(estimate.run_s)}, {_usd(total_usd)} USD"
        )
    return f"{text} (list prices, cheapest zone)"


def _sent(estimate: Estimate) -> str:
    if not estimate.answer["collectives"]:
        return "nothing between devices"
    reaches = ("within a host", "between hosts", "between slices")
    totals = {
        reach: estimate.sent_bytes(lambda collective: collective["reach"] == reach)  # noqa: B023
        for reach in reaches
    }
    text = ", ".join(f"{total / 2**20:,.1f} MiB {reach}" for reach, total in totals.items() if total)
    overlapped = estimate.sent_bytes(lambda collective: collective["overlapped_cycles"] > 0)
    return f"a device sends {text} a step; {overlapped / 2**20:,.1f} MiB of it beside the computation"


def _compiled(estimate: Estimate) -> str:
    origin = ", kept from an earlier time" if estimate.answer["is_kept"] else ""
    return f"compiled  in {estimate.answer['compile_s']:.0f} s{origin}"


def change_lines(changed: tuple[Arguments, Estimate] | None) -> Iterator[str]:
    """Return what is said of a step that does not fit."""
    if changed is None:
        yield "none of the changes that were tried fits; choose a larger slice, or a smaller model"
        return
    arguments, estimate = changed
    yield (
        f"it fits with {' '.join(arguments)}: {_gib(estimate.answer['memory']['total'])} GiB, a step of at least "
        f"{_ms(estimate.step_s)}, at most {estimate.per_s:,.0f} {estimate.answer['unit']}/s"
    )


def table(places: Sequence[Place], estimates: Sequence[Estimate | str]) -> Table:
    """Return a row for each slice: whether it fits, the estimate, and what a million costs."""
    measures = ("GiB", "step at least", "at most a second", "MFU", "USD a million", "spot")
    table = output.table("slice", "fits", *measures, right=measures)
    table.columns[0].no_wrap = True
    for place, estimate in zip(places, estimates, strict=True):
        table.add_row(place.name, *_row(estimate))
    return table


def _row(estimate: Estimate | str) -> list[str]:
    if isinstance(estimate, str):
        return ["–"]
    memory = f"{_gib(estimate.answer['memory']['total'])} of {_gib(estimate.memory_limit)}"
    if not estimate.fits:
        return ["no", memory]
    mfu = "–" if estimate.mfu is None else f"{100 * estimate.mfu:.0f} %"
    costs = [estimate.usd_per_million(capacity) for capacity in CAPACITIES]
    shown = ["–" if usd is None else _usd(usd) for usd in costs]
    return [
        "yes",
        memory,
        _ms(estimate.step_s),
        f"{estimate.per_s:,.0f} {estimate.answer['unit']}",
        mfu,
        *shown,
    ]


def _as_json(
    estimates: Sequence[Estimate | str], places: Sequence[Place], changed: tuple[Arguments, Estimate] | None
) -> dict[str, Any]:
    listed = [
        {"slice": place.name, "problem": estimate} if isinstance(estimate, str) else estimate.as_json()
        for place, estimate in zip(places, estimates, strict=True)
    ]
    fitting = None if changed is None else {"options": [*changed[0]], **changed[1].as_json()}
    return {"is_estimate": True, "slices": listed, "fits_with": fitting}


def _gib(size: float) -> str:
    """Two places, and of what is smaller that it is."""
    return f"{size / GIB:.2f}" if not 0 < size < GIB / 100 else "< 0.01"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"


def _usd(usd: float) -> str:
    """Two places, or as many as show two digits."""
    places = 2 if usd >= 1 or usd <= 0 else 1 - math.floor(math.log10(usd))
    return f"{usd:,.{places}f}"
