"""The part of a large corpus that the tokenizer is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

SAMPLE_BYTES = 1 << 27
"""The trainer's table takes 0.9 kB a different word (docs/benchmarks.md), and 128 MiB of English web text have some
half a million: the table stays below 1 GB whatever the corpus is. They are thousands of occurrences of a pair that
competes for the last of 50,000 places, so that more text would hardly change which wins."""


def sample_share(size_bytes: int) -> float:
    """The share of a corpus of `size_bytes` that is about SAMPLE_BYTES; 1.0: all of it."""
    return min(1.0, SAMPLE_BYTES / size_bytes)


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
