"""Files of this host: reading untrusted ones, supervisor.log, and the verbs for files and folders."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time

from contracts import atomic

from ..protocol import LARGEST_READ, Failed, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..protocol import Json


LAST_LINES = 20


def read_json(path: str) -> Json:
    """The object in `path`, empty where there is none, or none that can be read: a torn file is no news."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def tail(data: bytes, count: int = LAST_LINES) -> list[str]:
    """The last lines of a log, none of them endless."""
    return [line[-2000:] for line in data.decode(errors="replace").splitlines()[-count:]]


def last_lines(path: str, count: int = LAST_LINES) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return tail(file.read(65536), count)
    except OSError:
        return []


def note(text: str) -> None:
    """A line in supervisor.log; with a full disk there is nowhere to say it."""
    with contextlib.suppress(OSError):
        print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text, file=sys.stderr, flush=True)


def tried(description: str, action: Callable[[], object]) -> bool:
    """Run `action`. Returns whether it succeeded: a full disk or a removed folder must not end the supervision."""
    try:
        action()
    except (OSError, ValueError) as error:
        note(f"{description}: {error}")
        return False
    return True


def read_slices(request: Json) -> Json:
    """A piece of each file, from its offset on; a negative offset counts from the end. No such file: no text.

    A piece begins and ends with whole characters: one whose rest is not there yet waits. All pieces together are
    bounded too, so that the last ones may be shorter than asked for. With `folders`, one for each path, a file that
    does not lie in its folder when links are followed, or cannot be read, has an error and no text.
    """
    paths = request["paths"]
    offsets = [0] * len(paths) if request["offsets"] is None else request["offsets"]
    if len(offsets) != len(paths):
        message = f"read: {len(paths)} paths and {len(offsets)} offsets"
        raise Refused(message, "send an offset for every path, or none")
    folders = [None] * len(paths) if request["folders"] is None else request["folders"]
    if len(folders) != len(paths):
        message = f"read: {len(paths)} paths and {len(folders)} folders"
        raise Refused(message, "send a folder for every path, or none")
    room, pieces = LARGEST_READ, []
    for path, offset, folder in zip(paths, offsets, folders, strict=True):
        try:
            piece = read_piece(path, offset, min(request["limit_bytes"], room), folder)
        except (OSError, Failed) as error:
            if folder is None:
                raise
            reason = getattr(error, "strerror", None) or str(error)
            piece = {"text": None, "offset": 0, "next_offset": 0, "size": 0, "error": reason}
        room -= piece["next_offset"] - piece["offset"]
        pieces.append(piece)
    return {"files": pieces}


def read_piece(path: str, offset: int, limit: int, folder: str | None = None) -> Json:
    try:
        # Without O_NONBLOCK the opening of a named pipe waits for somebody who writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return {"text": None, "offset": 0, "next_offset": 0, "size": 0}
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Failed(f"read: {path} is not a file", "name a file")
        if folder is not None:
            from contracts.files import is_inside

            if not is_inside(descriptor, os.path.realpath(folder)):
                raise Failed("leads out of the run directory", "name a file in it")
        size = status.st_size
        begin = max(0, size + offset) if offset < 0 else min(offset, size)
        data = os.pread(descriptor, limit, begin)
        if offset < 0 and begin > 0:
            before = len(data)
            data = data.lstrip(bytes(range(0x80, 0xC0)))
            begin += before - len(data)
    finally:
        os.close(descriptor)
    data = data[: len(data) - torn_bytes(data)]
    text = data.decode(errors="replace")
    return {"text": text, "offset": begin, "next_offset": begin + len(data), "size": size}


def write_file(request: Json) -> Json:
    """Put a file there, whole or not at all, and the directories above it. With an offset: a piece of a file that
    nobody reads before it is whole and has been moved."""
    from contracts.files import DiskFiles

    data = request["text"].encode(errors="replace")
    if request["offset"]:
        with open(request["path"], "r+b") as file:
            file.seek(request["offset"])
            file.write(data)
    else:
        DiskFiles().write(request["path"], data)
    return {}


def create_file(request: Json) -> Json:
    """Put a file there, unless there is one; `created` says which."""
    from contracts.files import DiskFiles

    return {"created": DiskFiles().create(request["path"], request["text"].encode(errors="replace"))}


def move_file(request: Json) -> Json:
    """Give a file another name, in the place of one that has it."""
    from contracts.files import DiskFiles

    DiskFiles().move(request["path"], request["to"])
    return {}


def list_names(request: Json) -> Json:
    """The names in a directory; none if it does not exist."""
    try:
        return {"names": sorted(os.listdir(request["path"]))}
    except (FileNotFoundError, NotADirectoryError):
        return {"names": []}


def remove_file(request: Json) -> Json:
    """Remove a file, or a directory that is empty; one that is not there is removed already."""
    path = request["path"]
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            atomic.remove(path)
    except FileNotFoundError:
        pass  # somebody else was quicker
    return {}


def folder_bytes(request: Json) -> Json:
    """The size of the files in a directory, in bytes."""
    from contracts.files import DiskFiles

    return {"bytes": DiskFiles().folder_bytes(request["path"])}


def remove_folder(request: Json) -> Json:
    """Remove a directory with all that is in it, the file `first` before all others."""
    from contracts.files import DiskFiles

    DiskFiles().remove_folder(request["path"], request["first"])
    return {}


def torn_bytes(data: bytes) -> int:
    """The number of bytes at the end that are an incomplete UTF-8 character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if needed > back else 0
    return 0


def whole_lines(data: bytes, limit: int, ended: bool) -> bytes:
    """The beginning of `data` to hand out: whole lines, or whole characters of a line longer than the limit.

    `data` reaches past the limit where there is more; a line without its end waits until the log has ended.
    """
    chunk = data[:limit]
    is_all = len(data) <= limit
    if is_all and ended:
        return chunk
    newline = chunk.rfind(b"\n")
    if newline >= 0:
        return chunk[: newline + 1]
    return b"" if is_all else chunk[: len(chunk) - torn_bytes(chunk)]


def beginning(offset: int, before: bytes, after: bytes) -> int:
    """Where to begin instead of at `offset`: at the start of its line, if `before` reaches so far back, else at the
    next whole character."""
    newline = before.rfind(b"\n")
    if newline >= 0 or len(before) == offset:
        return offset - len(before) + newline + 1
    return offset + next((index for index, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)
