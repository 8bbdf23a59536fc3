"""The image of JAX for CPUs, which every container of the tests runs in, really builds here and passes its own smoke
test; nightly the four for TPUs do too: a broken pin is red.

The other locks for CPUs are the same versions without libtpu. The first time it takes
long: gigabytes of wheels. Afterwards only what changed is built. Where no image registry can be reached the base is the
stand-in of tools/stand_in_base.py (TPU_STACK_BASE_IMAGE), which is no official image.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from images.build import Builder
from images.docker_client import buildkit, connect
from images.recipe import BASE_VARIABLE, INDEXES, LOCK_LABEL, PROXIES, ImagePlatform, read
from launch.jobs import image_frameworks
from tools import stand_in_base

LIMIT_S = 1800
TOOLS = ("gcc", "g++", "make", "git", "pip", "uv", "cargo")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]


@pytest.fixture(scope="module")
def environ() -> Mapping[str, str]:
    found = stand_in_base.chosen(os.environ, print)
    return {**os.environ, **({BASE_VARIABLE: found} if found else {})}


@pytest.mark.parametrize(
    ("framework", "platform"),
    [*(pytest.param(name, "tpu", marks=pytest.mark.nightly) for name in image_frameworks()), ("jax", "cpu")],
)
def test_every_image_builds_and_passes_its_smoke_test(
    framework: str, platform: ImagePlatform, environ: Mapping[str, str]
) -> None:
    recipe = read(framework, platform, environ)
    client = connect(environ)
    try:
        builder = Builder(client=client, command=buildkit(client, environ), environ=environ, say=print)
        made = builder.make(recipe)
        config = client.api.inspect_image(made.image.id)["Config"]
    finally:
        client.close()
    assert recipe.tag in made.image.tags
    assert config["Labels"][LOCK_LABEL] == recipe.lock_sha256
    assert config["Entrypoint"] == ["tini", "--", "python"], "exec form, by a program that hands signals on"
    assert config["User"].partition(":")[0] not in ("", "0", "root")
    assert {variable.partition("=")[0] for variable in config["Env"]}.isdisjoint({*INDEXES, *PROXIES})
    asked = f"import shutil; print([name for name in {TOOLS!r} if shutil.which(name)])"
    assert in_container(made.image.id, "-c", asked).stdout.strip() == "[]", "it has tools to build with"
    is_tpu_host = [*Path("/dev").glob("accel*"), *Path("/dev").glob("vfio/[0-9]*")]
    if platform == "tpu" and not is_tpu_host:  # asked for and not there
        done = in_container(made.image.id, "/opt/tpu-stack/smoke", "--platform", "tpu")
        assert done.returncode == 1, done.stdout + done.stderr
        *lines, last = done.stdout.splitlines()
        assert '"ok": false' in last
        assert any(line.startswith("FAIL") and "tpu" in line.lower() for line in lines), done.stdout


def in_container(image: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", image, *arguments],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
