"""How one file of a corpus is read as documents: text in blocks, .jsonl by line, a module by its docstrings.

Everything here streams: no function holds more than one document. Undecodable bytes come out as lone
surrogates, for the corpus to count and replace.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import io
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from contracts.files import is_url

ENDINGS = (".txt", ".md", ".rst", ".text", ".jsonl")
DOCUMENT_CHARACTERS = 2_000
DOCUMENT_LIMIT_CHARACTERS = 100_000

_HEAD_BYTES = 1 << 16
_NOT_TEXT_SHARE = 0.3
"""A file with more than this share of bytes that are not UTF-8 at its beginning is no text, or in another encoding:
Cyrillic or Japanese text of old is at 0.5 and more, French or German at 0.05, which is warned of and trained on."""
_SIGNATURES = {
    b"\x1f\x8b": "gzip-compressed: give it a name that ends in .gz",
    b"BZh": "bzip2-compressed: unpack it",
    b"\xfd7zXZ\0": "xz-compressed: unpack it",
    b"\x28\xb5\x2f\xfd": "zstd-compressed: unpack it",
    b"PK\x03\x04": "a ZIP archive (or an office document): save its text",
    b"%PDF-": "a PDF: save its text",
    b"\xff\xfe\0\0": "UTF-32: convert it (`iconv -f UTF-32 -t UTF-8`)",
    b"\0\0\xfe\xff": "UTF-32: convert it (`iconv -f UTF-32 -t UTF-8`)",
    b"\xff\xfe": "UTF-16: convert it (`iconv -f UTF-16 -t UTF-8`)",
    b"\xfe\xff": "UTF-16: convert it (`iconv -f UTF-16 -t UTF-8`)",
}
"""What a file begins with that is something else, the longer ones first where one begins like another."""
_NOT_MODULES = frozenset(
    {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)


def is_readable(path: str) -> bool:
    """Whether a file found in a folder counts as text: one of ENDINGS, also with .gz."""
    return ending(path).removesuffix(".gz") in ENDINGS


def is_jsonl(path: str) -> bool:
    return ending(path).removesuffix(".gz") == ".jsonl"


def ending(path: str) -> str:
    """What decides how a file is read: ".txt", ".jsonl.gz", "" and the like, in lower case."""
    name = path.lower()
    return os.path.splitext(name.removesuffix(".gz"))[1] + (".gz" if name.endswith(".gz") else "")


def blocks(path: str) -> Iterator[str]:
    """A text file cut where a blank line follows at least DOCUMENT_CHARACTERS.

    A text without blank lines is cut at the first line end after DOCUMENT_LIMIT_CHARACTERS, and a longer line
    in the line, so that no file has to fit in memory.
    """
    with _open_text(path) as text:
        lines: list[str] = []
        characters = 0
        while line := text.readline(DOCUMENT_LIMIT_CHARACTERS):
            blank = line.isspace()
            if not blank or lines:
                lines.append(line)
                characters += len(line)
            if (blank and characters >= DOCUMENT_CHARACTERS) or characters >= DOCUMENT_LIMIT_CHARACTERS:
                yield "".join(lines).strip("\n")
                lines, characters = [], 0
        yield "".join(lines).strip("\n")


def json_lines(path: str, text_field: str) -> Iterator[str]:
    """The field `text_field` of each line's JSON object; lines of white space are passed over."""
    with _open_text(path) as text:
        for number, line in enumerate(text, 1):
            if not line.isspace():
                yield _field(line, text_field, place=f"{path}:{number}")


def _field(line: str, text_field: str, *, place: str) -> str:
    try:
        record: Any = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise RequestError(
            f"{place}: not JSON ({reason}); a .jsonl file has one JSON object a line: mend or remove the line"
        ) from None
    if not isinstance(record, dict):
        raise RequestError(
            f"{place}: a JSON {type(record).__name__}, but each line of a .jsonl file is an object with the "
            f"text in a field, as in {json.dumps({text_field: '…'}, ensure_ascii=False)}"
        )
    if text_field not in record:
        there = ", ".join(map(repr, sorted(record)[:20])) or "none"
        raise RequestError(
            f"{place}: no field {text_field!r}; the fields there are {there}: name the one with the text "
            "with --text-field"
        )
    value = record[text_field]
    if not isinstance(value, str):
        raise RequestError(
            f"{place}: field {text_field!r} is a {type(value).__name__}, not a string; name the field with "
            "the text with --text-field, or mend or remove the line"
        )
    return value


@contextlib.contextmanager
def _open_text(path: str) -> Iterator[io.TextIOWrapper]:
    """Universal newlines, no byte order mark. A damaged .gz or a file that is not text is a RequestError."""
    try:
        with contextlib.ExitStack() as stack:
            binary: Any = stack.enter_context(open_binary(path))
            if ending(path).endswith(".gz"):
                binary = stack.enter_context(gzip.GzipFile(fileobj=binary))
            buffered = io.BufferedReader(binary, _HEAD_BYTES)
            reason = _is_no_text(buffered.peek(_HEAD_BYTES)[:_HEAD_BYTES])
            if reason is not None:
                raise RequestError(f"{path}: not UTF-8 text; it is {reason}, or leave it out of --data")
            yield stack.enter_context(
                io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape")
            )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RequestError(f"{path}: damaged, or not gzip ({error}); fetch or compress it again") from error


def check_text(path: str) -> None:
    """Look at the beginning of a file; raises RequestError where it is not text."""
    with _open_text(path):
        pass


def _is_no_text(head: bytes) -> str | None:
    """What a file with this beginning is instead of UTF-8 text, and what to do with it; None: it is text."""
    for signature, what in _SIGNATURES.items():
        if head.startswith(signature):
            return what
    if b"\0" in head:
        return "a binary file, or UTF-16 (it has NUL bytes): convert it"
    # A character may be cut at the end: three bytes at most.
    bad = sum("\ud800" <= character <= "\udfff" for character in head.decode("utf-8", "surrogateescape"))
    if bad - 3 > _NOT_TEXT_SHARE * len(head):
        return (
            f"binary, or in another encoding ({bad / len(head):.0%} of its first {len(head):,} bytes are not UTF-8): "
            "convert it (`iconv -f ENCODING -t UTF-8`)"
        )
    return None


def open_binary(path: str) -> Any:
    """A local file or a URL, to be read as bytes in a `with`."""
    if not is_url(path):
        return open(path, "rb")
    import fsspec

    file_system, name = fsspec.core.url_to_fs(path)
    return file_system.open(name, "rb")


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_modules() -> Iterator[Path]:
    """The standard library's own modules: no tests, no IDLE, no lib2to3, nothing installed beside them."""
    for folder, folders, names in os.walk(stdlib_root()):
        folders[:] = [name for name in folders if name not in _NOT_MODULES]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def docstrings(path: str) -> str:
    """A module's docstring, then its classes' and functions', in source order; "" if there is none.

    A module that doesn't parse (lib-dynload's templates, other Python versions' code) has none either.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            tree = ast.parse(Path(path).read_bytes())
        except (SyntaxError, ValueError):
            return ""
    return "\n\n".join(text for node in _documented(tree) if (text := ast.get_docstring(node)))


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(tree: ast.Module) -> Iterator[_Documented]:
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, _Documented):
            yield node
        inner = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]
        todo.extend(reversed(inner))
