"""Docker on this machine: asked once whether it is there, and what it refuses in this project's words."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

import docker
import docker.errors
import requests
import urllib3.exceptions

from contracts.errors import RequestError

ANSWER_LIMIT_S = 60
LONG_LIMIT_S = 1800
"""Of an answer that is worked on: no more than so long between two pieces of it."""

NO_NEWS = "Error while fetching server API version: "


def connect(environ: Mapping[str, str] = os.environ) -> docker.DockerClient:
    """A client that has been answered.

    Raises:
        RequestError: Docker is not there, does not run, or is not for this user; each with what to do.
    """
    try:
        client = docker.from_env(timeout=ANSWER_LIMIT_S, environment=dict(environ))
    except (docker.errors.DockerException, requests.RequestException, ValueError) as error:
        raise RequestError(unreachable(error, environ)) from None
    try:
        client.ping()
    except (docker.errors.DockerException, requests.RequestException) as error:
        client.close()
        raise RequestError(unreachable(error, environ)) from None
    return client


def unreachable(error: Exception, environ: Mapping[str, str], platform: str = sys.platform) -> str:
    """Why Docker does not answer, and how to get an answer. Pure."""
    where = environ.get("DOCKER_HOST") or "/var/run/docker.sock"
    said = short(error)
    start = "open Docker Desktop" if platform == "darwin" else "sudo systemctl start docker"
    if "PermissionError" in said or "Permission denied" in said:
        return (
            f"Docker at {where} is not for this user; `sudo usermod --append --groups docker $USER`, "
            "then log in again"
        )
    if "DOCKER_HOST" in environ:
        return (
            f"Docker does not answer at {where}, which $DOCKER_HOST names ({said}); start it there, "
            "or unset DOCKER_HOST"
        )
    if "Connection refused" in said:
        return f"Docker is installed but does not run: nobody answers at {where}; {start}"
    get = (
        "brew install --cask docker, then open Docker Desktop"
        if platform == "darwin"
        else "sudo apt-get install docker.io (Debian, Ubuntu), others https://docs.docker.com/engine/install"
    )
    return (
        f"there is no Docker at {where}, and images are built with it: {get}; where it is installed: {start}"
    )


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """What Docker refuses while `what` is done becomes a RequestError that says so."""
    try:
        yield
    except docker.errors.DockerException as error:
        if (program := missing_helper(error)) is not None:
            raise RequestError(
                f"{what}: Docker's configuration (~/.docker/config.json) asks {program} for passwords, and that fails:"
                f" {short(error)}; install it, or take its entry out of that file"
            ) from None
        raise RequestError(f"{what}: {short(error)}") from None
    except (requests.Timeout, urllib3.exceptions.TimeoutError):
        raise RequestError(
            f"{what}: Docker has said nothing for too long; is its disk full, or the machine?"
        ) from None
    # Of an answer that is read piece by piece urllib3's own errors come through.
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise RequestError(
            f"{what}: the connection to Docker broke ({short(error)}); is it still running?"
        ) from None


def missing_helper(error: Exception) -> str | None:
    """The program that keeps Docker's passwords, where it is that which failed. Pure."""
    words = str(error).replace("'", " ").replace('"', " ").split()
    found = [word for word in words if word.startswith("docker-credential-")]
    if found:
        return found[0].strip(".,:;()")
    return "a program" if "Credentials store error" in str(error) else None


@contextlib.contextmanager
def patient(client: docker.DockerClient, limit_s: float = LONG_LIMIT_S) -> Iterator[None]:
    """Within it Docker may take so long for an answer."""
    before = client.api.timeout
    client.api.timeout = limit_s
    try:
        yield
    finally:
        client.api.timeout = before


def short(error: BaseException) -> str:
    """The end of what an error says, in one line."""
    explanation = getattr(error, "explanation", None)
    return " ".join(str(explanation or error).removeprefix(NO_NEWS).split())[-500:]
