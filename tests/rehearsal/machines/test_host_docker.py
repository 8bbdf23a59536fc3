"""Machines with Docker: a daemon in each, and a registry that this machine and all of them know by one name."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rehearsal.machines.docker_engine import MachinesError, connect
from rehearsal.machines.guardian import left
from rehearsal.machines.host_image import FILES, ROOT, official_base
from tools import stand_in_base

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # the first test may have to build image and registry

Lab = Any  # conftest.py's; a conftest is nothing to import from
SHARE = "/mnt/share"
# As the agent runs a job: nothing that the host does not need to give.
RUN = (
    "docker run --rm --network host --user $(id -u):$(id -g) --cap-drop ALL --security-opt no-new-privileges"
    f" --shm-size 1g --cpuset-cpus 0 --volume $HOME:$HOME --volume {SHARE}:{SHARE}"
)


@pytest.fixture(scope="module")
def base(environ: Mapping[str, str]) -> str:
    """An image with Python that is on this machine, since the hosts' is made of it."""
    return environ.get(stand_in_base.VARIABLE) or official_base((ROOT / FILES["Dockerfile"]).read_text())


@pytest.fixture(scope="module")
def image(docker_lab: Lab, base: str) -> str:
    """One with Python, by digest, pushed from here."""
    name = f"{docker_lab.machines.registry.host}/a/repository/python"
    with contextlib.closing(connect()) as client:
        client.images.get(base).tag(name, "new")
        try:
            answers = list(client.api.push(name, "new", stream=True, decode=True))
        finally:
            client.api.remove_image(f"{name}:new")
    (digest,) = [each["aux"]["Digest"] for each in answers if "aux" in each]
    return f"{name}@{digest}"


@pytest.fixture
def allowed(docker_lab: Lab) -> Iterator[None]:
    """Its user may use Docker from the next connection on, as `fab deploy` makes it."""
    assert "permission denied" in docker_lab.try_ssh("w-0", "docker ps").stderr
    for name in ("w-0", "w-1"):
        docker_lab.ssh(name, "sudo usermod --append --groups docker sa_rehearsal")
    yield
    for name in ("w-0", "w-1"):
        docker_lab.ssh(name, "sudo gpasswd --delete sa_rehearsal docker")


@pytest.mark.usefixtures("allowed")
def test_what_is_pushed_here_is_pulled_by_the_same_reference_on_all_hosts_at_once(
    docker_lab: Lab, image: str
) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        said = pool.map(lambda name: docker_lab.try_ssh(name, f"docker pull --quiet {image}"), ("w-0", "w-1"))
    assert [each.stdout.strip() for each in said] == [image, image]
    other = image[:-8] + "00000000"
    assert "manifest unknown" in docker_lab.try_ssh("w-0", f"docker pull --quiet {other}").stderr


@pytest.mark.usefixtures("allowed")
def test_a_container_has_the_hosts_network_share_and_user(docker_lab: Lab, image: str) -> None:
    address = docker_lab.machines.network.storage_address
    program = (
        "import os, socket, urllib.request as u;"
        f"open('{SHARE}/written', 'w').write('word');"
        f"print(u.urlopen('http://{address}:4443/storage/v1/b?project=p').status, socket.gethostname(), os.getuid());"
        "print(os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize, *os.sched_getaffinity(0))"
    )
    said = docker_lab.ssh("w-0", f'{RUN} {image} python3 -c "{program}"')
    assert said.splitlines() == ["200 w-0 2001", f"{2**30} 0"]
    assert docker_lab.ssh("w-1", f"stat -c %u {SHARE}/written; cat {SHARE}/written") == "2001\nword"
    docker_lab.faults.unmount_share("w-0")  # then it is empty in a container too
    try:
        assert docker_lab.ssh("w-0", f"{RUN} {image} ls {SHARE}") == ""
    finally:
        docker_lab.faults.mount_share("w-0")
    assert "written" in docker_lab.ssh("w-0", f"{RUN} {image} ls {SHARE}").split()


@pytest.mark.usefixtures("allowed")
def test_a_daemon_that_is_killed_answers_nobody_until_it_is_started(docker_lab: Lab, image: str) -> None:
    docker_lab.faults.kill_docker("w-0")
    try:
        assert "Cannot connect to the Docker daemon" in docker_lab.try_ssh("w-0", "docker ps").stderr
        assert docker_lab.ssh("w-1", "docker ps --quiet") == ""
    finally:
        docker_lab.faults.start_docker("w-0")
        docker_lab.faults.start_docker("w-0")
    assert docker_lab.ssh("w-0", f"{RUN} {image} echo again") == "again"


@pytest.mark.nightly
@pytest.mark.usefixtures("allowed")
def test_a_killed_host_comes_back_with_its_images_and_with_no_container_running(
    docker_lab: Lab, image: str
) -> None:
    detached = RUN.replace("--rm", "--detach --name job")
    docker_lab.ssh("w-1", f"{detached} {image} sleep infinity")
    docker_lab.machines.kill("w-1")
    docker_lab.machines.restart("w-1")
    assert docker_lab.ssh("w-1", "docker ps --all --format '{{.Names}} {{.State}}'") == "job exited"
    assert docker_lab.ssh("w-1", f"docker rm job >/dev/null; {RUN} {image} echo again") == "again"


@pytest.mark.nightly
def test_a_machine_with_docker_takes_its_images_with_it(docker_lab: Lab) -> None:
    with contextlib.closing(connect()) as client:
        before = left(client, docker_lab.machines.name)
        docker_lab.boot("w-2")
        docker_lab.machines.remove("w-2")
        assert sorted(left(client, docker_lab.machines.name)) == sorted(before)


def test_a_machine_without_docker_says_how_to_get_one_that_has_it(lab: Lab) -> None:
    with pytest.raises(MachinesError, match="w-0 was made without Docker; `fab rehearsal up --docker`"):
        lab.faults.kill_docker("w-0")
