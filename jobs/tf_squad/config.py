"""The options of tf_squad, and the rules that they must satisfy. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jobs.runtime.option_rules import FINITE, at_least, batch_problems, outside, profile_problems, ranges

QUESTION_TOKENS = 64
"""A longer question is cut, as in Devlin et al. 2019's program; at half of --max-length where that is less."""

COMPUTES = {
    "model_type": ("roberta",),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
}
"""What a model's config.json may say, where it says anything of these."""

GROUPS = {
    "data": "The questions",
    "init_from": "The model",
    "max_length": "Windows and answers",
    "batch_size": "Training",
    "dtype": "How it is computed",
    "log_every": "The run",
}
"""Headings of the help, each before this option."""

FROM_RUNS = ("init_from",)
"""Options that may name a run instead of the folder of a model: latest:JOB, or the run's id."""

FREE_ON_RESUME = frozenset(
    {"steps_per_call", "log_every", "checkpoint_every", "keep_checkpoints", "profile", "best_spans"}
)
"""Options that a resumed run may change: they do not touch what is computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tune a model to find the answers to questions in texts."""

    data: str = "topics"
    """Questions to learn from: "topics" (which exception, parameter or version is spoken of? From the definitions of
    Python's language, which every machine has), or a JSON file of SQuAD 1.1 or 2.0 (.json, .json.gz); gs://… too."""
    eval_data: str | None = None
    """A file of questions to evaluate on; none: a share of the titles or of the texts is held out."""
    eval_fraction: float = 0.1
    """Share that is held out."""

    init_from: str | None = None
    """A Hugging Face folder of a RoBERTa to begin with; gs://… too. latest:flax_mlm: the export of the latest run of
    that job; a run's id: that run's. None: the model is drawn, and a tokenizer trained on the texts."""
    scratch: bool = False
    """Take the tokenizer and the sizes of --init-from, and draw the weights."""
    model: Literal["tiny", "small", "base"] = "tiny"
    """The size of a model that is drawn without --init-from."""
    dropout: float | None = None
    """Share of activations dropped in training (default: the model's)."""

    max_length: int = 384
    """Tokens of a window at most: the question and a part of the text."""
    stride: int = 128
    """Tokens from the beginning of a window to that of the next one of the same text."""
    answer_length: int = 30
    """Tokens of an answer at most."""
    best_spans: int = 20
    """Places that are kept of each window as possible answers."""
    null_threshold: float = 0.0
    """Where questions may have no answer: none is given if its score is this much above that of the best place."""

    batch_size: int = 32
    """Windows of a step, over all hosts together."""
    epochs: float | None = None
    """How often each window is seen (default: 3 times with --init-from, else 8 times)."""
    steps: int | None = None
    """Training steps, in place of --epochs."""
    learning_rate: float | None = None
    """Peak of the learning rate, reached after the warm-up and decayed linearly to 0 (default: by the width)."""
    warmup_share: float = 0.1
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """AdamW's weight decay; biases and norms have none."""
    clip_norm: float = 1.0
    """The gradient, of all hosts together, is scaled down to this norm where it is longer."""
    seed: int = 0
    """Decides the drawn parameters, the order of the windows and dropout."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What activations are computed in; parameters are float32. auto: bfloat16, and float32 on a CPU
    without avx512_bf16."""
    steps_per_call: int = 10
    """Steps that the devices take between two returns to Python."""

    log_every: int = 20
    """Steps between two lines of metrics."""
    eval_every: int | None = None
    """Steps between two evaluations (default: an epoch)."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; before an evaluation one is written too."""
    keep_checkpoints: int = 2
    """The latest checkpoints that are kept."""
    profile: str | None = None
    """Steps A:B, both included, that are traced into profile/: 100:104."""


def learning_rate(config: Config, width: int) -> float:
    """The peak: the option, else by the model's width; 768: Liu et al. 2019, table 10; smaller: by trial."""
    if config.learning_rate is not None:
        return config.learning_rate
    return 1e-3 if width <= 256 else 1e-4 if width <= 512 else 3e-5


def problems(config: Config, *, devices: int) -> list[str]:
    """Everything that is wrong with `config` on so many devices; empty where it can run."""
    messages = outside(config, RANGES)
    if config.scratch and config.init_from is None:
        messages.append(
            "--scratch: takes tokenizer and sizes from --init-from; name a folder, or leave --scratch out"
        )
    room = config.max_length - min(QUESTION_TOKENS, config.max_length // 2) - 4
    if not messages and config.stride > room:
        messages.append(
            f"--stride {config.stride}: with --max-length {config.max_length} a window may hold only {room} tokens of "
            f"the text, and between two windows some would be left out; choose at most {room}"
        )
    messages += profile_problems(config)
    return messages or batch_problems(config.batch_size, devices)


RANGES = ranges(
    Config,
    {
        **dict.fromkeys(("stride", "answer_length", "best_spans"), at_least(1)),
        "max_length": at_least(16),
        "null_threshold": FINITE,
    },
)
