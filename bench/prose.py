"""Made-up prose of any length whose words go on getting new, as those of a real corpus do.

Sentences are the standard library's own words in another order; one word in TWO_IN is taken from those met so far and
changed, so that the number of different words grows with the text (Heaps' law) and the tokenizer's table with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from jobs.flax_mlm.documents import docstrings, stdlib_modules

NEW_SHARE = 0.004
"""Of all words: 100 MB have about a hundred thousand new ones, as many as English web text of that size has."""
DOCUMENT_WORDS = (50, 800)
FILE_BYTES = 512 << 20
_SYLLABLES = [c + v + e for c in "bcdfghklmnprstvwz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]


def documents(seed: int = 0) -> Iterator[str]:
    """Documents without end; the same seed, the same documents."""
    random = Random(seed)
    known = " ".join(docstrings(str(path)) for path in sorted(stdlib_modules())).split()
    while True:
        length = random.randint(*DOCUMENT_WORDS)
        start = random.randrange(len(known) - length)
        words = known[start : start + length]
        # Runs of the original keep the usual neighbours; a shuffled half sees to it that no document occurs twice.
        half = words[length // 2 :]
        random.shuffle(half)
        words[length // 2 :] = half
        for _ in range(round(length * NEW_SHARE) + (random.random() < length * NEW_SHARE % 1)):
            words[random.randrange(length)] = "".join(random.choices(_SYLLABLES, k=random.randint(2, 5)))
        yield " ".join(words)


def write(folder: Path, size_bytes: int) -> None:
    """.jsonl files of `size_bytes` together; those that are there already are taken as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, size_bytes, FILE_BYTES)):
        path = folder / f"prose-{number:04}-{min(FILE_BYTES, size_bytes - start)}.jsonl"
        if path.exists():
            continue
        beside = path.with_suffix(".part")
        written = 0
        with beside.open("w", encoding="utf-8") as file:
            for text in documents(seed=number):
                written += file.write(json.dumps({"text": text}) + "\n")
                if written >= min(FILE_BYTES, size_bytes - start):
                    break
        beside.rename(path)
