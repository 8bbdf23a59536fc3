"""Docker on this machine: asked once whether it is there, and its errors in this project's words."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import docker
import docker.errors
import requests

from rehearsal.machines.errors import MachinesError

# Everything of a rehearsal carries it; its value is the rehearsal's name.
LABEL = "tpu-stack.rehearsal"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
ANSWER_LIMIT_S = 60

HOW_TO_GET = (
    "the rehearsal's hosts are Docker containers: install Docker (Debian, Ubuntu: apt-get install docker.io; others:"
    " https://docs.docker.com/engine/install), start it (systemctl start docker), and be allowed to use it"
    " (usermod --append --groups docker $USER, then log in again)"
)


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


def _short(error: Exception) -> str:
    explanation = getattr(error, "explanation", None)
    return str(explanation or error).strip()[-500:]
