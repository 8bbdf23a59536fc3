"""How a training begins and ends in either framework: rows and a model that all processes agree on, and the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.glue import data
from jobs.glue.batches import PackedBatches
from jobs.glue.data import Dataset
from jobs.glue.options import Options
from jobs.glue.predictions import no_better_than_chance
from jobs.glue.pretrained import Beginning
from jobs.runtime.loop import Loop
from jobs.runtime.process import Final, Run

type Prepare = Callable[[Any, Dataset, Path, Callable[[str], None]], Beginning]
type Agree = Callable[[str, str, Callable[[str], None]], None]
"""Makes sure that all processes have the same fingerprint of what an option names."""


def open_inputs(run: Run, config: Options, prepare: Prepare, agree: Agree) -> tuple[Dataset, Beginning]:
    """The rows and what training begins with, the same in all processes.

    Raises:
        RequestError: the rows or the model are missing or not what they should be, or differ between the hosts.
    """
    run.prepare(f"reading {config.data}")
    dataset = data.read(config)
    agree(f"--data {config.data}", dataset.fingerprint, run.prepare)
    for text in dataset.warnings:
        run.warn(text)
    beginning = prepare(config, dataset, Path(run.environment.cache_dir), run.prepare)
    agree(f"--init-from {config.init_from}", beginning.fingerprint, run.prepare)
    return dataset, beginning


def settings(config: Options, dataset: Dataset, batches: PackedBatches, **decided: Any) -> dict[str, Any]:
    """The options, and what was decided where they left it open."""
    return {**vars(config), **decided, "padded_to": batches.lengths, "labels": list(dataset.labels)}


def conclude(run: Run, config: Options, loop: Loop, dataset: Dataset, batches: PackedBatches) -> Final:
    """Finish the loop; returns the final metrics of result.json. Warns of a model that is no better than chance."""
    final = loop.finish(best=config.best)
    warning = no_better_than_chance(dataset, final)
    if warning is not None:
        run.warn(warning)
    return {
        **final,
        "baseline": dataset.baseline,
        "best_step": loop.best_step,
        "exported_step": loop.exported_step,
        "padding": round(batches.padding, 4),
    }
