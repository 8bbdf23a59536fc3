"""A followed run on the terminal: a live bar, or plain lines where nobody watches."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

from rich.console import Console

from contracts.durations import clock

PLAIN_PERIOD_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is. step: None where it counts none. figures: what it measures. left_s: seconds until the last step
    at the present rate."""

    step: int | None
    total: int | None
    figures: tuple[str, ...] = ()
    left_s: float | None = None


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

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[str, float] = ("", float("-inf"))

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def waiting(self, text: str) -> None:
        if text != self._last[0]:
            self._last = (text, time.monotonic())
            self.note(text)

    def progress(self, progress: Progress) -> None:
        text, now_s = f"{_step_text(progress)}  {_figures(progress)}", time.monotonic()
        if text != self._last[0] and now_s - self._last[1] >= PLAIN_PERIOD_S:
            self._last = (text, now_s)
            self.note(text)

    def close(self) -> None:
        pass


def _step_text(progress: Progress) -> str:
    if progress.step is None:
        return "running"
    return f"step {progress.step}/{progress.total}" if progress.total else f"step {progress.step}"


def _figures(progress: Progress) -> str:
    parts = list(progress.figures)
    if progress.left_s is not None:
        parts.append(f"{clock(progress.left_s)} left")
    return "  ".join(parts)
