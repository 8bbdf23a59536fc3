"""A real Docker engine with a small image and an agent whose jobs run in it."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.conftest import INTERPRETERS, Agent, cmdline
from tests.waiting import until
from tools.stand_in_base import chosen

LABEL = "tpu-stack.tests-of-host"


def docker(*arguments: str, stdin: bytes | None = None, check: bool = True) -> str:
    done = subprocess.run(
        ["docker", *arguments], input=stdin, capture_output=True, timeout=100, check=False, env=os.environ
    )
    assert not check or done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def is_up() -> bool:
    return subprocess.run(["docker", "ps"], capture_output=True, timeout=20, check=False).returncode == 0


def build(base: str, *lines: str) -> str:
    """The id of an image of that base with tini, which Docker itself brings along."""
    tini = shutil.which("tini") or shutil.which("docker-init")
    assert tini, "Docker has no docker-init on this machine"
    context = io.BytesIO()
    dockerfile = "\n".join([f"FROM {base}", "COPY tini /usr/bin/tini", "ENV HOME=/tmp", *lines]).encode()
    with tarfile.open(fileobj=context, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(os.path.realpath(tini), "tini")
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(dockerfile)
        tar.addfile(entry, io.BytesIO(dockerfile))
    return docker("build", "--quiet", "--label", f"{LABEL}=1", "-", stdin=context.getvalue())


@pytest.fixture(scope="session")
def base() -> str:
    if shutil.which("docker") is None or not is_up():
        pytest.skip("no Docker engine on this machine")
    return chosen(os.environ, print) or "python:3.12-slim-bookworm"


@pytest.fixture(scope="session")
def image(base: str) -> Iterator[str]:
    """For CPUs. Its label makes it another one for every session, which removes no other's."""
    made = build(base, f"LABEL tpu-stack.platform=cpu tpu-stack.session={uuid.uuid4().hex}")
    yield made
    docker("image", "rm", "--force", made)


class BoxedAgent(Agent):
    """An agent whose jobs run in containers."""

    def __init__(self, python: str, root: Path, image: str) -> None:
        super().__init__(python, root)
        self.image = image
        self.run_id = f"run-{uuid.uuid4().hex[:8]}"  # Docker's names are the whole machine's

    def start_request(self, script: str, process_id: int = 0, **fields: Any) -> dict[str, Any]:
        usual = {"platform": "cpu", "mounts": [str(self.scripts)], "read_only_mounts": [], "shm_bytes": None}
        container = {"image": self.image, **usual, **fields.pop("boxed", {})}
        request = super().start_request(script, process_id, container=container, **fields)
        return {**request, "argv": ["python", *request["argv"][1:]]} if "argv" not in fields else request

    def name(self, process_id: int = 0) -> str:
        return f"tpu-stack-{self.run_id}-0-{process_id}"

    def containers(self) -> list[str]:
        found = docker(
            "ps", "--all", "--filter", f"label=tpu-stack.run={self.run_id}", "--format", "{{.Names}}"
        )
        return found.split()

    def of_container(self, form: str) -> Any:
        return json.loads(docker("inspect", "--format", f"{{{{json {form}}}}}", self.name()))


@pytest.fixture
def boxed(tmp_path: Path, image: str) -> Iterator[BoxedAgent]:
    made = BoxedAgent(INTERPRETERS[0], tmp_path, image)
    yield made
    made.end_all()
    if is_up():
        for name in made.containers():
            docker("rm", "--force", name, check=False)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, image: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon of the test's own, with the image, which may be killed."""
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("only root can start a Docker daemon")
    packed = subprocess.run(["docker", "save", image], capture_output=True, check=True, timeout=100).stdout
    root = Path(tempfile.mkdtemp(prefix="own-docker-"))  # the path of a socket may have 107 letters
    address = f"unix://{root}/sock"
    # In a network of its own: a daemon without a bridge takes away the one that another has made.
    command = ["unshare", "--net", "dockerd", "--host", address, "--data-root", str(root / "data")]
    command += ["--exec-root", str(root / "exec"), "--pidfile", str(root / "pid"), "--bridge", "none"]
    command += ["--iptables=false", "--ip-forward=false", "--shutdown-timeout", "1"]
    monkeypatch.setenv("DOCKER_HOST", address)
    with (root / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as daemon:
        try:
            until(lambda: daemon.poll() is not None or is_up(), 30)
            assert daemon.poll() is None, (root / "log").read_text()[-2000:]
            docker("load", stdin=packed)
            yield daemon
        finally:
            end_daemon(daemon, root)


def end_daemon(daemon: subprocess.Popen[bytes], root: Path) -> None:
    """At once, as nobody needs it any more: it, what it has started, and where it kept its things."""
    daemon.kill()
    daemon.wait(20)
    for path in Path("/proc").glob("[0-9]*"):
        if f"{root}/".encode() in cmdline(int(path.name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in reversed([place for place in mounted if place.startswith(f"{root}/")]):
        subprocess.run(["umount", "--lazy", place], check=False)
    shutil.rmtree(root, ignore_errors=True)
