"""A framework that is built in seconds, and the Docker of this machine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from images import local_images
from images.docker_client import connect
from images.recipe import BASE_VARIABLE, SMOKE_LABEL, Recipe, read
from tests.launch.conftest import program, runs_dir, write_run
from tools import stand_in_base

__all__ = ["program", "runs_dir", "write_run"]

DOCKERFILE = """\
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN echo MARK; true
RUN echo MARK; BODY
COPY smoke /opt/tpu-stack/smoke
USER 10001:10001
ENTRYPOINT ["python3"]
"""
MAIN = "import framework\nprint('ok   imports  0.1 s', flush=True)\nframework.main()\n"
PASSES = "def main():\n    print('{\"ok\": true}')\n"


class Lab:
    """Makes recipes of a framework of this test only, and knows what of them is on this machine."""

    def __init__(self, folder: Path, client: docker.DockerClient, base: str, framework: str) -> None:
        self.folder, self.client, self.base, self.framework = folder, client, base, framework
        self._hashes: set[str] = set()

    def recipe(self, *, body: str = "true", smoke: str = PASSES) -> Recipe:
        """body: what the second of its steps runs."""
        own = self.folder / self.framework
        own.mkdir(parents=True, exist_ok=True)
        (self.folder / "smoke").mkdir(exist_ok=True)
        (self.folder / "smoke" / "__main__.py").write_text(MAIN)
        (own / "Dockerfile").write_text(DOCKERFILE.replace("MARK", self.framework).replace("BODY", body))
        (own / "requirements.txt").touch()
        (own / "smoke.py").write_text(smoke)
        (self.folder / "uv.txt").touch()
        environ = {BASE_VARIABLE: self.base}
        made = read(self.framework, "cpu", environ, folder=self.folder, uv_lock=self.folder / "uv.txt")
        self._hashes.add(made.hash)
        return made

    def left(self) -> list[str]:
        """Images of any kind, named or not, that one of its steps made; and its containers."""
        found = []
        for image in self.client.api.images(all=True):
            steps = self.client.api.history(image["Id"])
            if any(f"echo {self.framework};" in step["CreatedBy"] for step in steps):
                named = [tag for tag in image["RepoTags"] or () if tag != "<none>:<none>"]
                found += named or [image["Id"]]
        for container in self.client.api.containers(all=True):
            if container["Labels"].get(SMOKE_LABEL) in self._hashes:
                found.append(container["Id"])
        return found

    def named(self) -> list[str]:
        """Of these, the images with a name."""
        return [each for each in self.left() if ":" in each and not each.startswith("sha256:")]

    def clear(self) -> None:
        for image in local_images.list_all(self.client):
            if image.framework == self.framework:
                local_images.remove(self.client, image)


@pytest.fixture(scope="session")
def base() -> str:
    """What images of tests begin with: the official image is not at hand everywhere."""
    found = stand_in_base.chosen({}, print)
    if found is None:
        pytest.skip("needs root and mmdebstrap for a stand-in base")
    return found


@pytest.fixture
def client() -> Iterator[docker.DockerClient]:
    found = connect()
    yield found
    found.close()


@pytest.fixture
def make_lab(tmp_path: Path, client: docker.DockerClient, base: str) -> Iterator[Callable[[str], Lab]]:
    made: list[Lab] = []

    def make(framework: str) -> Lab:
        lab = Lab(tmp_path / "images", client, base, framework)
        made.append(lab)
        lab.clear()
        return lab

    yield make
    for lab in made:
        lab.clear()
