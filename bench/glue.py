"""Fine-tuning by our jobs beside transformers' Trainer: the same rows, model, seed and steps, on this machine's CPU.

    python -m bench.glue                       every setting of both, by turns
    python -m bench.glue --steps 300 --rounds 2 --model small

Each turn is a process of its own. Rates leave the first steps out, which compile; memory is the peak of
the process. The losses of both are compared at the end: the rows come in another order, so they agree to noise.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import rounds

WARM_STEPS = 50
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "dropout": 0.1}
OURS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "torch_glue": ("torch_glue", "pytorch", {"compile": "no"}),
    "torch_glue, compiled": ("torch_glue", "pytorch", {"compile": "yes"}),
    "keras_glue": ("keras_glue", "jax", {}),
}
"""By name: the job, its framework and its options."""
TRAINER: dict[str, dict[str, Any]] = {
    "Trainer": {},
    "Trainer, grouped by length": {"train_sampling_strategy": "group_by_length"},
    "Trainer, grouped, compiled": {"train_sampling_strategy": "group_by_length", "torch_compile": True},
}
"""By name: what TrainingArguments is given besides bf16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", default="small", choices=["tiny", "small", "base"])
    rounds.main(
        parser,
        module="bench.glue",
        framework="pytorch",
        ours={name: functools.partial(_ours, job=job) for name, job in OURS.items()},
        theirs={name: functools.partial(_trainer, more=more) for name, more in TRAINER.items()},
        columns={
            "rate": ("rows/s", ".1f"),
            "peak_mib": ("peak memory, MiB", ".0f"),
            "loss": ("mean loss of the last 50 steps", ".4f"),
        },
    )


def _ours(
    arguments: argparse.Namespace, folder: Path, *, job: tuple[str, str, dict[str, Any]]
) -> rounds.Measured:
    name, framework, more = job
    steps = arguments.steps
    options = {
        "model": arguments.model,
        "steps": steps,
        **SETTINGS,
        "log_every": 1,
        "checkpoint_every": steps,
    }
    lines, measured = rounds.run_job(name, framework, {**options, **more}, folder)
    lines = [line for line in lines if "loss" in line]
    losses, warm = [line["loss"] for line in lines], lines[WARM_STEPS:]
    return {"rate": rounds.rate(warm, "rows_per_s"), "loss": _last(losses), **measured}


def _trainer(arguments: argparse.Namespace, parent: Path, *, more: dict[str, Any]) -> rounds.Measured:
    import torch
    import transformers

    from jobs.glue import data
    from jobs.glue.batches import Encoded
    from jobs.glue.options import learning_rate
    from jobs.glue.pretrained import prepare
    from jobs.glue.tokenizer import open_tokenizer
    from jobs.torch_glue.config import Config
    from jobs.torch_glue.model import build

    folder, steps = Path(tempfile.mkdtemp(dir=parent)), arguments.steps
    config = Config(model=arguments.model, steps=steps, **SETTINGS)
    dataset = data.read(config)
    beginning = prepare(config, dataset, folder, print)
    encoded = Encoded(
        dataset.train,
        open_tokenizer(beginning.tokenizer),
        pad_id=beginning.settings["pad_token_id"],
        max_length=config.max_length,
        is_regression=False,
    )
    rows = [
        {"input_ids": list(ids), "labels": int(label)}
        for ids, label in zip(encoded._ids, encoded.labels_N, strict=True)
    ]
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer = transformers.Trainer(
        model=build(beginning, config.seed),
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            bf16=True,
            max_steps=steps,
            per_device_train_batch_size=config.batch_size,
            learning_rate=learning_rate(config, beginning.settings["hidden_size"]),
            warmup_steps=round(config.warmup_share * steps),
            weight_decay=config.weight_decay,
            adam_beta2=0.98,
            adam_epsilon=1e-6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.seed,
            **more,
        ),
        train_dataset=rows,
        data_collator=transformers.DataCollatorWithPadding(
            transformers.RobertaTokenizerFast.from_pretrained(beginning.tokenizer), pad_to_multiple_of=8
        ),
        callbacks=[Clock()],
    )
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # it prints every step
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    seconds = ends[-1] - ends[WARM_STEPS - 1]
    return {"rate": (steps - WARM_STEPS) * config.batch_size / seconds, "loss": _last(losses)}


def _last(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-50:])


if __name__ == "__main__":
    main()
