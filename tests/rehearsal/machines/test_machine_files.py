"""The pure half: networks, sshd's lines, the image's name and what its build needs. Nothing here needs Docker."""

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests

from rehearsal.machines import docker_engine, host_image
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.servers import (
    REGISTRY_SERVER,
    find_or_build_program,
)
from tools import go


def test_without_docker_or_go_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:  # bound and not listening: a connection is refused
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(MachinesError, match=r"not answer at tcp://.*apt-get install docker\.io.*usermod"):
            docker_engine.connect()
    monkeypatch.setattr(go, "OTHER_PLACES", ())
    environ = {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(MachinesError, match=r"builds the image registry with Go, and there is no Go 1\.21"):
        find_or_build_program(REGISTRY_SERVER, environ, print)


class Engine:
    """Docker with some images here, and some in a registry that answers, or not at all."""

    def __init__(self, here: Collection[str], there: Collection[str] | None = ()) -> None:
        self.images = self
        self._here, self._there = here, there

    def get(self, name: str) -> None:
        if not any(name.startswith(each) for each in self._here):
            raise docker.errors.ImageNotFound(name)

    def get_registry_data(self, name: str) -> None:
        if self._there is None:
            raise requests.ReadTimeout("Read timed out.\nmore")
        if name not in self._there:
            raise docker.errors.APIError("500", explanation="no such host\nmore")


def test_a_build_goes_out_by_the_same_proxy_and_index_and_knows_nothing_else_of_this_machine() -> None:
    environ = {"HTTPS_PROXY": "http://proxy", "PIP_INDEX_URL": "", "HOME": "/root", "SECRET": "s"}
    assert host_image.build_arguments(environ, None) == {"HTTPS_PROXY": "http://proxy"}
    assert host_image.build_arguments({}, "base:1") == {"BASE_IMAGE": "base:1"}
    with pytest.raises(MachinesError, match="UV_INDEX_URL holds a password") as caught:
        host_image.build_arguments({"UV_INDEX_URL": "https://me:secret@index/simple"}, None)
    assert "secret" not in str(caught.value)


OFFICIAL = host_image.official_base((host_image.ROOT / host_image.FILES["Dockerfile"]).read_text())


@pytest.mark.parametrize(
    ("base", "here", "there", "problem"),
    [
        (None, ["tpu-stack-rehearsal-host:"], None, None),
        (None, [], [OFFICIAL], None),
        (None, [], [], rf"{OFFICIAL}, is not on this machine, and Docker cannot fetch it: no such host\n"),
        (None, [], None, r"fetch it: Read timed out\.\n"),
        ("mine:1", [OFFICIAL], [OFFICIAL], r"mine:1, is not .* \(TPU_STACK_BASE_IMAGE names it\)"),
    ],
)
def test_a_base_that_cannot_be_had_is_told_before_anything_is_built(
    base: str | None, here: list[str], there: list[str] | None, problem: str | None
) -> None:
    environ = {"TPU_STACK_BASE_IMAGE": base} if base else {}
    client: Any = Engine(here, there)
    if problem is None:
        host_image._require_base(client, environ, "plain")
        return
    with pytest.raises(MachinesError, match=problem) as caught:
        host_image._require_base(client, environ, "plain")
    assert "export TPU_STACK_BASE_IMAGE=$(.venv/bin/python -m tools.stand_in_base)" in str(caught.value)
