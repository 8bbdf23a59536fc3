"""The options of tf_images, and the rules that they must satisfy. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jobs.runtime.option_rules import at_least, between, execution_problems, outside, profile_problems, ranges

GROUPS = {
    "data": "The pictures",
    "model": "The model",
    "batch_per_core": "Training",
    "dtype": "How it is computed",
    "log_every": "The run",
}
"""Headings of the help, each before this option."""

FREE_ON_RESUME = frozenset({"log_every", "checkpoint_every", "keep_checkpoints", "profile", "tflite"})
"""Options that a resumed run may change: they do not touch what is computed."""
RATE_BATCH = 128
"""Pictures of a step that --learning-rate is meant for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Train a network to tell the classes of pictures."""

    data: str = "digits"
    """Shards that `python -m jobs.tf_images.shards` has made: a folder on every host or gs://…; "digits":
    scikit-learn's 1,797 handwritten digits."""
    image_size: int | None = None
    """Side of the square that pictures are brought to (default: theirs where all have the same, else 224)."""
    damaged: Literal["refuse", "skip"] = "refuse"
    """What is done about a damaged shard. skip: all shards are read once before training, and the records from the
    first damaged one of a shard on are left out."""
    flip: bool = False
    """Mirror half of the pictures; not for digits or letters."""
    shift: float = 0.1
    """Move pictures by up to this share of their side."""
    zoom: float = 0.1
    """Enlarge or shrink pictures by up to this share."""
    shuffle: int = 4096
    """Records that are mixed at a time; shards are read in another order in each epoch besides."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: a rare class counts as much as a frequent one."""

    model: Literal["convnet", "efficientnetv2-b0"] = "convnet"
    """convnet: four convolutions; efficientnetv2-b0: of tf_keras.applications."""
    width: int = 32
    """Channels of the convnet's first convolution; each next one has twice as many."""
    weights: str | None = None
    """A file of weights for efficientnetv2-b0 without its top (.h5), on every host; none: they are drawn."""

    batch_per_core: int = 128
    """Pictures of a step on each device; on a TPU a multiple of 8."""
    epochs: float = 30.0
    """How often each picture is seen."""
    steps: int | None = None
    """Training steps, in place of --epochs."""
    learning_rate: float = 2e-3
    """Peak of the learning rate for a step of 128 pictures; it is scaled with the pictures of a step."""
    warmup_share: float = 0.1
    """Share of the steps in which the learning rate rises; then it falls to 0 along a cosine."""
    label_smoothing: float = 0.1
    """Share of the label that is spread over all classes."""
    weight_decay: float = 0.01
    """AdamW's weight decay; biases and norms have none."""
    seed: int = 0
    """Decides the drawn parameters, the order of the pictures and how they are changed."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What activations are computed in; parameters are float32. auto: bfloat16, and float32 on a CPU
    without avx512_bf16."""
    steps_per_execution: int = 1
    """Steps that are taken without coming back to Python; logs, evaluations and checkpoints fall between."""

    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int | None = None
    """Steps between two evaluations (default: an epoch, and 50 at least)."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """The latest checkpoints that are kept, beside the best one."""
    best: bool = False
    """Export the model that was best on the held-out pictures, in place of the last one."""
    tflite: bool = False
    """Write export/model.tflite too."""
    profile: str | None = None
    """Steps A:B, both included, that are traced into profile/: 100:104."""


def problems(config: Config, *, devices: int) -> list[str]:  # noqa: ARG001 - a batch is given for each device
    """Everything that is wrong with `config`, on any number of devices; empty where it can run."""
    messages = outside(config, RANGES)
    if config.weights is not None and config.model == "convnet":
        messages.append(f"--weights {config.weights}: is for --model efficientnetv2-b0")
    return messages + execution_problems(config) + profile_problems(config)


RANGES = ranges(
    Config,
    {
        **dict.fromkeys(("shuffle", "width", "batch_per_core"), at_least(1)),
        "image_size": at_least(8),
        "seed": between(0, 2**32 - 2),
        "shift": between(0.0, 0.5),
        "zoom": between(0.0, 0.5),
        "label_smoothing": between(0.0, 0.9),
        "weight_decay": between(0.0, 10.0),
    },
)
