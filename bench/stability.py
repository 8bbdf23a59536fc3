"""Trains flax_mlm from several seeds for several numbers of steps: whether it is stable, and its final losses.

Each cell is one training in one process, by the job's own step, schedule, data and loss guard, without checkpoints;
as many processes at once as there are processors. A cell is stable where no step was an outlier (`loss_guard`). No time
is measured: run it beside whatever you like. The table gives the evaluation loss over all held-out text.

python -m bench.stability [--steps 100 200 … 3000] [--seeds 5] [--dtype float32 bfloat16] [--learning-rate RATE]
    [--out FILE]"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import queue
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs.flax_mlm.config import Config
from jobs.runtime.storage.cache import user_cache_dir

STEPS = (100, 200, 300, 350, 400, 450, 500, 600, 800, 1000, 1500, 2000, 3000)
IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What one training came to. steps: those taken, fewer than asked for where the guard ended it.

    outliers: the steps that were, the first ten. grad_norm: the largest after a tenth of the steps. unigrams: what the
    held-out tokens' own frequencies come to, in nats as `loss`.
    """

    dtype: str
    planned_steps: int
    seed: int
    steps: int
    loss: float
    unigrams: float
    outliers: Sequence[int]
    grad_norm: float


def train(config: Config) -> Cell:
    """Train one cell here, on the first device."""
    import jax
    import numpy as np

    from jobs.flax_mlm import data, sharding
    from jobs.flax_mlm import step as steps
    from jobs.flax_mlm.data import unigram_entropy
    from jobs.flax_mlm.input_pipeline import InputPipeline
    from jobs.flax_mlm.loss_guard import LossGuard

    tokens = data.prepare(config, user_cache_dir(), lambda _: None)
    mesh = sharding.make_mesh(1)
    inputs = InputPipeline(tokens, config, mesh)
    step_functions = steps.make_steps(config, tokens.tokenizer, mesh)
    state = step_functions.state
    rows_B = inputs.place(np.arange(config.batch_size, dtype=np.int32))
    guard, outliers, norms = LossGuard(), [], []
    in_flight: list[dict[str, jax.Array]] = []
    for step in range(1, config.steps + IN_FLIGHT + 1):
        if step <= config.steps:
            state, results = step_functions.train(state, inputs.step(step), rows_B)
            in_flight.append(results)
        if step > IN_FLIGHT and in_flight:
            values = {name: float(value) for name, value in in_flight.pop(0).items()}
            norms.append(values["grad_norm"])
            verdict = guard.check(values)
            if verdict is not None:
                outliers.append(step - IN_FLIGHT)
                if verdict.ends:
                    break
    result = steps.evaluate(
        step_functions.evaluate,
        state["params"],
        inputs.held_out,
        inputs.place,
        sequences=inputs.sequences("eval"),
        batch_size=config.batch_size,
        tick=lambda: None,
    )
    return Cell(
        dtype=config.dtype,
        planned_steps=config.steps,
        seed=config.seed,
        steps=len(norms),
        loss=result.loss,
        unigrams=unigram_entropy(tokens.eval, tokens.tokenizer.special_ids),
        outliers=outliers[:10],
        grad_norm=max(norms[config.steps // 10 :]),
    )


def all_trained(configs: Sequence[Config]) -> Iterator[Cell]:
    """The cells in the order in which they come to their end: a process each, and a processor each at a time."""
    context = multiprocessing.get_context("spawn")
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    processors = sorted(os.sched_getaffinity(0))
    for processor in processors:
        free.put(processor)

    def train_on_free_processor(config: Config) -> Cell:
        processor = free.get()
        try:
            with concurrent.futures.ProcessPoolExecutor(
                1, mp_context=context, initializer=_begin, initargs=(processor,)
            ) as pool:
                return pool.submit(train, config).result()
        finally:
            free.put(processor)

    with concurrent.futures.ThreadPoolExecutor(len(processors)) as threads:
        # The longest first, so that no processor is left with one at the end.
        order = sorted(configs, key=lambda config: -config.steps)
        for done in concurrent.futures.as_completed(
            [threads.submit(train_on_free_processor, config) for config in order]
        ):
            yield done.result()


def _begin(processor: int) -> None:
    """Take a processor of one's own, as a host process of the local target does."""
    os.sched_setaffinity(0, {processor})
    os.environ["JAX_PLATFORMS"] = "cpu"


def table(cells: Sequence[Cell]) -> str:
    """A line for each dtype and number of steps, the seeds side by side."""
    seeds = sorted({cell.seed for cell in cells})
    lines = [
        "| activations | steps | "
        + "".join(f"seed {seed} | " for seed in seeds)
        + "mean | ± | outliers | gradient |",
        "|---|---:|" + "---:|" * len(seeds) + "---:|---:|---:|---:|",
    ]
    for dtype, planned in sorted({(cell.dtype, cell.planned_steps) for cell in cells}):
        row = sorted(
            (cell for cell in cells if (cell.dtype, cell.planned_steps) == (dtype, planned)),
            key=lambda cell: cell.seed,
        )
        losses = [cell.loss for cell in row]
        by_seed = {cell.seed: f"{cell.loss:.3f}" + _ended(cell) for cell in row}
        lines.append(
            f"| {dtype} | {planned:,} | "
            + "".join(f"{by_seed.get(seed, '')} | " for seed in seeds)
            + f"{statistics.fmean(losses):.3f} | {spread(losses):.3f} | {sum(len(cell.outliers) for cell in row)} "
            + f"| {max(cell.grad_norm for cell in row):.1f} |"
        )
    return "\n".join(lines)


def spread(values: Sequence[float]) -> float:
    """The standard deviation that a sample stands for; of one value there is none."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _ended(cell: Cell) -> str:
    return f" (ended at {cell.steps})" if cell.steps < cell.planned_steps else ""


def main(arguments: Sequence[str]) -> int:
    """Prints a table; 1 where a cell was ended, had an outlier or has learned nothing beyond the unigrams."""
    parser = argparse.ArgumentParser(prog="python -m bench.stability", description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--learning-rate", type=float, help="default: the job's")
    parser.add_argument(
        "--out", type=Path, help="a file that each cell is appended to as JSON; those in it are kept"
    )
    options = parser.parse_args(arguments)
    cells = []
    if options.out is not None and options.out.exists():
        cells = [Cell(**json.loads(line)) for line in options.out.read_text().splitlines()]
    measured = {(cell.dtype, cell.planned_steps, cell.seed) for cell in cells}
    missing = [
        Config(steps=steps, seed=seed, dtype=dtype, learning_rate=options.learning_rate)
        for dtype in options.dtype
        for steps in options.steps
        for seed in range(options.seeds)
        if (dtype, steps, seed) not in measured
    ]
    for cell in all_trained(missing):
        cells.append(cell)
        print(json.dumps(dataclasses.asdict(cell)), file=sys.stderr, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
    print(f"\nunigrams: {cells[0].unigrams:.3f} nats\n\n{table(cells)}", flush=True)
    return int(
        any(cell.outliers or cell.steps < cell.planned_steps or cell.loss > cell.unigrams for cell in cells)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
