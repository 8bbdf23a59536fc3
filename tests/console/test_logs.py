"""`fab logs` shows every line of every host once, in order, and names hosts that do not answer."""

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from console import logs as log_command
from console.logs import HostLog
from contracts import run_directory
from launch.hosts import Agent, Completed, HostError
from launch.runs import Run
from tests.launch.slices import Beat, MakeAgent, WriteRun, make_target

LINES = [f"line {number} " + "x" * (number % 90) for number in range(20_000)]
TEXT = "".join(line + "\n" for line in LINES)
assert len(TEXT) > 3 * log_command.CHUNK_BYTES


def logs_of(text: str, request: dict[str, Any], *, ended: bool = True) -> dict[str, Any]:
    """As the agent answers: from the beginning of a line, whole lines, at most so many bytes."""
    begin = request["offset"] if request["offset"] >= 0 else max(0, len(text) + request["offset"])
    if request["offset"] < 0:
        begin = text.rfind("\n", 0, begin) + 1
    piece = text[begin : begin + request["limit_bytes"]]
    piece = piece[: piece.rfind("\n") + 1]
    return {
        "text": piece,
        "offset": begin,
        "next_offset": begin + len(piece),
        "size": len(text),
        "ended": ended,
    }


def silent() -> Completed:
    return Completed(exit_code=None, stdout="", stderr="")


def logs_on(agents: Sequence[Agent], run: Run) -> list[HostLog]:
    target = make_target(agents)
    return [HostLog(target=target, run=run, host=host) for host in range(len(agents))]


class Shown:
    """What was shown of each host, and what was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.messages: list[str] = []

    def show(self, host: int, line: str) -> None:
        self.lines.append((host, line))

    def of(self, host: int) -> list[str]:
        return [line for index, line in self.lines if index == host]

    def all(self, agents: Sequence[Agent], run: Run, *, lines: int, follow: bool = False) -> bool:
        """Shows all these agents' logs; whether every one answered."""
        logs = logs_on(agents, run)
        return log_command.show_logs(
            logs, lines=lines, follow=follow, show=self.show, tell=self.messages.append
        )


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def agent(make_agent: MakeAgent) -> Agent:
    return make_agent(lambda verb, request: logs_of(TEXT, request))


@pytest.fixture
def run(write_run: WriteRun) -> Run:
    return write_run(result={"outcome": "done"})


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_command, "POLL_S", 0.001)
    monkeypatch.setattr(log_command, "RETRY_S", 0.001)


@pytest.mark.parametrize("count", [1, 40, 15_000, 30_000])
def test_the_last_lines_are_the_logs_last_however_long_it_is(agent: Agent, run: Run, count: int) -> None:
    assert log_command.tail(logs_on([agent], run)[0], count) == (LINES[-count:], len(TEXT))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("lines", [0, 40])
def test_hosts_are_asked_at_once_and_each_is_shown_its_own_lines_in_order(
    make_agent: MakeAgent, run: Run, shown: Shown, lines: int, follow: bool
) -> None:
    together = threading.Barrier(2, timeout=20)
    first = itertools.count()

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if next(first) < 2:
            together.wait()
        return logs_of(TEXT, request)

    assert shown.all([make_agent(give), make_agent(give)], run, lines=lines, follow=follow)
    assert (shown.of(0), shown.of(1), shown.messages) == (LINES[-lines:], LINES[-lines:], [])


@pytest.mark.parametrize("lines", [0, 40])
def test_a_log_that_grows_faster_than_it_is_read_ends_all_the_same(
    make_agent: MakeAgent, run: Run, shown: Shown, lines: int
) -> None:
    more = "more\n" * (log_command.CHUNK_BYTES // 5 + 1)
    growing = itertools.count(1)

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        return logs_of(TEXT + more * next(growing), request, ended=False)

    assert shown.all([make_agent(give)], run, lines=lines)
    assert len(shown.lines) == lines or shown.of(0)[: len(LINES)] == LINES


def test_lines_are_shown_as_they_come_none_twice_made_safe_and_with_pauses_between_the_questions(
    make_agent: MakeAgent, run: Run, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_command, "POLL_S", 0.02)
    texts = ["a\nb\n", "a\nb\n", "a\nb\n1%\r2%\n", "a\nb\n1%\r2%\n\x1b]0;x\x07\n"]
    reads, began_s = itertools.count(), time.monotonic()

    def give(verb: str, request: dict[str, Any]) -> dict[str, Any]:
        read = next(reads)
        return logs_of(texts[min(read, 3)], request, ended=read > 3)

    assert shown.all([make_agent(give)], run, lines=0, follow=True)
    assert shown.of(0) == ["a", "b", "2%", "␛]0;x\\x07"]
    assert time.monotonic() - began_s > 0.02 * 3, "waiting for lines costs no questions without pause"


def test_a_host_that_does_not_answer_is_told_of_once_and_asked_again(
    make_agent: MakeAgent, run: Run, shown: Shown, hasty: None
) -> None:
    asked = itertools.count()

    def give(verb: str, request: dict[str, Any]) -> Any:
        return silent() if 0 < next(asked) < 5 else logs_of("a\nb\n", request, ended=next(asked) > 5)

    assert shown.all([make_agent(give, "h/0")], run, lines=0, follow=True)
    assert shown.of(0) == ["a", "b"]
    assert shown.messages == ["h/0: no answer to logs within 10 s; it is asked again", "h/0 answers again"]


@pytest.mark.parametrize("lines", [0, 40])
def test_a_host_that_does_not_answer_is_named_and_waited_for_only_as_long_as_its_run_may_last(
    make_agent: MakeAgent,
    agent: Agent,
    run: Run,
    shown: Shown,
    hasty: None,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = [make_agent(lambda verb, request: silent(), "h/0"), agent]
    assert not shown.all(agents, run, lines=lines)
    assert (shown.of(0), shown.of(1), shown.messages) == (
        [],
        LINES[-lines:],
        ["h/0: no answer to logs within 10 s"],
    )
    monkeypatch.setattr(log_command, "SILENCE_LIMIT_S", 0.3)
    began_s = time.monotonic()
    shown.messages.clear()
    assert not shown.all(agents, run, lines=lines, follow=True)
    assert time.monotonic() - began_s > 0.3
    assert shown.messages == [
        "h/0: no answer to logs within 10 s; it is asked again",
        "h/0: has not answered for 0 s; its log ends here",
    ]


def gone() -> Completed:
    raise HostError(host="h/1", reason="process 1 was never started on this host")


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("lines", [0, 40])
def test_of_an_ended_run_a_log_whose_host_is_gone_or_new_is_read_from_the_run_directory(
    make_agent: MakeAgent, run: Run, shown: Shown, lines: int, follow: bool
) -> None:
    run.directory.write_text(run_directory.log(0, 1), TEXT)
    agents = [
        make_agent(lambda verb, request: logs_of("a\n", request)),
        make_agent(lambda verb, request: gone()),
    ]
    assert shown.all(agents, run, lines=lines, follow=follow)
    assert (shown.of(0), shown.of(1), shown.messages) == (["a"], LINES[-lines:], [])


def test_of_a_run_that_may_be_active_a_log_in_the_run_directory_is_not_taken_for_the_hosts_own(
    make_agent: MakeAgent, write_run: WriteRun, beat: Beat, shown: Shown
) -> None:
    run = write_run(beats=[beat("stepping", rank=rank, time=time.time()) for rank in range(2)])
    run.directory.write_text(run_directory.log(0, 0), "old\n")
    assert not shown.all([make_agent(lambda verb, request: silent(), "h/0")], run, lines=40)
    assert (shown.lines, shown.messages) == ([], ["h/0: no answer to logs within 10 s"])
