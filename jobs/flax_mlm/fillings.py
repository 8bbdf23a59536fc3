"""A few held-out sentences with a word hidden, and what the model would write there, for people. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

SHOWN = 8
CONTEXT_CHARACTERS = 90
_SHORTEST_WORD = 3


class Place(NamedTuple):
    """Where a token was hidden: row of the sample, position in its sequence, and the number of the guess."""

    row: int
    position: int
    number: int


def readable(
    places: Sequence[Place], rows_NS: np.ndarray, decode: Callable[[Sequence[int]], str], most: int = SHOWN
) -> list[Place]:
    """Those of `places` that begin a word and have text on both sides, `most` of them, spread over the sample."""
    length = rows_NS.shape[1]
    inner = [
        place for place in places if length // 4 <= place.position < max(length // 4 + 1, 3 * length // 4)
    ]
    words = [place for place in inner if _is_word(decode([int(rows_NS[place.row, place.position])]))]
    if len(words) <= most:
        return words
    return [words[index] for index in np.linspace(0, len(words) - 1, most).astype(int)]


def filling(
    tokens_S: np.ndarray,
    position: int,
    guesses: Sequence[tuple[int, float]],
    decode: Callable[[Sequence[int]], str],
    special_ids: Sequence[int],
) -> dict[str, Any]:
    """What result.json holds of one: the text before and after within its document, the true word, and the guesses.

    guesses: (token, probability) pairs, best first.
    """
    special = set(special_ids)
    start = max((i + 1 for i in range(position) if int(tokens_S[i]) in special), default=0)
    ends = (i for i in range(position + 1, len(tokens_S)) if int(tokens_S[i]) in special)
    end = next(ends, len(tokens_S))
    before = " ".join(decode([int(token) for token in tokens_S[start:position]]).split())
    follows = decode([int(token) for token in tokens_S[position + 1 : end]])
    after = (" " if follows[:1].isspace() else "") + " ".join(follows.split())
    return {
        "before": before if len(before) <= CONTEXT_CHARACTERS else f"…{before[-CONTEXT_CHARACTERS:]}",
        "after": after if len(after) <= CONTEXT_CHARACTERS else f"{after[:CONTEXT_CHARACTERS]}…",
        "truth": shown(decode([int(tokens_S[position])])),
        "guesses": [[shown(decode([token])), round(probability, 4)] for token, probability in guesses],
    }


def shown(token: str) -> str:
    """A token for people: without the blanks around it; what cannot be seen is escaped, as a line end is."""
    seen = token.strip(" ")
    return seen if seen.isprintable() else repr(seen)[1:-1]


def _is_word(text: str) -> bool:
    word = text.strip()
    return text[:1].isspace() and len(word) >= _SHORTEST_WORD and word.isalpha()
