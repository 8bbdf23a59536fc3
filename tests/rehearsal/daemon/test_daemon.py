"""The daemon without Docker: its socket, faults that a person causes, and what is typed behind `pulumi`."""

from __future__ import annotations

import json
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rehearsal import state
from rehearsal.compute_api import ComputeControl
from rehearsal.daemon import cluster_rehearsal, daemon
from rehearsal.daemon.cli import UpRequest
from rehearsal.daemon.control_socket import Caller, ControlSocket, ask
from rehearsal.daemon.fault_commands import COMMANDS, FaultCommands, FaultRequest
from rehearsal.daemon.node_machines import NodeMachines
from rehearsal.daemon.rehearsal_stack import parse_pulumi
from rehearsal.machines.faults import Faults
from rehearsal.state import RehearsalError
from rehearsal.tpu_api import Control

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


NODE = "projects/p/locations/z/nodes/n"
POOL = "z:v5litepod:spot"


class Rehearsal:
    """What faults touch of a rehearsal with two hosts, of which w-1 is up; it writes down what is asked of it."""

    def __init__(self) -> None:
        self.faults = mock.create_autospec(Faults, instance=True)
        self.faults.wedge.return_value = 7
        self.hosts = mock.create_autospec(NodeMachines, instance=True)
        self.hosts.names.return_value = ["w-0", "w-1"]
        self.hosts.stands = {"w-0": "down", "w-1": "up"}.get
        self.control = mock.create_autospec(Control, instance=True)
        self.control.alive.return_value = {"nodes": [{"name": NODE}]}
        self.compute = mock.create_autospec(ComputeControl, instance=True)
        self.compute.slices.return_value = {}
        self.commands = FaultCommands(
            hosts=self.hosts,
            faults=self.faults,
            control=self.control,
            compute=self.compute,
            pool=POOL,
            chips=32,
            freeze_bucket=mock.Mock(),
        )


def test_each_fault_on_a_host_asks_which_and_tells_its_name_in_one_line() -> None:
    commands = Rehearsal().commands
    for name in sorted(name for name, command in COMMANDS.items() if "host" in command.needs):
        with pytest.raises(RehearsalError, match="--host"):
            commands.carry_out(name, FaultRequest(amount=60.0))
        with pytest.raises(RehearsalError, match=re.escape("choose one of 0 … 1")):
            commands.carry_out(name, FaultRequest(host="2", amount=60.0))
        line = commands.carry_out(name, FaultRequest(host="1", amount=60.0))
        assert "w-1" in line and "\n" not in line and "{" not in line
    commands.close()
    with pytest.raises(RehearsalError, match="how much"):
        commands.carry_out("clock", FaultRequest(host="0"))
    with pytest.raises(RehearsalError, match=r'"zap" is no act.*kill.*preempt'):
        commands.carry_out("zap", FaultRequest())


def test_what_befalls_a_slice_reaches_every_part_of_one_on_compute_engine() -> None:
    rehearsal = Rehearsal()
    parts = [f"projects/p/zones/z/instanceGroupManagers/main-{number}" for number in (0, 1)]
    rehearsal.compute.slices.return_value = dict.fromkeys(parts, "ACTIVE")
    rehearsal.commands.carry_out("preempt", FaultRequest())
    assert [call.args for call in rehearsal.compute.preempt.call_args_list] == [(part,) for part in parts]
    rehearsal.control.preempt.assert_not_called()


@pytest.mark.parametrize(
    ("line", "kind", "options"),
    [
        ("up --refresh --yes --skip-preview --stack rehearsal", "up", {"refresh": True}),
        ("up --yes --replace urn:a --replace urn:b", "up", {"replace": ["urn:a", "urn:b"]}),
        ("destroy --skip-preview", "destroy", {}),
        ("refresh -y", "refresh", {}),
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


def test_a_cluster_is_held_up_described_and_taken_down_by_the_daemon_that_holds_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines, cluster = mock.MagicMock(), mock.MagicMock()
    machines.__enter__.return_value, cluster.__enter__.return_value = machines, cluster
    machines.network.addresses = lambda count: [f"10.0.0.{index}" for index in range(count)]
    machines.storage.environment = {"STORAGE_EMULATOR_HOST": "here"}
    cluster.images, cluster.kubeconfig = {}, folder / "kubeconfig"
    monkeypatch.setattr(cluster_rehearsal, "find_or_build", lambda *_: {})
    monkeypatch.setattr(cluster_rehearsal, "Machines", lambda **_: machines)
    monkeypatch.setattr(cluster_rehearsal, "RehearsalCluster", lambda **_: cluster)
    monkeypatch.setattr(daemon, "require_base", lambda *_: None)
    request = UpRequest(hosts=4, kind="kubernetes", keeper=False, slices=2, queue="team")
    caller = mock.create_autospec(Caller, instance=True)
    with daemon.Daemon(folder=folder, request=request, socket_path=folder / "s", say=lambda _: None) as held:
        with pytest.raises(RehearsalError, match="no hosts yet"):
            held.answer("act", {"name": "drain", "asked": {}}, caller)
        held.open()
        recorded = json.loads((folder / state.FILE).read_text())
        assert (recorded["phase"], recorded["environment"]["KUBECONFIG"]) == ("ready", f"{folder}/kubeconfig")
        assert [each["count"] for each in json.loads(recorded["inventory"])["slices"]] == [2]
        with pytest.raises(RehearsalError, match="Say --host"):
            held.answer("act", {"name": "drain", "asked": {}}, caller)
        with pytest.raises(RehearsalError, match="a cluster that Pulumi has not made"):
            held.answer("pulumi", {"arguments": ["up"]}, caller)
        assert held.answer("status", {}, caller)["cluster"] is not None
    assert cluster.__exit__.called and machines.__exit__.called
