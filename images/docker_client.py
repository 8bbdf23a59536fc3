"""Docker on this machine: its API, a `docker` that has BuildKit, and their errors as messages for the user."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterable, Iterator, Mapping

import docker
import docker.errors
import paramiko
import requests
import urllib3.exceptions

from contracts.errors import DONE, FAILED, UNAVAILABLE, RequestError, Unreachable

ANSWER_LIMIT_S = 60
END_LIMIT_S = 20
LAST_BYTES = 8192
"""How much of Docker's output is kept, for the reason of a failure."""
SOCKET = "/var/run/docker.sock"
OLDEST_ENGINE = (20, 10)
"""From there on an engine's BuildKit has cache mounts without a frontend from a registry."""
FIRST_WITHOUT_OWN_BUILDKIT = 23
"""From there on `docker build` needs the plugin buildx; before it is in `docker` itself."""

LINES_OF_AN_END = 40
"""BuildKit ends with the last ten lines of the step that failed, and that place in the Dockerfile."""
NO_NEWS = "Error while fetching server API version: "
# Colours and whatever else would move a terminal's cursor.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


AWAY = (
    *("no such host", "connection refused", "connection reset", "connection timed out", "i/o timeout"),
    *("no route to host", "network is unreachable", "tls handshake timeout", "context deadline exceeded"),
    *("bad gateway", "service unavailable", "gateway timeout", "toomanyrequests"),
    *("temporary failure resolving", "could not connect to", "failed to establish a new connection"),
    *("dns error", "error sending request", "read timed out", "cannot connect to the docker daemon"),
)
"""What Docker, apt, pip and uv say of a server that does not answer, in lower case."""


class ImageError(Exception):
    """Something about one image failed although the request was right; the message says what, why, and what to do."""

    exit_code = FAILED


class ImageUnreachable(ImageError):
    """A registry or an index of packages did not answer: the same request may succeed later."""

    exit_code = UNAVAILABLE


def exit_code_of(errors: Iterable[ImageError]) -> int:
    """Return the exit code of a command that has tried several images; what is no outage counts first."""
    return min((error.exit_code for error in errors), default=DONE)


def away_line(output: str) -> str | None:
    """Return the last line that says that a server does not answer; None: none of the last LINES_OF_AN_END does, and
    what comes before them was tried again. Pure."""
    lines = (line.strip() for line in reversed(output.splitlines()[-LINES_OF_AN_END:]))
    return next((line for line in lines if any(words in line.lower() for words in AWAY)), None)


def connect(environ: Mapping[str, str] = os.environ) -> docker.DockerClient:
    """Return a client that has been answered.

    Raises:
        Unreachable: it does not run.
        RequestError: Docker is not there, or is not for this user; each with what to do.
    """
    try:
        client = docker.from_env(timeout=ANSWER_LIMIT_S, environment=dict(environ))
    # Of ssh:// and of an address that is none, others' errors come through.
    except (
        docker.errors.DockerException, requests.RequestException, paramiko.SSHException, OSError, ValueError
    ) as error:  # fmt: skip
        raise connection_error(error, environ) from None
    try:
        client.ping()
    except (docker.errors.DockerException, requests.RequestException) as error:
        client.close()
        raise connection_error(error, environ) from None
    return client


def connection_error(
    error: Exception, environ: Mapping[str, str], platform: str = sys.platform
) -> RequestError:
    """Return why Docker does not answer, and how to get an answer."""
    address = environ.get("DOCKER_HOST") or SOCKET
    message = short(error)
    start = "open Docker Desktop" if platform == "darwin" else "sudo systemctl start docker"
    is_local = "://" not in address or address.startswith("unix:")
    if is_local and ("PermissionError" in message or "Permission denied" in message):
        return RequestError(
            f"Docker at {address} is not for this user; `sudo usermod --append --groups docker $USER`, "
            "then log in again"
        )
    if "DOCKER_HOST" in environ and ("Invalid bind address" in message or isinstance(error, ValueError)):
        return RequestError(
            f"DOCKER_HOST is no address of a Docker engine: {address} ({message}); write unix:///var/run/docker.sock, "
            "tcp://HOST:PORT or ssh://USER@HOST, or unset it"
        )
    if "DOCKER_HOST" in environ:
        return Unreachable(
            f"Docker does not answer at {address}, which $DOCKER_HOST names ({message}); start it there, "
            "or unset DOCKER_HOST"
        )
    if "Connection refused" in message or shutil.which("docker", path=environ.get("PATH", "")) is not None:
        return Unreachable(f"Docker is installed but does not run: nobody answers at {address}; {start}")
    get = (
        "brew install --cask docker, then open Docker Desktop"
        if platform == "darwin"
        else "sudo apt-get install docker.io (Debian, Ubuntu), others https://docs.docker.com/engine/install"
    )
    return RequestError(
        f"there is no Docker at {address}, and images are built with it: {get}; where it is installed: {start}"
    )


def buildkit(client: docker.DockerClient, environ: Mapping[str, str]) -> str:
    """Return the first `docker` on PATH whose `docker build` is BuildKit's.

    Raises:
        RequestError: the engine is too old, or no command line there is complete; with what to install.
    """
    engine = str(client.version()["Version"])
    if _numbers(engine)[:2] < OLDEST_ENGINE:
        oldest = ".".join(map(str, OLDEST_ENGINE))
        raise RequestError(
            f"Docker's engine is {engine}, and images are built with BuildKit, which it has from {oldest} on; "
            "install a newer one: https://docs.docker.com/engine/install"
        )
    versions: dict[str, str] = {}
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        command = shutil.which("docker", path=folder)
        if command is None or command in versions:
            continue
        versions[command] = version = _answer([command, "--version"], environ)
        own = OLDEST_ENGINE <= _numbers(version)[:2] < (FIRST_WITHOUT_OWN_BUILDKIT,)
        if own or _answer([command, "buildx", "version"], environ):
            return command
    if not versions:
        raise RequestError(
            "docker is not on PATH, and images are built with it: sudo apt-get install docker-cli"
        )
    found_commands = "; ".join(
        f"{command}: {version_text or 'does not run'}" for command, version_text in versions.items()
    )
    raise RequestError(
        f"no docker on PATH has BuildKit ({found_commands}); install its plugin buildx: sudo apt-get install "
        "docker-buildx, or docker-buildx-plugin where Docker came from Docker's own packages"
    )


def command_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of `docker`: BuildKit, in the engine that `connect` asks, whatever else was chosen."""
    inherited = {name: value for name, value in environ.items() if name != "DOCKER_CONTEXT"}
    return {
        **inherited,
        "DOCKER_HOST": environ.get("DOCKER_HOST") or f"unix://{SOCKET}",
        "DOCKER_BUILDKIT": "1",
        "BUILDX_BUILDER": "default",
        "BUILDX_NO_DEFAULT_ATTESTATIONS": "1",
    }


def _answer(command: list[str], environ: Mapping[str, str]) -> str:
    """Return what it prints; empty where it fails."""
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=ANSWER_LIMIT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _numbers(version: str) -> tuple[int, ...]:
    """(20, 10, 24) of "Docker version 20.10.24+dfsg1"; empty where there are none."""
    match = re.search(r"\d+(?:\.\d+)+", version)
    return tuple(map(int, match[0].split("."))) if match else ()


@contextlib.contextmanager
def asking(action: str) -> Iterator[None]:
    """Turn Docker's errors during `action` into a RequestError that names it, Unreachable where something is away."""
    try:
        yield
    except docker.errors.DockerException as error:
        if (program := missing_helper(str(error))) is not None:
            raise RequestError(
                f"{action}: Docker's configuration (~/.docker/config.json) asks {program} for passwords, and that "
                f"fails: {short(error)}; install it, or take its entry out of that file"
            ) from None
        kind = Unreachable if away_line(str(error)) else RequestError
        raise kind(f"{action}: {short(error)}") from None
    except (requests.Timeout, urllib3.exceptions.TimeoutError):
        raise Unreachable(
            f"{action}: Docker has said nothing for too long; is its disk full, or the machine?"
        ) from None
    # Of an answer that is read piece by piece urllib3's own errors come through.
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise Unreachable(
            f"{action}: the connection to Docker broke ({short(error)}); is it still running?"
        ) from None


def missing_helper(message: str) -> str | None:
    """Return the program that keeps Docker's passwords, if it is what failed. Pure."""
    match = re.search(r"docker-credential-[\w-]+", message)
    return match[0] if match else "a program" if "Credentials store error" in message else None


def shown(command: list[str], stdin: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """Run `docker` with its display on our stderr, as a terminal if that is one. Returns exit code and output."""
    on_terminal = sys.stderr.isatty()
    our_end, its_end = os.openpty() if on_terminal else os.pipe()
    if on_terminal:
        termios.tcsetwinsize(its_end, termios.tcgetwinsize(sys.stderr))
    process = subprocess.Popen(command, stdin=stdin, stdout=its_end, stderr=its_end, env=dict(environ))
    os.close(its_end)
    last = b""
    try:
        # The end of a terminal is an error, that of a pipe is nothing.
        with contextlib.suppress(OSError):
            while piece := os.read(our_end, 2**16):
                last = (last + piece)[-LAST_BYTES:]
                sys.stderr.write(piece.decode(errors="replace"))
                sys.stderr.flush()
        return process.wait(), clean(last.decode(errors="replace").replace("\r", "\n"))
    finally:
        os.close(our_end)
        if process.poll() is None:  # interrupted: Docker ends what a client that goes has asked for
            process.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_LIMIT_S)
            finally:  # a second signal does not leave it behind
                process.kill()
                process.wait()


def short(error: BaseException) -> str:
    """Return the end of what an error says, in one line."""
    explanation = getattr(error, "explanation", None)
    return " ".join(str(explanation or error).removeprefix(NO_NEWS).split())[-500:]


def clean(text: str) -> str:
    """The text without the control sequences that move a terminal's cursor."""
    return CONTROL.sub("", text)
