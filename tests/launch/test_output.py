"""What many hosts say can be read: whose line it is, nothing lost, and of a chatty host no more than fits."""

from __future__ import annotations

import io
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from launch.commands import execute
from launch.commands.execute import Grouped, Prefixed, Terminal, ranges

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("indices", "text"), [([5, 0, 1, 2, 3], "0-3,5"), ([4], "4"), ([0, 2, 4], "0,2,4"), ([7, 8], "7-8")]
)
def test_hosts_are_named_as_the_hosts_option_takes_them(indices: list[int], text: str) -> None:
    assert ranges(indices) == text


def test_lines_come_behind_their_hosts_index_each_on_its_own_stream(capsys: Captured) -> None:
    shown = Prefixed([0, 3], Terminal())
    shown.show(0)("out", b"a\nb")
    shown.show(3)("err", b"bad\n")
    assert capsys.readouterr() == ("[0] a\n", "[3] bad\n")
    shown.show(0)("out", b"c\n")
    shown.show(3)("out", b"\x1b[2J no newline")
    shown.end()
    assert capsys.readouterr() == ("[0] bc\n[3] ␛[2J no newline\n", "")


def test_of_a_single_host_the_lines_are_as_they_are(capsys: Captured) -> None:
    Prefixed([3], Terminal()).show(3)("out", b"a\n")
    assert capsys.readouterr().out == "a\n"


def test_lines_of_hosts_that_speak_at_once_are_never_mixed(capsys: Captured) -> None:
    shown = Prefixed(range(4), Terminal())
    data = b"".join(b"%d\n" % number for number in range(5000))

    def speak(host: int) -> None:
        show = shown.show(host)
        for begin in range(0, len(data), 997):
            show("out", data[begin : begin + 997])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(speak, range(4)))
    lines = capsys.readouterr().out.splitlines()
    for host in range(4):
        mine = [line for line in lines if line.startswith(f"[{host}] ")]
        assert mine == [f"[{host}] {number}" for number in range(5000)]
    assert len(lines) == 20_000


def test_hosts_that_said_the_same_are_shown_once(capsys: Captured) -> None:
    shown = Grouped(range(4), Terminal())
    for host in range(4):
        show = shown.show(host)
        show("out", b"Lin")
        show("out", b"ux\n" if host != 2 else b"e\n")
        show("err", b"warn\n")
    assert capsys.readouterr() == ("", "")
    shown.end()
    assert capsys.readouterr() == ("[0-1,3] Linux\n[2] Line\n", "[0-1,3] warn\n[2] warn\n")


def test_of_a_chatty_host_the_beginning_is_kept_and_the_rest_counted(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "KEPT_CHARACTERS", 10)
    shown = Grouped([0, 1, 2], Terminal())
    for host in (0, 1):
        shown.show(host)("out", b"1234\nand much more\nx\n")
    shown.show(2)("out", b"1234\nand much less\nx\n")
    shown.end()
    note = "… 2 more lines were left out: --group keeps 10 characters of a host"
    assert capsys.readouterr() == (
        "[0-1] 1234\n[2] 1234\n",
        f"[0-1] {note}\n[2] {note}\n",
    )


def test_a_terminal_that_knows_no_such_letter_is_given_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    Prefixed([0], Terminal()).show(0)("out", "é\x1b\n".encode())
    ascii_only.seek(0)
    assert ascii_only.read() == "\\xe9\\u241b\n"


def test_after_the_reader_of_the_output_is_gone_nothing_more_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    terminal = Terminal()
    for _ in range(2):
        with pytest.raises(BrokenPipeError):
            terminal.write("out", "", ["a"])
    assert isinstance(terminal.fault, BrokenPipeError)
    assert written == ["a\n"]


def test_one_thread_writes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = threading.Lock()
    met = []

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            met.append(not alone.acquire(blocking=False))
            time.sleep(0.01)  # as a terminal takes its time
            if not met[-1]:
                alone.release()
            return len(text)

    monkeypatch.setattr(sys, "stdout", Slow())
    terminal = Terminal()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: terminal.write("out", "", ["a"]), range(8)))
    assert met == [False] * 8
