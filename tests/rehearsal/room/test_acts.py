"""The acts: what each needs is asked for, what each does exists, and what it tells names the host."""

from __future__ import annotations

import re

import pytest

from rehearsal.machines import Faults
from rehearsal.room import repertoire
from rehearsal.room.acts import Acts, Asked
from rehearsal.room.repertoire import ACTS
from rehearsal.state import RehearsalError


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


class Room:
    """What acts touch of a room."""

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
def room() -> Room:
    return Room()


@pytest.fixture
def acts(room: Room) -> Acts:
    return Acts(room)  # type: ignore[arg-type]


OF_ONE_HOST = sorted(name for name, act in ACTS.items() if "host" in act.needs)


@pytest.mark.parametrize("name", OF_ONE_HOST)
def test_an_act_on_a_host_tells_its_name_in_one_line(acts: Acts, name: str) -> None:
    line = repertoire.carry_out(acts, name, Asked(host="1", amount=60.0))
    acts.close()
    assert "w-1" in line and "\n" not in line and "{" not in line


@pytest.mark.parametrize("name", OF_ONE_HOST)
def test_an_act_on_a_host_asks_which(acts: Acts, name: str) -> None:
    with pytest.raises(RehearsalError, match="--host"):
        repertoire.carry_out(acts, name, Asked(amount=60.0))
    with pytest.raises(RehearsalError, match=re.escape("choose one of 0 … 1")):
        repertoire.carry_out(acts, name, Asked(host="2", amount=60.0))


@pytest.mark.parametrize(
    ("name", "done"),
    [
        ("cut", ("cut", "w-1")), ("heal", ("heal", "w-1")), ("clock", ("set_clock", "w-1", 60.0)),
        ("fill-disk", ("fill_disk", "w-1")), ("empty-disk", ("empty_disk", "w-1")), ("wedge", ("wedge", "w-1")),
        ("hold-device", ("hold_device", "w-1")), ("change-host-key", ("change_host_key", "w-1")),
    ],
)  # fmt: skip
def test_an_act_does_to_the_host_what_it_says(
    acts: Acts, room: Room, name: str, done: tuple[object, ...]
) -> None:
    repertoire.carry_out(acts, name, Asked(host="w-1", amount=60.0))
    assert room.faults.done == [done]


def test_the_share_is_filled_through_a_host_that_is_up(acts: Acts, room: Room) -> None:
    repertoire.carry_out(acts, "fill-disk", Asked(host="share"))
    repertoire.carry_out(acts, "empty-disk", Asked(host="share"))
    assert room.faults.done == [("fill_share", "w-1"), ("empty_share", "w-1")]


def test_what_was_wedged_goes_on(acts: Acts, room: Room) -> None:
    repertoire.carry_out(acts, "wedge", Asked(host="0"))
    repertoire.carry_out(acts, "unwedge", Asked(host="0"))
    assert room.faults.done == [("wedge", "w-0"), ("unwedge", "w-0", 7)]


def test_a_killed_host_is_started_again_later_unless_it_is_for_good(acts: Acts, room: Room) -> None:
    assert "starts it again in 30 s" in repertoire.carry_out(acts, "kill", Asked(host="0"))
    assert "stays so" in repertoire.carry_out(acts, "kill", Asked(host="1", for_good=True))
    assert room.hosts.moved == [("w-0", "down"), ("w-1", "down")]
    acts.close()


def test_acts_of_the_cloud_befall_the_slice_and_its_chips(acts: Acts, room: Room) -> None:
    for name in ("preempt", "vanish", "stockout", "restock"):
        assert repertoire.carry_out(acts, name, Asked())
    assert room.control.done == [
        ("preempt", room.node()),
        ("vanish", room.node()),
        ("set_capacity", room.pool, 0),
        ("set_capacity", room.pool, 32),
    ]


def test_an_act_that_is_none_is_told_with_those_that_are(acts: Acts) -> None:
    with pytest.raises(RehearsalError, match=r'"zap" is no act.*kill.*preempt'):
        repertoire.carry_out(acts, "zap", Asked())


def test_how_much_is_asked_for_where_it_matters(acts: Acts) -> None:
    with pytest.raises(RehearsalError, match="how much"):
        repertoire.carry_out(acts, "clock", Asked(host="0"))
