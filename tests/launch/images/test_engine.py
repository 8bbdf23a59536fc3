"""No Docker, or none that answers: said in words that help."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path

import docker.errors
import pytest

from contracts.errors import RequestError
from launch.images import engine


def test_without_a_daemon_it_is_said_how_to_get_one() -> None:
    said = engine.unreachable(FileNotFoundError("No such file or directory"), {}, "linux")
    assert "there is no Docker at /var/run/docker.sock" in said
    assert "apt-get install docker.io" in said
    assert "brew install" in engine.unreachable(FileNotFoundError(), {}, "darwin")


def test_a_daemon_that_is_not_for_this_user_is_told_from_one_that_is_not_there() -> None:
    said = engine.unreachable(
        Exception("('Connection aborted.', PermissionError(13, 'Permission denied'))"), {}
    )
    assert "usermod --append --groups docker" in said
    assert "does not run" in engine.unreachable(
        Exception("ConnectionRefusedError(111, 'Connection refused')"), {}
    )


# docker-py leaves the socket that it could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("listens", [False, True])
def test_a_socket_that_nobody_answers_on_is_an_error_and_no_traceback(tmp_path: Path, listens: bool) -> None:
    path = tmp_path / "docker.sock"
    if listens:  # and is closed: the file stays
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))
    with pytest.raises(RequestError, match="Docker does not answer at unix://.*DOCKER_HOST names"):
        engine.connect({**os.environ, "DOCKER_HOST": f"unix://{path}"})
    gc.collect()


def test_what_keeps_dockers_passwords_is_named_when_it_is_that_which_fails() -> None:
    error = docker.errors.DockerException(
        "Credentials store error: StoreError('docker-credential-gcloud not installed or not available in PATH')"
    )
    with (
        pytest.raises(RequestError, match="asks docker-credential-gcloud for passwords"),
        engine.asking("pushing"),
    ):
        raise error
