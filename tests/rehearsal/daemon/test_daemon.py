"""The daemon without Docker: its socket, faults that a person causes, and what is typed behind `pulumi`."""

import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rehearsal.daemon.control_socket import Caller, ControlSocket, ask
from rehearsal.daemon.rehearsal_stack import parse_pulumi
from rehearsal.state import RehearsalError

LIMIT_S = 10.0


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for the path of a socket."""
    return tmp_path_factory.mktemp("d")


@pytest.fixture
def open_socket(folder: Path) -> Iterator[Callable[[Callable[[str, Mapping[str, Any], Caller], Any]], str]]:
    sockets: list[ControlSocket] = []

    def make(answer: Callable[[str, Mapping[str, Any], Caller], Any]) -> str:
        sockets.append(ControlSocket(folder / "control", answer))
        sockets[-1].__enter__()
        return str(folder / "control")

    yield make
    for each in sockets:
        each.__exit__(None, None, None)


def test_only_its_user_may_open_the_socket_hears_every_line_and_a_refusal_and_a_bug_are_errors(
    open_socket: Any,
) -> None:
    def answer(do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        caller.say("one")
        caller.say("two\nthree")
        if do == "refuse":
            raise RehearsalError("not now")
        if do == "break":
            raise ZeroDivisionError("oh")
        return {"did": do, "with": arguments["what"]}

    path = open_socket(answer)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    with pytest.raises(RehearsalError, match="^not now$"):
        ask(path, "refuse", {})
    with pytest.raises(RehearsalError, match="break: ZeroDivisionError: oh"):
        ask(path, "break", {})
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(LIMIT_S)
        caller.connect(path)
        caller.sendall(b"nonsense\n")
        assert b"error" in caller.makefile("rb").readline()
    heard: list[str] = []  # the socket has stayed open
    assert ask(path, "it", {"what": "“ä”"}, say=heard.append) == {"did": "it", "with": "“ä”"}
    assert heard == ["one", "two\nthree"]


@pytest.mark.parametrize(
    ("line", "kind", "options"),
    [
        ("up --refresh --yes --skip-preview --stack rehearsal", "up", {"refresh": True}),
        ("up --yes --replace urn:a --replace urn:b", "up", {"replace": ["urn:a", "urn:b"]}),
        ("destroy --skip-preview", "destroy", {}),
        ("refresh -y", "refresh", {}),
        ("refresh -y --clear-pending-creates", "refresh", {"clear_pending_creates": True}),
        ("preview --diff", "preview", {"diff": True}),  # needs no yes
        ("stack output --json -s rehearsal", "output", {"json": True, "name": None}),
        ("stack output inventory", "output", {"json": False, "name": "inventory"}),
        ("stack --show-urns", "other", {}),
        ("up", "--yes", None),
        ("refresh", "--yes", None),
        ("up --yes --stack dev", "no stack named 'dev' found", None),
        ("stack output --json --stack dev", "no stack named 'dev' found", None),
        ("up --yes --parallel 4", "--parallel", None),
        ("destroy --yes --replace urn:a", "--replace", None),
        ("up --yes --clear-pending-creates", "--clear-pending-creates", None),
    ],
)
def test_what_is_typed_behind_pulumi_is_an_operation_for_the_command_line_or_refused(
    line: str, kind: str, options: dict[str, Any] | None
) -> None:
    """Without options it is refused, and `kind` is a part of why."""
    if options is None:
        with pytest.raises(RehearsalError, match=kind):
            parse_pulumi(line.split())
        return
    typed = parse_pulumi(line.split())
    assert (typed.kind, dict(typed.options)) == (kind, options)
    assert typed.arguments == (tuple(line.split()) if kind == "other" else ())
