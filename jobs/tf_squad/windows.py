"""Questions as windows of tokens, and back from a model's scores to words of the text.

A window is `<s> question </s></s> part of the text </s>` and padding: all are of one length, so one program serves all.
A text that is too long for one has several, which overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from contracts.errors import RequestError
from jobs.tf_squad.config import QUESTION_TOKENS, Config
from jobs.tf_squad.data import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

type Array = np.ndarray[Any, Any]

SPECIAL = ("<s>", "<pad>", "</s>")
MULTIPLE = 8
"""Lengths are multiples of this, as wide as a vector of any device is."""


class Batch(NamedTuple):
    """ids_BS: int32. first_B, behind_B: where the part of the text begins and ends among the tokens. starts_B, ends_B:
    the answer's first and last token; 0, which is <s>, where it is not in the window."""

    ids_BS: Array
    first_B: Array
    behind_B: Array
    starts_B: Array
    ends_B: Array


@dataclass(frozen=True, kw_only=True)
class Windows:
    """windows: of all N windows, in the questions' order. question_N: whose each is. skipped_N: tokens of the text
    before its part. places: of each question, where each token of the text begins and ends among its characters,
    (tokens, 2), without blanks around it."""

    windows: Batch
    question_N: Array
    skipped_N: Array
    places: Sequence[Array]
    questions: Sequence[Question]

    def __len__(self) -> int:
        return len(self.question_N)

    @property
    def tokens(self) -> Array:
        """Of each window, padding left out."""
        tokens_N: Array = self.windows.behind_B + 1
        return tokens_N

    def take(self, rows_B: Array, length: int) -> Batch:
        """These windows, cut to a length that all have room in."""
        ids_NS, *columns = self.windows
        return Batch(ids_NS[rows_B, :length], *(column[rows_B] for column in columns))


def encode(questions: Sequence[Question], tokenizer: Tokenizer, config: Config) -> Windows:
    """Windows of --max-length tokens, --stride tokens apart. Raises RequestError: the tokenizer is not RoBERTa's."""
    special = [tokenizer.token_to_id(name) for name in SPECIAL]
    if None in special:
        raise RequestError(
            f"--init-from {config.init_from}: its tokenizer lacks one of {', '.join(SPECIAL)}; take a model with "
            "RoBERTa's own tokenizer"
        )
    begin, pad, end = (token or 0 for token in special)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = {
        text: number for number, text in enumerate(dict.fromkeys(question.text for question in questions))
    }
    encoded_texts = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    encoded_questions = tokenizer.encode_batch(
        [question.question for question in questions], add_special_tokens=False
    )
    all_places = [_places(text, encoded.offsets) for text, encoded in zip(texts, encoded_texts, strict=True)]
    ids: list[list[int]] = []
    facts: list[tuple[int, ...]] = []
    for number, (question, encoded) in enumerate(zip(questions, encoded_questions, strict=True)):
        text, places = encoded_texts[texts[question.text]].ids, all_places[texts[question.text]]
        head = [begin, *encoded.ids[: min(QUESTION_TOKENS, config.max_length // 2)], end, end]
        room = config.max_length - len(head) - 1
        start, last = _target(question, places)
        for skipped in range(0, max(1, len(text) - room + config.stride), config.stride):
            part = text[skipped : skipped + room]
            is_in = skipped <= start and last < skipped + len(part)
            to = len(head) - skipped
            target = (start + to, last + to) if is_in else (0, 0)
            ids.append([*head, *part, end])
            facts.append((number, skipped, len(head), len(head) + len(part), *target))
    ids_NS = np.full((len(ids), config.max_length), pad, np.int32)
    for row, row_ids in enumerate(ids):
        ids_NS[row, : len(row_ids)] = row_ids
    question_N, skipped_N, *columns = np.array(facts, np.int32).T
    return Windows(
        windows=Batch(ids_NS, *columns),
        question_N=question_N,
        skipped_N=skipped_N,
        places=[all_places[texts[question.text]] for question in questions],
        questions=questions,
    )


def _places(text: str, offsets: Sequence[tuple[int, int]]) -> Array:
    """(tokens, 2): a byte-level token begins with the blank before its word, which is no part of an answer."""
    places = []
    for begin, end in offsets:
        while begin < end and text[begin].isspace():
            begin += 1
        places.append((begin, end))
    return np.array(places, np.int32).reshape(-1, 2)


def _target(question: Question, places: Array) -> tuple[int, int]:
    """The first and the last token that has a part of the answer; -1, which is in no window, without one."""
    if not question.answers:
        return -1, -1
    begin, end = question.starts[0], question.starts[0] + len(question.answers[0])
    first = int(np.searchsorted(places[:, 1], begin, side="right"))
    return first, max(first, int(np.searchsorted(places[:, 0], end)) - 1)


def shared_length(*window_sets: Windows) -> int:
    """The length that all windows have room in."""
    return int(-(-max(int(window_set.tokens.max()) for window_set in window_sets) // MULTIPLE) * MULTIPLE)


class Answer(NamedTuple):
    """What a model answers. text: "" for no answer. best: the best texts with their probabilities among each other,
    best first. null_odds: how far the score of no answer is above that of the best place."""

    text: str
    best: list[tuple[str, float]]
    null_odds: float


def answers(
    windows: Windows, start_NS: Array, end_NS: Array, config: Config, *, may_be_none: bool
) -> list[Answer]:
    """The answer to each question, from the scores of each token to be an answer's first and its last.

    may_be_none: "" is among the answers, with the score of <s>, the least of all windows of the question.
    """
    spans: list[dict[tuple[int, int], float]] = [{} for _ in windows.questions]
    null = np.full(len(spans), np.inf)
    for row, number in enumerate(windows.question_N):
        first, behind = windows.windows.first_B[row], windows.windows.behind_B[row]
        null[number] = min(null[number], start_NS[row, 0] + end_NS[row, 0])
        places = windows.places[number][windows.skipped_N[row] :]
        for begin, end, score in _best(start_NS[row, first:behind], end_NS[row, first:behind], config):
            place = int(places[begin, 0]), int(places[end, 1])
            spans[number][place] = max(score, spans[number].get(place, -np.inf))
    return [
        _answer(question, question_spans, float(none), config, may_be_none=may_be_none)
        for question, question_spans, none in zip(windows.questions, spans, null, strict=True)
    ]


def _best(start_T: Array, end_T: Array, config: Config) -> list[tuple[int, int, float]]:
    """The best places of a window: first token, last token, score."""
    longest = min(config.answer_length, len(start_T))
    # [l, t]: the answer of l + 1 tokens from token t on.
    scores_LT = np.full((longest, len(start_T)), -np.inf)
    for more in range(longest):
        scores_LT[more, : len(start_T) - more] = start_T[: len(start_T) - more] + end_T[more:]
    flat = scores_LT.ravel()
    best_T = np.argpartition(-flat, min(config.best_spans, len(flat)) - 1)[: config.best_spans]
    spans = [(int(at % len(start_T)), int(at // len(start_T)), float(flat[at])) for at in best_T]
    return [(begin, begin + more, score) for begin, more, score in spans if np.isfinite(score)]


def _answer(
    question: Question, spans: dict[tuple[int, int], float], null: float, config: Config, *, may_be_none: bool
) -> Answer:
    texts: dict[str, float] = {}
    for (begin, end), score in sorted(spans.items(), key=lambda entry: (-entry[1], entry[0])):
        if begin < end:
            texts.setdefault(question.text[begin:end], score)
    best_texts = list(texts.items())[: config.best_spans]
    odds = null - max((score for _, score in best_texts), default=-np.inf)
    if may_be_none:
        best_texts = sorted([*best_texts, ("", null)], key=lambda entry: -entry[1])
    scores_G = np.array([score for _, score in best_texts])
    shares_G = np.exp(scores_G - scores_G.max(initial=-np.inf))
    best = [
        (text, float(share))
        for (text, _), share in zip(best_texts, shares_G / max(shares_G.sum(), 1.0), strict=True)
    ]
    if may_be_none and odds > config.null_threshold:
        return Answer("", best, odds)
    return Answer(next((text for text, _ in best if text), ""), best, odds)
