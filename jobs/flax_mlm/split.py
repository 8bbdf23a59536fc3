"""Which documents are held out for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from contracts.errors import RequestError
from jobs.flax_mlm.corpus import Corpus

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = get_args(Split)

RULE_VERSION = 1
"""Part of the key of everything made from one split: raise it when the same documents would fall otherwise."""


def split_documents(
    corpus: Corpus, eval_fraction: float, *, warn: Callable[[str], None]
) -> Iterator[tuple[Split, str]]:
    """Each document with its split, which a hash of its own text decides: order and neighbours don't matter.

    A document that occurs twice is thus never in both splits. Raises RequestError, at the end, when one of them
    stayed empty.
    """
    lowest, highest = 1.0, -1.0
    for text in corpus.documents(warn=warn):
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        lowest, highest = min(lowest, place), max(highest, place)
        yield ("eval" if place < eval_fraction else "train"), text
    if highest < 0:
        raise RequestError(
            f"--data {corpus.source}: holds no text, only white space; name data with text in it"
        )
    if lowest == highest:
        raise RequestError(
            f"--data {corpus.source}: is one document, but one to learn from and another to hold out "
            "are needed; bring more text (a text file gives one each 2,000 characters, .jsonl one a line)"
        )
    if lowest >= eval_fraction:
        raise RequestError(
            f"--data {corpus.source}: no document falls into the held-out share; bring more text, or raise "
            f"--eval-fraction {eval_fraction} to more than {lowest:.4f}"
        )
    if highest < eval_fraction:
        raise RequestError(
            f"--data {corpus.source}: every document falls into the held-out share; bring more text, or "
            f"lower --eval-fraction {eval_fraction} to less than {highest:.4f}"
        )
