"""Text files, on this machine or behind a URL, opened and looked at whether they are text; and the modules of Python's
own library, which are text that every machine has.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.errors import RequestError
from contracts.files import is_url
from jobs.runtime.bucket_files import open_url

# Lone surrogates: what "surrogateescape" makes of bytes that are no UTF-8, and JSON's "\ud800" on its own.
UNDECODABLE = re.compile("[\ud800-\udfff]+")
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


def ending(path: str) -> str:
    """The ending by which a file is read, in lower case: ".txt", ".jsonl.gz" or ""."""
    name = path.lower()
    return os.path.splitext(name.removesuffix(".gz"))[1] + (".gz" if name.endswith(".gz") else "")


@contextlib.contextmanager
def open_text(path: str, *, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
    """Open a file as text, without a byte order mark. A damaged .gz or a file that is not text is a RequestError.

    Bytes that are not UTF-8 become lone surrogates, as "surrogateescape" makes them.
    """
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
                io.TextIOWrapper(buffered, "utf-8-sig", errors="surrogateescape", newline=newline)
            )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RequestError(f"{path}: damaged, or not gzip ({error}); fetch or compress it again") from error


def check_text(path: str) -> None:
    """Look at the beginning of a file; raises RequestError where it is not text."""
    with open_text(path):
        pass


def _is_no_text(head: bytes) -> str | None:
    """What a file with this beginning is if it is not UTF-8 text, and what to do with it; None: it is text."""
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
    """Open a local file or a URL as bytes, for a `with`."""
    if not is_url(path):
        return open(path, "rb")
    file_system, name = open_url(path, option="--data")
    return file_system.open(name, "rb")


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_modules() -> Iterator[Path]:
    """The standard library's own modules: no tests, no IDLE, no lib2to3, nothing installed beside them."""
    for folder, folders, names in os.walk(stdlib_root()):
        folders[:] = [name for name in folders if name not in _NOT_MODULES]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
