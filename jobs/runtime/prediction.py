"""Answers of an exported model: the interface of a job's predict.py, and the program that `fab predict` runs.

A job's predict.py has `load(export, cache_dir) -> Predictor`. The predictor turns an input into rows (`encode`) and
answers rows in batches of a given shape (`compute`), however they are padded and mixed: `fab predict` asks it once
(`answer`), a server keeps it (`jobs.serve`), and both give the same answers.

The program: `python -P -m jobs.runtime.prediction JOB EXPORT CACHE_DIR`. EXPORT is a folder of this machine, CACHE_DIR
may be used for what is made of it. One JSON object comes on stdin: {"inputs": [str, …], "second": str | null}. One goes
to stdout: {"answers": [{"input", "heading", "best": [{"text", "probability"}, …]}, …]}. Exit code 2 and `error: …` as
the last line on stderr: the request was wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

from contracts.errors import DONE, WRONG_REQUEST, RequestError

ON_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TPU_SKIP_MDS_QUERY": "1"}
"""The devices of this machine may be busy with a run; and TensorFlow would look for a TPU's metadata for minutes."""
SHORTEST, MULTIPLE = 16, 2
"""The lengths that rows are padded to: the shortest, and how many times as long the next one is."""
SIZES = (1, 4, 8, 16)
"""The numbers of rows that batches are filled up to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess:
    """probability: None where the model has none to give."""

    text: str
    probability: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """input: of the request; a predictor may leave it out. heading: printed above the answer; None: the input. best:
    best first."""

    input: str = ""
    heading: str | None = None
    best: Sequence[Guess]

    def as_json(self) -> dict[str, Any]:
        best = [{"text": guess.text, "probability": guess.probability} for guess in self.best]
        return {"input": self.input, "heading": self.heading or self.input, "best": best}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a model computes at once. length: how many positions it takes of those that rows are padded to. values: the
    predictor's own."""

    length: int
    values: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """An input as rows. answers: makes the answers of what the model computes of each of them."""

    rows: Sequence[Row]
    answers: Callable[[Sequence[Any]], Sequence[Answer]]


type Takes = Literal["text", "picture"]
TEXT: Takes = "text"
PICTURE: Takes = "picture"


class Predictor(Protocol):
    """The model of an export, loaded once.

    task: as the Hugging Face Hub calls it. takes: what an input is; a picture is given as its bytes. longest: the
    length of the longest row; 1 where all have one length. example: a short input that it takes, and its second text.
    """

    @property
    def task(self) -> str: ...
    @property
    def takes(self) -> Takes: ...
    @property
    def longest(self) -> int: ...
    @property
    def example(self) -> tuple[str | bytes, str | None]: ...

    def encode(self, value: str | bytes, second: str | None) -> Encoded:
        """Return the rows of an input. Several threads may call it at once.

        Raises:
            RequestError: it cannot be answered.
        """
        ...

    def compute(self, rows: Sequence[Row], size: int, length: int) -> Sequence[Any]:
        """Return what the model says of each row, computed as a batch of `size` rows of `length` positions."""
        ...


def load(job: str, export: Path, cache_dir: Path) -> Predictor:
    """The predictor of a job's export, on the devices that the framework has.

    Raises:
        RequestError: the export is none of this job.
        ModuleNotFoundError: the job cannot predict, or not in this environment.
    """
    predictor: Predictor = importlib.import_module(f"jobs.{job}.predict").load(export, cache_dir)
    return predictor


def refuse_second(second: str | None, kind: str) -> None:
    """Raises RequestError where a second text is given. kind: of the model, which takes none."""
    if second is not None:
        raise RequestError(f"--second: {kind} takes no second text; leave it out")


def lengths(longest: int) -> tuple[int, ...]:
    """Return the few lengths that rows are padded to; the last one is `longest`."""
    steps = [SHORTEST]
    while steps[-1] < longest:
        steps.append(steps[-1] * MULTIPLE)
    return (*steps[:-1], longest)


def answer(predictor: Predictor, inputs: Sequence[str], second: str | None = None) -> list[Answer]:
    """Answer all inputs: texts, questions, or paths of pictures.

    second: the second text of a pair, or what the questions are about.

    Raises:
        RequestError: some cannot be answered; all that is wrong with them.
    """
    encoded: list[Encoded] = []
    wrong: list[str] = []
    for value in inputs:
        try:
            encoded.append(predictor.encode(_read(value) if predictor.takes == PICTURE else value, second))
        except RequestError as error:
            wrong.append(f"{value}: {error}" if predictor.takes == PICTURE else str(error))
    if wrong:
        raise RequestError("; ".join(dict.fromkeys(wrong)))
    rows = [row for encoding in encoded for row in encoding.rows]
    outputs: list[Any] = [None] * len(rows)
    order, shapes = sorted(range(len(rows)), key=lambda index: rows[index].length), lengths(predictor.longest)
    while order:
        batch, order = order[: SIZES[-1]], order[SIZES[-1] :]
        size = next(size for size in SIZES if size >= len(batch))
        length = next(length for length in shapes if length >= rows[batch[-1]].length)
        computed = predictor.compute([rows[index] for index in batch], size, length)
        for index, output in zip(batch, computed, strict=True):
            outputs[index] = output
    answers = []
    for name, encoding in zip(inputs, encoded, strict=True):
        own, outputs = outputs[: len(encoding.rows)], outputs[len(encoding.rows) :]
        answers += [dataclasses.replace(result, input=name) for result in encoding.answers(own)]
    return answers


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"cannot be read as a picture ({error.strerror})") from None


def main(job: str, export: str, cache_dir: str) -> NoReturn:
    """Read the request, answer it on this machine's CPU, and exit."""
    os.environ |= ON_CPU
    asked = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the answer
            answers = answer(load(job, Path(export), Path(cache_dir)), asked["inputs"], asked["second"])
    except RequestError as error:
        message = " ".join(str(error).removeprefix("--init-from ").split("\n"))
        print(f"error: {message}", file=sys.stderr)
        sys.exit(WRONG_REQUEST)
    print(json.dumps({"answers": [result.as_json() for result in answers]}, ensure_ascii=False))
    sys.exit(DONE)


if __name__ == "__main__":
    # The module as jobs import it, and not this one: they make its answers.
    importlib.import_module("jobs.runtime.prediction").main(*sys.argv[1:])
