"""The part of a large corpus that the tokenizer is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

SAMPLE_BYTES = 1 << 27
"""The trainer's table takes 0.7 to 1 kB for each different word (measured, tokenizers 0.23): up to 1 GB for this much
prose of a million different words. Text whose words hardly ever come again, such as hashes, takes more."""


def sample_share(text_bytes: int) -> float:
    """The share of a corpus of `text_bytes` that is about SAMPLE_BYTES; 1.0: all of it."""
    return min(1.0, SAMPLE_BYTES / text_bytes)


def sample(documents: Iterable[str], share: float) -> Iterator[str]:
    """About `share` of the documents. A hash of its own text decides for each: order and neighbours don't matter."""
    if share == 1:
        yield from documents
        return
    for text in documents:
        # Other bytes than the split's, so that the two draws have nothing to do with each other.
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[8:16]) / 2**64
        if place < share:
            yield text
