"""How several builds look while they go on: a line each, renewed in place on a terminal; plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from contracts.durations import clock
from launch.images.builder import Watch

PERIODS_PER_S = 4
PLAIN_PERIOD_S = 10.0


class Board(Protocol):
    def begin(self, name: str) -> Watch:
        """Work on `name` begins; who works on it reports to what this returns."""
        ...

    def end(self, name: str, outcome: str) -> None: ...


@contextlib.contextmanager
def make(console: Console, names: Sequence[str]) -> Iterator[Board]:
    """A board that is on the terminal for as long as this lasts."""
    if not console.is_terminal:
        yield Plain(console)
        return
    lines = Lines(console, names)
    with Live(console=console, get_renderable=lines.table, refresh_per_second=PERIODS_PER_S, transient=True):
        yield lines


class Line:
    """One name's: what is being done and since when; ended_s: None while it goes on."""

    def __init__(self, console: Console, name: str) -> None:
        self.name = name
        self.text, self.began_s = "waits", 0.0
        self.ended_s: float | None = 0.0
        self._console = console

    def state(self, text: str) -> None:
        self.text = text

    progress = state

    def note(self, text: str) -> None:
        _print(self._console, f"{self.name}  {text}")

    @property
    def spent_s(self) -> float:
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.began_s


class Lines:
    """All names at once, one below the other."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._lines = {name: Line(console, name) for name in names}

    def begin(self, name: str) -> Watch:
        line = self._lines[name]
        line.began_s, line.ended_s, line.text = time.monotonic(), None, "begins"
        return line

    def end(self, name: str, outcome: str) -> None:
        line = self._lines[name]
        line.ended_s, line.text = time.monotonic(), outcome

    def table(self) -> Table:
        made = Table.grid(padding=(0, 2), expand=True)
        made.add_column(no_wrap=True)
        made.add_column(justify="right", no_wrap=True)
        made.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for line in self._lines.values():
            made.add_row(line.name, clock(line.spent_s) if line.spent_s else "", line.text)
        return made


class Plain:
    """A line for each thing that is begun, with the time since the name's work began; how far it is, now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, name: str) -> Watch:
        return PlainLine(self._console, name)

    def end(self, name: str, outcome: str) -> None:
        _print(self._console, f"{name}  {outcome}")


class PlainLine:
    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name, self._began_s = console, name, time.monotonic()
        self._said_s = float("-inf")

    def state(self, text: str) -> None:
        _print(self._console, f"{self._name}  {clock(time.monotonic() - self._began_s)}  {text}")

    def progress(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= PLAIN_PERIOD_S:
            self._said_s = now_s
            self.state(text)

    def note(self, text: str) -> None:
        _print(self._console, f"{self._name}  {text}")


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
