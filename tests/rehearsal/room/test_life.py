"""A rehearsal's life with real machines and the real engine, from outside as `fab rehearsal` lives it.

Slow: each takes some ten seconds, and the first, on a new computer, the minutes in which the hosts' image is built."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rehearsal import state
from rehearsal.machines import docker_engine, removal
from rehearsal.room import begin
from rehearsal.state import RehearsalError
from tests.rehearsal.waiting import until
from tools import stand_in_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 120.0
HOSTS = "import json, sys; [print(h['name']) for h in json.load(sys.stdin)['slices'][0]['hosts']]"


class Person:
    """Somebody at a terminal. `said`: what the rehearsal told."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.environ = {**environ, state.FOLDER_VARIABLE: str(folder)}
        self.said: list[str] = []

    def up(self, hosts: int = 1) -> None:
        begin.up(self.folder, hosts, self.said.append)

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        """In a shell that has the rehearsal's environment."""
        opened = state.open_rehearsal(self.environ)
        return subprocess.run(
            words, env={**self.environ, **opened.environment}, capture_output=True, text=True, timeout=LIMIT_S,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def hosts(self) -> dict[str, str]:
        """Name → host key, as the inventory has them."""
        (one,) = json.loads(state.open_rehearsal(self.environ).inventory_json)["slices"]
        return {host["name"]: host["host_keys"][0] for host in one["hosts"]}

    def ssh(self, name: str, command: str) -> subprocess.CompletedProcess[str]:
        """Through the stand-in for gcloud, with the pinned key."""
        known = self.folder / "known_hosts"
        known.write_text("".join(f"{host} {key}\n" for host, key in self.hosts().items()))
        return self.type(
            "ssh", "-F", "none", "-i", str(self.folder / "ssh" / "id_ed25519"), "-o", f"UserKnownHostsFile={known}",
            "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
            "-o", "ProxyCommand=gcloud compute start-iap-tunnel %h 22 --listen-on-stdin --zone z --project p",
            f"sa_rehearsal@{name}", command,
        )  # fmt: skip

    def act(self, *words: str) -> str:
        done = self.typed_python(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def typed_python(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import os, sys; from rehearsal.room.person import Typed, carry_out;"
            "carry_out(Typed(action=sys.argv[1], hosts=1, host=''.join(sys.argv[2:])), os.environ, print)"
        )
        return subprocess.run(
            [sys.executable, "-c", program, *words], cwd=ROOT, env=self.environ, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Of Docker's things, what carries this rehearsal's label."""
        client = docker_engine.connect()
        try:
            return [name for _, name in removal.left(client, state.name_of(self.folder))]
        finally:
            client.close()


@pytest.fixture(scope="module")
def environ() -> Iterator[Mapping[str, str]]:
    """With a base image for the hosts that this computer can get; the daemon inherits it."""
    base = stand_in_base.chosen(os.environ, print)
    with pytest.MonkeyPatch.context() as patch:
        if base:
            patch.setenv(stand_in_base.VARIABLE, base)
        yield dict(os.environ)


@pytest.fixture
def person(tmp_path: Path, environ: Mapping[str, str]) -> Iterator[Person]:
    made = Person(tmp_path / "rehearsal", environ)
    yield made
    begin.down(made.folder, made.said.append)


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
