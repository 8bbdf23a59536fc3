"""The pure half: networks, sshd's lines, the image's name and what its build needs. Nothing here needs Docker."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests

from rehearsal.machines import docker_engine, host_image
from rehearsal.machines.docker_engine import MachinesError
from rehearsal.machines.machines import Machine, container_options
from rehearsal.machines.servers import (
    REGISTRY_SERVER,
    RegistryServer,
    find_or_build_program,
    published_port,
)
from tools import go

KINDS: tuple[host_image.HostKind, ...] = ("plain", "docker")


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


def test_only_a_machine_that_is_to_have_docker_may_do_what_a_container_otherwise_may_not() -> None:
    asked = Machine(name="w", address="10.0.0.2", host_key="", authorized_key="")
    plain = container_options("r", asked, None)
    assert not plain.keys() & {"cap_add", "security_opt", "privileged", "devices"}
    assert [each["Target"] for each in plain["mounts"]] == [host_image.SHARE, host_image.SPARE_SHARE]
    able = container_options("r", asked, RegistryServer(address="10.0.0.253", port=32768))
    assert (able["cap_add"], able.get("privileged")) == (["SYS_ADMIN", "NET_ADMIN"], None)
    assert able["environment"]["REGISTRY"] == "32768 10.0.0.253:5000"
    (data,) = [each for each in able["mounts"] if each["Target"] == "/var/lib/docker"]
    # Without the label it would outlive the rehearsal.
    assert data["VolumeOptions"]["Labels"] == {docker_engine.LABEL: "r"}


def test_a_registry_whose_port_is_not_on_loopback_is_refused() -> None:
    ports = [{"HostIp": "0.0.0.0", "HostPort": "1"}, {"HostIp": "127.0.0.1", "HostPort": "2"}]
    assert published_port({"NetworkSettings": {"Ports": {"5000/tcp": ports}}}) == 2
    for found in (ports[:1], None):
        with pytest.raises(MachinesError, match="published no port"):
            published_port({"NetworkSettings": {"Ports": {"5000/tcp": found}}})


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


def test_the_image_has_another_name_when_any_of_what_it_is_made_of_has_changed() -> None:
    contents = {"Dockerfile": b"FROM a", "requirements/jobs.txt": b"jax==1"}
    names = {host_image.image_name(contents, base, kind) for base in (None, "base") for kind in KINDS}
    names |= {host_image.image_name({**contents, name: b"other"}, None, "plain") for name in contents}
    assert len(names) == 6
    other_order = dict(reversed(contents.items()))
    assert host_image.image_name(contents, None, "plain") == host_image.image_name(other_order, None, "plain")


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
