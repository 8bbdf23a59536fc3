"""Files of data, on this machine or behind a URL: what a file is, its bytes say and not its name.

`recognise` looks at the beginning of a file, beneath gzip, bzip2, xz or zstd. `read_rows` reads JSON lines, a JSON
list, a table of delimited columns, or Parquet; `open_text` opens text. A value stays the text that it is in the file.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from contracts.errors import RequestError, Unreachable
from contracts.files import is_url
from jobs.runtime.storage.bucket_files import open_url, place_error

type Kind = Literal["text", "table", "JSON lines", "JSON", "Parquet"]
type Row = tuple[int, Mapping[str, Any] | str]
"""The line that a row begins in (in Parquet its number, from 1), and its columns; or why it cannot be read."""

# Lone surrogates: what "surrogateescape" makes of bytes that are no UTF-8, and JSON's "\ud800" on its own.
UNDECODABLE = re.compile("[\ud800-\udfff]+")
MOST_LISTED = 10
HEAD_BYTES, LONG_HEAD_BYTES = 1 << 16, 1 << 23
"""What is looked at to find what a file is; the second where no row ends in the first."""
MOST_COMPRESSIONS = 3
NOT_TEXT_SHARE = 0.3
"""A file with more than this share of bytes that are not UTF-8 at its beginning is no text, or in another encoding:
Cyrillic or Japanese text of old is at 0.5 and more, French or German at 0.05."""

COLA = ("source", "judgement", "mark", "sentence")
"""CoLA's columns, which its files do not name."""
_DELIMITERS = "\t,;|"
_SAMPLE_ROWS = 100
_TABLE_ROWS = 5
_TABLE_SHARE = 0.95
_NAME_CHARACTERS = 40

_COMPRESSED = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_NOT_DATA = {
    re.compile(rb"(?i)<!doctype\s|<html[\s>]|<\?xml\s|<svg\s"): (
        "HTML or XML",
        "save its text without the markup",
    ),
    re.compile(rb"\{\\rtf|%!PS"): ("RTF or PostScript", "save its text"),
    re.compile(rb"version https://git-lfs\.github\.com/"): (
        "a pointer of Git LFS, and not the file",
        "fetch that (`git lfs pull`)",
    ),
    re.compile(rb"PK(?:\x03\x04|\x05\x06|\x07\x08)"): (
        "a ZIP archive or an office document",
        "unpack it, or save its text",
    ),
    re.compile(rb"%PDF-"): ("a PDF", "save its text"),
    re.compile(rb".{257}ustar", re.DOTALL): ("a tar archive", "unpack it"),
    re.compile(rb"7z\xbc\xaf|Rar!\x1a\x07|\x04\x22\x4d\x18|\x1f\x9d"): (
        "compressed by 7-Zip, RAR, LZ4 or compress",
        "unpack it, or compress it with gzip, bzip2, xz or zstd",
    ),
    re.compile(rb"ARROW1\0\0|Obj\x01"): ("in Arrow's or Avro's format", "save it as Parquet"),
}
_MARKS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)
"""Byte order marks, the longer ones first: one begins like another."""
_OBJECT = re.compile(r"""\{\s*["'}]""")
_LIST = re.compile(r"""\[\s*(?:\{\s*["'}]|"(?:[^"\\]|\\.)*"\s*[,\]]|\]\s*$)""")


class NotData(RequestError):
    """A file that holds neither text nor rows. reason: what it is."""

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(f"{path}: {reason}; {remedy}")
        self.reason = reason


class Number(str):
    """A number of a JSON file, as its text."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """What a file is. compressions: the outermost first. has_quotes: whether quotes enclose fields of a table."""

    kind: Kind
    compressions: tuple[str, ...] = ()
    encoding: str = "utf-8-sig"
    line_end: str = "\n"
    delimiter: str = ","
    has_quotes: bool = True


def listing(lines: Sequence[str]) -> str:
    """Return the first lines of a list of mistakes, and how many more there are."""
    more = [f"and {len(lines) - MOST_LISTED} more like these"] if len(lines) > MOST_LISTED else []
    return "\n".join([*lines[:MOST_LISTED], *more])


def recognise(path: str, *, column: str | None = None) -> Format:
    """Return what a file is, from its beginning.

    Text may be prose or a table. column: that of a table that would be read; without it, rows are needed, and text is a
    table. The name of a file counts only where its content is both: prose with as many commas in every line, say.

    Raises:
        NotData: it is neither text nor rows.
        RequestError: it is damaged.
    """
    if not is_url(path) and not os.path.isfile(path):
        if not os.path.islink(path):
            os.stat(path)  # raises OSError where nothing is there
        raise NotData(path, "not a regular file, and it is read more than once", "save it in one")
    compressions: list[str] = []
    while True:
        with _opened(path, compressions) as stream:
            head = stream.read(HEAD_BYTES)
        compression = next((name for name, begin in _COMPRESSED.items() if begin.match(head)), None)
        if compression is None:
            break
        if len(compressions) == MOST_COMPRESSIONS:
            raise NotData(path, f"compressed more than {MOST_COMPRESSIONS} times", "unpack it")
        compressions.append(compression)
    if head.startswith(b"PAR1"):
        return Format(kind="Parquet", compressions=tuple(compressions))
    begins = head.removeprefix(codecs.BOM_UTF8).lstrip()
    for begin, (reason, remedy) in _NOT_DATA.items():
        if begin.match(begins):
            raise NotData(path, reason, remedy)
    form, is_cut = _text_form(path, head, column, is_whole=len(head) < HEAD_BYTES)
    if is_cut:
        with _opened(path, compressions) as stream:
            head = stream.read(LONG_HEAD_BYTES)
        form, _ = _text_form(path, head, column, is_whole=len(head) < LONG_HEAD_BYTES)
    return dataclasses.replace(form, compressions=tuple(compressions))


def read_file(option: str, path: str) -> Iterator[Row]:
    """Yield the rows of the file that an option names.

    Raises:
        RequestError: it cannot be read; the message names the option and the file.
    """
    place = f"{option} {path}"
    try:
        yield from read_rows(path, recognise(path))
    except Unreachable:
        raise
    except RequestError as error:
        reason = str(error).removeprefix("--data ").removeprefix(f"{path}: ")
        raise RequestError(f"{place}: {reason}") from None
    except Exception as error:  # drivers of URLs have exceptions of their own
        if not (is_url(path) or isinstance(error, OSError)):
            raise
        raise place_error(error, place, "name a file that can be read") from error


def read_rows(path: str, form: Format, *, column: str | None = None) -> Iterator[Row]:
    """Yield the rows of a file, as a stream but for a JSON list. column: the only one that is needed.

    Raises:
        RequestError: the file is damaged.
    """
    match form.kind:
        case "Parquet":
            return _parquet(path, form, column)
        case "JSON":
            return _json(path, form)
        case "JSON lines":
            return _json_lines(path, form)
        case _:
            return _table(path, form)


@contextlib.contextmanager
def open_text(path: str, form: Format, *, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
    """Open a file as text, without a byte order mark. Bytes that are not UTF-8 become lone surrogates.

    Raises:
        RequestError: it is damaged.
    """
    errors = "surrogateescape" if form.encoding == "utf-8-sig" else "strict"
    try:
        with (
            _opened(path, form.compressions) as stream,
            io.TextIOWrapper(stream, form.encoding, errors=errors, newline=newline) as text,
        ):
            yield text
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path}: damaged {form.encoding.upper()} ({error.reason}); save it again"
        ) from None


@contextlib.contextmanager
def _opened(path: str, compressions: Sequence[str]) -> Iterator[Any]:
    """The bytes of a file without their compressions. Raises RequestError where these are damaged."""
    try:
        with contextlib.ExitStack() as stack:
            stream: Any = stack.enter_context(_open_binary(path))
            for compression in compressions:
                stream = stack.enter_context(_DECOMPRESSED[compression](stream))
            yield stack.enter_context(io.BufferedReader(stream, HEAD_BYTES))
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        # bz2 and pyarrow raise an OSError that is none of the system's, and so has no number.
        if not compressions or (isinstance(error, OSError) and error.errno is not None):
            raise
        if "too much memory" in str(error):  # zstd --long=28 and more: the library has no option for it
            raise NotData(path, "zstd with a window of over 128 MiB", "compress it without --long") from error
        raise RequestError(
            f"{path}: damaged {compressions[-1]} ({error}); fetch or compress it again"
        ) from error


def _open_binary(path: str) -> Any:
    if not is_url(path):
        return open(path, "rb")
    file_system, name = open_url(path, option="--data")
    return file_system.open(name, "rb")


def _zstd(stream: Any) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(stream, "zstd")


class _Streams(io.RawIOBase):
    """What bzip2 or xz wrote, as one stream or several, with padding between them: the library's own readers take
    damage there for the file's end."""

    def __init__(self, file: Any, new: Callable[[], Any], padding: bytes) -> None:
        self._file, self._new, self._padding = file, new, padding
        self._decompressor: Any = None
        self._behind = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._decompressor is None:
                data, self._behind = self._behind or self._file.read(HEAD_BYTES), b""
                if not data:
                    return 0
                data = data.lstrip(self._padding)
                if not data:
                    continue
                self._decompressor = self._new()
            elif self._decompressor.needs_input:
                data = self._file.read(HEAD_BYTES)
                if not data:
                    raise EOFError("it ends before its end is marked")
            piece = self._decompressor.decompress(data, len(buffer))
            if self._decompressor.eof:
                self._behind, self._decompressor = self._decompressor.unused_data, None
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)


_DECOMPRESSED: Mapping[str, Callable[[Any], Any]] = {
    "gzip": lambda stream: gzip.GzipFile(fileobj=stream, mode="rb"),
    "bzip2": lambda stream: _Streams(stream, bz2.BZ2Decompressor, padding=b""),
    "xz": lambda stream: _Streams(stream, lzma.LZMADecompressor, padding=b"\0"),
    "zstd": _zstd,
}


# --- recognising -------------------------------------------------------------------------------------------


def _decoded(path: str, head: bytes, encoding: str) -> str:
    """The beginning of a text; a character may be cut at its end. Raises NotData: it is none."""
    errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
    try:
        text = codecs.getincrementaldecoder(encoding)(errors).decode(head)
    except UnicodeDecodeError as error:
        raise NotData(path, f"damaged {encoding.upper()} ({error.reason})", "save it again") from None
    if "\0" in text:
        raise NotData(
            path, "binary, or UTF-16 without a byte order mark (it has NUL bytes)", "convert it to UTF-8"
        )
    share = sum(map(len, UNDECODABLE.findall(text))) / max(1, len(head))
    if share > NOT_TEXT_SHARE:
        share_text = f"{share:.0%} of its first {len(head):,} bytes are not UTF-8"
        remedy = "convert it (`iconv -f ENCODING -t UTF-8`)"
        raise NotData(path, f"binary, or in another encoding ({share_text})", remedy)
    return text


def _text_form(path: str, head: bytes, column: str | None, *, is_whole: bool) -> tuple[Format, bool]:
    """What a text is, from its beginning, as `recognise` has it; and whether more of it has to be seen for that."""
    encoding = next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8-sig")
    text = _decoded(path, head, encoding)
    line_end = "\r" if "\r" in text and "\n" not in text.removesuffix("\n") else "\n"
    prose = Format(kind="text", encoding=encoding, line_end=line_end)
    name = path.lower()
    while name.endswith(_SUFFIXES):
        name = os.path.splitext(name)[0]
    is_named = name.endswith((".json", ".jsonl", ".ndjson"))
    kind = _json_kind(text.lstrip(), line_end, is_named=is_named)
    if kind is not None:
        return dataclasses.replace(prose, kind=kind), False
    table = _Table(text, line_end, is_whole=is_whole)
    if column is None or name.endswith((".csv", ".tsv")) or table.has(column):
        return dataclasses.replace(
            prose, kind="table", delimiter=table.delimiter, has_quotes=table.has_quotes
        ), table.is_cut
    if is_named and text.strip():  # such as a message in place of a download: its lines are refused
        return dataclasses.replace(prose, kind="JSON lines"), False
    return prose, table.is_cut


def _json_kind(text: str, line_end: str, *, is_named: bool) -> Kind | None:
    """Which kind of JSON a text begins like; None: it is other text."""
    first, ended, more = text.partition(line_end)
    first = first.strip()
    if text.startswith("["):
        if not (is_named or _LIST.match(text)):
            return None
        are_lines = isinstance(_parsed(first)[0], list) and more.lstrip().startswith("[")
        return "JSON lines" if are_lines else "JSON"
    if not text.startswith("{") or not (is_named or _OBJECT.match(text)):
        return None
    # The first line of an object that is printed over several lines is cut behind one of these.
    return "JSON" if ended and _parsed(first)[1] and first.endswith(("{", "[", ",")) else "JSON lines"


class _Table:
    """The delimiter and the quotes by which the beginning of a text has most of its rows in equal columns.

    is_cut: whether by some delimiter no row below the first line ends in it.
    """

    def __init__(self, text: str, line_end: str, *, is_whole: bool) -> None:
        self.delimiter, self.has_quotes = ",", True
        self._header: list[str] = []
        self._share, self._rows = 0.0, 0
        self.is_cut = False
        for delimiter in _DELIMITERS:
            if delimiter not in text.lstrip().partition(line_end)[0]:
                continue
            quoted, is_clean = _sample(text, delimiter, is_whole=is_whole)
            self.is_cut |= is_clean and not is_whole and len(quoted) < 2
            sample, has_quotes = quoted, True
            if delimiter == "\t":
                lines = [line.rstrip("\r\n") for line in text.split(line_end)][: None if is_whole else -1]
                plain = [line.split("\t") for line in lines[:_SAMPLE_ROWS] if line]
                # Quotes have no meaning in GLUE's files, and most of those there are never close.
                has_quotes = is_clean and _share(quoted) == 1 and (_share(plain) < 1 or _are_quoted(plain))
                sample = quoted if has_quotes else plain
            share = _share(sample)
            if sample and len(sample[0]) > 1 and (share, len(sample[0])) > (self._share, len(self._header)):
                self.delimiter, self.has_quotes = delimiter, has_quotes
                self._header = [name.strip() for name in sample[0]]
                self._share, self._rows = share, len(sample) - 1

    def has(self, column: str) -> bool:
        """Whether the text is a table rather than prose. column: a name that tells more than any other."""
        names = self._header
        if len({*names} - {""}) < len(names) or max(map(len, names), default=0) > _NAME_CHARACTERS:
            return False
        if column in names and self._rows and self._share >= 0.5:
            return True
        return self._rows >= _TABLE_ROWS and self._share >= _TABLE_SHARE


def _sample(text: str, delimiter: str, *, is_whole: bool) -> tuple[list[list[str]], bool]:
    """The first rows, up to one that is no CSV or may be cut; and whether there is no such mistake."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    try:
        for row in reader:
            if len(rows) == _SAMPLE_ROWS:
                return rows, True
            rows += [row] if row else []
    except csv.Error as error:
        return rows, not is_whole and "unexpected end" in str(error)
    return rows if is_whole else rows[:-1], True


def _share(sample: Sequence[Sequence[str]]) -> float:
    """Of the rows, the share with as many columns as the first line."""
    return sum(len(row) == len(sample[0]) for row in sample[1:]) / max(1, len(sample) - 1) if sample else 0.0


def _are_quoted(plain: Sequence[Sequence[str]]) -> bool:
    """Whether quotes enclose fields: all names have some, or in fields with some they are doubled."""
    enclosed = [[len(field) > 1 and field[0] == field[-1] == '"' for field in row] for row in plain]
    return bool(plain) and (
        all(enclosed[0])
        or any(
            is_enclosed and '""' in field[1:-1]
            for row, flags in zip(plain, enclosed, strict=True)
            for field, is_enclosed in zip(row, flags, strict=True)
        )
    )


# --- reading -----------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("an object names a column twice")
    return record


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=Number,
    parse_float=Number,
    parse_constant=lambda name: None if name == "NaN" else Number(name),
)
"""NaN is what programs write for a value that is missing."""


_BLANKS = re.compile(r"\s*")


def _parsed(text: str) -> tuple[Any, str]:
    """What a JSON text holds, and why it is none."""
    try:
        return _DECODER.decode(text), ""
    except (ValueError, RecursionError) as error:
        return None, _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "JSON that is nested too deeply"
    if isinstance(error, json.JSONDecodeError) and error.lineno == 1:
        return f"not JSON ({error.msg} at column {error.colno})"
    return f"not JSON ({getattr(error, 'msg', error)})"


def _row(value: Any) -> Mapping[str, Any] | str:
    return value if isinstance(value, dict) else "JSON, but no object with columns"


def _json_lines(path: str, form: Format) -> Iterator[Row]:
    with open_text(path, form, newline=form.line_end) as text:
        for number, line in enumerate(text, 1):
            if not line.isspace():
                value, problem = _parsed(line.strip())
                yield number, problem or _row(value)


def _json(path: str, form: Format) -> Iterator[Row]:
    """The objects of a list, or a single object. Nothing is read after a syntax error."""
    with open_text(path, form) as file:
        text = file.read()
    at, line, counted = _behind_blanks(text, 0), 1, 0
    is_list = text.startswith("[", at)
    if is_list:
        at = _behind_blanks(text, at + 1)
    is_end = is_list and text.startswith("]", at)
    while not is_end:
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield getattr(error, "lineno", line), _reason(error)
            return
        yield line, _row(value)
        at = _behind_blanks(text, at)
        is_end = not is_list or text.startswith("]", at)
        if not is_end and not text.startswith(",", at):
            yield line, "not JSON (neither a comma nor the end of the list follows)"
            return
        at = at if is_end else _behind_blanks(text, at + 1)
    if _behind_blanks(text, at + is_list) < len(text):
        yield line, "not JSON (more follows its end)"


def _behind_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks else at


def _table(path: str, form: Format) -> Iterator[Row]:
    """Rows below a line with the columns' names. With the quotes of RFC 4180, a field may hold delimiters and line
    ends; without quotes, as in GLUE's files, a line is a row."""
    columns: list[str] = []
    with open_text(path, form, newline="" if form.has_quotes else form.line_end) as text:
        for line, values in (_quoted if form.has_quotes else _plain)(text, form.delimiter):
            if isinstance(values, str):
                yield line, values
                continue
            if (
                not columns
                and form.delimiter == "\t"
                and len(values) == len(COLA)
                and values[1] in ("0", "1")
            ):
                columns = [*COLA]
            if columns:
                yield line, _record(columns, values)
                continue
            columns = [name.strip() for name in values]
            if len({*columns} - {""}) < len([*filter(None, columns)]):
                yield line, "the first line names a column twice"
                return


def _plain(text: io.TextIOWrapper, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    for line, content in enumerate(text, 1):
        if content := content.rstrip("\r\n"):
            yield line, content.split(delimiter)


def _quoted(text: io.TextIOWrapper, delimiter: str) -> Iterator[tuple[int, list[str] | str]]:
    csv.field_size_limit(sys.maxsize)
    reader, line = csv.reader(text, delimiter=delimiter, strict=True), 1
    try:
        for values in reader:
            if values:
                yield line, values
            line = reader.line_num + 1
    except csv.Error as error:  # nothing can be read after it
        is_open = "unexpected end of data" in str(error)
        yield line, "a quote that opens in this row never closes" if is_open else f"not CSV: {error}"


def _record(columns: Sequence[str], values: Sequence[str]) -> dict[str, str] | str:
    if len(values) != len(columns):
        return f"{len(values)} columns, and the first line has {len(columns)}"
    return dict(zip(columns, values, strict=True))


def _parquet(path: str, form: Format, column: str | None) -> Iterator[Row]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    limit = 2**31 - 1  # of what the library takes a file's own description for an attack at
    with _opened(path, form.compressions) as file:
        try:
            source = io.BytesIO(file.read()) if form.compressions else file
            table = ParquetFile(source, thrift_string_size_limit=limit, thrift_container_size_limit=limit)
            columns = [column] if column in table.schema_arrow.names else None
            batches = table.iter_batches(columns=columns)
            yield from enumerate((row for batch in batches for row in _short(batch).to_pylist()), 1)
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise RequestError(f"{path}: damaged Parquet ({error}); save it again") from None


def _short(batch: Any) -> Any:
    """A batch with floats of less than 64 bits as the shortest numbers that stand for them: 0.1, not 0.100000001."""
    import pyarrow

    for index, field in enumerate(batch.schema):
        if field.type in (pyarrow.float16(), pyarrow.float32()):
            values = batch.column(index).to_numpy(zero_copy_only=False)
            short = pyarrow.array(
                [float(str(value)) for value in values],
                mask=batch.column(index).is_null().to_numpy(zero_copy_only=False),
            )
            batch = batch.set_column(index, field.name, short)
    return batch
