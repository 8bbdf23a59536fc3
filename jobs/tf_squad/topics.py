"""Which name is missing here? Questions made of the definitions of Python's language in `pydoc_data.topics`, a module
that every machine has. It is not SQuAD.

A text is some sentences of a topic. A question is a part of one of them with a gap in the place of a name that stands
in quotes or asterisks there, and its answer is this name. Whoever finds the part in the text again can answer nearly
every question, and whoever does not can only guess among the names of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

GAP = "___"
MOST_CHARACTERS = 200
"""A text has as many sentences as fit."""
WORDS = 5
"""Of the sentence, before and after the gap."""
_NAME = re.compile(r'(?<![\w"*])("[^"\s][^"]{0,28}[^"\s]"|\*\w{2,30}\*)(?![\w"*])')
_SENTENCE = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z\"*])")


class Text(NamedTuple):
    """Sentences of a topic. questions: each with the beginning of its answer in the text, and the answer."""

    topic: str
    text: str
    questions: list[tuple[str, int, str]]


def texts() -> Iterator[Text]:
    """All texts with a question, each sentence in one of them; the same on every machine with this Python version."""
    from pydoc_data.topics import topics

    # Topics contain each other, and what is held out must not be among what is trained on.
    seen: set[str] = set()
    for topic, whole in topics.items():
        gathered: list[str] = []
        for sentence in (*_sentences(whole), ""):
            if sentence in seen or len(sentence) > MOST_CHARACTERS:
                continue
            text = " ".join(gathered)
            if not sentence or len(text) + len(sentence) >= MOST_CHARACTERS:
                if questions := list(_questions(gathered)):
                    yield Text(topic, text, questions)
                gathered = []
            if sentence:
                gathered.append(sentence)
                seen.add(sentence)


def _sentences(topic: str) -> Iterator[str]:
    for paragraph in topic.split("\n\n"):
        if ">>>" not in paragraph and "--" not in paragraph:  # no examples, no tables, no titles
            yield from _SENTENCE.split(" ".join(paragraph.split()))


def _questions(sentences: list[str]) -> Iterator[tuple[str, int, str]]:
    begin = 0
    for sentence in sentences:
        for found in _NAME.finditer(sentence):
            before, after = sentence[: found.start()].split(), sentence[found.end() :].split()
            words = [*before[-WORDS:], GAP, *after[:WORDS]]
            if len(words) > WORDS:
                yield " ".join(words), begin + found.start() + 1, found.group()[1:-1]
        begin += len(sentence) + 1
