"""What GLUE measures: accuracy, F1, Matthews' correlation, and Pearson's and Spearman's for numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jobs.torch_glue.data import Dataset

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_HEADLINES = {"cola": "matthews", "mrpc": "f1", "qqp": "f1"}


def headline(dataset: Dataset) -> str:
    """The score that speaks for the others, as Devlin et al. 2019 (table 1) report GLUE; more is better."""
    if dataset.task == "regression":
        return "spearman"
    return _HEADLINES.get(dataset.metric_set or "", "accuracy")


def scores(
    predictions: npt.NDArray[np.generic], labels: npt.NDArray[np.generic], *, classes: int
) -> dict[str, float]:
    """All scores of predicted classes, or of numbers where `classes` is 0; both are (rows,).

    F1 is of class 1, where there are two. A correlation with what is constant, or not finite, is 0: that is what
    scikit-learn has for Matthews', while SciPy and GLUE's scripts have NaN for the others, which JSON has not.
    """
    import torch
    import torchmetrics.functional as metrics

    if not classes:
        given, true = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in (predictions, labels))
        return {
            "pearson": _correlation(metrics.pearson_corrcoef, given, true),
            "spearman": _correlation(metrics.spearman_corrcoef, given, true),
            "mse": float(metrics.mean_squared_error(given, true)),
        }
    given, true = (torch.as_tensor(indices, dtype=torch.int64) for indices in (predictions, labels))
    how: dict[str, Any] = {"task": "multiclass", "num_classes": classes}
    found = {
        # The mean over rows; torchmetrics' own default is the mean over classes.
        "accuracy": float(metrics.accuracy(given, true, average="micro", **how)),
        "matthews": _correlation(metrics.matthews_corrcoef, given, true, **how),
    }
    if classes == 2:
        found["f1"] = float(metrics.f1_score(given, true, task="binary"))
    return found


def _correlation(metric: Any, given: Any, true: Any, **how: Any) -> float:
    if any(len(numbers.unique()) < 2 or not numbers.isfinite().all() for numbers in (given, true)):
        return 0.0
    found = float(metric(given, true, **how))
    return found if math.isfinite(found) else 0.0
