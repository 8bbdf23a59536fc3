"""The daemon without Docker: its socket and folder, its machines, and what is typed behind `pulumi`."""

import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rehearsal import state
from rehearsal.daemon import daemon
from rehearsal.daemon.control_socket import Caller, ControlSocket, ask
from rehearsal.daemon.node_machines import NodeMachines
from rehearsal.daemon.rehearsal_stack import parse_pulumi
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.state import RehearsalError
from tests.waiting import until

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


def test_a_daemon_whose_folder_is_removed_ends(tmp_path: Path) -> None:
    (folder := tmp_path / "rehearsal").mkdir()
    (folder / state.LOCK).touch()
    done = threading.Event()
    watch = threading.Thread(target=daemon._watch, args=(folder, None, done), daemon=True)
    watch.start()
    assert not done.wait(2 * daemon.POLL_S)
    shutil.rmtree(folder)
    assert done.wait(LIMIT_S)


class UnreliableMachines:
    """failures: of the next boots."""

    def __init__(self, failures: int) -> None:
        self.failures, self.there = failures, set[str]()

    def boot(self, machine: Any) -> None:
        assert machine.name not in self.there
        self.there.add(machine.name)  # and what Docker could not remove stays
        self.failures -= 1
        if self.failures >= 0:
            raise MachinesError("sshd does not answer")

    def restart(self, name: str) -> None:
        pytest.fail("what has not booted was started again")

    def remove(self, name: str) -> None:
        self.there.discard(name)


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_machine_that_does_not_boot_is_tried_once_more_and_whenever_it_is_restarted(failures: int) -> None:
    machines: Any = UnreliableMachines(failures)
    said: list[str] = []
    hosts = NodeMachines(
        machines=machines, addresses=["10.0.0.2"], authorized_key="", say=said.append, moved=lambda: None
    )
    hosts.addresses("w-0")
    hosts.host_key("w-0")
    hosts.move("w-0", "up")
    assert hosts.settle(LIMIT_S)
    assert hosts.failed == ({"w-0": "sshd does not answer"} if failures == 2 else {}), said
    hosts.move("w-0", "up")
    until(lambda: hosts.stands("w-0") == "up" and not hosts.failed)
    hosts.close()
