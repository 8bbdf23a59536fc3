"""Answers of an exported model to texts or pairs: the part of predict.py that every framework shares."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from contracts.errors import RequestError
from jobs.glue.predictions import Array, softmax
from jobs.glue.pretrained import KEY, positions
from jobs.glue.tokenizer import open_tokenizer
from jobs.runtime.prediction import TEXT, Answer, Encoded, Guess, Row, refuse_second
from jobs.runtime.storage.model_folder import CONFIG


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Padded rows. mask_BS: 1: a token, 0: padding. types_BS: which text of a pair, where the model asks. int64."""

    ids_BS: Array
    mask_BS: Array
    types_BS: Array


type LogitsOf = Callable[[Batch], Array]
"""Makes of a batch its (rows, classes) logits."""


class Classifier:
    """Tells the class of a text or a pair, with the probabilities of all classes, or its number."""

    task, takes = "text-classification", TEXT

    def __init__(self, export: Path, compute_logits: LogitsOf) -> None:
        """compute_logits: by the model of the export."""
        settings = json.loads((export / CONFIG).read_bytes())
        about = settings.get(KEY, {})  # older exports do not say
        self._has_pairs, self._compute_logits = about.get("pairs"), compute_logits
        self._is_regression, self._pad_id = (
            settings.get("problem_type") == "regression",
            settings["pad_token_id"],
        )
        self._names = settings["id2label"]
        self.longest = int(about.get("max_length", positions(settings)))
        self._tokenizer = open_tokenizer(export)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.longest)
        self.example = "Good.", "Bad." if self._has_pairs else None

    def encode(self, value: str | bytes, second: str | None) -> Encoded:
        """As `Predictor` has it.

        Raises:
            RequestError: the model has learned from pairs and no second text is given, or the other way round.
        """
        assert isinstance(value, str)
        if self._has_pairs is True and second is None:
            raise RequestError(
                "the model has learned from pairs of texts; give the second text with --second"
            )
        if self._has_pairs is False:
            refuse_second(second, "a model that has learned from single texts")
        encoding = self._tokenizer.encode(value, second)
        heading = f"{value} (the model reads {self.longest} tokens of it)" if encoding.overflowing else None

        def answers(outputs: Sequence[Array]) -> list[Answer]:
            return [Answer(input=value, heading=heading, best=self._best(logits_C)) for logits_C in outputs]

        return Encoded(rows=[Row(length=len(encoding.ids), values=encoding)], answers=answers)

    def compute(self, rows: Sequence[Row], size: int, length: int) -> list[Array]:
        ids_BS = np.full((size, length), self._pad_id, np.int64)
        mask_BS, types_BS = np.zeros_like(ids_BS), np.zeros_like(ids_BS)
        mask_BS[len(rows) :, 0] = 1  # a row that sees nothing has no numbers
        for row, encoded in enumerate(rows):
            ids_BS[row, : encoded.length] = encoded.values.ids
            mask_BS[row, : encoded.length] = 1
            types_BS[row, : encoded.length] = encoded.values.type_ids
        batch = Batch(ids_BS=ids_BS, mask_BS=mask_BS, types_BS=types_BS)
        return list(self._compute_logits(batch)[: len(rows)])

    def _best(self, logits_C: Array) -> list[Guess]:
        if self._is_regression:
            return [Guess(text=f"{logits_C[0]:.4g}", probability=None)]
        shares_C = softmax(logits_C[None])[0]
        return [
            Guess(text=self._names[str(index)], probability=float(shares_C[index]))
            for index in np.argsort(-shares_C, kind="stable")
        ]
