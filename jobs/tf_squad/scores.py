"""Exact match and F1 as SQuAD defines them: Rajpurkar et al. 2016, section 6.1; without an answer: 2018, section 2.

Shares of 0 to 1; SQuAD's own program says them in per cent.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """In small letters, without ASCII punctuation and articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truth: str) -> float:
    return float(normalised(answer) == normalised(truth))


def f1(answer: str, truth: str) -> float:
    """The harmonic mean of precision and recall over words; where one of the two is nothing, whether both are."""
    words_given, right = normalised(answer).split(), normalised(truth).split()
    if not words_given or not right:
        return float(words_given == right)
    common = sum((Counter(words_given) & Counter(right)).values())
    return 2 * common / (len(words_given) + len(right))


def best(score: Callable[[str, str], float], answer: str, truths: Sequence[str]) -> float:
    """The best score over the truths; no answer is right where all are only punctuation and articles."""
    return max(
        score(answer, truth) for truth in [candidate for candidate in truths if normalised(candidate)] or [""]
    )


def scores(answers: Mapping[str, str], truths: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Means over all questions, by their ids; where some have no answer, over those with and without one too."""
    by_score = {
        name: {key: best(score, answers[key], right) for key, right in truths.items()}
        for name, score in (("f1", f1), ("exact_match", exact_match))
    }
    averages = {name: _mean(values.values()) for name, values in by_score.items()}
    without = {key for key, right in truths.items() if not right}
    if without:
        averages["no_answer_exact_match"] = _mean(by_score["exact_match"][key] for key in without)
    if without and len(without) < len(truths):
        for name, values in by_score.items():
            averages[f"has_answer_{name}"] = _mean(
                value for key, value in values.items() if key not in without
            )
    return averages


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
