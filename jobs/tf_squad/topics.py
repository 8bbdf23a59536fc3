"""Which exception is named, which version, which parameter? Questions about the definitions of Python's language in
`pydoc_data.topics`, a module that every machine has. It is not SQuAD.

A text is some sentences of a topic. KINDS has the questions, each with the pattern of its answers; a text gets each
question that it has an answer to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

MOST_CHARACTERS = 200
"""A text has as many sentences as fit."""
KINDS = {
    "Which exception is named?": r'"(\w+(?:Error|Exception|Exit|Interrupt|Iteration|Warning))"',
    "Which special method or attribute is named?": r"(__[a-z]+__)",
    "Which version of Python is spoken of?": r"(?:version|Python) (\d\.\d+)",
    "Which parameter is spoken of?": r"(?<![\w*])\*(\w+)\*",
    "Which words stand in quotes?": r'(?<!")"([^"]+)"(?!")',
    "What is said in parentheses?": r"(?<=\s)\(([^()]{4,80})\)",
    "Which function or method is called?": r'"([\w.]+\(\))"',
    "Which statement is named?": r'"(\w+)" (?:statement|clause|keyword|loop)',
    "Which PEP is cited?": r"\bPEP (\d+)",
    "An object of which kind is spoken of?": r"\b(?:a|an|the) (\w+) objects?\b",
    "What may, must or can be done?": r"\b(?:may|must|can|should) (?:not |also |only )?(be \w+)",
}
"""Each question with the pattern of its answer."""
_SENTENCE = re.compile(r"(?<=[.:;!?])\s+(?=[A-Z\"*])")


class Text(NamedTuple):
    """Sentences of a topic. questions: each with its answers, and where they begin in the text."""

    topic: str
    text: str
    questions: list[tuple[str, tuple[str, ...], tuple[int, ...]]]


def texts() -> Iterator[Text]:
    """All texts with a question, each sentence in one of them; the same on every machine with this Python version."""
    from pydoc_data.topics import topics

    # Topics contain each other, and what is held out must not be among what is trained on.
    used: set[str] = set()
    for topic, article in topics.items():
        gathered = ""
        for sentence in (*_sentences(article), ""):
            if sentence in used or len(sentence) > MOST_CHARACTERS:
                continue
            if not sentence or len(gathered) + len(sentence) >= MOST_CHARACTERS:
                if questions := list(_questions(gathered)):
                    yield Text(topic, gathered, questions)
                gathered = ""
            if sentence:
                gathered = f"{gathered} {sentence}".strip()
                used.add(sentence)


def _sentences(topic: str) -> Iterator[str]:
    for paragraph in topic.split("\n\n"):
        if ">>>" not in paragraph and "--" not in paragraph:  # no examples, no tables, no titles
            yield from _SENTENCE.split(" ".join(paragraph.split()))


def _questions(text: str) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    for question, pattern in KINDS.items():
        matches = list(re.finditer(pattern, text))
        if matches:
            yield question, tuple(match[1] for match in matches), tuple(match.start(1) for match in matches)
