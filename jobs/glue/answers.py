"""What an exported model says of texts or pairs: the part of predict.py that is the same in every framework."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import RequestError
from jobs.glue.batches import MULTIPLE, Batch, Encoded
from jobs.glue.data import Dataset, Rows
from jobs.glue.options import Options
from jobs.glue.predictions import Array, softmax
from jobs.glue.pretrained import positions
from jobs.glue.tokenizer import open_tokenizer
from jobs.runtime.model_folder import CONFIG
from jobs.runtime.prediction import Answer, Asked, Guess

KEY = "tpu_stack"
"""In an export's config.json, beside what transformers reads of it: how the rows were made that it has learned from."""
BATCH_SIZE = 32

type Load = Callable[[Path], Callable[[Batch], Array]]
"""The folder of an export to what makes of a batch its (rows, classes) logits."""


def rows_of(options: Options, dataset: Dataset) -> dict[str, Any]:
    """What stands under KEY: whether a row is a pair of texts, and how many tokens of it the model has seen at most."""
    return {"pairs": bool(dataset.train.texts_b), "max_length": options.max_length}


def answer(export: Path, asked: Asked, load: Load) -> list[Answer]:
    """An answer for each input: all classes, the most probable first, or one number.

    Raises:
        RequestError: the model has learned from pairs and no second text is given, or the other way round.
    """
    told = json.loads((export / CONFIG).read_bytes())
    about = told.get(KEY, {})  # older exports do not say
    if about.get("pairs") is True and asked.second is None:
        raise RequestError("the model has learned from pairs of texts; give the second text with --second")
    if about.get("pairs") is False:
        asked.refuse_second("a model that has learned from single texts")
    is_regression = told.get("problem_type") == "regression"
    max_length = int(about.get("max_length", positions(told)))
    count, tokenizer = len(asked.inputs), open_tokenizer(export)
    seconds = () if asked.second is None else (asked.second,) * count
    rows = Rows(texts_a=asked.inputs, texts_b=seconds, labels=(0.0,) * count)
    encoded = Encoded(
        rows, tokenizer, pad_id=told["pad_token_id"], max_length=max_length, is_regression=is_regression
    )
    logits_of, logits = load(export), []
    order_N = np.argsort(encoded.lengths_N, kind="stable")
    for begin in range(0, count, BATCH_SIZE):
        rows_B = order_N[begin : begin + BATCH_SIZE]
        length = -(-int(encoded.lengths_N[rows_B].max()) // MULTIPLE) * MULTIPLE
        logits.append(logits_of(encoded.batch(rows_B, min(length, max_length))))
    logits_NC = np.concatenate(logits)[np.argsort(order_N)]
    names = [told["id2label"][str(index)] for index in range(logits_NC.shape[1])]
    tokenizer.no_truncation()
    found = []
    for index, (text, shares_C) in enumerate(zip(asked.inputs, softmax(logits_NC), strict=True)):
        is_cut = len(tokenizer.encode(text, asked.second)) > max_length
        best = [
            Guess(text=names[each], probability=float(shares_C[each]))
            for each in np.argsort(-shares_C, kind="stable")
        ]
        if is_regression:
            best = [Guess(text=f"{logits_NC[index, 0]:.4g}", probability=None)]
        heading = f"{text} (the model reads {max_length} tokens of it)" if is_cut else None
        found.append(Answer(input=text, heading=heading, best=best))
    return found
