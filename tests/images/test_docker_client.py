"""No Docker, or none that answers: said in words that help."""

import gc
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.errors import UNAVAILABLE, WRONG_REQUEST, RequestError, Unreachable, exit_code_for
from images import docker_client


@pytest.mark.parametrize(
    ("error", "platform", "words"),
    [
        (FileNotFoundError("No such file or directory"), "linux", "apt-get install docker.io"),
        (FileNotFoundError(), "darwin", "brew install"),
        (Exception("('Connection aborted.', PermissionError(13, 'Permission denied'))"), "linux", "usermod"),
        (Exception("ConnectionRefusedError(111, 'Connection refused')"), "linux", "does not run"),
    ],
)
def test_why_docker_does_not_answer_is_told_with_how_to_get_an_answer(
    error: Exception, platform: str, words: str
) -> None:
    refusal = docker_client.connection_error(error, {}, platform)
    assert words in str(refusal) and "/var/run/docker.sock" in str(refusal)
    assert exit_code_for(refusal) == (UNAVAILABLE if words == "does not run" else WRONG_REQUEST)


def test_a_docker_that_is_installed_and_does_not_run_is_an_outage_though_its_socket_is_gone(
    tmp_path: Path,
) -> None:
    environ = {"PATH": docker_of(tmp_path / "bin", "28.2.2", buildx=False)}
    refusal = docker_client.connection_error(FileNotFoundError("No such file or directory"), environ, "linux")
    assert "does not run" in str(refusal) and isinstance(refusal, Unreachable)


# docker-py leaves the socket that it could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("listens", [False, True])
def test_a_socket_that_nobody_answers_on_is_an_error_and_no_traceback(tmp_path: Path, listens: bool) -> None:
    path = tmp_path / "docker.sock"
    if listens:  # and is closed: the file stays
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
    with pytest.raises(Unreachable, match="Docker does not answer at unix://.*DOCKER_HOST names"):
        docker_client.connect({**os.environ, "DOCKER_HOST": f"unix://{path}"})
    gc.collect()


@pytest.mark.parametrize(
    ("address", "words", "code"),
    [
        ("nonsense", "DOCKER_HOST is no address of a Docker engine: nonsense", WRONG_REQUEST),
        ("ftp://x:1", "DOCKER_HOST is no address", WRONG_REQUEST),
        ("tcp://h:port", "DOCKER_HOST is no address", WRONG_REQUEST),
        ("ssh://127.0.0.1:1", "Docker does not answer at ssh://127.0.0.1:1", UNAVAILABLE),
    ],
)
def test_an_address_that_is_none_is_a_mistake_and_one_that_nobody_answers_at_an_outage(
    address: str, words: str, code: int
) -> None:
    with pytest.raises(RequestError, match=words) as refusal:
        docker_client.connect({**os.environ, "DOCKER_HOST": address})
    assert exit_code_for(refusal.value) == code


def docker_of(folder: Path, version: str, *, buildx: bool) -> str:
    """A `docker` of that version; its folder."""
    folder.mkdir()
    said = f'--version) echo "Docker version {version}, build 1" ;; *) echo v0.1; exit {int(not buildx)} ;;'
    answers = f'case "$1" in {said} esac'
    (folder / "docker").write_text(f"#!/bin/sh\n{answers}\n")
    (folder / "docker").chmod(0o755)
    return str(folder)


def engine(version: str) -> Any:
    return SimpleNamespace(version=lambda: {"Version": version})


def test_the_first_docker_on_path_that_has_buildkit_is_taken(tmp_path: Path) -> None:
    bare = docker_of(tmp_path / "bare", "28.2.2", buildx=False)
    own = docker_of(tmp_path / "own", "20.10.24+dfsg1", buildx=False)
    plugin = docker_of(tmp_path / "plugin", "28.2.2", buildx=True)
    for path, taken in (([bare, own, plugin], own), ([bare, plugin, own], plugin)):
        environ = {"PATH": os.pathsep.join(path)}
        assert docker_client.buildkit(engine("20.10.24+dfsg1"), environ) == f"{taken}/docker"
    with pytest.raises(
        RequestError, match=r"bare/docker: Docker version 28\.2\.2.*apt-get install docker-buildx"
    ):
        docker_client.buildkit(engine("28.2.2"), {"PATH": bare})
    with pytest.raises(RequestError, match="Docker's engine is 19.03.5, .* from 20.10 on"):
        docker_client.buildkit(engine("19.03.5"), {"PATH": own})
    with pytest.raises(RequestError, match="docker is not on PATH"):
        docker_client.buildkit(engine("28.2.2"), {"PATH": str(tmp_path)})


def test_what_builds_asks_the_engine_that_is_asked_for_images_whatever_else_was_chosen() -> None:
    made = docker_client.command_environment({"DOCKER_CONTEXT": "other", "BUILDX_BUILDER": "far", "A": "b"})
    assert "DOCKER_CONTEXT" not in made
    assert (made["BUILDX_BUILDER"], made["DOCKER_BUILDKIT"], made["A"]) == ("default", "1", "b")
    assert made["DOCKER_HOST"] == "unix:///var/run/docker.sock"
    assert docker_client.command_environment({"DOCKER_HOST": "tcp://h:1"})["DOCKER_HOST"] == "tcp://h:1"
