"""Logs are read whole: the last lines are the last ones, and what is followed is followed to its very end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from launch import log
from launch.agents import Agent
from launch.runs import Run

LINES = [f"line {number} " + "x" * (number % 90) for number in range(20_000)]
TEXT = "".join(line + "\n" for line in LINES)
assert len(TEXT) > 3 * log.CHUNK_BYTES


def logs_of(text: str, request: dict[str, Any]) -> dict[str, Any]:
    """As the agent answers: from the beginning of a line, whole lines, at most so many bytes."""
    begin = request["offset"] if request["offset"] >= 0 else max(0, len(text) + request["offset"])
    if request["offset"] < 0:
        begin = text.rfind("\n", 0, begin) + 1
    piece = text[begin : begin + request["limit_bytes"]]
    piece = piece[: piece.rfind("\n") + 1]
    return {"text": piece, "next_offset": begin + len(piece), "size": len(text)}


@pytest.fixture
def agent(make_agent: Callable[..., Agent]) -> Agent:
    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return logs_of(TEXT, request) if verb == "logs" else {"processes": []}

    return make_agent(give)


@pytest.fixture
def run(write_run: Callable[..., Run]) -> Run:
    return write_run(result={"outcome": "done"})


@pytest.mark.parametrize("count", [1, 40, 3000, 0])
def test_the_last_lines_are_the_logs_last_however_long_it_is(agent: Agent, run: Run, count: int) -> None:
    lines, offset = log.tail(agent, run, 0, lines=count)
    assert lines == LINES[-count:]
    assert offset == len(TEXT)


def test_a_log_that_grows_faster_than_it_is_read_ends_all_the_same(
    make_agent: Callable[..., Agent], run: Run
) -> None:
    growing = itertools.count(1)

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return logs_of(TEXT + "more\n" * next(growing), request)

    lines, _ = log.tail(make_agent(give), run, 0, lines=0)
    assert lines[: len(LINES)] == LINES
    assert set(lines[len(LINES) :]) <= {"more"}


def test_what_is_followed_is_shown_to_the_end_of_a_run_that_has_ended(agent: Agent, run: Run) -> None:
    shown: list[tuple[int, str]] = []
    log.follow_all([agent, agent], run, {0: 0, 1: len(TEXT)}, lambda host, line: shown.append((host, line)))
    assert shown == [(0, line) for line in LINES]


def test_lines_are_shown_as_they_come_and_none_twice(
    make_agent: Callable[..., Agent], write_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a\nb\n", "a\nb\n", "a\nb\nc\n", "a\nb\nc\nd\n"]
    polls = itertools.count()
    write_run()

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if verb == "status":
            poll = next(polls)
            if poll == 3:
                return {"processes": []}
            entry = {
                "run_id": request["run_id"],
                "attempt": 0,
                "process_id": 0,
                "state": "running",
                "ended": None,
            }
            return {"processes": [entry]}
        return logs_of(texts[min(next(reads), 3)], request)

    reads = itertools.count()
    monkeypatch.setattr(log, "POLL_S", 0)
    shown: list[str] = []
    log.follow_all([make_agent(give)], write_run(), {0: 0}, lambda _, line: shown.append(line))
    assert shown == ["a", "b", "c", "d"]
