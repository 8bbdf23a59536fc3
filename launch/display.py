"""How a followed run looks: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console

PLAIN_PERIOD_S = 10.0
WIDE = 240


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is. figures: what it measures. left_s: seconds until the last step at the present rate."""

    step: int
    total: int | None
    figures: tuple[str, ...] = ()
    left_s: float | None = None


def terminal() -> Console:
    """A terminal that prints what runs and users say as it is: "[/tmp]" is no markup, ":x:" no emoji.

    What is read by a program is as wide as it needs: a run's name that was cut off would be no name.
    """
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE
    return Console(markup=False, emoji=False, width=wide)


def say(console: Console) -> Callable[[str], None]:
    """Prints a line as it is, however long."""
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


class Display(Protocol):
    def note(self, text: str) -> None:
        """A line that stays."""
        ...

    def waiting(self, text: str) -> None:
        """What is being waited for, before there are steps."""
        ...

    def progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


def make(console: Console) -> Display:
    return Bar(console) if console.is_terminal else Plain(console)


class Bar:
    """A bar with step, what is measured, and the time left, renewed in place."""

    def __init__(self, console: Console) -> None:
        from rich import progress

        self._console = console
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, figures="")
        self._bar.start()

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def waiting(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def progress(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            description=_step_text(progress),
            completed=progress.step,
            total=progress.total,
            figures=_figures(progress),
        )

    def close(self) -> None:
        self._bar.stop()


class Plain:
    """A line now and then, for logs and pipes."""

    def __init__(self, console: Console, period_s: float = PLAIN_PERIOD_S) -> None:
        self._console, self._period_s = console, period_s
        self._last: tuple[str, float] = ("", float("-inf"))

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def waiting(self, text: str) -> None:
        if text != self._last[0]:
            self._last = (text, time.monotonic())
            self.note(text)

    def progress(self, progress: Progress) -> None:
        text, now_s = f"{_step_text(progress)}  {_figures(progress)}", time.monotonic()
        if text != self._last[0] and now_s - self._last[1] >= self._period_s:
            self._last = (text, now_s)
            self.note(text)

    def close(self) -> None:
        pass


def _step_text(progress: Progress) -> str:
    return f"step {progress.step}/{progress.total}" if progress.total else f"step {progress.step}"


def _figures(progress: Progress) -> str:
    parts = list(progress.figures)
    if progress.left_s is not None:
        parts.append(f"{duration(progress.left_s)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """ "0:07", "12:30", "3:05:00"."""
    whole = round(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
