"""The sizes of model that have names, and what follows from a size."""

from __future__ import annotations

from typing import Literal

Size = Literal["vocab_size", "layers", "width", "heads", "ff_width"]

SIZES = {
    "tiny": {"layers": 2, "width": 128, "heads": 2, "ff_width": 512, "vocab_size": 2048},
    "small": {"layers": 4, "width": 256, "heads": 4, "ff_width": 1024, "vocab_size": 8192},
    "base": {"layers": 12, "width": 768, "heads": 12, "ff_width": 3072, "vocab_size": 50265},
}
"""`base` is RoBERTa-base (Liu et al. 2019, table 9); the vocabulary counts where a tokenizer is trained."""

MAX_POSITIONS = 512
"""As RoBERTa (Liu et al. 2019)."""

LEARNING_RATES = {"tiny": 3e-3, "small": 1e-3, "base": 6e-4}
"""Peaks: base from Liu et al. 2019, table 9; the others by trial on the standard library's docstrings."""

VOCABULARY_MULTIPLE = 128
"""The token table has a multiple of this many rows, as wide as a matrix unit, and --fsdp shares them out evenly."""


def vocabulary_rows(vocab_size: int) -> int:
    """Rows of the token table: RoBERTa's 50,265 tokens take 50,304. Those beyond the vocabulary are of no token."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
