"""What GLUE measures: accuracy, F1, Matthews' correlation, and Pearson's and Spearman's for numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jobs.glue.data import Dataset

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
    import numpy as np
    from scipy import stats
    from sklearn import metrics

    predicted, true = np.asarray(predictions), np.asarray(labels)

    if not classes:
        return {
            "pearson": _correlation(stats.pearsonr, predicted, true),
            "spearman": _correlation(stats.spearmanr, predicted, true),
            "mse": float(np.square(predicted.astype(np.float64) - true).mean()),
        }
    results = {
        "accuracy": float(metrics.accuracy_score(true, predicted)),
        "matthews": _correlation(metrics.matthews_corrcoef, true, predicted),
    }
    if classes == 2:
        results["f1"] = float(metrics.f1_score(true, predicted, zero_division=0))
    return results


def _correlation(metric: Any, predicted: npt.NDArray[np.generic], true: npt.NDArray[np.generic]) -> float:
    import numpy as np

    if any(len(np.unique(numbers)) < 2 or not np.isfinite(numbers).all() for numbers in (predicted, true)):
        return 0.0
    value = metric(predicted, true)
    value = float(getattr(value, "statistic", value))
    return value if math.isfinite(value) else 0.0
