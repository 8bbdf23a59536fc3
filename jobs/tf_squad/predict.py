"""Answers to questions about a text, by an exported model on a CPU: see `jobs.runtime.prediction`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

# Before TensorFlow is loaded: it would look for a TPU's metadata for minutes, and take a GPU that trains something.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import tensorflow as tf

from contracts.errors import RequestError
from jobs.glue.tokenizer import open_tokenizer
from jobs.runtime.model_folder import CONFIG
from jobs.runtime.prediction import Answer, Asked, Guess, main
from jobs.tf_squad import model, windows
from jobs.tf_squad.config import Config
from jobs.tf_squad.data import Question

BEST = 5
NO_ANSWER = "(no answer)"
BATCH_SIZE = 16


def answer_all(export: Path, _cache_dir: Path, asked: Asked) -> Sequence[Answer]:
    """The best places of the second text for each question.

    Raises:
        RequestError: there is no text to find the answers in, a question is empty, or the export is none of this job.
    """
    text = asked.second
    if text is None or not text.strip():
        raise RequestError(
            "--second: a model that answers questions needs the text that they are about; give it"
        )
    if not all(map(str.strip, asked.inputs)):
        raise RequestError("a question is empty; ask something")
    try:
        settings = json.loads((export / CONFIG).read_bytes())
        notes = settings["task_specific_params"]["tf_squad"]
        config = Config(**{name: value for name, value in notes.items() if name != "may_be_none"})
    except (OSError, ValueError, TypeError, KeyError):
        raise RequestError(f"{export}: no export of tf_squad; name one of its runs") from None
    questions = [Question(str(number), "", text, each, (), ()) for number, each in enumerate(asked.inputs)]
    cut = windows.encode(questions, open_tokenizer(export), config)
    network = model.build(settings, "float32")
    network.give(model.read_weights(export))
    length = windows.shared_length(cut)
    scores = [
        [each.numpy() for each in network(tf.constant(cut.take(rows_B, length).ids_BS))]
        for rows_B in np.array_split(np.arange(len(cut)), -(-len(cut) // BATCH_SIZE))
    ]
    start_NS, end_NS = (np.concatenate(each) for each in zip(*scores, strict=True))
    found = windows.answers(cut, start_NS, end_NS, config, may_be_none=notes["may_be_none"])
    return [
        Answer(
            input=question,
            best=[Guess(text=said or NO_ANSWER, probability=p) for said, p in each.best[:BEST]],
        )
        for question, each in zip(asked.inputs, found, strict=True)
    ]


if __name__ == "__main__":
    main(answer_all)
