"""Files of this host: read without trust in what is there, and the verbs read, write, list and remove."""

from __future__ import annotations

import json
import os
import stat

from contracts import atomic

from .protocol import LARGEST_READ, Failed, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def read_json(path: str) -> Json:
    """The object in `path`, empty where there is none, or none that can be read: a torn file is no news."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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


def read_slices(request: Json) -> Json:
    """A piece of each file, from its offset on; a negative offset counts from the end. No such file: no text.

    A piece begins and ends with whole characters: one whose rest is not there yet waits. All pieces together are
    bounded too, so that the last ones may be shorter than asked for.
    """
    paths = request["paths"]
    offsets = [0] * len(paths) if request["offsets"] is None else request["offsets"]
    if len(offsets) != len(paths):
        message = f"read: {len(paths)} paths and {len(offsets)} offsets"
        raise Refused(message, "send an offset for every path, or none")
    room, pieces = LARGEST_READ, []
    for path, offset in zip(paths, offsets, strict=True):
        piece = slice_of(path, offset, min(request["limit_bytes"], room))
        room -= piece["next_offset"] - piece["offset"]
        pieces.append(piece)
    return {"files": pieces}


def slice_of(path: str, offset: int, limit: int) -> Json:
    try:
        # Without O_NONBLOCK the opening of a named pipe waits for somebody who writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return {"text": None, "offset": 0, "next_offset": 0, "size": 0}
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Failed(f"read: {path} is not a file", "name a file")
        size = found.st_size
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
    """Put a file there, whole or not at all, and the directories above it."""
    path = request["path"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    atomic.write(path, request["text"])
    return {}


def list_names(request: Json) -> Json:
    """What is in a directory; nothing where there is none."""
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


def torn_bytes(data: bytes) -> int:
    """How many bytes at the end are the beginning of a UTF-8 character."""
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
    """Where to begin instead of at `offset`: back where its line starts, if `before` reaches so far, else on
    at the next whole character."""
    newline = before.rfind(b"\n")
    if newline >= 0 or len(before) == offset:
        return offset - len(before) + newline + 1
    return offset + next((index for index, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)
