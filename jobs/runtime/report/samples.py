"""What a model says of held-out rows, from samples.json: confusion matrix, texts, answered questions, pictures.

The file is a job's own. What is not as `contracts.run_directory` has it is left out, and the page says so.
"""

import base64
import binascii
import json
from collections.abc import Callable, Sequence

from contracts.run_directory import SAMPLES
from jobs.runtime.report.page import Json, escape, mapping, number, rows, text

_MOST_CLASSES = 30
"""A larger matrix cannot be read; in its place stand its most frequent mistakes."""
_MOST_MISTAKES = 20
_UPRIGHT_CLASSES, _UPRIGHT_LETTERS = 4, 3
"""With more of both, the names above the columns run upwards."""
_LONGEST_LABEL = 40
_LONGEST_TEXT = 300
_AROUND_ANSWER = 160
_MOST_PICTURES = 24
_MOST_ROWS = 12
_LARGEST_PICTURE_BYTES = 16 * 1024
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_BYTES = 4 * 2**20


def samples(file: str | None) -> str:
    """The sections of samples.json, by its text; None: there is none."""
    if file is None:
        return ""
    try:
        found = json.loads(file) if len(file) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return f"<h2>Samples</h2><p>{SAMPLES} is torn, or no JSON object: nothing of it is shown.</p>"
    sections, wrong = [], []
    for name, section in _SECTIONS.items():
        if name in found:
            try:
                sections.append(section(found[name]))
            except (ValueError, TypeError, KeyError):
                wrong.append(name)
    said = f"{SAMPLES}: {', '.join(wrong)} cannot be understood and is not shown."
    return "".join([*sections, f"<p>{said}</p>" if wrong else ""])


def _confusion(value: object) -> str:
    labels, counts = mapping(value)["labels"], mapping(value)["counts"]
    if not isinstance(labels, list) or not labels or len(counts) != len(labels):
        raise ValueError
    table = [[_count(cell) for cell in row] for row in counts]
    if any(len(row) != len(labels) for row in table):
        raise ValueError
    total, right = sum(map(sum, table)), sum(row[index] for index, row in enumerate(table))
    told = f"{right:,} of {total:,} held-out rows are right{f' ({right / total:.1%})' if total else ''}."
    if len(labels) > _MOST_CLASSES:
        return _section("Confusion", f"{told} The most frequent mistakes:", _mistakes(labels, table))
    is_short = len(labels) <= _UPRIGHT_CLASSES or all(
        len(text(label)) <= _UPRIGHT_LETTERS for label in labels
    )
    upright = " upright" if is_short else ""
    names = [escape(label, longest=_LONGEST_LABEL) for label in labels]
    head = "".join(f"<th><span>{name}</span></th>" for name in names)
    lines = []
    for index, row in enumerate(table):
        of = sum(row)
        cells = "".join(
            f'<td class="{"right" if index == column else "wrong"}" style="--share:{count / of if of else 0:.3f}">'
            f"{f'{count:,}' if count else ''}</td>"
            for column, count in enumerate(row)
        )
        share = f"{row[index] / of:.0%}" if of else "—"
        lines.append(f"<tr><th>{names[index]}</th>{cells}<td>{share}</td></tr>")
    matrix = (
        f'<table class="confusion{upright}"><tr><td></td>{head}<th>right</th></tr>{"".join(lines)}</table>'
    )
    told += " A row is a true class, a column what the model says; a stronger colour is a larger share of the row."
    return _section("Confusion matrix", told, matrix)


def _count(value: object) -> int:
    count = number(value)
    if count is None or count < 0:
        raise ValueError
    return int(count)


def _mistakes(labels: Sequence[object], table: Sequence[Sequence[int]]) -> str:
    wrong = [
        (count, truth, said)
        for truth, row in enumerate(table)
        for said, count in enumerate(row)
        if count and truth != said
    ]
    lines = "".join(
        f"<tr><td>{escape(labels[truth])}</td><td>{escape(labels[said])}</td><td>{count:,}</td></tr>"
        for count, truth, said in sorted(wrong, key=lambda each: -each[0])[:_MOST_MISTAKES]
    )
    return f"<table><tr><th>true class</th><th>the model says</th><th>rows</th></tr>{lines}</table>"


def _texts(value: object) -> str:
    lines = []
    for each in _objects(value)[:_MOST_ROWS]:
        texts = "<br>".join(escape(part, longest=_LONGEST_TEXT) for part in each["texts"])
        lines.append(f"<tr><td>{texts}</td><td>{escape(each['truth'])}</td><td>{_said(each)}</td></tr>")
    table = f"<table><tr><th>text</th><th>truth</th><th>the model says</th></tr>{''.join(lines)}</table>"
    return _section("Held-out texts", "", table) if lines else ""


def _questions(value: object) -> str:
    items = []
    for each in _objects(value)[:_MOST_ROWS]:
        answer, truth = text(each["answer"]), [text(one) for one in each["truth"]]
        is_right = answer.casefold() in [one.casefold() for one in truth or [""]]
        items.append(
            f"<dt>{escape(each['question'])}</dt>"
            f'<dd><b class="{"good" if is_right else "plain"}">{escape(answer or "no answer")}</b> {_share(each)} '
            f"{'' if is_right else f'(true: {escape(" or ".join(truth) or "no answer")})'}"
            f"<p>{_marked(text(each['context']), answer)}</p></dd>"
        )
    return _section("Answered questions", "", f'<dl class="questions">{"".join(items)}</dl>') if items else ""


def _marked(context: str, answer: str) -> str:
    """The context around the answer, which is marked."""
    at = context.find(answer) if answer else -1
    if at < 0:
        return escape(context, longest=2 * _AROUND_ANSWER)
    end = at + len(answer)
    before, after = context[max(0, at - _AROUND_ANSWER) : at], context[end : end + _AROUND_ANSWER]
    return (
        f"{'…' if at > _AROUND_ANSWER else ''}{escape(before)}<mark>{escape(answer)}</mark>{escape(after)}"
        f"{'…' if end + _AROUND_ANSWER < len(context) else ''}"
    )


def _pictures(value: object) -> str:
    found = _objects(value)
    items = [item for each in found[:_MOST_PICTURES] if (item := _picture(each))]
    if found and not items:
        raise ValueError
    told = "Wrong ones first: the true class, and what the model says."
    return _section("Held-out pictures", told, f'<ul class="pictures">{"".join(items)}</ul>') if items else ""


def _picture(each: Json) -> str:
    """A picture with its two classes; nothing where it is no small PNG."""
    try:
        data = base64.b64decode(text(each["png"]), validate=True)
    except (binascii.Error, ValueError):
        return ""
    if not data.startswith(_PNG) or len(data) > _LARGEST_PICTURE_BYTES:
        return ""
    source = base64.b64encode(data).decode()
    return (
        f'<li><img alt="" src="data:image/png;base64,{source}">'
        f"{escape(each['truth'], longest=_LONGEST_LABEL)}<br>{_said(each)}</li>"
    )


def _said(each: Json) -> str:
    """The prediction, in colour, with its probability; a number without one is neither right nor wrong."""
    colour = "good" if text(each["truth"]) == text(each["prediction"]) else "bad" if _share(each) else "plain"
    return f'<b class="{colour}">{escape(each["prediction"], longest=_LONGEST_TEXT)}</b> {_share(each)}'


def _share(each: Json) -> str:
    share = number(each.get("probability"))
    return "" if share is None else f"{100 * share:.0f}\u00a0%"


def _objects(value: object) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError
    return rows(value)


def _section(title: str, told: str, body: str) -> str:
    return f'<h2>{title}</h2>{f"<p>{told}</p>" if told else ""}<div class="scroll">{body}</div>'


_SECTIONS: dict[str, Callable[[object], str]] = {
    "confusion": _confusion,
    "texts": _texts,
    "questions": _questions,
    "pictures": _pictures,
}
"""The parts of samples.json, in the page's order."""
