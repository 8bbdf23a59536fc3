"""Machines with Docker: a daemon in each, and a registry that this machine and all of them know by one name."""

from __future__ import annotations

import concurrent.futures
import contextlib
import shlex
from typing import Any

import pytest

from rehearsal.machines import MachinesError
from rehearsal.machines.docker_engine import connect
from rehearsal.machines.guardian import left

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
# A shell and three programs with their libraries: some megabytes, pushed and pulled in a moment.
PACK = (
    "programs=$(which bash ls sleep stat); tar -ch $(ldd $programs | grep -o '/[^ :]*' | sort -u) $programs"
)


@pytest.fixture(scope="module")
def image(docker_lab: Lab) -> str:
    """A small one, by digest, pushed from here; the user of the machines may use Docker, as after `fab deploy`."""
    for name in ("w-0", "w-1"):
        assert "permission denied" in docker_lab.try_ssh(name, "docker ps").stderr
        docker_lab.ssh(
            name, "sudo usermod --append --groups docker sa_rehearsal"
        )  # from the next connection on
    container, _ = docker_lab.machines.find("w-0")
    packed, _ = container.exec_run(["sh", "-c", PACK], demux=True).output
    name = f"{docker_lab.machines.registry.host}/a/repository/shell"
    with contextlib.closing(connect()) as client:
        client.api.import_image_from_data(packed, repository=name, tag="new")
        answers = list(client.api.push(name, "new", stream=True, decode=True))
    (digest,) = [each["aux"]["Digest"] for each in answers if "aux" in each]
    return f"{name}@{digest}"


def test_what_is_pushed_here_runs_on_all_hosts_with_their_network_share_and_user(
    docker_lab: Lab, image: str
) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        said = pool.map(lambda name: docker_lab.try_ssh(name, f"docker pull --quiet {image}"), ("w-0", "w-1"))
    assert [each.stdout.strip() for each in said] == [image, image]
    other = image[:-8] + "00000000"
    assert "manifest unknown" in docker_lab.try_ssh("w-0", f"docker pull --quiet {other}").stderr

    address = docker_lab.machines.network.storage_address
    program = (
        f"echo -n word >{SHARE}/written; exec 3<>/dev/tcp/{address}/4443; echo $HOSTNAME $UID;"
        " stat -f -c '%b x %S' /dev/shm;"
        " while read -r name value; do [ $name = Cpus_allowed_list: ] && echo $value; done </proc/self/status"
    )
    said = docker_lab.ssh("w-0", f"{RUN} {image} bash -c {shlex.quote(program)}").splitlines()
    blocks, _, size = said[1].partition(" x ")
    assert (said[0], int(blocks) * int(size), said[2]) == ("w-0 2001", 2**30, "0")
    assert docker_lab.ssh("w-1", f"stat -c %u {SHARE}/written; cat {SHARE}/written") == "2001\nword"


def test_a_daemon_that_is_killed_answers_nobody_until_it_is_started(docker_lab: Lab, image: str) -> None:
    docker_lab.faults.kill_docker("w-0")
    try:
        assert "Cannot connect to the Docker daemon" in docker_lab.try_ssh("w-0", "docker ps").stderr
        assert docker_lab.ssh("w-1", "docker ps --quiet") == ""
    finally:
        docker_lab.faults.start_docker("w-0")
        docker_lab.faults.start_docker("w-0")
    assert docker_lab.ssh("w-0", f"{RUN} {image} bash -c 'echo again'") == "again"


@pytest.mark.nightly
def test_a_share_that_is_not_mounted_is_empty_in_a_container_too(docker_lab: Lab, image: str) -> None:
    docker_lab.ssh("w-0", f"touch {SHARE}/there")
    docker_lab.faults.unmount_share("w-0")
    try:
        assert docker_lab.ssh("w-0", f"{RUN} {image} ls {SHARE}") == ""
    finally:
        docker_lab.faults.mount_share("w-0")
    assert "there" in docker_lab.ssh("w-0", f"{RUN} {image} ls {SHARE}").split()


@pytest.mark.nightly
def test_a_killed_host_comes_back_with_its_images_and_with_no_container_running(
    docker_lab: Lab, image: str
) -> None:
    detached = RUN.replace("--rm", "--detach --name job")
    docker_lab.ssh("w-1", f"{detached} {image} sleep infinity")
    docker_lab.machines.kill("w-1")
    docker_lab.machines.restart("w-1")
    assert docker_lab.ssh("w-1", "docker ps --all --format '{{.Names}} {{.State}}'") == "job exited"
    said = docker_lab.ssh("w-1", f"docker rm job >/dev/null; {RUN} {image} bash -c 'echo again'")
    assert said == "again"


@pytest.mark.nightly
def test_a_host_that_is_cut_off_pulls_nothing_until_it_is_healed(docker_lab: Lab, image: str) -> None:
    docker_lab.ssh("w-0", f"docker pull --quiet {image}")
    container, _ = docker_lab.machines.find("w-0")
    docker_lab.faults.cut("w-0")
    try:
        done = container.exec_run(["timeout", "3", "docker", "pull", "--quiet", image])
        assert done.exit_code == 124  # timeout's own: nothing came back
    finally:
        docker_lab.faults.heal("w-0")
    assert docker_lab.ssh("w-0", f"docker pull --quiet {image}") == image


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
