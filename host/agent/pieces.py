"""Pieces of a text that grows: whole lines, or whole characters, by their offsets in bytes."""

from __future__ import annotations


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
