"""What a model says of the held-out rows: scores, a comparison with chance, and the rows with their predictions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from contracts.run_directory import RunDirectory
from jobs.glue import scores
from jobs.glue.data import Dataset

type Array = np.ndarray[Any, Any]

PREDICTIONS = "predictions.jsonl"


def evaluation(dataset: Dataset, logits_NC: Array) -> dict[str, float]:
    """The score that counts, the loss and all scores; C is 1 for numbers."""
    labels_N = np.array(dataset.eval.labels)
    if dataset.task == "regression":
        said_N = logits_NC[:, 0]
        loss = np.square(said_N - labels_N).mean()
    else:
        said_N, labels_N = logits_NC.argmax(axis=1), labels_N.astype(np.int64)
        loss = -_log_softmax(logits_NC)[np.arange(len(labels_N)), labels_N].mean()
    found = scores.scores(said_N, labels_N, classes=len(dataset.labels))
    return {"eval_score": found[scores.headline(dataset)], "eval_loss": float(loss), **found}


def _log_softmax(logits_NC: Array) -> Array:
    shifted = logits_NC.astype(np.float64) - logits_NC.max(axis=1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
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
    """Write predictions.jsonl: of each held-out row its texts, its label and what the model says."""
    rows, lines = dataset.eval, []
    probabilities_NC = np.exp(_log_softmax(logits_NC)).round(6).tolist()
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
