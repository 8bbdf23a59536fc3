"""A followed run is a bar on a terminal and a line now and then elsewhere; what runs say is shown as it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from launch import display
from launch.display import Bar, Plain, Progress, duration

PROGRESS = Progress(step=120, total=3000, figures=("loss 2.346", "51,234 tokens/s"), left_s=3723.4)
WHOLE = "step 120/3000  loss 2.346  51,234 tokens/s  1:02:03 left"


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("terminal", "kind"), [(True, Bar), (False, Plain)])
def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(terminal: bool, kind: type) -> None:
    shown = display.make(console(terminal=terminal))
    shown.close()
    assert type(shown) is kind


def test_a_line_has_the_step_and_what_is_known() -> None:
    screen = console(terminal=False)
    plain = Plain(screen, period_s=0)
    plain.progress(PROGRESS)
    plain.progress(Progress(step=121, total=None))
    assert printed(screen).splitlines() == [WHOLE, "step 121  "]


def test_lines_come_no_more_often_than_the_period_and_the_same_one_never_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    screen = console(terminal=False)
    plain = Plain(screen, period_s=10)
    for now_s, step in ((0.0, 1), (9.9, 2), (10.0, 3), (30.0, 3)):  # noqa: B007 - the clock reads it
        plain.progress(Progress(step=step, total=5))
    assert [line.strip() for line in printed(screen).splitlines()] == ["step 1/5", "step 3/5"]


def test_what_is_waited_for_is_said_once() -> None:
    screen = console(terminal=False)
    plain = Plain(screen)
    for text in ("starting", "starting", "tokenising", "tokenising"):
        plain.waiting(text)
    assert printed(screen).splitlines() == ["starting", "tokenising"]


def test_the_bar_shows_step_loss_rate_and_time_left_and_leaves_nothing_behind() -> None:
    screen = console(terminal=True)
    bar = Bar(screen)
    bar.waiting("compiling the first step")
    bar._bar.refresh()
    bar.progress(PROGRESS)
    bar._bar.refresh()
    bar.note("step 100: eval loss 2.500")
    bar.close()
    text = printed(screen)
    for part in (
        "compiling the first step",
        "step 120/3000",
        WHOLE.partition("  ")[2],
        "step 100: eval loss",
    ):
        assert part in text
    assert text.endswith("\x1b[2K"), "the bar's line is cleared at the end"


@pytest.mark.parametrize(
    "text", ["tokenising [/tmp/a] [b]", "[/]", "[bold]x", "{task.nothing}", ":fire: 100 %"]
)
@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_run_says_is_shown_letter_by_letter(terminal: bool, text: str) -> None:
    screen = console(terminal=terminal)
    screen._emoji = False
    shown = display.make(screen)
    try:
        shown.waiting(text)
        if isinstance(shown, Bar):
            shown._bar.refresh()
        shown.note(f"note {text}")
    finally:
        shown.close()
    assert text in printed(screen).replace("\n", "")
    assert f"note {text}" in printed(screen)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (750, "12:30"), (3599.9, "1:00:00"), (11100, "3:05:00")],
)
def test_a_duration_reads_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_a_program_reads_is_not_cut_to_a_terminals_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(box=None)
    table.add_column("run")
    table.add_row("x" * 200)
    display.terminal().print(table)
    assert "x" * 200 in capsys.readouterr().out
