"""Answers to questions about a text, by an exported model: see `jobs.runtime.prediction`."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import RequestError
from jobs.glue.tokenizer import open_tokenizer
from jobs.runtime.prediction import TEXT, Answer, Encoded, Guess, Row
from jobs.runtime.storage.model_folder import CONFIG
from jobs.tf_squad.config import Config
from jobs.tf_squad.data import Question

BEST = 5
NO_ANSWER = "(no answer)"


class Reader:
    """Finds the answer to a question in a text: a row for each window of the text."""

    task, takes = "question-answering", TEXT
    example = "What?", "It is."

    def __init__(self, export: Path) -> None:
        import tensorflow as tf

        from jobs.tf_squad import model

        try:
            settings = json.loads((export / CONFIG).read_bytes())
            notes = settings["task_specific_params"]["tf_squad"]
            self._config = Config(**{name: value for name, value in notes.items() if name != "may_be_none"})
        except (OSError, ValueError, TypeError, KeyError):
            raise RequestError(f"{export}: no export of tf_squad; name one of its runs") from None
        self._may_be_none, self._pad_id = notes["may_be_none"], settings["pad_token_id"]
        self.longest, self._tokenizer = self._config.max_length, open_tokenizer(export)
        network = model.build(settings, "float32")
        network.give(model.read_weights(export))
        self._encoding = threading.Lock()  # `windows.encode` sets the tokenizer's ways
        self._network = tf.function(network.call, input_signature=[tf.TensorSpec((None, None), tf.int32)])

    def encode(self, value: str | bytes, second: str | None) -> Encoded:
        """As `Predictor` has it: the best places of the second text.

        Raises:
            RequestError: there is no text to find the answer in, or the question is empty.
        """
        from jobs.tf_squad import windows

        assert isinstance(value, str)
        if second is None or not second.strip():
            raise RequestError(
                "--second: a model that answers questions needs the text that they are about; give it"
            )
        if not value.strip():
            raise RequestError("a question is empty; ask something")
        question = Question("0", "", second, value, (), ())
        with self._encoding:
            cut = windows.encode([question], self._tokenizer, self._config)

        def answers(outputs: Sequence[Any]) -> list[Answer]:
            scores = np.zeros((2, len(cut), self.longest), np.float32)
            for row, (start_S, end_S) in enumerate(outputs):
                scores[0, row, : len(start_S)], scores[1, row, : len(end_S)] = start_S, end_S
            (answer,) = windows.answers(
                cut, scores[0], scores[1], self._config, may_be_none=self._may_be_none
            )
            best = [Guess(text=text or NO_ANSWER, probability=share) for text, share in answer.best[:BEST]]
            return [Answer(input=value, best=best)]

        rows = [
            Row(length=int(length), values=ids_S[:length])
            for ids_S, length in zip(cut.windows.ids_BS, cut.tokens, strict=True)
        ]
        return Encoded(rows=rows, answers=answers)

    def compute(self, rows: Sequence[Row], size: int, length: int) -> list[Any]:
        ids_BS = np.full((size, length), self._pad_id, np.int32)
        for row, encoded in enumerate(rows):
            ids_BS[row, : encoded.length] = encoded.values
        start_BS, end_BS = (scores.numpy() for scores in self._network(ids_BS))
        return list(zip(start_BS, end_BS, strict=True))[: len(rows)]


def load(export: Path, _cache_dir: Path) -> Reader:
    """The predictor of an export. Raises RequestError: it is none of this job."""
    return Reader(export)
