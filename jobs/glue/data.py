"""The rows of `--data`: one text or a pair each, with a class or a number, and which of them are held out.

Light: the launching side calls `problems` before anything is started.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contracts.errors import RequestError, Unreachable
from contracts.files import is_url
from jobs.glue import docstrings
from jobs.glue.options import Options
from jobs.glue.pretrained import open_pretrained
from jobs.runtime.bucket_files import place_error
from jobs.runtime.text_files import UNDECODABLE, ending, open_binary, open_text

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

COLA = ("source", "judgement", "mark", "sentence")
"""CoLA's columns, which its files do not name."""
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

MOST_SHOWN = 10
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


def problems(options: Options, cache_dir: Path) -> list[str]:
    """What is wrong with the data, and with the model of --init-from; called before anything is started.

    Raises:
        Unreachable: a place does not answer now.
    """
    found: list[str] = []
    try:
        _is_whole(options)
        if options.data != DOCSTRINGS:  # nothing is wrong with these, and they take seconds
            read(options)
    except Unreachable:
        raise
    except RequestError as error:
        found += str(error).splitlines()
    try:
        if options.init_from is not None:
            open_pretrained(options, options.init_from, cache_dir, lambda _: None)
    except Unreachable:
        raise
    except RequestError as error:
        found.append(str(error))
    return found


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
        for module, of_module in docstrings.modules():
            keys += [module] * len(of_module)
            rows += [_Row(0, *row) for row in of_module]
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


def _is_whole(options: Options) -> bool:
    """Whether `--data` names columns, held-out rows and task too. Raises RequestError where options name others."""
    place = _place(options.data)
    if options.data != DOCSTRINGS and not os.path.isdir(place) and (not is_url(place) or ending(place)):
        return False
    of_files = {
        "eval_data": None,
        "text_field": None,
        "pair_field": None,
        "label_field": None,
        "task": "auto",
    }
    given = [
        f"--{name.replace('_', '-')}" for name, none in of_files.items() if getattr(options, name) != none
    ]
    if given:
        raise RequestError(
            f"--data {options.data}: has columns, held-out rows and a task of its own; leave out {', '.join(given)}"
        )
    return True


def _glue(options: Options, folder: str) -> Dataset:
    """The rows of a folder with GLUE's own files."""

    def fields(columns: Sequence[str]) -> Fields:
        for wanted in GLUE.values():
            if {*wanted} - {None} <= {*columns}:
                return wanted
        raise RequestError(
            f"no columns of a GLUE task: {_listed(columns)}; of other data name the file itself"
        )

    folder = folder.rstrip("/")
    train = _read("--data", f"{folder}/train.tsv", fields, are_left_out=True)
    name = next(name for name, wanted in GLUE.items() if wanted == train.fields)
    of_eval = "dev_matched.tsv" if name == "mnli" else "dev.tsv"
    held_out = _read("--data", f"{folder}/{of_eval}", lambda _: train.fields, are_left_out=True)
    if name == "rte" and {row.label for row in train.rows} <= {"0", "1"}:
        name = "wnli"
    task: Task = "regression" if name == "stsb" else "classification"
    return _dataset(options, (train, held_out), task, metric_set=name)


def _split(options: Options, table: _Table, keys: Sequence[str]) -> tuple[_Table, _Table]:
    """What is trained on and what is held out: rows with the same key together."""
    splits: tuple[list[_Row], list[_Row]] = ([], [])
    for key, row in zip(keys, table.rows, strict=True):
        share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64
        splits[share < options.eval_fraction].append(row)
    if not all(splits):
        which, remedy = ("every", "lower") if splits[1] else ("no", "raise")
        raise RequestError(
            f"{table.place}: {which} row of {len(table.rows)} falls into the held-out share; {remedy} --eval-fraction "
            f"{options.eval_fraction}, bring more rows with different texts, or name a file with --eval-data"
        )
    train, held_out = (dataclasses.replace(table, rows=rows) for rows in splits)
    return train, held_out


def _fields(options: Options, columns: Sequence[str]) -> Fields:
    """The columns that were asked for, else those with usual names."""
    of = {name.lower(): name for name in reversed(columns)}
    text, second = options.text_field, options.pair_field
    if text is None:
        single = next(((name, None) for name in TEXTS if name in of), ("", None))
        first, other = next((pair for pair in PAIRS if {*pair} <= of.keys()), single)
        text, second = of.get(first, ""), second or (other and of[other])
    label = options.label_field or next((of[name] for name in LABELS if name in of), "")
    wrong = [
        f"no column {name!r} ({option})" if name else f"no column with a usual name for {option}"
        for option, name in (("--text-field", text), ("--pair-field", second), ("--label-field", label))
        if name is not None and name not in columns
    ]
    if wrong:
        raise RequestError(
            f"{' and '.join(wrong)}; the columns are {_listed(columns)}: name them with these options"
        )
    return text, second, label


def _listed(names: Sequence[str]) -> str:
    shown = [repr(name if len(name) <= 40 else f"{name[:40]}…") for name in names[:20]]
    return ", ".join(shown) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _some(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - MOST_SHOWN} more like these"] if len(lines) > MOST_SHOWN else []
    return "\n".join([*lines[:MOST_SHOWN], *more])


# --- files -------------------------------------------------------------------------------------------------

type _Record = tuple[int, Mapping[str, Any] | str]
"""The line of a row, and its columns; or why it cannot be read."""


def _read(
    option: str, path: str, fields_of: Callable[[Sequence[str]], Fields], *, are_left_out: bool = False
) -> _Table:
    """Read a file. Raises RequestError with all rows that are wrong in it.

    are_left_out: such rows are only warned of. QQP has some, and its files are nobody's to mend.
    """
    place = f"{option} {path}"
    if ending(path) not in _FORMATS:
        raise RequestError(
            f"{place}: choose {DOCSTRINGS!r}, a folder with GLUE's train.tsv and dev.tsv, or a file that ends in "
            f"{', '.join(_FORMATS)}"
        )
    fields: Fields | None = None
    rows: list[_Row] = []
    wrong: list[tuple[int, str]] = []
    with _named(place, path):
        for line, record in _FORMATS[ending(path)](path):
            if isinstance(record, str):
                wrong.append((line, record))
                continue
            try:
                fields = fields or fields_of(tuple(record))
            except RequestError as error:
                raise RequestError(f"{place}: {error}") from None
            try:
                rows.append(_row(line, record, fields))
            except ValueError as error:
                wrong.append((line, str(error)))
    said = [f"{path}:{line}: {reason}" for line, reason in wrong]
    if wrong and not (are_left_out and rows):
        raise RequestError(_some([f"{option} {each}" for each in said]) + "; mend or remove what is wrong")
    if fields is None or not rows:
        raise RequestError(f"{place}: holds no rows; name a file with texts and labels")
    left_out = f"rows left out: {len(wrong)}, as {'; '.join(said[:3])}"
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
        elif isinstance(value, int | float):
            value = "" if value != value else str(value)  # NaN is what programs write for none
        if not isinstance(value, str | None):
            raise ValueError(f"{field!r} is no text and no number: {value!r:.60}")
        if field is not None and (not value or value.isspace()):
            raise ValueError(f"{field!r} is empty")
        if value and not value.isascii() and UNDECODABLE.search(value):
            raise ValueError(f"{field!r} is not UTF-8; convert the file (`iconv -f ENCODING -t UTF-8`)")
        texts.append(value or "")
    text, second, label = texts
    return _Row(line, text, second, label.strip())


@contextlib.contextmanager
def _named(place: str, path: str) -> Iterator[None]:
    """What a file system says of a file, as a RequestError; drivers of URLs have exceptions of their own."""
    try:
        if not is_url(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise RequestError(f"{place}: not a regular file, and every process reads it; save it in one")
        yield
    except Exception as error:
        if isinstance(error, RequestError) or not (is_url(path) or isinstance(error, OSError)):
            raise
        remedy = "name a file that can be read, or a folder with GLUE's train.tsv and dev.tsv"
        raise place_error(error, place, remedy) from error


def _csv(path: str) -> Iterator[_Record]:
    """Comma-separated, with the quotes of RFC 4180: a field in quotes may hold commas and line ends."""
    with open_text(path, newline="") as text:
        reader = csv.reader(text, strict=True)
        columns: list[str] = []
        line = 1
        try:
            for values in reader:
                if columns and values:
                    yield line, _record(columns, values)
                columns, line = columns or [name.strip() for name in values], reader.line_num + 1
        except csv.Error as error:  # what follows cannot be told apart any more
            is_open = "unexpected end of data" in str(error) or "field limit" in str(error)
            yield line, "a quote that opens in this row never closes" if is_open else f"not CSV: {error}"


def _tsv(path: str) -> Iterator[_Record]:
    """Tab-separated: a line is a row, and quotes mean nothing, as in GLUE's files."""
    with open_text(path, newline="\n") as text:
        columns: Sequence[str] = ()
        for line, content in enumerate(text, 1):
            values = content.rstrip("\r\n").split("\t")
            if not columns and len(values) == len(COLA) and values[1] in ("0", "1"):
                columns = COLA
            if columns and values != [""]:
                yield line, _record(columns, values)
            columns = columns or [name.strip() for name in values if values != [""]]


def _record(columns: Sequence[str], values: Sequence[str]) -> dict[str, str] | str:
    if len(values) != len(columns):
        return f"{len(values)} columns, and the first line has {len(columns)}"
    record = dict(zip(columns, values, strict=True))
    if len(record) < len(columns) and max(map(columns.count, filter(None, columns))) > 1:
        return "the first line names a column twice"
    return record


def _jsonl(path: str) -> Iterator[_Record]:
    """A JSON object a line."""
    with open_text(path, newline="\n") as text:
        for line, content in enumerate(text, 1):
            if content.isspace():
                continue
            try:
                record = json.loads(content)
                yield line, record if isinstance(record, dict) else "JSON, but no object with columns"
            except (ValueError, RecursionError) as error:
                yield line, f"not JSON ({getattr(error, 'msg', error)})"


def _parquet(path: str) -> Iterator[_Record]:
    """Parquet; its rows count from 1."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise RequestError(
            f"{path}: needs pyarrow, which is not installed; install it where the job runs, or save the rows as .jsonl"
        ) from None
    with open_binary(path) as file:
        try:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches()
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        except pyarrow.ArrowInvalid as error:
            raise RequestError(f"{path}: not Parquet, or damaged ({error}); save it again") from None


_TEXT = {".csv": _csv, ".tsv": _tsv, ".jsonl": _jsonl}
_FORMATS = {**_TEXT, **{f"{kind}.gz": read for kind, read in _TEXT.items()}, ".parquet": _parquet}


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
        names, values = _classes(splits, numbers, names)
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
    splits: tuple[_Table, _Table], numbers: list[list[float | None]], names: tuple[str, ...]
) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """The names of the classes, by number where all of them are whole, and of each row the index of its class."""
    are_whole = all(number is not None and not number % 1 for found in numbers for number in found)
    classes = [
        [
            str(round(number or 0)) if are_whole else row.label
            for row, number in zip(table.rows, found, strict=True)
        ]
        for table, found in zip(splits, numbers, strict=True)
    ]
    names = names or tuple(sorted({*classes[0]}, key=int if are_whole else None))
    if len(names) > MANY_CLASSES and 2 * len(names) > len(classes[0]):
        raise RequestError(
            f"{splits[0].place}: {len(names)} different labels in {len(classes[0])} rows, as {_listed(names[:3])}; "
            f"name the labels' column with --label-field (it is {splits[0].fields[2]!r}); --task regression takes "
            "labels as numbers"
        )
    index = {name: float(position) for position, name in enumerate(names)}
    indices = [[index.get(name) for name in found] for found in classes]
    return names, _checked(splits, indices, "in no row to train on", f"those have {_listed(names)}")


def _checked(
    splits: tuple[_Table, _Table], values: list[list[float | None]], wrong: str, rule: str
) -> list[tuple[float, ...]]:
    """The values, where none is missing."""
    said = [
        f"{table.place}:{row.line}: the label {row.label!r:.60} is {wrong}"
        for table, found in zip(splits, values, strict=True)
        for row, value in zip(table.rows, found, strict=True)
        if value is None
    ]
    if said:
        raise RequestError(f"{_some(said)}; mend or remove the rows: {rule}")
    return [tuple(value for value in found if value is not None) for found in values]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
