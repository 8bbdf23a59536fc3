"""The verb logs: a job's output in pieces of whole lines."""

from __future__ import annotations

import os

from .pieces import beginning, whole_lines
from .process import known_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def logs(request: Json) -> Json:
    """A piece of the log; a negative offset counts from the end and is moved back to a line's start."""
    process = known_process(request)
    ended = process.state()[0] in ("exited", "lost")
    limit, offset = request["limit_bytes"], request["offset"]
    try:
        log = os.open(process.record["log_path"], os.O_RDONLY)
    except FileNotFoundError:
        return {"text": "", "offset": 0, "next_offset": 0, "size": 0, "ended": ended}
    try:
        size = os.fstat(log).st_size
        begin = max(0, size + offset) if offset < 0 else min(offset, size)
        back = min(begin, limit) if offset < 0 else 0
        begin = beginning(begin, os.pread(log, back, begin - back), os.pread(log, 4, begin))
        data = whole_lines(os.pread(log, min(limit + 1, size - begin), begin), limit, ended)
    finally:
        os.close(log)
    text = data.decode(errors="replace")
    return {"text": text, "offset": begin, "next_offset": begin + len(data), "size": size, "ended": ended}
