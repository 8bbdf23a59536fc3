"""The stand-ins for gcloud and pulumi, started as a launcher starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rehearsal import state
from rehearsal.state import State

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


TUNNEL = ("gcloud", "compute", "start-iap-tunnel")
WHERE = ("--listen-on-stdin", "--zone", "us-central1-a", "--project", "my-rehearsal")


def test_a_tunnel_to_an_instance_that_is_not_there_or_is_down_fails_as_gclouds_does(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shell.tell(instances={"w-0": "127.0.0.1"})
    assert b"4003" in shell.type(*TUNNEL, "w-0", str(port), *WHERE).stderr
    done = shell.type(*TUNNEL, "w-9", "22", *WHERE)
    assert done.returncode == 1 and b"instances/w-9' was not found" in done.stderr


@pytest.mark.parametrize("line", ["pulumi stack output --json", "gcloud compute os-login describe-profile"])
def test_without_a_rehearsal_they_say_how_to_get_one(shell: Shell, line: str) -> None:
    done = shell.type(*line.split())
    assert done.returncode != 0 and b"fab rehearsal up" in done.stderr
