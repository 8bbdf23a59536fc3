"""Waits for what a container is to do, with a limit, and with the container's last words where it does not."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from docker.models.containers import Container

from rehearsal.machines.errors import MachinesError

LOOK_AGAIN_S = 0.05
BANNER_LIMIT_S = 2.0
LAST_LINES = 15


def wait_for(holds: Callable[[], bool], limit_s: float, container: Container, what: str) -> None:
    """Returns once it holds. Raises MachinesError after the limit, or when the container has ended."""
    until = time.monotonic() + limit_s
    while not holds():
        container.reload()
        ended = container.status not in ("created", "running", "restarting")
        if ended or time.monotonic() > until:
            said = container.logs(tail=LAST_LINES).decode(errors="replace").strip()
            how = f"its container is {container.status}" if ended else f"it does not after {limit_s:g} s"
            raise MachinesError(f"{what} should answer, but {how}; it said last:\n{said or '(nothing)'}")
        time.sleep(LOOK_AGAIN_S)


def shows_ssh(address: str, port: int = 22) -> bool:
    """Whether an sshd greets there."""
    try:
        with socket.create_connection((address, port), timeout=BANNER_LIMIT_S) as connection:
            connection.settimeout(BANNER_LIMIT_S)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
