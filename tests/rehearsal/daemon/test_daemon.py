"""The daemon without Docker: its socket, faults that a person causes, what is typed behind `pulumi`, its machines."""

from __future__ import annotations

import base64
import json
import re
import socket
import stat
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import asyncssh
import pytest

from rehearsal.daemon.control_socket import Caller, ControlSocket, ask
from rehearsal.daemon.fault_commands import COMMANDS, FaultCommands, FaultRequest
from rehearsal.daemon.node_machines import NodeMachines
from rehearsal.daemon.rehearsal_stack import parse_pulumi
from rehearsal.machines.faults import Faults
from rehearsal.state import RehearsalError
from rehearsal.tpu_api import Control
from tests.rehearsal.daemon.conftest import Lab

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
        self.commands = FaultCommands(
            hosts=self.hosts,
            faults=self.faults,
            control=self.control,
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


# --- machines follow the nodes of the simulated cloud: there when one is READY, gone as soon as it is lost ---

NewLab = Callable[[list[str]], Lab]
ZONE = "projects/p/locations/us-central1-a"
ADDRESSES = [f"10.9.0.{number}" for number in range(2, 12)]


def send(lab: Lab, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"{lab.api.url}/v2/{path}", method=method, data=None if body is None else json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def make_node(lab: Lab, name: str = "n", accelerator: str = "v5litepod-16") -> Any:
    """A spot node, READY."""
    body = {
        "acceleratorType": accelerator,
        "runtimeVersion": "v2-alpha-tpuv5-lite",
        "schedulingConfig": {"spot": True},
    }
    send(lab, "POST", f"{ZONE}/nodes?nodeId={name}", body)
    node = send(lab, "GET", f"{ZONE}/nodes/{name}")
    assert node["state"] == "READY"
    return node


def published(lab: Lab, name: str = "n") -> list[dict[str, str]]:
    """Of each worker, its guest attributes by key."""
    found = send(lab, "POST", f"{ZONE}/nodes/{name}:getGuestAttributes", {})["guestAttributes"]
    return [{item["key"]: item["value"] for item in each["queryValue"]["items"]} for each in found]


def settled(lab: Lab) -> None:
    assert lab.hosts.settle(LIMIT_S), lab.said


def test_every_worker_of_a_ready_node_is_a_machine_with_the_address_and_host_key_that_the_api_tells(
    new_lab: NewLab,
) -> None:
    lab = new_lab(ADDRESSES)
    node = make_node(lab)
    settled(lab)
    told = [end["ipAddress"] for end in node["networkEndpoints"]]
    machines = [lab.paper.up[worker["hostname"]] for worker in published(lab)]
    assert [machine.address for machine in machines] == told
    assert len(set(told)) == 4 and set(told) <= set(ADDRESSES)
    for machine, worker in zip(machines, published(lab), strict=True):
        pair = asyncssh.import_private_key(machine.host_key)
        assert base64.b64encode(pair.public_data).decode() == worker["ssh-ed25519"]


@pytest.mark.parametrize("loss", ["preempt", "terminate", "vanish", "delete"])
def test_a_node_that_is_lost_takes_its_machines_with_it(new_lab: NewLab, loss: str) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    if loss == "delete":
        send(lab, "DELETE", f"{ZONE}/nodes/n")
    else:
        getattr(lab.api.control, loss)("n")
    settled(lab)
    assert (lab.paper.up, lab.paper.down, lab.hosts.names()) == ({}, {}, [])


def test_a_node_that_is_lost_while_its_machines_boot_leaves_none(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    lab.paper.may_boot.clear()
    make_node(lab)
    assert all(worker["ssh-ed25519"] for worker in published(lab))  # the API waits for none of them
    lab.api.control.preempt("n")
    lab.paper.may_boot.set()
    settled(lab)
    assert (lab.paper.up, lab.paper.down) == ({}, {})


def test_a_machine_that_cannot_boot_is_named_and_the_others_are_up_and_come_back_after_a_power_cut(
    new_lab: NewLab,
) -> None:
    lab = new_lab([f"10.9.0.{number}" for number in range(2, 40)])
    lab.paper.may_boot.clear()
    make_node(lab, accelerator="v5litepod-64")
    # In their order, beyond ten too.
    assert lab.hosts.names() == [worker["hostname"] for worker in published(lab)]
    broken, cut = lab.hosts.names()[2:4]
    lab.paper.broken = {broken}
    lab.paper.may_boot.set()
    settled(lab)
    assert lab.hosts.failed == {broken: "no room for it"}
    assert len(lab.paper.up) == 15 and lab.moves >= 16
    assert f"machine {broken}: no room for it" in lab.said
    lab.hosts.move(cut, "down")
    settled(lab)
    assert list(lab.paper.down) == [cut] and lab.hosts.stands(cut) == "down"
    lab.hosts.move(cut, "up")
    settled(lab)
    assert len(lab.paper.up) == 15 and lab.paper.down == {}
