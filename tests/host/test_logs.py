"""A log is handed out in whole lines and whole characters; stacks come from those who can give them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.agent import files as module

ONE: dict[str, Any] = {"run_id": "run-1", "attempt": 0, "process_id": 0}
TEXTS = st.text(st.sampled_from("aø€😀\n"), max_size=60)


def pieces(data: bytes, limit: int, ended: bool) -> list[bytes]:
    found = []
    while piece := module.whole_lines(data[: limit + 1], limit, ended):
        found.append(piece)
        data = data[len(piece) :]
    return found


@given(TEXTS, st.integers(4, 20))
def test_the_pieces_of_a_log_are_the_log(text: str, limit: int) -> None:
    found = pieces(text.encode(), limit, ended=True)
    assert "".join(piece.decode() for piece in found) == text
    assert all(len(piece) <= limit for piece in found)


@given(TEXTS, st.integers(4, 20))
def test_a_piece_ends_with_a_line_unless_the_line_is_longer_than_the_limit(text: str, limit: int) -> None:
    data = text.encode()
    for piece in pieces(data, limit, ended=False):
        assert piece.endswith(b"\n") or (b"\n" not in piece and len(piece) > limit - 4)


@given(st.binary(max_size=40), st.integers(4, 10))
def test_a_log_of_any_bytes_comes_to_its_end(data: bytes, limit: int) -> None:
    assert b"".join(pieces(data, limit, ended=True)) == data


@given(TEXTS, st.integers(0, 200), st.integers(0, 200))
def test_a_log_never_begins_inside_a_character(text: str, offset: int, back: int) -> None:
    data = text.encode()
    offset = min(offset, len(data))
    back = min(back, offset)
    begin = module.beginning(offset, data[offset - back : offset], data[offset : offset + 4])
    data[begin:].decode()
    assert begin <= offset + 3
    if b"\n" in data[offset - back : offset]:
        assert data[begin - 1 : begin] == b"\n"


def test_a_log_is_read_on_from_where_the_last_piece_ended(agent: Any) -> None:
    text = "".join(f"linje {n} på €\n" for n in range(20))
    agent.start(f"sys.stdout.reconfigure(encoding='utf-8'); sys.stdout.write({text!r})")
    agent.ended()
    offset, read = 0, ""
    while offset < len(text.encode()):
        piece = agent("logs", **ONE, offset=offset, limit_bytes=100)
        assert piece["text"].endswith("\n")
        read, offset = read + piece["text"], piece["next_offset"]
    assert read == text
    last = agent("logs", **ONE, offset=-20, limit_bytes=100)
    assert last["text"] == "linje 18 på €\nlinje 19 på €\n"
    assert (last["next_offset"], last["size"], last["ended"]) == (
        len(text.encode()),
        len(text.encode()),
        True,
    )


def test_a_line_that_is_still_being_written_waits_for_its_end(agent: Any) -> None:
    started = agent.start_and_hear('sys.stdout.write("one\\ntwo"); sys.stdout.flush(); live()')
    piece = agent("logs", **ONE, offset=0, limit_bytes=100)
    assert (piece["text"], piece["next_offset"], piece["ended"]) == ("one\n", 4, False)
    os.kill(started["pid"], signal.SIGKILL)
    agent.ended()
    piece = agent("logs", **ONE, offset=4, limit_bytes=100)
    assert (piece["text"], piece["ended"]) == ("two", True)


def test_a_log_that_is_gone_is_empty_and_an_offset_past_its_end_is_its_end(agent: Any) -> None:
    agent.start('say("x")')
    agent.ended()
    assert agent("logs", **ONE, offset=999, limit_bytes=10)["next_offset"] == 2
    (agent.run_dir / "logs/0/host-0.log").unlink()
    assert agent("logs", **ONE, offset=0, limit_bytes=10)["size"] == 0


def test_the_log_of_a_process_that_was_never_started_is_an_error(agent: Any) -> None:
    status, message = agent.refusal("logs", **ONE, offset=0, limit_bytes=10)
    assert (status, "was never started" in message) == (1, True)


def test_a_process_without_a_handler_is_not_killed_by_asking_for_its_stacks(
    agent: Any, is_running: Any
) -> None:
    started = agent.start_and_hear('say("up"); live()')
    status, message = agent.refusal("stacks", **ONE, timeout_s=1)
    assert status == 1
    assert "no SIGUSR1 handler" in message
    assert is_running(started["pid"])


def test_a_process_that_does_not_answer_is_said_not_to(agent: Any) -> None:
    agent.start_and_hear('signal.signal(signal.SIGUSR1, lambda *_: None); say("up"); live()')
    assert "did not answer" in agent.refusal("stacks", **ONE, timeout_s=0.3)[1]


@pytest.mark.parametrize("again", [1, 2])
def test_each_request_for_stacks_gives_the_new_ones(agent: Any, again: int) -> None:
    job = """
import faulthandler
file = open(os.environ["RUN_CONTROL_DIR"] + "/stacks.txt", "w")
faulthandler.register(signal.SIGUSR1, file=file)
say("up")
live()
"""
    agent.start_and_hear(job)
    for _ in range(again):
        assert agent("stacks", **ONE, timeout_s=10)["text"].count("most recent call first") == 1
