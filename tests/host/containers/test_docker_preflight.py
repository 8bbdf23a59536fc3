"""A preflight for a container looks at Docker and the image instead of the host's Python, and names what to do."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from host.agent import docker_client, images
from tests.host.conftest import Host
from tests.host.containers.conftest import docker
from tests.host.containers.fake_docker import FakeDocker

REF = "region-docker.pkg.dev/project/images/jax@sha256:" + "a" * 64


@pytest.mark.slow
def test_an_image_that_is_here_passes_without_any_python_of_the_host(boxed: Any) -> None:
    container = {"image": boxed.image, "mounts": [str(boxed.scripts)], "size_bytes": None}
    response = Host(boxed).response(python="/no/python", container=container, alone=True)
    assert [each for each in response["checks"] if not each["ok"]] == []
    assert {"docker", "image"} <= {each["name"] for each in response["checks"]}
    assert response["facts"]["image_present"] is True
    assert response["facts"]["docker_root_free_bytes"] > 0 and response["facts"]["docker_version"]


@pytest.mark.slow
def test_an_image_of_another_platform_or_one_that_can_only_be_built_here_is_refused(boxed: Any) -> None:
    host = Host(boxed)
    here = {"image": boxed.image, "mounts": []}
    (found,) = [
        each for each in host.response(platform="gpu", container=here)["checks"] if each["name"] == "image"
    ]
    assert (found["ok"], "was built for cpu" in found["message"]) == (False, True)
    ok, message = host.finding("image", container={"image": "sha256:" + "a" * 64, "mounts": []})
    assert not ok and "is not on this host" in message


@pytest.mark.slow
def test_an_image_that_is_still_to_be_pulled_is_no_fault_where_there_is_room(boxed: Any) -> None:
    host = Host(boxed)
    assert host.finding("image", container={"image": REF, "mounts": []})[0]
    assert host.finding("docker_disk", container={"image": REF, "mounts": [], "size_bytes": 1})[0]
    ok, message = host.finding("docker_disk", container={"image": REF, "mounts": [], "size_bytes": 10**15})
    assert not ok and "needs 1400000.0 GB" in message


@pytest.mark.slow
def test_a_container_that_runs_is_a_leftover_of_its_run_even_where_its_processes_are_hidden(
    boxed: Any,
) -> None:
    labels = {"run": boxed.run_id, "root": boxed.root, "host": os.uname().nodename}
    marks = [f"--label=tpu-stack.{name}={value}" for name, value in labels.items()]
    # Without the environment by which this host would know it, as where it is root's.
    docker("run", "--detach", "--network", "none", *marks, boxed.image, "sleep", "600")
    container = {"image": boxed.image, "mounts": []}
    ok, message = Host(boxed).finding("leftovers", container=container, alone=True)
    assert not ok and boxed.run_id in message


def checked(**fields: Any) -> list[dict[str, Any]]:
    container = {"image": REF, "mounts": [], "size_bytes": None, **fields}
    return images.check_docker({"container": container, "platform": "cpu"})[0]


def test_a_host_without_docker_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = checked()
    assert not found["ok"] and "fab deploy" in found["remedy"]


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("permission denied while trying to connect to the Docker daemon socket at unix:///x", "usermod"),
        (
            "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?",
            "systemctl start",
        ),
    ],
)
def test_a_docker_that_does_not_answer_is_told_with_what_would_make_it(
    fake_docker: FakeDocker, complaint: str, remedy: str
) -> None:
    fake_docker.answers({"version": [(1, "", complaint)]})
    (found,) = checked()
    assert not found["ok"] and remedy in found["remedy"]


def test_a_docker_that_hangs_is_not_waited_for_longer_than_the_limit(fake_docker: FakeDocker) -> None:
    sleeper = Path(str(docker_client.program()))
    sleeper.write_text(f"#!{sys.executable} -SE\nimport time\ntime.sleep(60)\n")
    answer = docker_client.ask(["version"], 0.3)
    assert answer.code is None and "no answer within 0.3 s" in answer.complaint


def test_a_mount_that_is_missing_is_named(fake_docker: FakeDocker) -> None:
    fake_docker.answers({"version": [(1, "", "no")]})
    assert "/no/share is to be seen in the container" in checked(mounts=["/no/share"])[-1]["message"]


def test_the_client_gets_no_secrets_of_the_host() -> None:
    given = {"HOME": "/h", "PATH": "/p", "DOCKER_HOST": "d", "AWS_SECRET": "x", "RUN_ID": "y"}
    assert set(docker_client.client_environment(given)) == {"HOME", "PATH", "DOCKER_HOST"}


def test_docker_s_words_are_told_without_its_introduction() -> None:
    said = "docker: Error response from daemon: bad device\n\nRun 'docker run --help' for more information\n"
    assert docker_client.core(said) == "bad device"
    assert shutil.which("docker") is None or docker_client.program() == shutil.which("docker")


@pytest.mark.parametrize(
    ("free", "removable", "ok", "part"),
    [
        (20, 0, True, "has 0.0 GB free for the image"),
        (5, 20, True, "old images of ours will be removed"),
        (5, 4, False, "free and the image needs"),
    ],
)
def test_a_disk_that_old_images_of_ours_fill_is_no_reason_not_to_start(
    free: int, removable: int, ok: bool, part: str
) -> None:
    found = images.check_docker_disk(free, 10, removable)
    assert (found["ok"], part in found["message"]) == (ok, True), found
