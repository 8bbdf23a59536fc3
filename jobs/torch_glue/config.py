"""The options of torch_glue, and the rules that they must satisfy. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fine-tune a model to tell classes or numbers from a text or a pair of texts."""

    data: str = "docstrings"
    """Rows to learn from: "docstrings" (does this docstring belong to this function? From Python's standard library),
    a file (.csv, .tsv, .jsonl, .parquet) or a folder of a GLUE task; gs://… too."""
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
