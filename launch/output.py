"""What commands print with: a console whose output is the text as it is, and text from hosts made safe for it."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 240
NARROW = 80
"""In fewer columns rich would leave out what does not fit in; a terminal wraps it."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 step, 2,000 steps, 2 processes."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def last_line(output: str, otherwise: str = "it said nothing") -> str:
    """Return the last line that a program has printed, which says why it failed; `otherwise`, where it printed none."""
    return (output.strip().splitlines() or [otherwise])[-1]


class Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Leave to the command how it ends when nobody reads its output: rich would end it as failed."""
        raise BrokenPipeError


def terminal() -> Console:
    """Return a terminal that prints texts as they are: "[/tmp]" is no markup, ":x:" no emoji.

    What is read by a program is as wide as it needs: a run's name that was cut off would be no name.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return Terminal(markup=False, emoji=False, width=max(int(columns), NARROW))
    is_sized = sys.stdout.isatty() and not columns  # rich reads COLUMNS too, and takes 0 for a width
    return Terminal(markup=False, emoji=False, width=None if is_sized else WIDE)


def table(*headings: str, right: Collection[str] = (), wrap: bool = True) -> Table:
    """Return an empty table without lines. right: the columns that are aligned to the right."""
    from rich.table import Table

    empty = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        empty.add_column(heading, justify=justify, overflow="fold", no_wrap=not wrap)
    return empty


def say(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line as it is, however long."""
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


LINE_LIMIT = 8192
"""Characters of a line that are kept in memory; a longer one is handed on in pieces."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*[mK]")
"""Colours, and "erase the line" as progress bars say it: they say nothing by themselves."""

_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad"
    r"\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064"
    r"\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001"
    r"\U000e0020-\U000e007f]"
)
"""Control, format (bidirectional overrides, invisible tags), surrogate and line-separating characters. Not the two
joiners, U+200C and U+200D, which words and emojis are written with and which change no order."""


def printable(text: str) -> str:
    """Return the text with every character visible; tabs and newlines stay, colours go.

    ESC becomes ␛, another control character \\x07 or \\u202e. Of a line that carriage returns wrote several times
    over, such as a progress bar, its last state is left.
    """
    if text.isprintable():
        return text
    return "\n".join(_visible(_last_state(line)) for line in text.split("\n"))


def _last_state(line: str) -> str:
    if "\r" not in line:
        return line
    return next((state for state in reversed(line.split("\r")) if _COLOUR.sub("", state)), "")


def _visible(line: str) -> str:
    return _UNSAFE.sub(_shown, _COLOUR.sub("", line))


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 0x1B:
        return "␛"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Lines:
    """Cuts what comes in pieces into printable lines; never holds more than LINE_LIMIT characters and one piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._pending = ""

    def feed(self, piece: bytes | str) -> list[str]:
        """Return the lines that end in this piece, without newlines; a byte that is no UTF-8 is shown as \\xff."""
        text = self._pending + (self._decoder.decode(piece) if isinstance(piece, bytes) else piece)
        *complete_lines, self._pending = text.split("\n")
        lines = [part for line in complete_lines for part in _parts(line)]
        if "\r" in self._pending:
            # What was written over needs no memory; the last return may be half of a line's end, so it stays.
            before, _, now = self._pending.rpartition("\r")
            self._pending = f"{_last_state(before)}\r{now}"
        while len(self._pending) > LINE_LIMIT + 1:
            lines.append(printable(self._pending[:LINE_LIMIT]))
            self._pending = self._pending[LINE_LIMIT:]
        return lines

    def end(self) -> list[str]:
        """Return what came after the last newline."""
        last, self._pending = self._pending + self._decoder.decode(b"", final=True), ""
        return _parts(last) if last else []


def _parts(line: str) -> list[str]:
    shown = _last_state(line)
    return [
        printable(shown[begin : begin + LINE_LIMIT]) for begin in range(0, max(1, len(shown)), LINE_LIMIT)
    ]
