"""A model's predictions on held-out rows, from samples.json: confusion matrix, texts, answered questions, pictures.

A part that does not follow the format in `contracts.run_directory` is left out, and the page says so.
"""

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

from contracts.run_directory import SAMPLES
from jobs.runtime.report.page import Json, Section, clip, number, table, text

_MOST_CLASSES = 30
"""A larger matrix cannot be read; in its place stand its most frequent mistakes."""
_MOST_MISTAKES = 20
_LONGEST_LABEL = 40
_LONGEST_TEXT = 300
_AROUND_ANSWER = 160
_MOST_PICTURES = 24
_MOST_ROWS = 12
_LARGEST_PICTURE_BYTES = 16 * 1024
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 4 * 2**20


def samples(file: str | None) -> list[Section]:
    """The sections of samples.json, by its text; None: there is none."""
    if file is None:
        return []
    try:
        content = json.loads(file) if len(file) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return [_unread(f"{SAMPLES} is torn, or no JSON object: nothing of it is shown.")]
    sections, wrong = [], []
    for name, section in _SECTIONS.items():
        if name in content:
            try:
                sections += section(content[name])
            except (ValueError, TypeError, KeyError, AttributeError, IndexError):
                wrong.append(name)
    if wrong:
        sections.append(_unread(f"{SAMPLES}: {', '.join(wrong)} cannot be understood and is not shown."))
    return sections


def _unread(reason: str) -> Section:
    return {"title": "Samples", "kind": "list", "items": [reason]}


def _confusion(value: Any) -> list[Section]:
    labels, matrix = value["labels"], value["counts"]
    names = [clip(label, _LONGEST_LABEL) for label in labels]
    total, right = sum(map(sum, matrix)), sum(row[index] for index, row in enumerate(matrix))
    note = f"{right:,} of {total:,} held-out rows are right{f' ({right / total:.1%})' if total else ''}."
    if len(labels) > _MOST_CLASSES:
        return table(
            "Confusion",
            ("true class", "the model says", "rows"),
            _mistakes(names, matrix),
            note=f"{note} The most frequent mistakes:",
        )
    note += " A row is a true class, a column what the model says; a stronger colour is a larger share of the row."
    return [{"title": "Confusion matrix", "kind": "matrix", "note": note, "labels": names, "counts": matrix}]


def _mistakes(labels: Sequence[str], matrix: Sequence[Sequence[int]]) -> list[list[object]]:
    wrong = [
        (count, truth, predicted)
        for truth, row in enumerate(matrix)
        for predicted, count in enumerate(row)
        if count and truth != predicted
    ]
    return [
        [labels[truth], labels[predicted], f"{count:,}"]
        for count, truth, predicted in sorted(wrong, key=lambda mistake: -mistake[0])[:_MOST_MISTAKES]
    ]


def _texts(value: Any) -> list[Section]:
    lines = [
        ["\n".join(clip(part, _LONGEST_TEXT) for part in row["texts"]), clip(row["truth"]), _prediction(row)]
        for row in value[:_MOST_ROWS]
    ]
    return table("Held-out texts", ("text", "truth", "the model says"), lines)


def _questions(value: Any) -> list[Section]:
    lines = []
    for row in value[:_MOST_ROWS]:
        answer, truth = row["answer"], row["truth"]
        is_right = answer.casefold() in [answer_text.casefold() for answer_text in truth or [""]]
        shown = [clip(answer or "no answer"), "good" if is_right else "plain"]
        true = "" if is_right else clip(f" (true: {' or '.join(truth) or 'no answer'})")
        lines.append(
            [clip(row["question"]), [shown, f" {_share(row)}", true], _marked(row["context"], answer)]
        )
    return table("Answered questions", ("question", "the model says", "text"), lines)


def _marked(context: str, answer: str) -> list[object]:
    """The context around the answer, which is marked."""
    at = context.find(answer) if answer else -1
    if at < 0:
        return [clip(context, 2 * _AROUND_ANSWER)]
    end = at + len(answer)
    before, after = context[max(0, at - _AROUND_ANSWER) : at], context[end : end + _AROUND_ANSWER]
    return [
        f"{'…' if at > _AROUND_ANSWER else ''}{before}",
        [clip(answer), "mark"],
        f"{after}{'…' if end + _AROUND_ANSWER < len(context) else ''}",
    ]


def _pictures(value: Any) -> list[Section]:
    items = [item for row in value[:_MOST_PICTURES] if (item := _picture(row))]
    note = "Wrong ones first: the true class, and what the model says."
    section = {"title": "Held-out pictures", "kind": "pictures", "note": note, "items": items}
    return [section] if items else []


def _picture(row: Json) -> Section | None:
    """A picture with its two classes; None where it is no small PNG."""
    data = base64.b64decode(row["png"], validate=True)
    if not data.startswith(_PNG) or len(data) > _LARGEST_PICTURE_BYTES:
        return None
    truth = clip(row["truth"], _LONGEST_LABEL)
    return {
        "png": base64.b64encode(data).decode(),
        "truth": truth,
        "caption": [f"{truth}: ", *_prediction(row)],
    }


def _prediction(row: Json) -> list[object]:
    """The prediction, in colour, with its probability; a number without one is neither right nor wrong."""
    colour = "good" if text(row["truth"]) == text(row["prediction"]) else "bad" if _share(row) else "plain"
    return [[clip(row["prediction"], _LONGEST_TEXT), colour], f" {_share(row)}"]


def _share(row: Json) -> str:
    share = number(row.get("probability"))
    return "" if share is None else f"{100 * share:.0f}\u00a0%"


_SECTIONS: dict[str, Callable[[Any], list[Section]]] = {
    "confusion": _confusion,
    "texts": _texts,
    "questions": _questions,
    "pictures": _pictures,
}
"""The parts of samples.json, in the page's order."""
