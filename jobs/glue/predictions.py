"""A model's predictions on the held-out rows: scores, a comparison with chance, and files of the predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from contracts.run_directory import SAMPLES, RunDirectory
from jobs.glue import scores
from jobs.glue.data import Dataset

type Array = np.ndarray[Any, Any]

PREDICTIONS = "predictions.jsonl"
SHOWN, WORST_SHOWN = 12, 8
"""Rows for the report, and how many of them are those with the largest errors."""
LONGEST_SHOWN = 1000
"""Characters of a text."""


def evaluation(dataset: Dataset, logits_NC: Array) -> dict[str, float]:
    """The score that counts, the loss and all scores; C is 1 for numbers."""
    labels_N = np.array(dataset.eval.labels)
    if dataset.task == "regression":
        said_N = logits_NC[:, 0]
        loss = np.square(said_N - labels_N).mean()
    else:
        said_N, labels_N = logits_NC.argmax(axis=1), labels_N.astype(np.int64)
        loss = -_log_softmax(logits_NC)[np.arange(len(labels_N)), labels_N].mean()
    results = scores.scores(said_N, labels_N, classes=len(dataset.labels))
    return {"eval_score": results[scores.headline(dataset)], "eval_loss": float(loss), **results}


def _log_softmax(logits_NC: Array) -> Array:
    shifted = logits_NC.astype(np.float64) - logits_NC.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def softmax(logits_NC: Array) -> Array:
    """The probabilities of the classes."""
    result: Array = np.exp(_log_softmax(logits_NC))
    return result


def no_better_than_chance(dataset: Dataset, final: Mapping[str, float]) -> str | None:
    """A warning where the accuracy is within two standard deviations of that of naming the most frequent class."""
    baseline, rows = dataset.baseline, len(dataset.eval.labels)
    likely = baseline + 2 * math.sqrt(baseline * (1 - baseline) / rows)
    if dataset.task == "regression" or final["accuracy"] > likely:
        return None
    return (
        f"accuracy {final['accuracy']:.3f} of {rows} rows: no better than always naming the most frequent label "
        f"({baseline:.3f}), as far as so many rows can tell; begin with a model that is pre-trained on such text "
        "(--init-from), or train for longer"
    )


def write_predictions(directory: RunDirectory, dataset: Dataset, logits_NC: Array) -> None:
    """Write predictions.jsonl, with the texts, label and prediction of each held-out row, and samples.json."""
    rows, lines = dataset.eval, []
    probabilities_NC = softmax(logits_NC).round(6).tolist()
    for index, label in enumerate(rows.labels):
        texts = [rows.texts_a[index], *([rows.texts_b[index]] if rows.texts_b else [])]
        line: dict[str, Any] = {"texts": texts}
        if dataset.task == "regression":
            line |= {"label": label, "prediction": float(logits_NC[index, 0])}
        else:
            names = dataset.labels
            chosen = int(logits_NC[index].argmax())
            line |= {"label": names[int(label)], "prediction": names[chosen]}
            line["probabilities"] = dict(zip(names, probabilities_NC[index], strict=True))
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    directory.write_text(PREDICTIONS, "".join(lines))
    directory.write_json(SAMPLES, _samples(dataset, logits_NC))


def _samples(dataset: Dataset, logits_NC: Array) -> dict[str, Any]:
    """What the report shows: the confusion matrix, and rows: those that the model errs in most come first."""
    rows, names, labels_N = dataset.eval, dataset.labels, np.array(dataset.eval.labels)
    if dataset.task == "regression":
        said_N, shares_N = logits_NC[:, 0], [None] * len(labels_N)
        errors_N = np.abs(said_N - labels_N)
        label_texts = [[f"{number:.4g}" for number in numbers] for numbers in (labels_N, said_N)]
    else:
        labels_N, said_N = labels_N.astype(np.int64), logits_NC.argmax(axis=1)
        shares_N = softmax(logits_NC).max(axis=1).round(4).tolist()
        errors_N = np.where(said_N == labels_N, 0.0, shares_N)
        label_texts = [[names[number] for number in numbers] for numbers in (labels_N, said_N)]
    order = np.argsort(-errors_N, kind="stable")
    chosen = [*order[:WORST_SHOWN], *order[::-1][: SHOWN - WORST_SHOWN]]
    texts = [
        {
            "texts": [text[:LONGEST_SHOWN] for text in (rows.texts_a[row], *rows.texts_b[row : row + 1])],
            "truth": label_texts[0][row],
            "prediction": label_texts[1][row],
            "probability": shares_N[row],
        }
        for row in dict.fromkeys(map(int, chosen))
    ]
    if dataset.task == "regression":
        return {"texts": texts}
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (labels_N, said_N), 1)
    return {"confusion": {"labels": list(names), "counts": counts.tolist()}, "texts": texts}
