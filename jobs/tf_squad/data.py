"""The questions of `--data`, each with a text and the places of its answers there, and which of them are held out.

Light: the launching side calls `problems` before anything is started.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from contracts.errors import RequestError, noted_in
from jobs.glue.pretrained import open_pretrained
from jobs.runtime.storage.data_files import UNDECODABLE, Number, Row, listing, read_file
from jobs.tf_squad import scores, topics
from jobs.tf_squad.config import COMPUTES, Config

TOPICS = "topics"


class Question(NamedTuple):
    """title: of the article. starts: where each of the answers begins in the text; without any there is no answer."""

    id: str
    title: str
    text: str
    question: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The questions to train on and those to evaluate on.

    has_unanswerable: whether some have no answer, as in SQuAD 2.0. fingerprint: a sha256 of all that is read.
    baseline: the F1 over the held-out questions of always answering with the words in the place where most answers to
    train on are (from one word of the text to another, or no answer).
    """

    train: tuple[Question, ...]
    eval: tuple[Question, ...]
    has_unanswerable: bool
    fingerprint: str
    baseline: float
    warnings: tuple[str, ...] = ()


def problems(config: Config, cache_dir: Path) -> list[str]:
    """What is wrong with the data, and with the model of --init-from; called before anything is started.

    Raises:
        Unreachable: a place does not answer now.
    """
    messages: list[str] = []
    with noted_in(messages):
        read(config)
    if config.init_from is not None:
        with noted_in(messages):
            open_pretrained(config, config.init_from, cache_dir, lambda _: None, COMPUTES)
    return messages


def read(config: Config) -> Dataset:
    """Read all questions, and hold some out where no others are named to evaluate on.

    Raises:
        RequestError: there are no such data, or the message lists what is wrong in them, by paragraph and question.
    """
    if config.data == TOPICS:
        if config.eval_data is not None:
            raise RequestError(f"--data {TOPICS}: has held-out questions of its own; leave out --eval-data")
        train, held_out = _split(config, _topic_questions())
    elif config.eval_data is None:
        train, held_out = _split(config, _read("--data", config.data))
    else:
        train, held_out = _read("--data", config.data), _read("--eval-data", config.eval_data)
    if not any(question.answers for question in train):
        raise RequestError(f"--data {config.data}: no question has an answer; there is nothing to learn from")
    warnings = []
    both = len({question[2:4] for question in train} & {question[2:4] for question in held_out})
    if both and config.eval_data is not None:
        warnings.append(f"--eval-data {config.eval_data}: questions that are trained on too: {both}")
    return Dataset(
        train=tuple(train),
        eval=tuple(held_out),
        has_unanswerable=not all(question.answers for question in (*train, *held_out)),
        fingerprint=hashlib.sha256(json.dumps([train, held_out]).encode()).hexdigest(),
        baseline=_baseline(train, held_out),
        warnings=tuple(warnings),
    )


def _topic_questions() -> list[Question]:
    return [
        Question(f"{topic}-{number}-{place}", topic, text, question, answers, starts)
        for number, (topic, text, questions) in enumerate(topics.texts())
        for place, (question, answers, starts) in enumerate(questions)
    ]


def _split(config: Config, questions: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """What is trained on and what is held out, by a hash: of the title where there are enough titles to hold one out
    in all likelihood, else of the text. So no text is in both."""
    titles = {question.title for question in questions}
    by_title = config.data != TOPICS and len(titles) >= 4 / config.eval_fraction
    splits: tuple[list[Question], list[Question]] = ([], [])
    for question in questions:
        key = question.title if by_title else question.text
        share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64
        splits[share < config.eval_fraction].append(question)
    if not all(splits):
        quantity, remedy = ("every", "lower") if splits[1] else ("no", "raise")
        raise RequestError(
            f"--data {config.data}: {quantity} question of {len(questions)} falls into the held-out share; {remedy} "
            f"--eval-fraction {config.eval_fraction}, bring more texts, or name a file with --eval-data"
        )
    return splits


def _baseline(train: Sequence[Question], held_out: Sequence[Question]) -> float:
    places: Counter[tuple[int, int]] = Counter()
    for question in train:
        first = len(question.text[: question.starts[0]].split()) if question.starts else 0
        places[first, first + len(question.answers[0].split()) if question.answers else 0] += 1
    begin, end = min(places, key=lambda place: (-places[place], place))
    answers = {question.id: " ".join(question.text.split()[begin:end]) for question in held_out}
    return scores.scores(answers, {question.id: question.answers for question in held_out})["f1"]


# --- SQuAD's files -----------------------------------------------------------------------------------------


def _read(option: str, path: str) -> list[Question]:
    """The questions of a file. Raises RequestError with all that is wrong in it."""
    rows = [*read_file(option, path)]
    reader = _Reader(option)
    is_nested = len(rows) == 1 and isinstance(rows[0][1], dict) and "data" in rows[0][1]
    questions = list(reader.questions(rows[0][1]) if is_nested else reader.flat(path, rows))
    if reader.wrong:
        raise RequestError(listing(reader.wrong) + "; mend or remove what is wrong")
    if not questions:
        raise RequestError(
            f"{option} {path}: holds no questions; name a file as SQuAD's are, or with a question in each row"
        )
    return questions


class _Reader:
    """Reads the questions of a file. wrong: what is wrong in it, by its place."""

    def __init__(self, option: str) -> None:
        self.wrong: list[str] = []
        self._option = option
        self._seen: set[str] = set()

    def questions(self, document: Any) -> Iterator[Question]:
        articles = self._get(document, "the file", "data", list)
        for n, article in enumerate(articles or []):
            place = f"data[{n}]"
            title = article.get("title") if isinstance(article, dict) else None
            for m, paragraph in enumerate(self._get(article, place, "paragraphs", list) or []):
                paragraph_place = f"{place}.paragraphs[{m}]"
                text = self._text(paragraph, paragraph_place, "context")
                for k, entry in enumerate(self._get(paragraph, paragraph_place, "qas", list) or []):
                    named = entry.get("id") if isinstance(entry, dict) else None
                    question = self._question(
                        entry, f"{paragraph_place}.qas[{k}]" + (f" (id {named})" if named else ""), text
                    )
                    if question is not None:
                        yield question._replace(title=str(title or place))

    def flat(self, path: str, rows: Iterable[Row]) -> Iterator[Question]:
        """Rows of a question each, as the Hugging Face Hub has them: all answers' texts, and all their places."""
        for line, row in rows:
            place = f"{path}:{line}"
            if isinstance(row, str):
                self._say(place, row)
                continue
            answers = row.get("answers")
            if isinstance(answers, dict):
                texts = self._get(answers, place, "text", list) or []
                starts = self._get(answers, place, "answer_start", list) or []
                if len(texts) != len(starts):
                    self._say(place, f"{len(texts)} texts of answers and {len(starts)} places")
                    continue
                pairs = zip(texts, starts, strict=True)
                answers = [{"text": text, "answer_start": start} for text, start in pairs]
                row = {**row, "answers": answers, "is_impossible": not answers}
            question = self._question(row, place, self._text(row, place, "context"))
            if question is not None:
                yield question._replace(title=str(row.get("title") or place))

    def _question(self, entry: Any, place: str, text: str | None) -> Question | None:
        before = len(self.wrong)
        named, question = self._text(entry, place, "id"), self._text(entry, place, "question")
        is_impossible = isinstance(entry, dict) and entry.get("is_impossible", False)
        if not isinstance(is_impossible, bool):
            self._say(place, f"is_impossible must be true or false, and is {is_impossible!r:.40}")
        answers = (
            [] if is_impossible or not isinstance(entry, dict) else self._get(entry, place, "answers", list)
        )
        texts, starts = [], []
        for n, answer in enumerate(answers or []):
            answer_place = f"{place}.answers[{n}]"
            answer_text = self._text(answer, answer_place, "text")
            start = self._get(answer, answer_place, "answer_start", int)
            if answer_text is None or start is None or text is None:
                continue
            if start < 0 or text[start : start + len(answer_text)] != answer_text:
                self._say(answer_place, _elsewhere(text, answer_text, start))
            texts.append(answer_text)
            starts.append(start)
        if is_impossible is True and entry.get("answers"):
            self._say(place, "is_impossible is true, and there are answers; remove one of the two")
        if answers == [] and not is_impossible:
            self._say(place, "no answers, and is_impossible is not true; add one of the two")
        if named in self._seen:
            self._say(place, "the id is that of an earlier question; each needs one of its own")
        if named is None or question is None or text is None or len(self.wrong) > before:
            return None
        self._seen.add(named)
        return Question(named, "", text, question, tuple(texts), tuple(starts))

    def _text(self, record: Any, place: str, name: str) -> str | None:
        value: str | None = self._get(record, place, name, str)
        if value is not None and not value.strip():
            self._say(place, f"{name} is empty")
        elif value is not None and UNDECODABLE.search(value):
            self._say(place, f"{name} is not UTF-8; convert the file (`iconv -f ENCODING -t UTF-8`)")
        else:
            return value
        return None

    def _get(self, record: Any, place: str, name: str, kind: type) -> Any:
        """The field; None, with a message, where it is missing or of another kind."""
        if not isinstance(record, dict) or name not in record:
            problem = "has no" if isinstance(record, dict) else f"is no object ({record!r:.40}), so it has no"
            self._say(place, f"{problem} {name!r}")
        elif kind is int and isinstance(record[name], Number) and _PLACE.fullmatch(record[name]):
            return int(record[name])
        elif not isinstance(record[name], kind) or isinstance(record[name], bool):
            self._say(place, f"{name} must be {_KINDS[kind]}, and is {record[name]!r:.40}")
        else:
            return record[name]
        return None

    def _say(self, place: str, problem: str) -> None:
        self.wrong.append(f"{self._option}: {place}: {problem}")


_PLACE = re.compile(r"-?[0-9]{1,18}")
_KINDS = {list: "a list", str: "a text", int: "a whole number"}


def _elsewhere(text: str, answer: str, start: int) -> str:
    """The message about an answer that is not where it should be."""
    message = f"the answer {answer!r:.60} is not at answer_start {start}"
    if 0 <= start < len(text):
        message += f", where the text has {text[start : start + len(answer)]!r:.60}"
    at = min(_all(text, answer), key=lambda place: abs(place - start), default=None)
    return f"{message}; " + ("it is nowhere in the text" if at is None else f"it is at {at}")


def _all(text: str, answer: str) -> Iterator[int]:
    at = text.find(answer)
    while at >= 0:
        yield at
        at = text.find(answer, at + 1)
