"""A Docker of the test's own, whose disk is small and which can be killed: the message says which it was."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from contracts.errors import RequestError
from launch.images import builder
from launch.images.engine import connect
from launch.images.errors import ImageError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("dockerd") is None, reason="only root starts a Docker"
    ),
]
DISK_BYTES = 800 * 10**6
"""Room for the base, and for nothing as large again."""
LIMIT_S = 60


class Daemon:
    """A dockerd with its own socket, no network and a disk of DISK_BYTES in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/sock"
        for name in ("disk", "exec"):
            (folder / name).mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder / "disk"], check=True
        )
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *(
                    # In a network of its own: without a bridge it takes away the one that another has made.
                    *("unshare", "--net", "dockerd"),
                    "--host",
                    self.host,
                    "--data-root",
                    folder / "disk",
                    "--exec-root",
                    folder / "exec",
                ),
                *("--pidfile", folder / "pid", "--bridge", "none", "--iptables=false", "--ip-masq=false"),
            ],
            stdout=self.log,
            stderr=self.log,
        )

    def client(self) -> docker.DockerClient:
        until_s = time.monotonic() + LIMIT_S
        while not (self.folder / "sock").exists():
            assert time.monotonic() < until_s, (self.folder / "log").read_text()
            time.sleep(0.1)
        return connect({**os.environ, "DOCKER_HOST": self.host})

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            self.log.close()
            subprocess.run(["umount", "--recursive", "--lazy", self.folder / "disk"], check=False)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    folder = tmp_path / "d"
    folder.mkdir()
    made = Daemon(folder)
    yield made
    made.end()


class Killing:
    """A watch that kills the daemon when a step of the build begins."""

    def __init__(self, daemon: Daemon, step: str) -> None:
        self._daemon, self._step = daemon, step

    def state(self, text: str) -> None:
        if self._step in text:
            self._daemon.process.kill()

    progress = note = state


class Silent:
    def state(self, text: str) -> None:
        """Nothing."""

    progress = note = state


# docker-py leaves the sockets that it could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_full_disk_and_a_daemon_that_is_killed_are_told_apart(
    daemon: Daemon, client: docker.DockerClient, base: str, make_lab: Callable[[str], Any]
) -> None:
    own = daemon.client()
    own.images.load(client.images.get(base).save(named=True))
    lab = make_lab("faulty")
    arguments = {"BASE_IMAGE": base}

    recipe = lab.recipe(body=f"head -c {DISK_BYTES} /dev/zero >/file")
    with pytest.raises(
        ImageError, match=rf"the disk that Docker keeps images on \({daemon.folder}/disk\) is full"
    ):
        builder.build(own, recipe, arguments, {}, Silent())
    assert [each["RepoTags"] for each in own.api.images(all=True)] == [[base]]
    assert own.api.containers(all=True) == []

    recipe = lab.recipe(body="sleep 20")
    with pytest.raises(RequestError, match="the connection to Docker broke .* is it still running"):
        builder.build(own, recipe, arguments, {}, Killing(daemon, "RUN echo faulty"))
    own.close()
    gc.collect()
