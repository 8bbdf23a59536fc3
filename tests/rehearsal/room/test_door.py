"""The daemon's door: answers and what is said on the way, for its user alone; a caller that hangs up has left."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rehearsal.room.door import Caller, Door, ask
from rehearsal.state import RehearsalError

LIMIT_S = 10.0


@pytest.fixture
def nook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for the path of a socket."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture
def open_door(nook: Path) -> Iterator[Callable[[Callable[[str, Mapping[str, Any], Caller], Any]], str]]:
    doors: list[Door] = []

    def make(answer: Callable[[str, Mapping[str, Any], Caller], Any]) -> str:
        doors.append(Door(nook / "door", answer))
        doors[-1].__enter__()
        return str(nook / "door")

    yield make
    for door in doors:
        door.__exit__(None, None, None)


def test_a_caller_hears_every_line_and_the_answer(open_door: Any) -> None:
    def answer(do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        caller.say("one")
        caller.say("two\nthree")
        return {"did": do, "with": arguments["what"]}

    heard: list[str] = []
    assert ask(open_door(answer), "it", {"what": "“ä”"}, say=heard.append) == {"did": "it", "with": "“ä”"}
    assert heard == ["one", "two\nthree"]


def test_nobody_else_may_knock(open_door: Any, nook: Path) -> None:
    open_door(lambda *_: None)
    assert stat.S_IMODE((nook / "door").stat().st_mode) == 0o600


def test_a_refusal_and_a_bug_are_errors_for_the_caller_and_the_door_stays_open(open_door: Any) -> None:
    def answer(do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        if do == "refuse":
            raise RehearsalError("not now")
        if do == "break":
            raise ZeroDivisionError("oh")
        return "well"

    door = open_door(answer)
    with pytest.raises(RehearsalError, match="^not now$"):
        ask(door, "refuse", {})
    with pytest.raises(RehearsalError, match="break: ZeroDivisionError: oh"):
        ask(door, "break", {})
    assert ask(door, "go on", {}) == "well"


def test_what_is_no_request_is_refused(open_door: Any) -> None:
    door = open_door(lambda *_: None)
    for line in (b"nonsense\n", b"{}\n", b"[1]\n", b'{"do": "x", "with": 3}\n', b"\n"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(LIMIT_S)
            caller.connect(door)
            caller.sendall(line)
            assert b"error" in caller.makefile("rb").readline(), line


def test_a_caller_that_hangs_up_has_left_and_one_that_waits_has_not(open_door: Any) -> None:
    begun, left = threading.Event(), threading.Event()
    seen: list[bool] = []

    def answer(do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        seen.append(caller.gone())
        begun.set()
        waiting = threading.Event()
        while not caller.gone():
            waiting.wait(0.01)
        caller.say("to nobody")
        left.set()

    door = open_door(answer)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(door)
        caller.sendall(b'{"do": "x"}\n')
        assert begun.wait(LIMIT_S) and not left.is_set()
    assert left.wait(LIMIT_S)
    assert seen == [False]


def test_a_daemon_that_is_not_there_or_dies_is_an_error_with_a_remedy(open_door: Any, nook: Path) -> None:
    with pytest.raises(RehearsalError, match="fab rehearsal down"):
        ask(str(nook / "nobody"), "x", {})
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(nook / "dying"))
        dying.listen()
        hangs_up = threading.Thread(target=lambda: dying.accept()[0].close())
        hangs_up.start()
        with pytest.raises(RehearsalError, match="ended meanwhile|does not answer"):
            ask(str(nook / "dying"), "x", {})
        hangs_up.join()


def test_a_daemon_that_is_silent_is_not_waited_for_for_ever(nook: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(nook / "silent"))
        silent.listen()
        with pytest.raises(RehearsalError, match="said nothing for 0 s"):
            ask(str(nook / "silent"), "x", {}, limit_s=0.05)
