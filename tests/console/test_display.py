"""A followed run is a bar on a terminal and a line now and then elsewhere; what runs say is shown as it is."""

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from console import display
from console.display import Bar, Plain, Progress
from launch.output import LINE_LIMIT, Lines, printable, terminal

PROGRESS = Progress(step=120, total=3000, figures=("loss 2.346", "51,234 tokens/s"), left_s=3723.4)
WHOLE = "step 120/3000  loss 2.346  51,234 tokens/s  1:02:03 left"


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_bar_shows_step_loss_rate_and_time_left_and_leaves_nothing_behind() -> None:
    screen = console(terminal=True)
    bar = Bar(screen)
    bar.progress(PROGRESS)
    bar._bar.refresh()
    bar.close()
    text = printed(screen)
    assert "step 120/3000" in text and WHOLE.partition("  ")[2] in text
    assert text.endswith("\x1b[2K"), "the bar's line is cleared at the end"


@pytest.mark.parametrize("text", ["tokenising [/tmp/a] [/]", "[bold]x {task.nothing} :fire: 100 %"])
@pytest.mark.parametrize(("terminal", "kind"), [(True, Bar), (False, Plain)])
def test_a_terminal_gets_a_bar_and_a_pipe_lines_in_which_a_run_is_quoted_letter_by_letter(
    terminal: bool, kind: type, text: str
) -> None:
    screen = console(terminal=terminal)
    screen._emoji = False
    shown = display.make(screen)
    assert type(shown) is kind
    try:
        shown.waiting(text)
        if isinstance(shown, Bar):
            shown._bar.refresh()
        shown.note(f"note {text}")
    finally:
        shown.close()
    assert text in printed(screen).replace("\n", "")
    assert f"note {text}" in printed(screen)


def test_what_a_program_reads_is_not_cut_to_a_terminals_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(box=None)
    table.add_column("run")
    table.add_row("x" * 200)
    terminal().print(table)
    assert "x" * 200 in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "0")  # of a terminal without a size
    terminal().print(table)
    assert "x" * 200 in capsys.readouterr().out


HOSTILE = st.text(
    st.one_of(st.characters(), st.sampled_from("\r\n\t\x00\x07\x1b\x7f\x9b\u202e\u2066\u2028[0;31mK]\\é")),
    max_size=200,
)


def in_pieces(data: bytes, sizes: list[int]) -> list[str]:
    lines, out = Lines(), []
    for size in sizes:
        out += lines.feed(data[:size])
        data = data[size:]
    return [*out, *lines.feed(data), *lines.end()]


def as_lines(text: str) -> list[str]:
    whole = printable(text).split("\n")
    return whole[:-1] if text == "" or text.endswith("\n") else whole


def test_every_character_that_a_terminal_or_a_reader_could_be_deceived_by_is_made_visible() -> None:
    allowed = "\t\n\u200c\u200d"
    deceiving = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and chr(code) not in allowed
    ]
    assert len(deceiving) > 200
    assert [each for each in deceiving if not printable(f"a{each}b").isprintable()] == []


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\tb\nc\n", "a\tb\nc\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "␛]0;title\\x07"),
        ("\x1b\x1b[m[31mnested", "␛[31mnested"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("10%\r20%\r\n", "20%\n"),
        ("10%\r\x1b[K20%\x1b[K", "20%"),
        ("100%\r\x1b[K\n", "100%\n"),
        ("windows\r\nlines\r\n", "windows\nlines\n"),
        ("👩‍🔬", "👩‍🔬"),
    ],
)
def test_what_a_host_says_is_shown_so(said: str, shown: str) -> None:
    assert printable(said) == shown


@given(
    HOSTILE.map(lambda text: text.encode(errors="ignore")) | st.binary(max_size=200),
    st.lists(st.integers(0, 20)),
)
def test_lines_come_out_the_same_however_they_come_in_and_no_bytes_are_lost(
    data: bytes, sizes: list[int]
) -> None:
    assert in_pieces(data, sizes) == as_lines(data.decode(errors="backslashreplace"))


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_without_end_comes_in_pieces_with_nothing_lost(end: str) -> None:
    text = "".join(chr(ord("a") + number % 26) for number in range(5 * LINE_LIMIT + 7))
    pieces = in_pieces(f"{text}{end}".encode(), [1000] * 50)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= LINE_LIMIT


@pytest.mark.parametrize("said", [b"x" * 1000, b"|####    | 50%\r", b"\r", b"\x1b[K\r", b"\x1b"])
def test_what_never_ends_its_line_fills_no_memory(said: bytes) -> None:
    lines = Lines()
    for _ in range(1000):
        lines.feed(said * 10)
        assert len(lines._pending) <= LINE_LIMIT + 1
