"""A rehearsal's life with real machines and the real engine, from outside as `fab rehearsal` lives it.

Slow: each takes some ten seconds, and the first, on a new computer, the minutes in which the hosts' image is built."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal import state
from rehearsal.room import begin
from rehearsal.state import RehearsalError
from tests.rehearsal.room.person import LIMIT_S, Person
from tests.rehearsal.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_hosts_that_pulumi_made_are_reached_by_their_pinned_keys_preempted_made_again_and_destroyed(
    person: Person,
) -> None:
    person.up(hosts=2)
    first = person.hosts()
    assert len(first) == 2
    for name in first:
        done = person.ssh(
            name, "hostname; cat /proc/sys/kernel/hostname; echo hello > /mnt/share/$(hostname)"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [name, name]

    with pytest.raises(RehearsalError, match="up already"):
        person.up()

    told = person.act("preempt")
    assert "without notice" in told
    until(lambda: all(name not in " ".join(person.left()) for name in first), LIMIT_S)
    assert person.ssh(next(iter(first)), "true").returncode != 0
    repaired = person.type("pulumi", "up", "--refresh", "--yes", "--skip-preview", "--stack", "rehearsal")
    assert repaired.returncode == 0, repaired.stdout
    second = person.hosts()
    assert len(second) == 2 and not second.keys() & first.keys()
    until(lambda: all(person.ssh(name, "true").returncode == 0 for name in second), LIMIT_S)
    share = person.ssh(next(iter(second)), "cat /mnt/share/*")
    assert share.stdout.split() == ["hello", "hello"]  # it outlives the hosts

    assert person.type("pulumi", "destroy", "--yes").returncode == 0
    until(lambda: all(name not in " ".join(person.left()) for name in second), LIMIT_S)
    assert begin.down(person.folder, person.said.append)
    assert person.left() == [] and not person.folder.exists()
    assert not begin.down(person.folder, person.said.append)


def test_a_host_that_loses_power_comes_back_by_itself_with_the_same_key(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    person.up()
    (name,) = person.hosts()
    person.act("kill", "0")
    until(lambda: person.ssh(name, "true").returncode != 0, LIMIT_S)
    assert name in person.act("status")
    until(lambda: person.ssh(name, "true").returncode == 0, LIMIT_S)


def test_a_daemon_that_is_killed_leaves_no_machine_and_down_removes_the_rest(person: Person) -> None:
    person.up()
    daemon = state.require(person.folder)
    assert person.left()
    os.kill(daemon.pid, signal.SIGKILL)
    until(lambda: person.left() == [], LIMIT_S)
    with pytest.raises(RehearsalError, match="without being taken down"):
        state.open_rehearsal(person.environ)
    assert begin.down(person.folder, person.said.append)
    assert not person.folder.exists() and not Path(daemon.door).parent.exists()


def test_a_rehearsal_ends_with_its_owner(person: Person) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with owner:
        begin.up(person.folder, 1, person.said.append, owner=owner.pid)
        owner.kill()
        owner.wait()
        until(lambda: not state.is_alive(person.folder), LIMIT_S)
    assert person.left() == []


@pytest.mark.parametrize("when", ["pulumi up", "is up"])
def test_ctrl_c_while_it_comes_up_leaves_nothing(person: Person, when: str) -> None:
    def say(line: str) -> None:
        person.said.append(line)
        if when in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin.up(person.folder, 1, say)
    assert person.left() == [] and not person.folder.exists()


def test_a_pulumi_that_is_interrupted_lets_the_next_one_in(person: Person) -> None:
    person.up()
    person.act("stockout")
    person.act("preempt")
    opened = state.open_rehearsal(person.environ)
    waiting = subprocess.Popen(
        ["pulumi", "up", "--refresh", "--yes"], env={**person.environ, **opened.environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert waiting.stdout is not None
    for line in waiting.stdout:
        if "WAITING_FOR_RESOURCES" in line:
            waiting.kill()
            break
    waiting.communicate(timeout=LIMIT_S)
    person.act("restock")
    done = lambda: person.type("pulumi", "up", "--refresh", "--yes").returncode == 0  # noqa: E731
    until(done, LIMIT_S)
    assert len(person.hosts()) == 1


def test_a_slice_size_that_there_is_not_is_refused_with_those_that_there_are(person: Person) -> None:
    with pytest.raises(RehearsalError, match="--hosts 3: .* choose one of 1, 2, 4"):
        person.up(hosts=3)
    assert not person.folder.exists()


def test_an_image_that_the_configuration_names_is_in_the_inventory_and_its_registry_is_here_and_on_the_hosts(
    person: Person,
) -> None:
    person.up(kind="docker")
    said = person.type("pulumi", "stack", "output", "--json", "--stack", "rehearsal")
    repository = json.loads(said.stdout)["image_repository"]
    assert repository.startswith("127.0.0.1:")
    reference = f"{repository}/jax@sha256:{'0' * 64}"
    key = "tpu-stack:images.references.jax"
    for words in (("config", "set", "--path", key, reference), ("up", "--yes")):
        done = person.type("pulumi", *words, "--stack", "rehearsal")
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(state.open_rehearsal(person.environ).inventory_json)["images"] == {"jax": reference}
    (host,) = person.hosts()
    for pulled in (
        person.ssh(host, f"sudo docker pull {reference}"),
        person.type("docker", "pull", reference),
    ):
        assert "manifest" in pulled.stderr and "unknown" in pulled.stderr
    assert person.typed_python("status").stdout.count(repository.partition("/")[0]) == 1
