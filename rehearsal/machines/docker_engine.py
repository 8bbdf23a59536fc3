"""Docker on this machine: whether it is there, its errors in this project's words, labels, files, waiting."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping

import docker
import docker.errors
import requests
from docker.models.containers import Container

# Everything of a rehearsal carries it; its value is the rehearsal's name.
LABEL = "tpu-stack.rehearsal"
ANSWER_LIMIT_S = 300
"""Docker removes a host with the gigabytes of its own images before it answers, and makes no other one meanwhile: on a
busy machine that took over a minute."""
LOOK_AGAIN_S = 0.05
BANNER_LIMIT_S = 2.0
LAST_LINES = 15

HOW_TO_GET = (
    "the rehearsal's hosts are Docker containers: install Docker (Debian, Ubuntu: apt-get install docker.io; others:"
    " https://docs.docker.com/engine/install), start it (systemctl start docker), and be allowed to use it"
    " (usermod --append --groups docker $USER, then log in again)"
)


class MachinesError(Exception):
    """An error of Docker or of a machine: what was tried, the answer, and the remedy."""


def connect(limit_s: int = ANSWER_LIMIT_S) -> docker.DockerClient:
    """A client whose engine answers, with this time limit. Raises MachinesError, which says how to get Docker."""
    try:
        client = docker.from_env(timeout=limit_s)
        client.ping()
    except (docker.errors.DockerException, requests.RequestException) as error:
        address = os.environ.get("DOCKER_HOST", "/var/run/docker.sock")
        raise MachinesError(f"Docker does not answer at {address} ({_short(error)}); {HOW_TO_GET}") from None
    return client


@contextlib.contextmanager
def asking(action: str) -> Iterator[None]:
    """Turn Docker's errors during `action` into a MachinesError that names it."""
    try:
        yield
    except docker.errors.ContainerError as error:
        output = (
            error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else str(error.stderr)
        )
        raise MachinesError(f"{action}: exit code {error.exit_status}: {output.strip()[-500:]}") from None
    except docker.errors.DockerException as error:
        raise MachinesError(f"{action}: {_short(error)}") from None
    except requests.Timeout:
        raise MachinesError(f"{action}: Docker has not answered for {ANSWER_LIMIT_S} s") from None
    except requests.RequestException as error:
        raise MachinesError(
            f"{action}: the connection to Docker broke ({_short(error)}); is it running?"
        ) from None


def labels(rehearsal: str, **more: str) -> dict[str, str]:
    """The labels of a rehearsal's container, network or volume; further labels begin with the rehearsal's."""
    return {LABEL: rehearsal, **{f"{LABEL}.{key}": value for key, value in more.items()}}


def archive(contents: Mapping[str, tuple[bytes, int]]) -> bytes:
    """Files of root's, path → (content, mode), as Docker takes them. Always the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for path, (content, mode) in sorted(contents.items()):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), mode
            packed.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def wait_for(holds: Callable[[], bool], limit_s: float, container: Container, awaited: str) -> None:
    """Wait until `holds` returns true. Raises MachinesError after the limit, or if the container has ended."""
    until = time.monotonic() + limit_s
    while not holds():
        container.reload()
        ended = container.status not in ("created", "running", "restarting")
        if ended or time.monotonic() > until:
            output = container.logs(tail=LAST_LINES).decode(errors="replace").strip()
            state = f"its container is {container.status}" if ended else f"it does not after {limit_s:g} s"
            raise MachinesError(
                f"{awaited} should answer, but {state}; its last output:\n{output or '(nothing)'}"
            )
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
