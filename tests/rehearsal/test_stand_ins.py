"""The stand-ins for gcloud and pulumi, started as a launcher starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rehearsal import state
from rehearsal.daemon.control_socket import Caller, ControlSocket
from rehearsal.state import State
from rehearsal.tpu_api import TpuApi

LIMIT_S = 20.0


class Shell:
    """A shell in which a rehearsal is up. told: what it tells; write it with `tell`."""

    def __init__(self, folder: Path, socket_folder: Path) -> None:
        self.folder = folder
        self.socket = socket_folder / "control"
        self.environ = {
            "PATH": state.stand_ins_first(os.environ["PATH"]),
            state.FOLDER_VARIABLE: str(folder),
            "TPU_STACK_REHEARSAL_PYTHON": sys.executable,
        }

    def tell(self, **changes: Any) -> None:
        told = {"instances": {}, "user": "sa_rehearsal", "inventory": "{}", **changes}
        state.write(
            self.folder, State(phase="ready", pid=os.getpid(), socket=str(self.socket), hosts=1, **told)
        )

    def type(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            words, env=self.environ, input=stdin, capture_output=True, timeout=LIMIT_S, check=False
        )


@pytest.fixture
def shell(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path, tmp_path_factory.mktemp("d"))


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that greets, gives back what it gets until the other side is done, and says goodbye. Its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"hello\n")
                while piece := connection.recv(1 << 16):
                    connection.sendall(piece)
                connection.sendall(b"goodbye\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]


TUNNEL = ("gcloud", "compute", "start-iap-tunnel")
WHERE = ("--listen-on-stdin", "--zone", "us-central1-a", "--project", "my-rehearsal")


def test_a_tunnel_carries_every_byte_both_ways_until_both_are_done(shell: Shell, echo: int) -> None:
    shell.tell(instances={"w-0": "127.0.0.1"})
    sent = bytes(range(256)) * 8000
    done = shell.type(*TUNNEL, "w-0", str(echo), *WHERE, stdin=sent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"hello\n" + sent + b"goodbye\n"


def test_a_tunnel_to_an_instance_that_is_not_there_or_is_down_fails_as_gclouds_does(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shell.tell(instances={"w-0": "127.0.0.1"})
    assert b"4003" in shell.type(*TUNNEL, "w-0", str(port), *WHERE).stderr
    done = shell.type(*TUNNEL, "w-9", "22", *WHERE)
    assert done.returncode == 1 and b"instances/w-9' was not found" in done.stderr


def test_os_login_knows_nobody_before_the_first_key_was_added(shell: Shell, tmp_path: Path) -> None:
    shell.tell()
    login = ("gcloud", "compute", "os-login")
    assert json.loads(shell.type(*login, "describe-profile", "--format=json").stdout) == {"name": "rehearsal"}
    (tmp_path / "key.pub").write_text("ssh-ed25519 BBBB me\n")
    for key in ("--key=ssh-ed25519 AAAA", f"--key-file={tmp_path}/key.pub", "--key=ssh-ed25519 AAAA"):
        assert shell.type(*login, "ssh-keys", "add", key).returncode == 0
    profile = json.loads(shell.type(*login, "describe-profile", "--format=json").stdout)
    assert [account["username"] for account in profile["posixAccounts"]] == ["sa_rehearsal"]
    known = [key["key"] for key in profile["sshPublicKeys"].values()]
    assert known == ["ssh-ed25519 AAAA", "ssh-ed25519 BBBB me"]
    assert shell.type(*login, "ssh-keys", "add").returncode == 1


def test_gcloud_tells_its_version_and_the_state_of_a_slice_and_refuses_the_rest(shell: Shell) -> None:
    told = json.loads(shell.type("gcloud", "version", "--format=json").stdout)
    assert told["Google Cloud SDK"] == "478.0.0" and "stand-in" in told["rehearsal"]
    describe = ("gcloud", "compute", "tpus", "tpu-vm", "describe", "n", "--zone=us-central1-a", "--project=p")
    with TpuApi() as api:
        shell.tell(tpu_url=api.url)
        done = shell.type(*describe, "--format=value(state)")
    assert done.returncode == 1 and b"NOT_FOUND" in done.stderr
    done = shell.type("gcloud", "compute", "instances", "delete", "w-0")
    assert done.returncode == 1 and b"the rehearsal's stand-in" in done.stderr


@pytest.mark.parametrize("line", ["pulumi stack output --json", "gcloud compute os-login describe-profile"])
def test_without_a_rehearsal_they_say_how_to_get_one(shell: Shell, line: str) -> None:
    done = shell.type(*line.split())
    assert done.returncode != 0 and b"fab rehearsal up" in done.stderr


def test_pulumi_says_what_the_daemon_says_and_ends_as_it_ends(shell: Shell) -> None:
    def answer(do: str, given: Mapping[str, Any], caller: Caller) -> Any:
        words = given["arguments"]
        if "dev" in words:
            raise state.RehearsalError("no stack named 'dev' found")
        caller.say(f"doing {do} {' '.join(words)}")
        return {"code": 255, "stdout": "out\n"}

    shell.tell()
    with ControlSocket(shell.socket, answer):
        done = shell.type("pulumi", "up", "--yes", "a b")
        refused = shell.type("pulumi", "stack", "output", "--json", "--stack", "dev")
    assert (done.returncode, done.stdout, done.stderr) == (255, b"doing pulumi up --yes a b\nout\n", b"")
    assert (refused.returncode, refused.stdout) == (255, b"")
    assert refused.stderr == b"error: no stack named 'dev' found\n"
