"""The rows of `--data`: one text or a pair each, with a class or a number, and which of them are held out.

Light: the launching side calls `problems` before anything is started.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from contracts.errors import RequestError, noted_in
from contracts.files import is_url
from jobs.glue import docstrings
from jobs.glue.options import Options
from jobs.runtime.storage.bucket_files import open_url, place_error
from jobs.runtime.storage.data_files import UNDECODABLE, listing, read_file

_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

type Task = Literal["classification", "regression"]
type Fields = tuple[str, str | None, str]
"""The columns of the text, of the second text of a pair, and of the label."""

DOCSTRINGS = "docstrings"

PAIRS = (
    *(("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis")),
    *(("question", "sentence"), ("question", "passage"), ("text1", "text2"), ("text_a", "text_b")),
)
TEXTS = ("text", "sentence", "question", "premise", "review", "content", "document", "sentence1", "text1")
LABELS = (
    "label",
    "labels",
    "gold_label",
    "class",
    "category",
    "target",
    "score",
    "is_duplicate",
    "judgement",
)
"""Usual names of columns, in the order in which they are looked for; upper and lower case are the same."""

GLUE: Mapping[str, Fields] = {
    "mrpc": ("#1 String", "#2 String", "Quality"),
    "stsb": ("sentence1", "sentence2", "score"),
    "qqp": ("question1", "question2", "is_duplicate"),
    "mnli": ("sentence1", "sentence2", "gold_label"),
    "qnli": ("question", "sentence", "label"),
    "rte": ("sentence1", "sentence2", "label"),
    "sst2": ("sentence", None, "label"),
    "cola": ("sentence", None, "judgement"),
}
"""The tasks are told apart by their columns, in this order; WNLI's are RTE's, but its labels are 0 and 1."""

FEW_FRACTIONS = 4
"""More different labels than these that are not whole are numbers, and not names of classes."""
MANY_CLASSES = 20
"""More classes than these, and more than half as many as rows, are no classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """One split, as parallel tuples: texts_b is empty for single texts, labels are indices of classes or numbers."""

    texts_a: tuple[str, ...]
    texts_b: tuple[str, ...]
    labels: tuple[float, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts, the first ones of the rows before the second ones."""
        return (*self.texts_a, *self.texts_b)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The rows to train on and those to evaluate on.

    metric_set: the GLUE task in small letters; None for other data.
    labels: the names of the classes by their indices; none for regression.
    fingerprint: a sha256 of all that training and evaluation read.
    baseline: the share of the most frequent class among the eval rows; 0 for regression.
    warnings: what whoever trains on them should know.
    """

    source: str
    task: Task
    metric_set: str | None
    labels: tuple[str, ...]
    train: Rows
    eval: Rows
    fingerprint: str
    baseline: float
    warnings: tuple[str, ...] = ()


class _Row(NamedTuple):
    line: int
    text: str
    second: str
    label: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table:
    """What one file holds. place: the option and the file, for messages."""

    place: str
    fields: Fields
    rows: Sequence[_Row]
    warnings: tuple[str, ...] = ()


def problems(options: Options) -> list[str]:
    """What is wrong with the data; called before anything is started.

    Raises:
        Unreachable: a place does not answer now.
    """
    messages: list[str] = []
    with noted_in(messages):
        _is_whole(options)
        if options.data != DOCSTRINGS:  # nothing is wrong with these, and they take seconds
            read(options)
    return messages


def read(options: Options) -> Dataset:
    """Read all rows, and hold some out where no others are named to evaluate on.

    What is held out a hash decides: of a row's first text, so that no first text is in both splits; of a docstring's
    module.

    Raises:
        RequestError: there are no such data, or the message lists what is wrong in them, by line.
    """
    is_whole = _is_whole(options)
    if options.data == DOCSTRINGS:
        keys, rows = [], []
        for module, functions in docstrings.modules():
            keys += [module] * len(functions)
            rows += [_Row(0, *row) for row in functions]
        table = _Table(place=f"--data {DOCSTRINGS}", fields=docstrings.FIELDS, rows=rows)
        return _dataset(options, _split(options, table, keys), "classification", names=docstrings.LABELS)
    if is_whole:
        return _glue(options, _place(options.data))
    table = _read("--data", _place(options.data), lambda columns: _fields(options, columns))
    if options.eval_data is None:
        return _dataset(options, _split(options, table, [row.text for row in table.rows]), options.task)
    held_out = _read("--eval-data", _place(options.eval_data), lambda _: table.fields)
    return _dataset(options, (table, held_out), options.task)


def _place(name: str) -> str:
    return os.path.expanduser(name.removeprefix("file://"))


def _is_folder(place: str) -> bool:
    """Raises RequestError: the place cannot be looked at."""
    if not is_url(place):
        return os.path.isdir(place)
    file_system, path = open_url(place, option="--data")
    try:
        return bool(file_system.isdir(path))
    except Exception as error:  # drivers of URLs have exceptions of their own
        raise place_error(error, f"--data {place}", "check the address and your permission there") from error


def _is_whole(options: Options) -> bool:
    """Whether `--data` names columns, held-out rows and task too. Raises RequestError where options name others."""
    if options.data != DOCSTRINGS and not _is_folder(_place(options.data)):
        return False
    files = {
        "eval_data": None,
        "text_field": None,
        "pair_field": None,
        "label_field": None,
        "task": "auto",
    }
    columns = [
        f"--{name.replace('_', '-')}" for name, none in files.items() if getattr(options, name) != none
    ]
    if columns:
        raise RequestError(
            f"--data {options.data}: has columns, held-out rows and a task of its own; leave out {', '.join(columns)}"
        )
    return True


def _glue(options: Options, folder: str) -> Dataset:
    """The rows of a folder with GLUE's own files."""

    def fields(columns: Sequence[str]) -> Fields:
        for task_fields in GLUE.values():
            if {*task_fields} - {None} <= {*columns}:
                return task_fields
        raise RequestError(
            f"no columns of a GLUE task: {_listed(columns)}; of other data name the file itself"
        )

    folder = folder.rstrip("/")
    train = _read("--data", f"{folder}/train.tsv", fields, are_left_out=True)
    name = next(name for name, task_fields in GLUE.items() if task_fields == train.fields)
    eval_name = "dev_matched.tsv" if name == "mnli" else "dev.tsv"
    held_out = _read("--data", f"{folder}/{eval_name}", lambda _: train.fields, are_left_out=True)
    if name == "rte" and {row.label for row in train.rows} <= {"0", "1"}:
        name = "wnli"
    task: Task = "regression" if name == "stsb" else "classification"
    return _dataset(options, (train, held_out), task, metric_set=name)


def _split(options: Options, table: _Table, keys: Sequence[str]) -> tuple[_Table, _Table]:
    """The rows to train on and those held out; rows with the same key stay together."""
    splits: tuple[list[_Row], list[_Row]] = ([], [])
    for key, row in zip(keys, table.rows, strict=True):
        share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64
        splits[share < options.eval_fraction].append(row)
    if not all(splits):
        quantity, remedy = ("every", "lower") if splits[1] else ("no", "raise")
        raise RequestError(
            f"{table.place}: {quantity} row of {len(table.rows)} falls into the held-out share; {remedy} "
            f"--eval-fraction {options.eval_fraction}, bring more rows with different texts, or name a file with "
            "--eval-data"
        )
    train, held_out = (dataclasses.replace(table, rows=rows) for rows in splits)
    return train, held_out


def _fields(options: Options, columns: Sequence[str]) -> Fields:
    """The columns that the options name, else those with usual names."""
    by_lower_name = {name.lower(): name for name in reversed(columns)}
    text, second = options.text_field, options.pair_field
    if text is None:
        single = next(((name, None) for name in TEXTS if name in by_lower_name), ("", None))
        first, pair_name = next((pair for pair in PAIRS if {*pair} <= by_lower_name.keys()), single)
        text, second = by_lower_name.get(first, ""), second or (pair_name and by_lower_name[pair_name])
    label = options.label_field or next((by_lower_name[name] for name in LABELS if name in by_lower_name), "")
    wrong = [
        f"no column {name!r} ({option})" if name else f"no column with a usual name for {option}"
        for option, name in (("--text-field", text), ("--pair-field", second), ("--label-field", label))
        if name is not None and (not name or name not in columns)
    ]
    if wrong:
        raise RequestError(
            f"{' and '.join(wrong)}; the columns are {_listed(columns)}: name them with these options"
        )
    return text, second, label


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name if len(name) <= 40 else f"{name[:40]}…") for name in names[:20]]
    return ", ".join(shown) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


# --- files -------------------------------------------------------------------------------------------------


def _read(
    option: str, path: str, choose_fields: Callable[[Sequence[str]], Fields], *, are_left_out: bool = False
) -> _Table:
    """Read a file. Raises RequestError with all rows that are wrong in it.

    are_left_out: such rows are only warned of. QQP has some, and its files are nobody's to mend.
    """
    place = f"{option} {path}"
    fields: Fields | None = None
    rows: list[_Row] = []
    wrong: list[str] = []
    for line, record in read_file(option, path):
        try:
            if isinstance(record, str):
                raise ValueError(record)
            fields = fields or choose_fields(tuple(record))
            rows.append(_row(line, record, fields))
        except ValueError as error:
            wrong.append(f"{path}:{line}: {error}")
        except RequestError as error:
            raise RequestError(f"{place}: {error}") from None
    if wrong and not (are_left_out and rows):
        raise RequestError(
            listing([f"{option} {message}" for message in wrong]) + "; mend or remove what is wrong"
        )
    if fields is None or not rows:
        raise RequestError(f"{place}: holds no rows; name a file with texts and labels")
    left_out = f"rows left out: {len(wrong)}, as {'; '.join(wrong[:3])}"
    return _Table(place=place, fields=fields, rows=rows, warnings=(left_out,) if wrong else ())


def _row(line: int, record: Mapping[str, Any], fields: Fields) -> _Row:
    """Raises ValueError: what is wrong with the row."""
    texts = []
    for field in fields:
        if field is not None and field not in record:
            raise ValueError(f"no column {field!r}; the columns are {_listed([*record])}")
        value = "" if field is None else record[field]
        if isinstance(value, bool):
            value = str(value).lower()
        elif isinstance(value, int | float | Decimal):
            value = "" if value != value else str(value)  # NaN is what programs write for none
        if not isinstance(value, str | None):
            raise ValueError(f"{field!r} is no text and no number: {value!r:.60}")
        if field is not None and (not value or value.isspace()):
            raise ValueError(f"{field!r} is empty")
        if value and not value.isascii() and UNDECODABLE.search(value):
            raise ValueError(f"{field!r} is not UTF-8; convert the file (`iconv -f ENCODING -t UTF-8`)")
        texts.append(value or "")
    text, second, label = texts
    return _Row(line, text, second, label)


# --- labels ------------------------------------------------------------------------------------------------


def _dataset(
    options: Options,
    splits: tuple[_Table, _Table],
    task: Task | Literal["auto"],
    *,
    names: tuple[str, ...] = (),
    metric_set: str | None = None,
) -> Dataset:
    """The rows with their labels as numbers, of which RequestError says what is wrong; `names`: of known classes."""
    numbers = [[_number(row.label) for row in table.rows] for table in splits]
    if task == "auto":
        fractions = {number for number in numbers[0] if number is not None and number % 1}
        are_many = len(fractions) > FEW_FRACTIONS and 2 * numbers[0].count(None) < len(numbers[0])
        task = "regression" if are_many else "classification"
    if task == "regression":
        names, values = (
            (),
            _checked(splits, numbers, "no number", "--task classification takes labels as names"),
        )
    else:
        names, values = _classes(splits, names)
    if len({*values[0]}) < 2:
        raise RequestError(
            f"{splits[0].place}: every row to train on has the label {splits[0].rows[0].label!r:.60}; bring rows of "
            f"another, or name the labels' column with --label-field (it is {splits[0].fields[2]!r})"
        )
    digest = hashlib.sha256(json.dumps([task, names]).encode())
    rows = []
    for table, labels in zip(splits, values, strict=True):
        texts_a, texts_b = tuple(row.text for row in table.rows), tuple(row.second for row in table.rows)
        rows.append(Rows(texts_a=texts_a, texts_b=texts_b if table.fields[1] else (), labels=labels))
        for row in zip(texts_a, texts_b, labels, strict=True):
            digest.update(json.dumps(row).encode())
        digest.update(b"\n")
    warnings = [*splits[0].warnings, *splits[1].warnings]
    if len({unicodedata.normalize("NFKC", name).strip() for name in names}) < len(names):
        reason = "only in blanks or in the form of a character"
        warnings.append(f"labels that differ {reason} are different classes: {_listed(names)}")
    both = len({row[1:3] for row in splits[0].rows} & {row[1:3] for row in splits[1].rows})
    if both and options.eval_data is not None:
        warnings.append(f"--eval-data {options.eval_data}: rows that are trained on too: {both}")
    return Dataset(
        source=options.data,
        task=task,
        metric_set=metric_set,
        labels=names,
        train=rows[0],
        eval=rows[1],
        fingerprint=digest.hexdigest(),
        baseline=max(Counter(values[1]).values()) / len(values[1]) if names else 0.0,
        warnings=tuple(warnings),
    )


def _classes(
    splits: tuple[_Table, _Table], names: tuple[str, ...]
) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """The names of the classes, ordered as numbers where all of them are whole, and of each row the index of its class.
    A name is the label's text: 01 and 1 are two classes."""
    classes = [[row.label for row in table.rows] for table in splits]
    numbers = all(_WHOLE.fullmatch(label) for label in {*classes[0]})
    names = names or tuple(sorted({*classes[0]}, key=lambda label: (Decimal(label if numbers else 0), label)))
    if len(names) > MANY_CLASSES and 2 * len(names) > len(classes[0]):
        raise RequestError(
            f"{splits[0].place}: {len(names)} different labels in {len(classes[0])} rows, as {_listed(names[:3])}; "
            f"name the labels' column with --label-field (it is {splits[0].fields[2]!r}); --task regression takes "
            "labels as numbers"
        )
    index = {name: float(position) for position, name in enumerate(names)}
    indices = [[index.get(name) for name in labels] for labels in classes]
    return names, _checked(splits, indices, "in no row to train on", f"those have {_listed(names)}")


def _checked(
    splits: tuple[_Table, _Table], values: list[list[float | None]], wrong: str, rule: str
) -> list[tuple[float, ...]]:
    """The values, where none is missing."""
    messages = [
        f"{table.place}:{row.line}: the label {row.label!r:.60} is {wrong}"
        for table, labels in zip(splits, values, strict=True)
        for row, value in zip(table.rows, labels, strict=True)
        if value is None
    ]
    if messages:
        raise RequestError(f"{listing(messages)}; mend or remove the rows: {rule}")
    return [tuple(value for value in labels if value is not None) for labels in values]


def _number(text: str) -> float | None:
    """The number that a text writes in digits; Python itself takes `1_1`, `infinity` and `nan` for numbers too."""
    number = float(text) if _NUMBER.fullmatch(text.strip()) else math.inf
    return number if math.isfinite(number) else None
