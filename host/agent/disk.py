"""The verbs read, write, list and remove: files of this host, such as a run directory's on a share that it mounts."""

from __future__ import annotations

import os
import stat

from . import files
from .pieces import torn_bytes
from .protocol import LARGEST_READ, Failed, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def read(request: Json) -> Json:
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
    for path, offset in zip(paths, offsets):
        piece = piece_of(path, offset, min(request["limit_bytes"], room))
        room -= piece["next_offset"] - piece["offset"]
        pieces.append(piece)
    return {"files": pieces}


def piece_of(path: str, offset: int, limit: int) -> Json:
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


def write(request: Json) -> Json:
    """Put a file there, whole or not at all, and the directories above it."""
    path = request["path"]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    files.write(path, request["text"])
    return {}


def names(request: Json) -> Json:
    """What is in a directory; nothing where there is none."""
    try:
        return {"names": sorted(os.listdir(request["path"]))}
    except (FileNotFoundError, NotADirectoryError):
        return {"names": []}


def remove(request: Json) -> Json:
    """Remove a file, or a directory that is empty; one that is not there is removed already."""
    path = request["path"]
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            files.remove(path)
    except FileNotFoundError:
        pass  # somebody else was quicker
    return {}
