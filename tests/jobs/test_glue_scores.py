"""The scores of labelled rows: what scikit-learn 1.9 and SciPy 1.18 say, and what is said where they say NaN."""

import numpy as np
import pytest

from jobs.glue.scores import scores

TWO = "11100000011111111111011001101110010100000000011101"
TWO_GIVEN = "10000000011100111111111010111110110100000010010111"
THREE = "01220100101120122012202110012000201101010201000200"
THREE_GIVEN = "02220102101220122212202120012020211101120210002201"
NUMBERS = [2, 1, 3, 1, 3, 3, 5, 0, 2, 4, 1, 2, 0, 4, 0, 2, 4, 2, 5, 4]
NUMBERS_GIVEN = [
    2.6, 1.0, 2.4, 0.1, 6.1, 2.9, 3.0, -0.6, 2.7, 3.5, 2.4, 3.0, -0.2, 3.5, -1.0, 1.3, 2.5, 3.2, 6.6, 2.7,
]  # fmt: skip


def indices(digits: str) -> np.ndarray:
    return np.array([int(digit) for digit in digits])


def test_scores_of_two_and_of_three_classes_are_scikit_learns() -> None:
    assert scores(indices(TWO_GIVEN), indices(TWO), classes=2) == pytest.approx(
        {"accuracy": 0.76, "f1": 0.7777777777777778, "matthews": 0.5169082125603864}
    )
    assert scores(indices(THREE_GIVEN), indices(THREE).astype(np.float32), classes=3) == pytest.approx(
        {"accuracy": 0.74, "matthews": 0.6351405455484178}
    )


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_scores_of_numbers_are_scipys_also_where_they_lie_close_together(scale: float) -> None:
    predictions, true = (np.array(numbers) * scale + 1 for numbers in (NUMBERS_GIVEN, NUMBERS))
    assert scores(predictions, true, classes=0) == pytest.approx(
        {"pearson": 0.7730386596050017, "spearman": 0.7861572214682673, "mse": 1.4464999999999997 * scale**2}
    )


def test_what_has_no_correlation_has_0_and_not_nan() -> None:
    same = np.full(20, 0.1, np.float32)
    for predictions, true in ((same, np.array(NUMBERS)), (np.array(NUMBERS), same), (same * np.nan, same)):
        actual = scores(predictions, true, classes=0)
        assert (actual["pearson"], actual["spearman"]) == (0, 0)
    nothing, never = indices("0000"), {"accuracy": 1, "f1": 0, "matthews": 0}
    assert scores(nothing, nothing, classes=2) == never
    assert scores(nothing, indices("0101"), classes=2) == never | {"accuracy": 0.5}
    # An evaluation that meets only some of the classes has the same scores as any other.
    assert scores(nothing, nothing, classes=3).keys() == {"accuracy", "matthews"}
