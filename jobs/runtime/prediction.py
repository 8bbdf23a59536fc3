"""The program of a job's predict.py: `python -P -m jobs.JOB.predict EXPORT CACHE_DIR`, which `fab predict` runs.

EXPORT is a folder of this machine, CACHE_DIR may be used for what is made of it. One JSON object comes on stdin:
{"inputs": [str, …], "second": str | null}. One goes to stdout: {"answers": [{"input", "heading", "best": [{"text",
"probability"}, …]}, …]}. Exit code 2 and `error: …` as the last line on stderr: the request was wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from contracts.errors import DONE, WRONG_REQUEST, RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """inputs: texts, questions, or paths of pictures.

    second: the second text of a pair, or what the questions are about.
    """

    inputs: tuple[str, ...]
    second: str | None = None

    def refuse_second(self, kind: str) -> None:
        """Raises RequestError where a second text is given. kind: of the model, which takes none."""
        if self.second is not None:
            raise RequestError(f"--second: {kind} takes no second text; leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess:
    """probability: None where the model has none to give."""

    text: str
    probability: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """heading: what is printed above the answer; None: the input. best: best first."""

    input: str
    heading: str | None = None
    best: Sequence[Guess]


type Predict = Callable[[Path, Path, Asked], Sequence[Answer]]
"""(export, cache_dir, what is asked) to the answers; raises RequestError where it cannot be answered."""


def main(predict: Predict, arguments: Sequence[str] | None = None) -> NoReturn:
    """Read what is asked, answer it, and exit."""
    export, cache_dir = map(Path, sys.argv[1:] if arguments is None else arguments)
    try:
        asked = _read(sys.stdin.read())
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the answer
            answers = predict(export, cache_dir, asked)
    except RequestError as error:
        said = " ".join(str(error).removeprefix("--init-from ").split("\n"))
        print(f"error: {said}", file=sys.stderr)
        sys.exit(WRONG_REQUEST)
    told = [{**dataclasses.asdict(each), "heading": each.heading or each.input} for each in answers]
    print(json.dumps({"answers": told}, ensure_ascii=False))
    sys.exit(DONE)


def _read(text: str) -> Asked:
    """Raises RequestError: it is not what the contract says."""
    try:
        told = json.loads(text)
        inputs, second = told["inputs"], told.get("second")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise RequestError('stdin: no JSON object with "inputs" and "second"') from None
    if not isinstance(inputs, list) or not all(isinstance(each, str) for each in [*inputs, second or ""]):
        raise RequestError('stdin: "inputs" must be a list of texts, and "second" a text or null')
    return Asked(inputs=tuple(inputs), second=second)
