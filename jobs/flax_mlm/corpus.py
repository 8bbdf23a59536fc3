"""The corpus that `--data` names: its files, read as a stream of documents of which some are held out.

Prose is cut into blocks, of rows (JSON lines, a table, Parquet) one column is read, of a module its docstrings. All but
a JSON list streams: no function holds more than one document.

Light on purpose: the launching side opens a corpus to find mistakes before anything starts.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import logging
import os
import re
import stat
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from contracts.errors import RequestError
from contracts.files import is_url
from jobs.runtime.storage.bucket_files import open_url, place_error
from jobs.runtime.storage.data_files import (
    MOST_LISTED,
    UNDECODABLE,
    Format,
    NotData,
    Number,
    listing,
    open_text,
    read_rows,
    recognise,
)
from jobs.runtime.storage.standard_library import stdlib_modules, stdlib_root

Split = Literal["train", "eval"]
SPLITS: tuple[Split, ...] = get_args(Split)

RULE_VERSION = 1
"""Part of the key of everything made from one split: raise it when the same documents would fall otherwise."""

STDLIB = "stdlib"

_FORMAT = 1  # part of the fingerprint: raise it when the same modules give other documents
_FILES_FORMAT = 2  # raise it when the same files do
# What object stores and file systems say of a file's content, the surest first.
_VERSION_KEYS = ("md5Hash", "crc32c", "ETag", "etag", "mtime", "LastModified", "updated", "created")

_MOST_NAMED = 3
_MOST_LOOKED_AT = 1000
_CHECK_BYTES = 1 << 25

_LOG = logging.getLogger(__name__)

DOCUMENT_CHARACTERS = 2_000
DOCUMENT_LIMIT_CHARACTERS = 100_000


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """One file: a local path or a URL; `version` is what a URL's file system says of its content, else ""."""

    path: str
    size_bytes: int
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files sorted by path, and the documents in them. Made by `open_corpus`."""

    source: str
    text_field: str
    files: tuple[CorpusFile, ...]

    @property
    def size_bytes(self) -> int:
        """The files' size as stored: compressed where they are, whole modules for "stdlib"."""
        return sum(file.size_bytes for file in self.files)

    @property
    def text_bytes(self) -> int:
        """About how much text the files hold: prose is up to four times as long as its .gz."""
        packed = (".gz", ".bz2", ".xz", ".zst", ".parquet")
        return sum(file.size_bytes * (4 if file.path.lower().endswith(packed) else 1) for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 that is the same wherever the same documents would be read in the same order.

        Local files count by content, not by path; URLs by what their file system says of the content, without a
        download; "stdlib" by the Python version and its modules' names and sizes.
        Computed on first use: local files are read once for it.
        """
        identity: list[Any] = [_FORMAT]
        if self.source == STDLIB:
            root = stdlib_root()
            identity += ["{}.{}.{}".format(*sys.version_info)]
            identity += [[os.path.relpath(file.path, root), file.size_bytes] for file in self.files]
        else:
            identity += [_FILES_FORMAT, self.text_field]
            identity += [file.version or _sha256(file.path) for file in self.files]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def documents(self, *, warn: Callable[[str], None] = _LOG.warning) -> Iterator[str]:
        """The documents in a fixed order, as a stream: memory holds one document, not the corpus.

        - A row of JSON lines, a JSON list, a table or Parquet is a document: its column `text_field`.
        - Any other text is cut where a blank line follows at least 2,000 characters, so that one large file still has
          many documents to hold some out from; a text without blank lines is cut at the first line end after 100,000
          characters.
        - "stdlib": the docstrings of one module.

        Documents of nothing but white space are left out. Bytes that are no UTF-8 become U+FFFD (one for each run of
        them) and are counted; files of several that hold neither text nor rows with such a column are skipped. Of both,
        `warn` is told once, at the end.

        Raises:
            RequestError: rows that have no such text, up to ten of them; a damaged file; no file that can be read.
        """
        replaced: Counter[str] = Counter()
        skipped: list[str] = []
        wrong: list[str] = []
        documents = damaged = 0
        for file in self.files:
            try:
                for raw in self._read(file.path, wrong):
                    text = raw
                    if not raw.isascii() and (bad := sum(map(len, UNDECODABLE.findall(raw)))):
                        text = UNDECODABLE.sub("\ufffd", raw)
                        replaced[file.path] += bad
                        damaged += 1
                    if text and not text.isspace() and not wrong:
                        documents += 1
                        yield text
            except NotData as error:
                if len(self.files) == 1:
                    raise RequestError(f"--data {error}") from None
                skipped.append(f"{file.path} ({error.reason})")
        if wrong:
            raise RequestError(f"{listing(wrong)}; mend or remove the rows")
        if len(skipped) == len(self.files):
            raise RequestError(f"--data {self.source}: none of its files can be read: {listing(skipped)}")
        if skipped:
            named = listing(skipped).replace("\n", ", ")
            warn(f"{len(skipped):,} of {len(self.files):,} files of {self.source} are skipped: {named}")
        if replaced:
            worst = ", ".join(f"{path} ({count:,})" for path, count in replaced.most_common(_MOST_NAMED))
            more = len(replaced) - _MOST_NAMED
            warn(
                f"{replaced.total():,} bytes in {damaged:,} of {documents:,} documents are not UTF-8 and were read as "
                f"U+FFFD: {worst}{f' and {more} more files' if more > 0 else ''}; convert them (`iconv -f ENCODING "
                "-t UTF-8`) if they should be something else"
            )

    def check(self) -> None:
        """Look through files on this machine: all that is in a small corpus, the beginnings of a large one's files.

        Raises:
            RequestError: as `documents`.
        """
        local = [file.path for file in self.files if not is_url(file.path)]
        if self.source == STDLIB or not local:
            return
        if self.size_bytes <= _CHECK_BYTES:
            for _ in self.documents(warn=lambda _: None):
                pass
            return
        wrong: list[str] = []
        for path in local[:_MOST_LOOKED_AT]:
            try:
                recognise(path, column=self.text_field)
            except NotData as error:
                wrong.append(str(error))
        if len(wrong) == len(self.files):
            raise RequestError(listing(wrong))

    def _read(self, path: str, wrong: list[str]) -> Iterator[str]:
        """The texts of a file; what is wrong with rows is added to `wrong`.

        Raises:
            RequestError: there is more of it than is listed, or the file is damaged.
        """
        if self.source == STDLIB:
            yield docstrings(path)
            return
        form = recognise(path, column=self.text_field)
        if form.kind == "text":
            yield from blocks(path, form)
            return
        for number, (line, record) in enumerate(read_rows(path, form, column=self.text_field)):
            try:
                yield _text(record, self.text_field)
            except ValueError as error:
                if number == 0 and not isinstance(record, str) and self.text_field not in record:
                    raise NotData(
                        f"{path}:{line}", str(error), "name the one with the text with --text-field"
                    ) from None
                wrong.append(f"--data {path}:{line}: {error}")
                if len(wrong) == MOST_LISTED:
                    raise RequestError(f"{listing(wrong)}; mend or remove the rows") from None


def split_documents(
    corpus: Corpus, eval_fraction: float, *, warn: Callable[[str], None]
) -> Iterator[tuple[Split, str]]:
    """Yield each document with its split, which a hash of its own text decides: order and neighbours don't matter.

    A document that occurs twice is thus never in both splits. Raises RequestError, at the end, when one of them
    stayed empty.
    """
    lowest, highest = 1.0, -1.0
    for text in corpus.documents(warn=warn):
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
        lowest, highest = min(lowest, place), max(highest, place)
        yield ("eval" if place < eval_fraction else "train"), text
    if highest < 0:
        raise RequestError(
            f"--data {corpus.source}: holds no text, only white space; name data with text in it"
        )
    if lowest == highest:
        raise RequestError(
            f"--data {corpus.source}: is one document, but one to learn from and another to hold out "
            "are needed; bring more text (prose gives one each 2,000 characters, other files one a row)"
        )
    if lowest >= eval_fraction:
        raise RequestError(
            f"--data {corpus.source}: no document falls into the held-out share; bring more text, or raise "
            f"--eval-fraction {eval_fraction} to more than {lowest:.4f}"
        )
    if highest < eval_fraction:
        raise RequestError(
            f"--data {corpus.source}: every document falls into the held-out share; bring more text, or "
            f"lower --eval-fraction {eval_fraction} to less than {highest:.4f}"
        )


def open_corpus(source: str, *, text_field: str = "text") -> Corpus:
    """Find the files that `source` names.

    `source` is "stdlib" (the docstrings of Python's own standard library; ./stdlib is a folder of that name),
    a file, a folder (its files at any depth, without hidden ones and editors' backups, and without following links to
    folders), a glob (`**` for any depth), or one of these under a URL (where `*`, `?` and `[` always make a glob).
    Raises RequestError when there is nothing to read, or no permission or driver to read it.
    """
    if not source:
        raise RequestError(f"--data: is empty; give {STDLIB!r}, a file, a folder, a glob or a URL")
    if source == STDLIB:
        files = [_local_file(str(path)) for path in stdlib_modules()]
    elif is_url(source) and not source.startswith("file://"):
        files = _remote_files(source)
    else:
        files = _local_files(source, os.path.expanduser(source.removeprefix("file://")))
    if not any(file.size_bytes for file in files):
        raise RequestError(
            f"--data {source}: empty: {len(files)} files of 0 bytes; name data that holds text"
        )
    return Corpus(
        source=source, text_field=text_field, files=tuple(sorted(files, key=lambda file: file.path))
    )


def _local_files(source: str, path: str) -> list[CorpusFile]:
    try:
        if os.path.isdir(path):
            return _require_files(source, "folder", [_local_file(name) for name in _folder(path)])
        if glob.has_magic(path) and not os.path.lexists(path):
            names = [name for name in glob.glob(path, recursive=True) if not os.path.isdir(name)]
            return _require_files(source, "glob", [_local_file(name) for name in names])
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise RequestError(
                f"--data {path}: not a regular file, and it is read more than once; save it in one"
            )
        return [_local_file(path)]
    except PermissionError as error:
        raise RequestError(
            f"--data {source}: no permission to read {error.filename}; change its mode, or run as its owner"
        ) from None
    except OSError as error:
        raise RequestError(
            f"--data {source}: {error.filename or 'it'}: {error.strerror}; give {STDLIB!r}, a file, a "
            "folder, a glob or a URL"
        ) from None


def _folder(path: str) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(path, onerror=unreadable):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        yield from (os.path.join(folder, name) for name in names if not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.endswith("~")


def _local_file(path: str) -> CorpusFile:
    if not os.path.isfile(path):
        return CorpusFile(path=path, size_bytes=0, version="not a regular file")
    with open(path, "rb") as file:  # a permission is known for certain only by using it
        return CorpusFile(path=path, size_bytes=os.fstat(file.fileno()).st_size)


def _remote_files(source: str) -> list[CorpusFile]:
    file_system, root = open_url(source, option="--data")
    try:
        if glob.has_magic(root):
            kind, entries = "glob", file_system.glob(root, detail=True)
        elif (info := file_system.info(root))["type"] == "directory":
            kind, entries = "folder", file_system.find(root, detail=True)
        else:
            kind, entries = "file", {root: info}
    except Exception as error:  # each driver has its own: credentials, network, a refused bucket
        remedy = "check the address, the network and your permission there"
        raise place_error(error, f"--data {source}", remedy) from error
    base = len(re.split(r"[*?\[]", root)[0])
    files = [
        CorpusFile(
            path=file_system.unstrip_protocol(name), size_bytes=info["size"] or 0, version=_version(info)
        )
        for name, info in entries.items()
        if info["type"] == "file" and not any(map(_is_hidden, name[base:].split("/")))
    ]
    return _require_files(source, kind, files)


def _version(info: Mapping[str, Any]) -> str:
    version = next((f"{key}={info[key]}" for key in _VERSION_KEYS if info.get(key)), "")
    return f"{info['size']} bytes {version}"


def _require_files(source: str, kind: str, files: list[CorpusFile]) -> list[CorpusFile]:
    if files:
        return files
    if kind == "glob":
        raise RequestError(f"--data {source}: no file matches; check the pattern (** stands for any depth)")
    raise RequestError(f"--data {source}: no file in this folder or below; give one with files")


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def blocks(path: str, form: Format) -> Iterator[str]:
    """Yield a text file in documents, cut where a blank line follows at least DOCUMENT_CHARACTERS.

    A text without blank lines is cut at the first line end after DOCUMENT_LIMIT_CHARACTERS, and a longer line
    in the line, so that no file has to fit in memory.
    """
    with open_text(path, form) as text:
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


def _text(record: Mapping[str, Any] | str, text_field: str) -> str:
    """The text of a row. Raises ValueError: why it has none."""
    if isinstance(record, str):
        raise ValueError(record)
    if text_field not in record:
        names = ", ".join(map(repr, sorted(record)[:20])) or "none"
        raise ValueError(f"no field {text_field!r}; the fields there are {names}")
    value = record[text_field]
    if not isinstance(value, str) or isinstance(value, Number):
        raise ValueError(f"field {text_field!r} is no text: {value!r:.60}")
    return value


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
