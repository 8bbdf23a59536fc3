"""Faults of machines whose effect nothing else shows exactly; of the others, tests/rehearsal/faults sees the effect."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
from collections.abc import Iterator
from typing import IO, Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test may have to build the image

Lab = Any  # conftest.py's; a conftest is nothing to import from


def reachable(address: str) -> bool:
    """False where nothing at all comes back; a refusal is an answer, and none of what is asked for here."""
    try:
        socket.create_connection((address, 22), timeout=1.0).close()
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[tuple[IO[bytes], IO[bytes], subprocess.Popen[bytes]]]:
    """A process with its input and output; it is killed at the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin and process.stdout
        try:
            yield process.stdin, process.stdout, process
        finally:
            process.kill()


def comes(output: IO[bytes], within_s: float) -> bytes:
    """A line, or nothing where none comes in that time."""
    return output.readline() if select.select([output], [], [], within_s)[0] else b""


def test_a_machine_that_is_cut_off_tells_nobody_and_its_connections_go_on_when_it_is_healed(lab: Lab) -> None:
    peer = f"timeout 2 bash -c 'exec 3<>/dev/tcp/{lab.addresses['w-0']}/22'"
    echo = lab.ssh_command("w-0", "tee ~/received")
    tick = lab.ssh_command("w-0", "while echo tick; do sleep 0.2; done")
    with running(echo) as (told, heard, echoing), running(tick) as (_, ticks, ticking):
        told.write(b"before\n")
        assert (comes(heard, 10), comes(ticks, 10)) == (b"before\n", b"tick\n")
        lab.faults.cut("w-0")
        try:
            told.write(b"meanwhile\n")
            while comes(ticks, 0):  # what had come before
                pass
            assert comes(ticks, 1.0) == b""
            container = lab.machines.find("w-0")
            assert container.exec_run("cat /home/sa_rehearsal/received").output == b"before\n"
            assert not reachable(lab.addresses["w-0"])
            assert lab.try_ssh("w-1", peer).returncode == 124  # timeout's own: nothing came back
            assert reachable(lab.addresses["w-1"])
            assert (echoing.poll(), ticking.poll()) == (None, None)
            lab.faults.cut("w-0")
        finally:
            lab.faults.heal("w-0")
        assert (comes(heard, 20), comes(ticks, 20)) == (b"meanwhile\n", b"tick\n")
        assert lab.ssh("w-0", "echo back") == "back"
        assert lab.ssh("w-1", f"{peer}; echo $?") == "0"
