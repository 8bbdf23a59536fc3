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
import json
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
OURS = {"torch_glue": "no", "torch_glue, compiled": "yes", "keras_glue": ""}
TRAINER: dict[str, dict[str, Any]] = {
    "Trainer": {},
    "Trainer, grouped by length": {"train_sampling_strategy": "group_by_length"},
    "Trainer, grouped, compiled": {"train_sampling_strategy": "group_by_length", "torch_compile": True},
}
"""By name: what TrainingArguments is given besides bf16, or torch_glue's --compile."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="small", choices=["tiny", "small", "base"])
    parser.add_argument("--only", nargs="+", choices=[*OURS, *TRAINER], help="these programs (default: all)")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model, steps = options.model, options.steps
    if options.turn is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(_trainer(Path(folder), model, steps, TRAINER[options.turn])))
        return
    forwarded = ["--model", model, "--steps", steps, "--turn"]
    only = options.only or [*OURS, *TRAINER]
    ours = {
        name: functools.partial(_ours, model, steps, compiled)
        for name, compiled in OURS.items()
        if name in only
    }
    theirs = {
        name: functools.partial(rounds.ask, "bench.glue", "pytorch", [*forwarded, name])
        for name in TRAINER
        if name in only
    }
    print(f"model {model}, {steps} steps")
    columns = {
        "rate": ("rows/s", ".1f"),
        "peak_mib": ("peak memory, MiB", ".0f"),
        "loss": ("mean loss of the last 50 steps", ".4f"),
    }
    rounds.compare(ours, theirs, rounds=options.rounds, columns=columns)


def _ours(model: str, steps: int, compiled: str) -> rounds.Measured:
    job, framework = ("torch_glue", "pytorch") if compiled else ("keras_glue", "jax")
    options = {"model": model, "steps": steps, **SETTINGS, "log_every": 1, "checkpoint_every": steps}
    with tempfile.TemporaryDirectory() as folder:
        more = {"compile": compiled} if compiled else {}
        lines, measured = rounds.run_job(job, framework, {**options, **more}, Path(folder))
    lines = [line for line in lines if "loss" in line]
    losses, warm = [line["loss"] for line in lines], lines[WARM_STEPS:]
    return {"rate": rounds.rate(warm, "rows_per_s"), "loss": _last(losses), **measured}


def _trainer(folder: Path, model: Any, steps: int, more: dict[str, Any]) -> rounds.Measured:
    import torch
    import transformers

    from jobs.glue import data
    from jobs.glue.batches import Encoded
    from jobs.glue.options import learning_rate
    from jobs.glue.pretrained import prepare
    from jobs.glue.tokenizer import open_tokenizer
    from jobs.torch_glue.config import Config
    from jobs.torch_glue.model import build

    config = Config(model=model, steps=steps, **SETTINGS)
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
