"""What the TPU compiler says of the jobs' training steps on slices that are not there: memory, estimated cycles, what
devices send each other. No time is measured: the figures are the same on every machine, whatever else it does.

Share: the model's own operations in a cycle, over those of a product of 8,192 by 8,192 by 8,192 by the same estimate.
Kernels in Pallas, which have no estimate, are counted as `fab fit` does (docs/accelerators.md).

python -m bench.tpu [--only tiny v5litepod-4 | --kept] [--check | --write]
--only: cells whose name has all of these. --kept: those in bench/tpu_cells.json. --check: compare with that file, and
end with 1 where an estimate rose by more than 3 %, with the operations that grew; --write: put there what was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.local import environments
from console.fit import COMPILER, ENVIRONMENT, GIB, Estimate, Place, measure
from infra import catalogue
from launch import jobs
from launch.jobs import CHECKOUT

KEPT = Path(__file__).with_name("tpu_cells.json")
MOST_GROWTH = 0.03
SPENT_KEPT = 30
SLICES = (
    *("v2-8", "v3-8", "v4-8", "v5litepod-4", "v5p-8", "v6e-8", "tpu7x-8"),
    *("v4-32", "v5litepod-16", "v5p-32", "v6e-16"),
    *("v4-512", "v5litepod-256", "v5p-512", "v6e-256"),
)
"""One host of each generation, 16 chips, 256 chips."""
STEPS = {
    "tiny 128": ("flax_mlm", 64, ("--model", "tiny", "--sequence-length", "128", "--dropout", "0.1")),
    "base 128": ("flax_mlm", 64, ("--model", "base", "--sequence-length", "128", "--dropout", "0.1")),
    "base 512": ("flax_mlm", 16, ("--model", "base", "--sequence-length", "512", "--dropout", "0.1")),
    "tiny 128 fsdp": ("flax_mlm", 64, ("--model", "tiny", "--sequence-length", "128", "--fsdp", "4")),
    "keras_glue": ("keras_glue", 8, ()),
}
"""A name: the job, rows a device, and its other options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A step on a slice, or on several that train together."""

    step: str
    accelerator: str
    slices: int = 1

    @property
    def place(self) -> Place:
        return Place(accelerator=catalogue.accelerator(self.accelerator, "any"), slices=self.slices)

    @property
    def name(self) -> str:
        return f"{self.step}, {self.place.name}"

    def measure(self) -> Estimate:
        job_name, rows, words = STEPS[self.step]
        job = jobs.find(job_name)
        words = (*words, "--batch-size", str(rows * self.place.devices))
        return measure(job, job.parse(words), self.place)


CELLS = (
    *(Cell(step=step, accelerator=accelerator) for step in STEPS for accelerator in SLICES),
    *(Cell(step=step, accelerator="v5litepod-4", slices=2) for step in ("tiny 128", "base 128")),
)


def growth(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Say which operations grew where the cycles of a cell rose by more than MOST_GROWTH; None where they did not."""
    if now["cycles"] <= before["cycles"] * (1 + MOST_GROWTH):
        return None
    rise = {name: cycles - before["spent"].get(name, 0) for name, cycles in now["spent"].items()}
    grown = sorted((name for name in rise if rise[name] > 0), key=lambda name: -rise[name])[:3]
    said = ", ".join(f"{name} +{rise[name]:,}" for name in grown)
    percent = 100 * (now["cycles"] / before["cycles"] - 1)
    return f"{before['cycles']:,} cycles are now {now['cycles']:,}, {percent:+.1f} %: {said}"


def kept(found: Estimate) -> dict[str, Any]:
    """What is kept of a cell."""
    answer = found.answer
    spent = {f"{each['scope']}: {each['operation']}": each["cycles"] for each in answer["spent"][:SPENT_KEPT]}
    return {
        "compiler": answer["compiler"],
        "cycles": answer["cycles"],
        "memory": answer["memory"]["total"],
        "spent": spent,
    }


def products(cells: Sequence[Cell]) -> dict[str, float]:
    """The operations in a cycle of the large product on a device of each generation."""
    of_one_host: dict[str, dict[str, Any]] = {}
    for cell in CELLS:
        of_one_host.setdefault(cell.place.accelerator.generation.name, cell.place.topology)
    names = list(dict.fromkeys(cell.place.accelerator.generation.name for cell in cells))
    done = subprocess.run(
        [
            *(str(environments.python_of(ENVIRONMENT)), "-P", "-m", "bench.tpu_product"),
            *(json.dumps(of_one_host[name]) for name in names),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        env={**os.environ, **COMPILER, "PYTHONPATH": str(CHECKOUT)},
    )
    return dict(zip(names, json.loads(done.stdout), strict=True))


HEADING = (
    "| step | slice | GiB a device | M cycles | kernels ms | share | step at least | MFU at most | MiB sent in a host "
    "| between hosts | between slices | compiled in |\n|---|---|" + "---:|" * 10
)


def row(cell: Cell, found: Estimate, product: float) -> str:
    """A line of the table."""
    _, rows, _ = STEPS[cell.step]
    answer = found.answer
    memory = f"{answer['memory']['total'] / GIB:.2f} of {found.memory_limit / GIB:.0f}"
    if not found.fits:
        return f"| {cell.step}, {rows} rows a device | {cell.place.name} | {memory}: does not fit |"
    clock = cell.place.accelerator.generation.clock_mhz * 1e6
    cycles = answer["cycles"] + found.kernels_s * clock
    share = answer["model_operations"] / answer["devices"] / cycles / product
    sent = [
        found.sent_bytes(lambda each, reach=reach: each["reach"] == reach) / 2**20  # type: ignore[misc]
        for reach in ("within a host", "between hosts", "between slices")
    ]
    cells = [
        *(f"{cell.step}, {rows} rows a device", cell.place.name, memory),
        *(f"{answer['cycles'] / 1e6:.2f}", f"{found.kernels_s * 1e3:.2f}", f"{100 * share:.0f} %"),
        *(f"{found.step_s * 1e3:.2f} ms", f"{100 * (found.mfu or 0):.0f} %"),
        *(f"{size:,.1f}" for size in sent),
        f"{answer['compile_s']:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def chosen(only: Sequence[str]) -> Iterator[Cell]:
    for cell in CELLS:
        if all(text in cell.name for text in only):
            yield cell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT")
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    environments.ensure(ENVIRONMENT, print)
    before = json.loads(KEPT.read_text())
    cells = [cell for cell in chosen(asked.only) if cell.name in before or not asked.kept]
    product, complaints, now = products(cells), [], {}
    print(HEADING)
    for cell in cells:
        found = cell.measure()
        print(row(cell, found, product[cell.place.accelerator.generation.name]), flush=True)
        if not found.fits:
            continue
        now[cell.name] = kept(found)
        was = before.get(cell.name)
        if was is not None and was["compiler"] == now[cell.name]["compiler"]:
            said = growth(was, now[cell.name])
            complaints += [f"{cell.name}: {said}"] if said else []
    if asked.write:
        latest = json.loads(KEPT.read_text())  # another one may have written meanwhile
        KEPT.write_text(json.dumps({**latest, **now}, indent=1, sort_keys=True) + "\n")
    if asked.check:
        print(
            "\n".join(complaints) or f"no estimate of {len(now)} rose by more than {MOST_GROWTH:.0%}",
            file=sys.stderr,
        )
    return 1 if asked.check and complaints else 0


if __name__ == "__main__":
    sys.exit(main())
