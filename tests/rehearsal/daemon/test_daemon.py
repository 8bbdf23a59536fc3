"""The daemon without Docker: its socket, faults that a person causes, what is typed behind `pulumi`, its machines."""

from __future__ import annotations

import base64
import json
import re
import socket
import stat
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from rehearsal.daemon.control_socket import Caller, ControlSocket, ask
from rehearsal.daemon.fault_commands import COMMANDS, FaultCommands, FaultRequest
from rehearsal.daemon.rehearsal_stack import parse_pulumi, with_registry
from rehearsal.machines import Faults
from rehearsal.state import RehearsalError
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


def test_a_caller_hears_every_line_and_the_answer(open_socket: Any) -> None:
    def answer(do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        caller.say("one")
        caller.say("two\nthree")
        return {"did": do, "with": arguments["what"]}

    heard: list[str] = []
    assert ask(open_socket(answer), "it", {"what": "“ä”"}, say=heard.append) == {"did": "it", "with": "“ä”"}
    assert heard == ["one", "two\nthree"]


def test_only_its_user_may_open_the_socket(open_socket: Any, folder: Path) -> None:
    open_socket(lambda *_: None)
    assert stat.S_IMODE((folder / "control").stat().st_mode) == 0o600


def test_a_refusal_and_a_bug_are_errors_for_the_caller_and_the_socket_stays_open(open_socket: Any) -> None:
    def answer(do: str, arguments: Mapping[str, Any], caller: Caller) -> Any:
        if do == "refuse":
            raise RehearsalError("not now")
        if do == "break":
            raise ZeroDivisionError("oh")
        return "well"

    path = open_socket(answer)
    with pytest.raises(RehearsalError, match="^not now$"):
        ask(path, "refuse", {})
    with pytest.raises(RehearsalError, match="break: ZeroDivisionError: oh"):
        ask(path, "break", {})
    assert ask(path, "go on", {}) == "well"


def test_what_is_no_request_is_refused(open_socket: Any) -> None:
    path = open_socket(lambda *_: None)
    for line in (b"nonsense\n", b"{}\n", b"[1]\n", b'{"do": "x", "with": 3}\n', b"\n"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(LIMIT_S)
            caller.connect(path)
            caller.sendall(line)
            assert b"error" in caller.makefile("rb").readline(), line


def test_a_caller_that_hangs_up_has_left_and_one_that_waits_has_not(open_socket: Any) -> None:
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

    path = open_socket(answer)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)
        caller.sendall(b'{"do": "x"}\n')
        assert begun.wait(LIMIT_S) and not left.is_set()
    assert left.wait(LIMIT_S)
    assert seen == [False]


def test_a_daemon_that_is_not_there_or_dies_is_an_error_with_a_remedy(open_socket: Any, folder: Path) -> None:
    with pytest.raises(RehearsalError, match="fab rehearsal down"):
        ask(str(folder / "nobody"), "x", {})
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(folder / "dying"))
        dying.listen()
        hangs_up = threading.Thread(target=lambda: dying.accept()[0].close())
        hangs_up.start()
        with pytest.raises(RehearsalError, match="ended meanwhile|does not answer"):
            ask(str(folder / "dying"), "x", {})
        hangs_up.join()


def test_a_daemon_that_is_silent_is_not_waited_for_for_ever(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "silent"))
        silent.listen()
        with pytest.raises(RehearsalError, match="said nothing for 0 s"):
            ask(str(folder / "silent"), "x", {}, limit_s=0.05)


class Recorder:
    """Faults that are written down; each answers with the pid 7."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        assert hasattr(Faults, name), f"machines have no fault {name}"

        def fault(*arguments: object) -> int:
            self.done.append((name, *arguments))
            return 7

        return fault


class Hosts:
    """Two that are up."""

    def __init__(self) -> None:
        self.moved: list[tuple[str, str]] = []

    def names(self) -> list[str]:
        return ["w-0", "w-1"]

    def stands(self, name: str) -> str:
        return "up" if name == "w-1" else "down"

    def move(self, name: str, place: str) -> None:
        self.moved.append((name, place))


class Controls:
    """Of the simulated API, what is asked of it."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        return lambda *arguments: self.done.append((name, *arguments))


class Accelerator:
    chips = 16


class Rehearsal:
    """What faults touch of a rehearsal."""

    def __init__(self) -> None:
        self.hosts = Hosts()
        self.faults = Recorder()
        self.machines = self
        self.control = Controls()
        self.api = self
        self.pool = "z:v5litepod:spot"
        self.accelerator = Accelerator()

    def node(self) -> str:
        return "projects/p/locations/z/nodes/n"


@pytest.fixture
def rehearsal() -> Rehearsal:
    return Rehearsal()


@pytest.fixture
def commands(rehearsal: Rehearsal) -> FaultCommands:
    return FaultCommands(rehearsal)  # type: ignore[arg-type]


OF_ONE_HOST = sorted(name for name, command in COMMANDS.items() if "host" in command.needs)


@pytest.mark.parametrize("name", OF_ONE_HOST)
def test_a_fault_on_a_host_tells_its_name_in_one_line(commands: FaultCommands, name: str) -> None:
    line = commands.carry_out(name, FaultRequest(host="1", amount=60.0))
    commands.close()
    assert "w-1" in line and "\n" not in line and "{" not in line


@pytest.mark.parametrize("name", OF_ONE_HOST)
def test_a_fault_on_a_host_asks_which(commands: FaultCommands, name: str) -> None:
    with pytest.raises(RehearsalError, match="--host"):
        commands.carry_out(name, FaultRequest(amount=60.0))
    with pytest.raises(RehearsalError, match=re.escape("choose one of 0 … 1")):
        commands.carry_out(name, FaultRequest(host="2", amount=60.0))


@pytest.mark.parametrize(
    ("name", "done"),
    [
        ("cut", ("cut", "w-1")), ("heal", ("heal", "w-1")), ("clock", ("set_clock", "w-1", 60.0)),
        ("fill-disk", ("fill_disk", "w-1")), ("empty-disk", ("empty_disk", "w-1")), ("wedge", ("wedge", "w-1")),
        ("hold-device", ("hold_device", "w-1")), ("change-host-key", ("change_host_key", "w-1")),
    ],
)  # fmt: skip
def test_a_fault_does_to_the_host_what_it_says(
    commands: FaultCommands, rehearsal: Rehearsal, name: str, done: tuple[object, ...]
) -> None:
    commands.carry_out(name, FaultRequest(host="w-1", amount=60.0))
    assert rehearsal.faults.done == [done]


def test_the_share_is_filled_through_a_host_that_is_up(commands: FaultCommands, rehearsal: Rehearsal) -> None:
    commands.carry_out("fill-disk", FaultRequest(host="share"))
    commands.carry_out("empty-disk", FaultRequest(host="share"))
    assert rehearsal.faults.done == [("fill_share", "w-1"), ("empty_share", "w-1")]


def test_what_was_wedged_goes_on(commands: FaultCommands, rehearsal: Rehearsal) -> None:
    commands.carry_out("wedge", FaultRequest(host="0"))
    commands.carry_out("unwedge", FaultRequest(host="0"))
    assert rehearsal.faults.done == [("wedge", "w-0"), ("unwedge", "w-0", 7)]


def test_a_killed_host_is_started_again_later_unless_it_is_for_good(
    commands: FaultCommands, rehearsal: Rehearsal
) -> None:
    assert "starts it again in 30 s" in commands.carry_out("kill", FaultRequest(host="0"))
    assert "stays so" in commands.carry_out("kill", FaultRequest(host="1", for_good=True))
    assert rehearsal.hosts.moved == [("w-0", "down"), ("w-1", "down")]
    commands.close()


def test_faults_of_the_cloud_befall_the_slice_and_its_chips(
    commands: FaultCommands, rehearsal: Rehearsal
) -> None:
    for name in ("preempt", "vanish", "stockout", "restock"):
        assert commands.carry_out(name, FaultRequest())
    assert rehearsal.control.done == [
        ("preempt", rehearsal.node()),
        ("vanish", rehearsal.node()),
        ("set_capacity", rehearsal.pool, 0),
        ("set_capacity", rehearsal.pool, 32),
    ]


def test_a_fault_that_is_none_is_told_with_those_that_are(commands: FaultCommands) -> None:
    with pytest.raises(RehearsalError, match=r'"zap" is no act.*kill.*preempt'):
        commands.carry_out("zap", FaultRequest())


def test_how_much_is_asked_for_where_it_matters(commands: FaultCommands) -> None:
    with pytest.raises(RehearsalError, match="how much"):
        commands.carry_out("clock", FaultRequest(host="0"))


def test_up_with_refresh_is_one_operation() -> None:
    typed = parse_pulumi(["up", "--refresh", "--yes", "--skip-preview", "--stack", "rehearsal"])
    assert (typed.kind, dict(typed.options)) == ("up", {"refresh": True})


def test_a_resource_can_be_replaced_by_its_urn() -> None:
    typed = parse_pulumi(["up", "--yes", "--replace", "urn:a", "--replace", "urn:b"])
    assert dict(typed.options) == {"replace": ["urn:a", "urn:b"]}


@pytest.mark.parametrize("kind", ["up", "destroy", "refresh"])
def test_what_changes_something_has_to_be_confirmed(kind: str) -> None:
    with pytest.raises(RehearsalError, match="--yes"):
        parse_pulumi([kind])
    assert parse_pulumi([kind, "--yes"]).kind == kind


def test_a_preview_needs_no_yes() -> None:
    assert parse_pulumi(["preview", "--diff"]).options == {"diff": True}


@pytest.mark.parametrize("line", ["up --yes --stack dev", "stack output --json --stack dev"])
def test_another_stack_than_the_rehearsals_is_not_found(line: str) -> None:
    with pytest.raises(RehearsalError, match="no stack named 'dev' found"):
        parse_pulumi(line.split())


def test_a_flag_that_is_not_known_is_refused_and_not_left_out() -> None:
    with pytest.raises(RehearsalError, match="--parallel"):
        parse_pulumi(["up", "--yes", "--parallel", "4"])
    with pytest.raises(RehearsalError, match="--replace"):
        parse_pulumi(["destroy", "--yes", "--replace", "urn:a"])


def test_outputs_are_told_without_the_command_line() -> None:
    assert parse_pulumi(["stack", "output", "--json", "-s", "rehearsal"]).options == {
        "json": True,
        "name": None,
    }
    assert parse_pulumi(["stack", "output", "inventory"]).options == {"json": False, "name": "inventory"}


def test_what_needs_no_program_goes_to_the_command_line_as_it_is() -> None:
    assert parse_pulumi(["stack", "--show-urns"]).words == ("stack", "--show-urns")
    assert parse_pulumi(["version"]).kind == "other"


OUTPUTS = {"inventory": "{}", "image_repository": "us-central1-docker.pkg.dev/my-rehearsal/images"}


def test_images_go_to_the_rehearsals_own_registry_under_the_path_that_they_would_have_at_googles() -> None:
    assert (
        with_registry(OUTPUTS, "127.0.0.1:5000")["image_repository"] == "127.0.0.1:5000/my-rehearsal/images"
    )
    assert with_registry(OUTPUTS, None) == OUTPUTS


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
        pair = asyncssh.import_private_key(machine.host_key_private_pem)
        assert base64.b64encode(pair.public_data).decode() == worker["ssh-ed25519"]


def test_the_api_answers_while_machines_take_their_time(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    lab.paper.may_boot.clear()
    make_node(lab)
    assert all(worker["ssh-ed25519"] for worker in published(lab))
    assert lab.paper.up == {}
    lab.paper.may_boot.set()
    settled(lab)
    assert len(lab.paper.up) == 4


@pytest.mark.parametrize("loss", ["preempt", "terminate", "vanish"])
def test_a_node_that_is_lost_takes_its_machines_with_it(new_lab: NewLab, loss: str) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    getattr(lab.api.control, loss)("n")
    settled(lab)
    assert (lab.paper.up, lab.paper.down) == ({}, {})
    assert lab.hosts.names() == []


def test_a_node_that_is_deleted_takes_its_machines_with_it(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    send(lab, "DELETE", f"{ZONE}/nodes/n")
    settled(lab)
    assert (lab.paper.up, lab.paper.down) == ({}, {})


def test_a_node_that_is_lost_while_its_machines_boot_leaves_none(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    lab.paper.may_boot.clear()
    make_node(lab)
    lab.api.control.preempt("n")
    lab.paper.may_boot.set()
    settled(lab)
    assert (lab.paper.up, lab.paper.down) == ({}, {})


def test_a_machine_that_loses_power_comes_back_as_itself(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    name = lab.hosts.names()[1]
    lab.hosts.move(name, "down")
    settled(lab)
    assert list(lab.paper.down) == [name] and lab.hosts.stands(name) == "down"
    lab.hosts.move(name, "up")
    settled(lab)
    assert len(lab.paper.up) == 4


def test_a_machine_that_was_removed_does_not_come_back(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab)
    settled(lab)
    name = lab.hosts.names()[0]
    lab.api.control.preempt("n")
    lab.hosts.move(name, "up")
    settled(lab)
    assert lab.paper.up == {} and len(lab.paper.booted) == 4


def test_a_machine_that_is_being_removed_is_not_started_again(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    make_node(lab, accelerator="v5litepod-8")
    settled(lab)
    (name,) = lab.hosts.names()
    lab.paper.may_remove.clear()
    lab.api.control.preempt("n")
    lab.hosts.move(name, "up")
    lab.paper.may_remove.set()
    settled(lab)
    assert lab.paper.up == {}


def test_no_two_machines_have_the_same_address(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES[:3])
    for name in ("a", "b"):
        make_node(lab, name, "v5litepod-8")
    settled(lab)
    lab.api.control.vanish("b")
    settled(lab)
    for name in ("c", "d"):
        make_node(lab, name, "v5litepod-8")
    settled(lab)
    assert sorted(machine.address for machine in lab.paper.up.values()) == ADDRESSES[:3]


def test_an_address_is_given_out_again_only_when_its_machine_is_gone(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES[:5])
    first = make_node(lab)
    settled(lab)
    lab.api.control.vanish("n")
    settled(lab)
    second = make_node(lab, "m")
    settled(lab)
    told = [[end["ipAddress"] for end in node["networkEndpoints"]] for node in (first, second)]
    assert len(set(told[1])) == 4
    assert told[1][0] == ADDRESSES[4]  # the one that has rested longest


def test_a_machine_that_cannot_boot_is_named_and_the_others_are_up(new_lab: NewLab) -> None:
    lab = new_lab(ADDRESSES)
    lab.paper.may_boot.clear()
    make_node(lab)
    broken = lab.hosts.names()[2]
    lab.paper.broken = {broken}
    lab.paper.may_boot.set()
    settled(lab)
    assert lab.hosts.failed == {broken: "no room for it"}
    assert len(lab.paper.up) == 3
    assert f"machine {broken}: no room for it" in lab.said


def test_workers_are_listed_in_their_order_beyond_ten(new_lab: NewLab) -> None:
    lab = new_lab([f"10.9.0.{number}" for number in range(2, 40)])
    make_node(lab, accelerator="v5litepod-64")
    settled(lab)
    assert lab.hosts.names() == [worker["hostname"] for worker in published(lab)]
    assert lab.moves >= 16
