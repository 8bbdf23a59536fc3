"""Docker on this machine: whether it is there, its errors in this project's words, waiting for a container."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator

import docker
import docker.errors
import requests
from docker.models.containers import Container

# Everything of a rehearsal carries it; its value is the rehearsal's name.
LABEL = "tpu-stack.rehearsal"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
ANSWER_LIMIT_S = 60
LOOK_AGAIN_S = 0.05
BANNER_LIMIT_S = 2.0
LAST_LINES = 15

HOW_TO_GET = (
    "the rehearsal's hosts are Docker containers: install Docker (Debian, Ubuntu: apt-get install docker.io; others:"
    " https://docs.docker.com/engine/install), start it (systemctl start docker), and be allowed to use it"
    " (usermod --append --groups docker $USER, then log in again)"
)


class MachinesError(Exception):
    """What was asked, what Docker or the machine said to it, and what to do."""


def connect(limit_s: int = ANSWER_LIMIT_S) -> docker.DockerClient:
    """A client that has been answered, and waits so long each time. Raises MachinesError: how to get Docker."""
    try:
        client = docker.from_env(timeout=limit_s)
        client.ping()
    except (docker.errors.DockerException, requests.RequestException) as error:
        where = os.environ.get("DOCKER_HOST", "/var/run/docker.sock")
        raise MachinesError(f"Docker does not answer at {where} ({_short(error)}); {HOW_TO_GET}") from None
    return client


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """What Docker refuses while `what` is done becomes a MachinesError that says so."""
    try:
        yield
    except docker.errors.ContainerError as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        raise MachinesError(f"{what}: exit code {error.exit_status}: {said.strip()[-500:]}") from None
    except docker.errors.DockerException as error:
        raise MachinesError(f"{what}: {_short(error)}") from None
    except requests.Timeout:
        raise MachinesError(f"{what}: Docker has not answered for {ANSWER_LIMIT_S} s") from None
    except requests.RequestException as error:
        raise MachinesError(
            f"{what}: the connection to Docker broke ({_short(error)}); is it running?"
        ) from None


def checked_name(name: str, what: str) -> str:
    """The name, if containers may be called so. Raises MachinesError."""
    if not NAME.fullmatch(name):
        raise MachinesError(
            f"{what} {name!r}: 1 to 40 of a-z, 0-9 and - are allowed, no - at either end; choose another name"
        )
    return name


def labels(rehearsal: str, **more: str) -> dict[str, str]:
    """Of a thing of that rehearsal; what else there is to say of it has the label's name before it."""
    return {LABEL: rehearsal, **{f"{LABEL}.{key}": value for key, value in more.items()}}


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


def _short(error: Exception) -> str:
    explanation = getattr(error, "explanation", None)
    return str(explanation or error).strip()[-500:]
