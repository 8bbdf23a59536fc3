"""The options that the glue jobs have in common, and the rules that they must satisfy. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jobs.runtime.option_rules import at_least, batch_problems, between, outside, profile_problems, ranges

SIZES = {
    "tiny": {"layers": 2, "width": 128, "heads": 2, "ff_width": 512},
    "small": {"layers": 4, "width": 256, "heads": 4, "ff_width": 1024},
    "base": {"layers": 12, "width": 768, "heads": 12, "ff_width": 3072},
}
"""`base` is RoBERTa-base (Liu et al. 2019, table 9); flax_mlm has the same names."""
VOCAB_SIZE = 4096
"""Of the tokenizer that is trained where no model is given."""

GROUPS = {
    "data": "The rows",
    "init_from": "The model",
    "max_length": "Training",
    "log_every": "The run",
    "dtype": "How it is computed",
}
"""Headings of the help, each before this option; a job's own options come last."""

FROM_RUNS = ("init_from",)
"""Options that may name a run instead of the folder of a model: latest:JOB, or the run's id."""

FREE_ON_RESUME = frozenset({"log_every", "checkpoint_every", "keep_checkpoints", "profile"})
"""Options that a resumed run may change: they do not touch what is computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to learn from, with what to begin, how to train, and what to keep of it."""

    data: str = "docstrings"
    """Rows to learn from: "docstrings" (does this function return a value? Of Python's standard library),
    a file of CSV, TSV, JSON lines, a JSON list or Parquet, or a folder of a GLUE task; gs://… too."""
    eval_data: str | None = None
    """A file of rows to evaluate on; none: a share of the rows is held out."""
    eval_fraction: float = 0.1
    """Share of the rows that is held out."""
    text_field: str | None = None
    """The column of the text, or of the first of a pair (default: found by its usual names)."""
    pair_field: str | None = None
    """The column of the second text of a pair."""
    label_field: str | None = None
    """The column of the label (default: found by its usual names)."""
    task: Literal["auto", "classification", "regression"] = "auto"
    """What a label is: a class, or a number to come near to. auto: a number where labels are not whole."""

    init_from: str | None = None
    """A Hugging Face folder of a RoBERTa or BERT to begin with; gs://… too. latest:flax_mlm: the export of the latest
    run of that job; a run's id: that run's. None: the model is drawn, and a tokenizer trained on the rows."""
    scratch: bool = False
    """Take the tokenizer and the sizes of --init-from, and draw the weights."""
    model: Literal["tiny", "small", "base"] = "tiny"
    """The size of a model that is drawn without --init-from."""
    dropout: float | None = None
    """Share of activations dropped in training (default: the model's)."""

    max_length: int = 128
    """Tokens of a row at most; what is longer is cut."""
    lengths: int = 16
    """Lengths that the rows of a batch are padded to, chosen so that little is padded."""
    batch_size: int = 32
    """Rows of a step, over all hosts together."""
    epochs: float = 3.0
    """How often each row is seen."""
    steps: int | None = None
    """Training steps, in place of --epochs."""
    learning_rate: float | None = None
    """Peak of the learning rate, reached after the warm-up and decayed linearly to 0 (default: by the width)."""
    warmup_share: float = 0.1
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """AdamW's weight decay; biases and norms have none."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this norm where it is longer."""
    seed: int = 0
    """Decides the drawn parameters, the order of the rows and dropout."""

    log_every: int = 20
    """Steps between two lines of metrics."""
    eval_every: int | None = None
    """Steps between two evaluations (default: an epoch)."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; before an evaluation one is written too."""
    keep_checkpoints: int = 2
    """The latest checkpoints that are kept, beside the best one."""
    best: bool = False
    """Export the model that was best on the held-out rows, in place of the last one."""
    patience: int | None = None
    """Evaluations without a better score after which training ends early."""
    profile: str | None = None
    """Steps A:B, both included, that are traced into profile/: 100:104."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What activations are computed in; parameters are float32. auto: bfloat16, and float32 on a CPU without
    avx512_bf16."""


def learning_rate(options: Options, width: int) -> float:
    """The peak: the option, else by the model's width; 768: Liu et al. 2019, table 10; smaller: by trial."""
    if options.learning_rate is not None:
        return options.learning_rate
    return 5e-4 if width <= 256 else 1e-4 if width <= 512 else 2e-5


def scheduled(options: Options, peak: float, step: int, steps: int) -> float:
    """The learning rate of a step, from 1: up from 0 in the warm-up, then down to 0, each in a line."""
    warmup = options.warmup_share * steps
    return peak * min(step / max(warmup, 1), (steps - step + 1) / max(steps - warmup, 1))


def problems(options: Options, *, devices: int) -> list[str]:
    """Everything that is wrong with `options` on so many devices; empty where it can run."""
    messages = outside(options, RANGES)
    if options.scratch and options.init_from is None:
        messages.append(
            "--scratch: takes tokenizer and sizes from --init-from; name a folder, or leave --scratch out"
        )
    if options.pair_field is not None and options.text_field is None:
        messages.append(f"--pair-field {options.pair_field}: name the first text with --text-field too")
    messages += profile_problems(options)
    return messages or batch_problems(options.batch_size, devices)


RANGES = ranges(Options, {"max_length": at_least(8), "lengths": between(1, 16)})
