"""A guard is there for the one case in which nobody else is: its supervisor was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import os, signal, socket, sys, time
from host.agent.supervisor import stand_guard
listener = socket.create_server(("127.0.0.1", 0))
place = sys.argv[1]
def avenge():
    with open(place + "/avenged", "w") as file:
        file.write(str(os.getpid()))
    while os.path.isdir(place) and not os.path.exists(place + "/enough"):
        time.sleep(0.01)
dismiss = stand_guard(avenge, [listener.fileno()])
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
if sys.argv[2] == "well":
    dismiss()
else:
    os.killpg(0, signal.SIGKILL)
"""


@pytest.fixture
def supervisor(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        yield process
        (tmp_path / "enough").touch()


@pytest.mark.parametrize("supervisor", ["well"], indirect=True)
def test_a_guard_that_is_dismissed_does_nothing(supervisor: Any, tmp_path: Path) -> None:
    # The guard has the supervisor's output open too: that this returns says that both have ended.
    supervisor.communicate("\n", timeout=20)
    assert supervisor.returncode == 0
    assert not (tmp_path / "avenged").exists()


@pytest.mark.parametrize("supervisor", ["killed"], indirect=True)
def test_a_guard_acts_when_the_whole_session_of_its_supervisor_was_killed_and_holds_no_port(
    supervisor: Any, tmp_path: Path, until: Any
) -> None:
    port = int(supervisor.stdout.readline())
    supervisor.stdin.write("\n")
    supervisor.stdin.flush()
    assert supervisor.wait(20) == -signal.SIGKILL
    until(lambda: (tmp_path / "avenged").exists() and (tmp_path / "avenged").read_text() != "")
    os.kill(int((tmp_path / "avenged").read_text()), 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
