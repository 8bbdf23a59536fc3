"""Whatever hosts say, the terminal stays whole, memory stays small, and what they meant is still there."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.display import LINE_LIMIT, Lines, printable

HOSTILE = st.text(
    st.one_of(st.characters(), st.sampled_from("\r\n\t\x00\x07\x1b\x7f\x9b\u202e\u2066\u2028[0;31mK]\\é")),
    max_size=200,
)
PLAIN = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp")))


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


@given(HOSTILE)
def test_what_is_printable_is_so_for_good_and_holds_no_control_character(text: str) -> None:
    shown = printable(text)
    assert printable(shown) == shown
    assert shown.isprintable() or all(
        each in "\t\n\u200c\u200d" or unicodedata.category(each) in ("Zs", "Co", "Cn")
        for each in shown
        if not each.isprintable()
    )


@given(PLAIN)
def test_plain_text_of_any_language_is_left_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("a\tb\nc\n", "a\tb\nc\n"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "␛]0;title\\x07"),
        ("\x1b\x1b[m[31mnested", "␛[31mnested"),
        ("\x9b31m", "\\x9b31m"),
        ("nul\x00 del\x7f", "nul\\x00 del\\x7f"),
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


@given(HOSTILE, st.lists(st.integers(0, 20)))
def test_lines_come_out_the_same_however_they_come_in(text: str, sizes: list[int]) -> None:
    data = text.encode(errors="ignore")
    assert in_pieces(data, sizes) == as_lines(data.decode())


@given(st.binary(max_size=200), st.lists(st.integers(0, 20)))
def test_no_bytes_break_a_line_and_none_are_lost(data: bytes, sizes: list[int]) -> None:
    assert in_pieces(data, sizes) == as_lines(data.decode(errors="backslashreplace"))


def test_a_byte_that_is_no_text_is_shown_by_its_number() -> None:
    assert in_pieces(b"a\xff\xc3", [2, 1]) == ["a\\xff\\xc3"]


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
        assert len(lines._rest) <= LINE_LIMIT + 1


def test_an_empty_line_is_a_line() -> None:
    assert in_pieces(b"\n\na\n\n", []) == ["", "", "a", ""]
