"""How a training begins and ends in either framework: rows and a model that all processes agree on, and the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from contracts.errors import RequestError
from jobs.glue import data
from jobs.glue.batches import MULTIPLE, Encoded, PackedBatches
from jobs.glue.data import Dataset
from jobs.glue.options import Options
from jobs.glue.predictions import no_better_than_chance
from jobs.glue.pretrained import Beginning
from jobs.glue.tokenizer import open_tokenizer
from jobs.runtime.loop import Checkpoints, Loop
from jobs.runtime.monitoring.profile import Tracer
from jobs.runtime.process import Final, Run
from jobs.runtime.storage.model_folder import require_unchanged

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


def pack(
    options: Options, dataset: Dataset, beginning: Beginning, *, shares: int, device: str
) -> PackedBatches:
    """The packed batches that the options ask for, each in so many shares, for devices of a kind.

    Raises:
        RequestError: there are fewer rows to learn from than a batch has.
    """
    tokenizer, pad_id = open_tokenizer(beginning.tokenizer), beginning.settings["pad_token_id"]
    train, held_out = (
        Encoded(
            rows,
            tokenizer,
            pad_id=pad_id,
            max_length=options.max_length,
            is_regression=dataset.task == "regression",
        )
        for rows in (dataset.train, dataset.eval)
    )
    if len(train) < options.batch_size:
        raise RequestError(
            f"--batch-size {options.batch_size}: {options.data} has only {len(train)} rows to learn from"
        )
    return PackedBatches(
        train,
        held_out,
        batch_size=options.batch_size,
        lengths=options.lengths,
        seed=options.seed,
        shares=shares,
        multiple=1 if device == "cpu" else MULTIPLE,
    )


class Task(Protocol):
    """One process's part of a training, by its framework: the model with its optimizer, and the evaluation.

    parameters: their number. dtype_name: of activations.
    """

    dataset: Dataset
    beginning: Beginning
    batches: PackedBatches
    steps: int
    peak_rate: float
    parameters: int
    dtype_name: str

    def numbers(self, step: int, results: Any) -> dict[str, float]: ...

    def score(self, step: int) -> dict[str, float]: ...


def begin(
    run: Run,
    config: Options,
    task: Task,
    checkpoints: Checkpoints,
    *,
    eval_every: int,
    devices: str,
    tracer: Tracer,
    wait: Callable[[], object],
    **decided: Any,
) -> Loop:
    """Record what was decided where the options leave it open, and resume; returns the loop over the steps.

    devices: for the log.
    """
    batches = task.batches
    decided |= {"steps": task.steps, "eval_every": eval_every, "learning_rate": task.peak_rate}
    decided |= {"dtype": task.dtype_name, "padded_to": batches.lengths, "labels": list(task.dataset.labels)}
    run.decide({**vars(config), **decided})
    run.say(f"{task.parameters:,} parameters on {devices}; {batches.described()}")
    loop = Loop(
        run=run,
        checkpoints=checkpoints,
        steps=task.steps,
        unit="rows",
        per_step=config.batch_size,
        flops_per_step=6 * task.parameters * batches.tokens_per_step,
        checkpoint_every=config.checkpoint_every,
        log_every=config.log_every,
        score=task.score,
        headline="eval_score",
        eval_every=eval_every,
        patience=config.patience,
        profile=config.profile,
        tracer=tracer,
        wait=wait,
        read=task.numbers,
        notes={"began_from": task.beginning.fingerprint},
    )
    if notes := loop.resume():
        require_unchanged(config.init_from, notes["began_from"], task.beginning.fingerprint)
    return loop


def conclude(run: Run, config: Options, loop: Loop, task: Task) -> Final:
    """Finish the loop; returns the final metrics of result.json. Warns of a model that is no better than chance."""
    final = loop.finish(best=config.best)
    warning = no_better_than_chance(task.dataset, final)
    if warning is not None:
        run.warn(warning)
    return {
        **final,
        "baseline": task.dataset.baseline,
        "best_step": loop.best_step,
        "exported_step": loop.exported_step,
        "padding": round(task.batches.padding, 4),
    }
