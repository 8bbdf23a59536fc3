"""What the TPU compiler says of the jobs' training steps on slices that are not there: memory, estimated cycles, what
devices send each other. No time is measured: the figures are the same on every machine, whatever else it does.

python -m bench.tpu [--only TEXT …] [--ci] [--check | --write] [--peer]

--only: cells whose name has all of these. --ci: those that CI compiles. --write: put each cell into
bench/tpu_cells.json as soon as it is compiled, and the tables of all that are there into docs/benchmarks.md; the
compiler's answers are kept as `fab fit` keeps them, so that a table that was interrupted goes on where it was.
--check: compare those that are there with what the compiler says now, and end with 1 where an estimate has risen by
more than 3 %, with what grew. --peer: the step of FlaxRobertaForMaskedLM too, by the compiler of its JAX's time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.local import environments
from bench import tpu_product
from bench.peers import PROGRAMS, run_in_peer
from console.compiler.fit import COMPILER, ENVIRONMENT, GIB, Estimate, Place, measure
from contracts.errors import DONE, FAILED, WRONG_REQUEST, RequestError
from infra import catalogue
from jobs.runtime.jax import hlo
from launch import jobs
from launch.hosts import HostError
from launch.jobs import CHECKOUT

RECORDS = Path(__file__).with_name("tpu_cells.json")
PAGE = CHECKOUT / "docs" / "benchmarks.md"
MOST_GROWTH = 0.03
MOST_SPENT = 20
"""Operations of a cell that are recorded, the largest first."""
MIB = 2**20

ONE_HOST = ("v2-8", "v3-8", "v4-8", "v5litepod-4", "v5p-8", "v6e-4", "tpu7x-8")
"""Of four chips each."""
CHIPS_16 = ("v2-32", "v3-32", "v4-32", "v5litepod-16", "v5p-32", "v6e-16", "tpu7x-32")
CHIPS_256 = ("v2-512", "v3-512", "v4-512", "v5litepod-256", "v5p-512", "v6e-256", "tpu7x-512")
DROPOUT = ("--dropout", "0.1")
STEPS = {
    "tiny 128": ("flax_mlm", 64, ("--model", "tiny", "--sequence-length", "128", *DROPOUT)),
    "base 128": ("flax_mlm", 64, ("--model", "base", "--sequence-length", "128", *DROPOUT)),
    "base 128 of 2 layers": (
        "flax_mlm",
        64,
        ("--model", "base", "--layers", "2", "--sequence-length", "128", *DROPOUT),
    ),
    "base 512": ("flax_mlm", 16, ("--model", "base", "--sequence-length", "512", *DROPOUT)),
    "large 128": ("flax_mlm", 64, ("--model", "large", "--sequence-length", "128", *DROPOUT)),
    "tiny 128 fsdp": ("flax_mlm", 64, ("--model", "tiny", "--sequence-length", "128", "--fsdp", "4")),
    "keras_glue": ("keras_glue", 8, ()),
}
"""By name: the job, rows a device, and its other options."""
STEPS_ON_ALL_SLICES = ("tiny 128", "base 128", "large 128", "keras_glue")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A step on a slice, or on several that train together. hosts: as `Place` has them."""

    step: str
    accelerator: str
    slices: int = 1
    hosts: int | None = None

    @property
    def place(self) -> Place:
        accelerator = catalogue.accelerator(self.accelerator, "any")
        return Place(accelerator=accelerator, slices=self.slices, hosts=self.hosts)

    @property
    def name(self) -> str:
        return f"{self.step}, {self.place.name}"

    @property
    def rows(self) -> str:
        return f"{self.step}, {STEPS[self.step][1]} rows a device"

    def record(self) -> dict[str, Any]:
        """What is recorded of it: the compiler's answer in short, or why there is none."""
        job_name, rows, arguments = STEPS[self.step]
        job = jobs.find(job_name)
        arguments = (*arguments, "--batch-size", str(rows * self.place.devices))
        try:
            return shortened(measure(job, job.parse(arguments), self.place))
        except (RequestError, HostError) as error:
            return {"problem": str(error)}

    def estimate(self, record: Mapping[str, Any]) -> Estimate:
        return Estimate(place=self.place, answer=record)


CI = (
    Cell(step="tiny 128", accelerator="v5litepod-4", slices=2),
    Cell(step="tiny 128 fsdp", accelerator="v6e-8", hosts=2),
    Cell(step="base 128 of 2 layers", accelerator="v5litepod-4"),
)
"""Two slices, parameters that are shared by four on each of two hosts, and wide products on one host. As many as CI has
time for: `base` with all its layers takes longer, and has the same operations."""
CELLS = tuple(
    dict.fromkeys(
        (
            Cell(step="tiny 128", accelerator="v5litepod-4"),
            *CI,
            Cell(step="tiny 128 fsdp", accelerator="v6e-16"),
            *(Cell(step="base 512", accelerator=accelerator) for accelerator in ONE_HOST),
            Cell(step="base 128", accelerator="v5litepod-16", slices=2),
            *(
                Cell(step=step, accelerator=accelerator)
                for accelerators in (ONE_HOST, CHIPS_16, CHIPS_256)
                for step in STEPS_ON_ALL_SLICES
                for accelerator in accelerators
            ),
        )
    )
)

GOALS = {
    "base 128, v5litepod-4": 0.65,
    "base 512, v5litepod-4": 0.65,
    "large 128, v5p-8": 0.60,
    "base 128, v6e-4": 0.40,
    "large 128, v6e-4": 0.50,
}
"""Of the rate of the large product. A matrix unit of a v6e is wider than base's shapes fill."""
PEER = ("v5e:2x2", 64, 128, "bfloat16")
PEER_CELL = "base 128, v5litepod-4"


# --- records ---------------------------------------------------------------------------------------------------------


def shortened(estimate: Estimate) -> dict[str, Any]:
    """Of the compiler's answer what the tables and the comparison need."""
    answer = estimate.answer
    recorded = ("compiler", "devices", "fits", "memory", "unit", "per_step", "model_operations")
    record = {name: answer[name] for name in recorded}
    if not answer["fits"]:
        return record
    sent, overlapped = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for collective in answer["collectives"]:
        sent[collective["kind"], collective["reach"]] += collective["sent_bytes"]
        overlapped[collective["kind"], collective["reach"]] += estimate.useful_overlap(collective)
    return {
        **record,
        "cycles": answer["cycles"],
        "memory_bytes": answer["memory_bytes"],
        "kernels": answer["kernels"],
        "collectives": [
            {"kind": kind, "reach": reach, "sent_bytes": size, "overlapped_cycles": overlapped[kind, reach]}
            for (kind, reach), size in sent.items()
        ],
        "spent": {
            f"{operation['scope']}: {operation['operation']}": operation["cycles"]
            for operation in answer["spent"][:MOST_SPENT]
        },
    }


def complaints(cell: Cell, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Say what has risen by more than MOST_GROWTH since `before`, and which of its parts the most; what no longer
    compiles or fits."""
    if "problem" in before or not before["fits"]:
        return
    if "problem" in now:
        yield f"{cell.name}: {now['problem']}"
        return
    yield from _growth(
        cell,
        "bytes of memory",
        before["memory"]["total"],
        _parts(before),
        now["memory"]["total"],
        _parts(now),
    )
    if not now["fits"]:
        return
    yield from _growth(cell, "cycles", *_cycles(cell, before), *_cycles(cell, now))
    yield from _growth(cell, "bytes sent", *_sent(before), *_sent(now))


def _growth(
    cell: Cell,
    unit: str,
    before: int,
    parts_before: Mapping[str, int],
    now: int,
    parts_now: Mapping[str, int],
) -> Iterator[str]:
    if now <= before * (1 + MOST_GROWTH):
        return
    rise = {name: size - parts_before.get(name, 0) for name, size in parts_now.items()}
    grown = sorted((name for name in rise if rise[name] > 0), key=lambda name: -rise[name])[:3]
    parts = ", ".join(f"{name} +{rise[name]:,}" for name in grown)
    percent = f"{100 * (now / before - 1):+.1f} %" if before else "from none"
    yield f"{cell.name}: {before:,} {unit} are now {now:,}, {percent}: {parts}"


def _parts(record: Mapping[str, Any]) -> dict[str, int]:
    return {name: size for name, size in record["memory"].items() if name not in ("total", "limit")}


def _cycles(cell: Cell, record: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """Of the whole step, with what is counted beside the compiler's estimate; and of its largest parts."""
    estimate, clock_hz = cell.estimate(record), cell.place.accelerator.generation.clock_mhz * 1e6
    counted = {
        "kernels": round(estimate.kernels_s * clock_hz),
        "sums between devices": round(estimate.collectives_s * clock_hz),
    }
    return record["cycles"] + sum(counted.values()), {**record["spent"], **counted}


def _sent(record: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    parts = Counter[str]()
    for collective in record["collectives"]:
        parts[f"{collective['kind']} {collective['reach']}"] += collective["sent_bytes"]
    return parts.total(), dict(parts)


def read_records() -> dict[str, Any]:
    records: dict[str, Any] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return records


def write_records(records: Mapping[str, Any]) -> None:
    """Write them with a cell a line."""
    cells = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in sorted(records["cells"].items())
    )
    further = {name: value for name, value in records.items() if name != "cells"}
    lines = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in sorted(further.items()))
    RECORDS.write_text(f'{{\n{lines} "cells": {{\n{cells}\n }}\n}}\n', encoding="utf-8")


# --- the compiler ----------------------------------------------------------------------------------------------------


def products(generations: Sequence[str]) -> dict[str, float]:
    """The operations in a cycle of the large product on a device of each generation."""
    hosts = {place.accelerator.generation.name: place for place in map(_one_host, ONE_HOST)}
    answers = _cycles_of_products([hosts[name].topology for name in generations])
    return {
        name: 2 * tpu_product.SIDE**3 / cycles for name, (cycles,) in zip(generations, answers, strict=True)
    }


def products_of_step(cell: Cell) -> list[int]:
    """The cycles of the products of a flax_mlm step, each by itself, and those of its attention."""
    _, rows, arguments = STEPS[cell.step]
    request = {**cell.place.topology, "model": [*arguments, "--batch-size", str(rows)]}
    return _cycles_of_products([request])[0]


def _cycles_of_products(requests: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    done = subprocess.run(
        [str(environments.environment_python(ENVIRONMENT)), "-P", "-m", tpu_product.__name__],
        input=json.dumps(requests),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env={**os.environ, **COMPILER, "PYTHONPATH": str(CHECKOUT)},
    )
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _one_host(accelerator: str) -> Place:
    return Place(accelerator=catalogue.accelerator(accelerator, "any"), slices=1)


def measure_peer() -> dict[str, Any]:
    """What FlaxRobertaForMaskedLM's step takes, by PEER."""
    with tempfile.NamedTemporaryFile(mode="r", encoding="utf-8") as file:
        arguments = [*map(str, PEER), file.name]
        printed = run_in_peer("flax_tpu", PROGRAMS / "flax_tpu_step.py", arguments, limit_s=3600)
        program = hlo.summary(file.read(), [(0, 0)] * 4)
    return {"cycles": program.all_cycles, "memory": int(printed.split()[-1])}


# --- tables ----------------------------------------------------------------------------------------------------------

HEADING = (
    "| step | slice | GiB a device | M cycles | kernels, ms | share | step at least | MFU at most | MiB sent within a "
    "host | between hosts | between slices | waited for |\n|---|---|" + "---:|" * 10
)
GOALS_HEADING = (
    "| step | slice | share | goal | step without sums | its products alone | its bytes alone |\n"
    "|---|---|" + "---:|" * 5
)


def share(cell: Cell, record: Mapping[str, Any], product: float) -> float:
    """The model's own operations in a cycle, over those of the large product. Sums between devices are left out."""
    clock_hz = cell.place.accelerator.generation.clock_mhz * 1e6
    cycles = record["cycles"] + cell.estimate(record).kernels_s * clock_hz
    return float(record["model_operations"] / record["devices"] / cycles / product)


def row(cell: Cell, record: Mapping[str, Any], product: float) -> str:
    """A line of the table."""
    begin = f"| {cell.rows} | {cell.place.name} |"
    if "problem" in record:
        return f"{begin} {record['problem'].replace('|', '/')} |"
    estimate = cell.estimate(record)
    memory = f"{record['memory']['total'] / GIB:.2f} of {estimate.memory_limit / GIB:.3g}"
    if not record["fits"]:
        return f"{begin} {memory}: does not fit |"
    sent = [
        estimate.sent_bytes(lambda collective, reach=reach: collective["reach"] == reach) / MIB  # type: ignore[misc]
        for reach in ("within a host", "between hosts", "between slices")
    ]
    parts = [
        *(
            memory,
            f"{record['cycles'] / 1e6:.2f}",
            f"{estimate.kernels_s * 1e3:.2f}" if record["kernels"] else "–",
        ),
        "–" if record["model_operations"] is None else f"{100 * share(cell, record, product):.0f} %",
        f"{estimate.step_s * 1e3:.2f} ms",
        "–" if estimate.mfu is None else f"{100 * estimate.mfu:.0f} %",
        *(f"{size:,.1f}" if size else "–" for size in sent),
        f"{100 * estimate.collectives_s / estimate.step_s:.0f} %",
    ]
    return f"{begin} {' | '.join(parts)} |"


def goal_row(
    name: str, record: Mapping[str, Any] | None, product: float, products: Sequence[int] | None
) -> str:
    """A line of the goals' table: beside the share, what the step would take if nothing but memory, or nothing but the
    matrix units, were in the way. products: as `products_of_step` has them."""
    cell = _named(name)
    begin, goal = f"| {cell.rows} | {cell.place.name} |", f"{100 * GOALS[name]:.0f} %"
    if record is None or not record.get("fits"):
        return f"{begin} – | {goal} | – | – | – |"
    generation, estimate = cell.place.accelerator.generation, cell.estimate(record)
    bandwidth = generation.hbm_gb_per_s_per_chip * 1e9 / generation.devices_per_chip
    products_s = "–"
    if products is not None:
        model_s, attention_s = (cycles / (generation.clock_mhz * 1e6) for cycles in products)
        products_s = f"{1e3 * (model_s + (estimate.kernels_s or attention_s)):.1f} ms"
    return (
        f"{begin} {100 * share(cell, record, product):.0f} % | {goal} | "
        f"{1e3 * (estimate.core_s + estimate.kernels_s):.1f} ms | {products_s} | "
        f"{1e3 * record['memory_bytes'] / bandwidth:.1f} ms |"
    )


def tables(records: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What stands in docs/benchmarks.md between two comments, by the name in them."""
    cells, rates = records["cells"], records["products"]

    def product(cell: Cell) -> float:
        return float(rates[cell.place.accelerator.generation.name])

    lines = [row(cell, cells[cell.name], product(cell)) for cell in CELLS if cell.name in cells]
    missing = Counter(cell.step for cell in CELLS if cell.name not in cells)
    named = ", ".join(f"{step} on {count}" for step, count in missing.items())
    text = f"\n\nNot compiled: {missing.total()} of {len(CELLS)} cells ({named} slices)." if named else ""
    yield "cells", f"{HEADING}\n" + "\n".join(lines) + text
    goals = [
        goal_row(name, cells.get(name), product(_named(name)), records["goals"].get(name)) for name in GOALS
    ]
    peer, ours = records.get("peer"), cells.get(PEER_CELL)
    yield "goals", f"{GOALS_HEADING}\n" + "\n".join(goals)
    if peer and ours and ours.get("fits"):
        yield (
            "peer",
            (
                "| program | M cycles | GiB a device |\n|---|---:|---:|\n"
                f"| flax_mlm | {ours['cycles'] / 1e6:.1f} | {ours['memory']['total'] / GIB:.2f} |\n"
                f"| FlaxRobertaForMaskedLM | {peer['cycles'] / 1e6:.1f} | {peer['memory'] / GIB:.2f} |"
            ),
        )


def _named(name: str) -> Cell:
    return next(cell for cell in CELLS if cell.name == name)


def with_table(page: str, name: str, table: str) -> str:
    """The page with this table between the comments of its name."""
    begin, end = f"<!-- bench.tpu: {name} -->", f"<!-- bench.tpu: end of {name} -->"
    before, begin_line, tail = page.partition(begin)
    _, end_line, after = tail.partition(end)
    if not begin_line or not end_line:
        raise RequestError(f"{PAGE}: has no place for the table {name}, between {begin} and {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def write_page(records: Mapping[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables(records):
        page = with_table(page, name, table)
    PAGE.write_text(page, encoding="utf-8")


# --- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT")
    for option in ("ci", "check", "write", "peer"):
        parser.add_argument(f"--{option}", action="store_true")
    options = parser.parse_args()
    records = read_records()
    cells = [
        cell
        for cell in (CI if options.ci else CELLS)
        if all(text in cell.name for text in options.only)
        and (cell.name in records["cells"] or not options.check)
    ]
    missing = [cell.name for cell in CI if options.ci and options.check and cell.name not in records["cells"]]
    if missing:
        print(
            f"not compared, for want of a record: {'; '.join(missing)} (--ci --write makes them)",
            file=sys.stderr,
        )
    if not cells and not options.peer:
        print(f"--only {' '.join(options.only)}: no cell of that name", file=sys.stderr)
        return WRONG_REQUEST
    environments.ensure(ENVIRONMENT, print)
    rates = products(list(dict.fromkeys(cell.place.accelerator.generation.name for cell in cells)))
    grown: list[str] = []
    if options.write:
        keep(products=rates)
    print(HEADING)
    for cell in cells:
        record = cell.record()
        print(row(cell, record, rates[cell.place.accelerator.generation.name]), flush=True)
        if options.write:
            keep(cells={cell.name: record})
            if cell.name in GOALS and cell.name not in records["goals"]:
                keep(goals={cell.name: products_of_step(cell)})
        if options.check:
            grown += complaints(cell, records["cells"][cell.name], record)
    if options.peer:
        peer = measure_peer()
        print(f"FlaxRobertaForMaskedLM: {peer['cycles'] / 1e6:.1f} M cycles, {peer['memory'] / GIB:.2f} GiB")
        if options.write:
            keep(peer=peer)
    if options.check:
        print(
            "\n".join(grown) or f"nothing of {len(cells)} cells rose by more than {MOST_GROWTH:.0%}",
            file=sys.stderr,
        )
    return FAILED if grown else DONE


def keep(**entries: dict[str, Any]) -> None:
    """Add to the records, and renew the page."""
    records = read_records()  # another one may have written meanwhile
    records = {**records, **{name: {**records.get(name, {}), **value} for name, value in entries.items()}}
    write_records(records)
    write_page(records)


if __name__ == "__main__":
    sys.exit(main())
