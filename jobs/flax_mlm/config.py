"""The options of flax_mlm, and the rules that they must satisfy. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from contracts.files import unwritable
from jobs.runtime.option_rules import at_least, batch_problems, between, outside, profile_problems, ranges

if TYPE_CHECKING:
    from jobs.flax_mlm.tokenizer import TokenizerFacts

Size = Literal["vocab_size", "layers", "width", "heads", "ff_width"]

SIZES = {
    "tiny": {"layers": 2, "width": 128, "heads": 2, "ff_width": 512, "vocab_size": 2048},
    "small": {"layers": 4, "width": 256, "heads": 4, "ff_width": 1024, "vocab_size": 8192},
    "base": {"layers": 12, "width": 768, "heads": 12, "ff_width": 3072, "vocab_size": 50265},
    "large": {"layers": 24, "width": 1024, "heads": 16, "ff_width": 4096, "vocab_size": 50265},
}
"""`base` and `large` are RoBERTa's (Liu et al. 2019, table 9); the vocabulary counts where a tokenizer is trained."""

MAX_POSITIONS = 512
"""As RoBERTa (Liu et al. 2019)."""

LEARNING_RATES = {"tiny": 3e-3, "small": 1e-3, "base": 6e-4, "large": 4e-4}
"""Peaks: base and large from Liu et al. 2019, table 9; the others by trial on the standard library's docstrings."""

VOCABULARY_MULTIPLE = 128
"""The token table has a multiple of this many rows, as wide as a matrix unit, and --fsdp shares them out evenly."""


GROUPS = {
    "data": "The text",
    "init_from": "The model",
    "sequence_length": "Training",
    "dtype": "How it is computed",
    "log_every": "The run",
}
"""Headings of the help, each before this option."""

FROM_RUNS = ("init_from",)
"""Options that may name a run instead of the folder of a model: latest:JOB, or the run's id."""

FREE_ON_RESUME = frozenset(
    {
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
        "on_trouble",
        "profile",
        "remote_cache",
        "fsdp",
        "remat",
        "accumulate",
    }
)
"""Options that a resumed run may change: they do not touch what is computed, or only in which order sums are taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Pre-train a RoBERTa masked language model on text."""

    data: str = "stdlib"
    """Text to learn from: "stdlib" (the docstrings of Python's standard library), a file, a folder or a glob, of prose,
    JSON lines, a JSON list, CSV, TSV or Parquet, also compressed, or the same in a bucket (gs://…)."""
    text_field: str = "text"
    """The column of rows that holds the text."""
    tokenizer: str | None = None
    """An existing tokenizer.json; none: a byte-level BPE is trained on the data."""
    eval_fraction: float = 0.1
    """Share of the documents that is held out for evaluation."""
    remote_cache: str | None = None
    """Where hosts share what they have tokenised: gs://…, or a folder that all of them see. The first host makes it,
    the others and later runs fetch it."""

    init_from: str | None = None
    """A Hugging Face folder of a RobertaForMaskedLM to continue from (gs://… too; latest:flax_mlm: the export of the
    latest run; a run's id: that run's): weights, tokenizer and sizes come from it."""
    model: Literal["tiny", "small", "base", "large"] = "tiny"
    """The size that the options below start from."""
    vocab_size: int | None = None
    """Tokens of the vocabulary that is trained (default: the model's); of one that is given, the least that the model
    has room for."""
    layers: int | None = None
    """Layers (default: the model's)."""
    width: int | None = None
    """Width of a hidden state (default: the model's)."""
    heads: int | None = None
    """Attention heads (default: the model's)."""
    ff_width: int | None = None
    """Width inside the feed-forward (default: the model's)."""
    max_positions: int | None = None
    """The longest sequence that the model can ever take (default: 512)."""
    dropout: float = 0.0
    """Share of activations dropped in training; 0.1 pays where a corpus is read many times."""

    sequence_length: int = 64
    """Tokens of a training sequence."""
    batch_size: int = 32
    """Sequences of a step, over all hosts together."""
    steps: int = 3000
    """Training steps."""
    learning_rate: float | None = None
    """Peak of the learning rate, reached after the warm-up and decayed linearly to 0 (default: the model's)."""
    warmup_share: float = 0.1
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """AdamW's weight decay; biases and norms have none."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this norm where it is longer."""
    mask_share: float = 0.4
    """Share of the tokens that are hidden and predicted; BERT's 0.15 learns less from each step (Wettig et al. 2022,
    arXiv:2202.08005). Evaluations always hide 0.15."""
    attend_within: Literal["sequence", "document"] = "sequence"
    """What a token attends to: its whole sequence, which may hold the ends of several documents (as RoBERTa), or its
    own document only."""
    seed: int = 0
    """Decides the initial parameters, the order of the data, masks and dropout."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What activations are computed in; parameters are float32. auto: bfloat16, and float32 on a CPU
    without avx512_bf16."""
    fsdp: int = 1
    """Devices that share one copy of the parameters and of the optimizer's state; 1: each device has them whole, but
    the TPUs of a single host share them."""
    remat: bool = False
    """Keep of each layer only its input for the backward pass and compute the rest again: less memory, a third more
    work."""
    accumulate: int = 1
    """Parts in which a device takes its rows of a step, one after the other: less memory, the same result."""

    log_every: int = 20
    """Steps between two lines of metrics."""
    eval_every: int = 500
    """Steps between two evaluations."""
    eval_sequences: int = 256
    """Held-out sequences of an evaluation on the way; the last one takes them all."""
    checkpoint_every: int = 500
    """Steps between two checkpoints; before an evaluation one is written too."""
    keep_checkpoints: int = 2
    """The latest checkpoints that are kept, beside the best one."""
    on_trouble: Literal["stop", "warn"] = "stop"
    """What to do when the loss stays far from its usual value, stays not finite, or has nothing left to learn: stop,
    or only warn. A single outlier never stops a run; its batch is kept under trouble/."""

    profile: str | None = None
    """Steps A:B, both included, that are traced into profile/, for TensorBoard and Perfetto: 100:104."""

    def size(self, name: Size) -> int:
        """A dimension: the option where it is given, else the model's."""
        value: int | None = getattr(self, name)
        return SIZES[self.model][name] if value is None else value

    @property
    def positions(self) -> int:
        return MAX_POSITIONS if self.max_positions is None else self.max_positions

    @property
    def peak_learning_rate(self) -> float:
        return LEARNING_RATES[self.model] if self.learning_rate is None else self.learning_rate

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_share * self.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes of one model; all that is needed to build it.

    position_offset: row of the position table that the first token takes. In RoBERTa it is the padding
    token's id + 1, so 2: the rows before it are never used.
    document_start: the token that begins a document, where positions see those of their own document only;
    None: they see the whole sequence.
    """

    vocab_size: int
    max_positions: int
    position_offset: int
    layers: int
    width: int
    heads: int
    ff_width: int
    dropout: float = 0.0
    document_start: int | None = None

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the token table: RoBERTa's 50,265 tokens take 50,304. Those beyond the vocabulary are of no token."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def dimensions(config: Config, tokenizer: TokenizerFacts) -> Dimensions:
    """The sizes of the model that is trained with this tokenizer."""
    return Dimensions(
        # A pretrained model may have room for more tokens than its tokenizer has.
        vocab_size=max(tokenizer.vocab_size, (config.tokenizer and config.vocab_size) or 0),
        max_positions=config.positions,
        position_offset=tokenizer.pad_id + 1,
        layers=config.size("layers"),
        width=config.size("width"),
        heads=config.size("heads"),
        ff_width=config.size("ff_width"),
        dropout=config.dropout,
        document_start=tokenizer.bos_id if config.attend_within == "document" else None,
    )


def settings(config: Config, *, vocab_size: int) -> dict[str, object]:
    """Every option with its decided value, including those that were left open."""
    dimensions: tuple[Size, ...] = ("layers", "width", "heads", "ff_width")
    return {
        **dataclasses.asdict(config),
        **{name: config.size(name) for name in dimensions},
        "vocab_size": vocab_size,
        "max_positions": config.positions,
        "learning_rate": config.peak_learning_rate,
    }


def problems(config: Config, *, devices: int) -> list[str]:
    """Everything that is wrong with `config` on `devices` devices in all; empty where it can run."""
    messages = [*outside(config, RANGES), *profile_problems(config)]
    if config.remote_cache is not None and (problem := unwritable(config.remote_cache)):
        messages.append(f"--remote-cache {config.remote_cache}: {problem}")
    if messages:
        return messages
    # Of a model to go on from the sizes are known when its folder has been read.
    longest = config.positions if config.init_from is None else config.max_positions
    if longest is not None and config.sequence_length > longest:
        messages.append(
            f"--sequence-length {config.sequence_length}: the model takes at most --max-positions "
            f"{longest}; shorten the one or raise the other"
        )
    if config.init_from is not None and config.tokenizer is not None:
        messages.append(
            f"--tokenizer {config.tokenizer}: the tokenizer comes from --init-from {config.init_from}, whose model "
            "knows no other; leave --tokenizer out"
        )
    width, heads = config.size("width"), config.size("heads")
    if width % heads and config.init_from is None:
        fitting = [n for n in range(1, width + 1) if width % n == 0 and abs(n - heads) <= max(8, heads)]
        messages.append(f"--heads {heads}: does not divide --width {width}; choose one of {_listed(fitting)}")
    if devices % config.fsdp:
        messages.append(
            f"--fsdp {config.fsdp}: {devices} devices do not make groups of {config.fsdp}; choose one of "
            f"{_listed(_divisors(devices))}"
        )
    widths = {"--width": width, "--ff-width": config.size("ff_width")} if config.init_from is None else {}
    uneven = [f"{name} {size}" for name, size in widths.items() if size % config.fsdp]
    if uneven or VOCABULARY_MULTIPLE % config.fsdp:
        shared = math.gcd(VOCABULARY_MULTIPLE, *widths.values())
        messages.append(
            f"--fsdp {config.fsdp}: cannot share out {' and '.join(uneven) or 'the token table'} evenly; choose one of "
            f"{_listed(_divisors(shared))}"
        )
    return messages + batch_problems(config.batch_size, devices, config.accumulate)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


RANGES = ranges(
    Config,
    {
        **dict.fromkeys(
            ("layers", "width", "heads", "ff_width", "eval_sequences", "fsdp", "accumulate"), at_least(1)
        ),
        "vocab_size": at_least(300),  # 256 bytes, the special tokens, and a few merges
        "max_positions": at_least(8),
        "sequence_length": at_least(8),
        "mask_share": between(0.01, 0.9),
    },
)
