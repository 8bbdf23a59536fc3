"""Small files: written whole or not at all, read without trust in what is there."""

from __future__ import annotations

import contextlib
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Json


def write_json(path: str, value: Json, put: Callable[[str, str], None] = os.replace) -> None:
    """Write `value` beside and move it there: a reader finds the old file or the new one, never half of one.

    With `put=os.link` a file that is there already stays: FileExistsError.
    """
    write(path, json.dumps(value), put)


def write(path: str, text: str, put: Callable[[str, str], None] = os.replace) -> None:
    """The same for any text."""
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        put(beside, path)
    finally:
        remove(beside)


def read_json(path: str) -> Json:
    """The object in `path`, empty where there is none, or none that can be read: a torn file is no news."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def tail(data: bytes, count: int = 20) -> list[str]:
    """The last lines of a log, none of them endless."""
    return [line[-2000:] for line in data.decode(errors="replace").splitlines()[-count:]]


def tail_of(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return tail(file.read(65536))
    except OSError:
        return []
