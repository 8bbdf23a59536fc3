"""The image of JAX for CPUs, which every container of the tests runs in, really builds here and passes its own smoke
test; nightly the four for TPUs do too: a broken pin is red.

The other locks for CPUs are the same versions without libtpu (tests/images/test_locks.py). The first time it takes
long: gigabytes of wheels. Afterwards only what changed is built. Where no image registry can be reached the base is the
stand-in of tools/stand_in_base.py (TPU_STACK_BASE_IMAGE), which is no official image.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.images import local_images
from launch.images.build import Builder
from launch.images.docker_client import buildkit, connect
from launch.images.recipe import BASE_VARIABLE, INDEXES, LOCK_LABEL, PROXIES, Platform, frameworks, read
from launch.jobs import CHECKOUT
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
    [*(pytest.param(name, "tpu", marks=pytest.mark.nightly) for name in frameworks()), ("jax", "cpu")],
)
def test_every_image_builds_and_passes_its_smoke_test(
    framework: str, platform: Platform, environ: Mapping[str, str]
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


@pytest.mark.nightly
@pytest.mark.parametrize("framework", frameworks())
def test_no_image_has_tools_to_build_with(framework: str, environ: Mapping[str, str]) -> None:
    image = local_images.required(framework, "tpu", environ)
    asked = f"import shutil; print([name for name in {TOOLS!r} if shutil.which(name)])"
    done = subprocess.run(
        ["docker", "run", "--rm", "--network", "none", image.id, "-c", asked],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"


@pytest.mark.nightly
@pytest.mark.parametrize("framework", frameworks())
def test_a_tpu_that_is_asked_for_and_not_there_fails_the_smoke_test(
    framework: str, environ: Mapping[str, str]
) -> None:
    if list(Path("/dev").glob("accel*")) or list(Path("/dev").glob("vfio/[0-9]*")):
        pytest.skip("this machine has a TPU")
    image = local_images.required(framework, "tpu", environ)
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", image.id),
            *("/opt/tpu-stack/smoke", "--platform", "tpu"),
        ],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert '"ok": false' in done.stdout.splitlines()[-1]
    assert any(line.startswith("FAIL") and "tpu" in line.lower() for line in done.stdout.splitlines()), (
        done.stdout
    )


@pytest.mark.nightly
def test_one_build_by_hand_says_what_there_is(environ: Mapping[str, str]) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("fab"), "build"],
        cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for framework in frameworks():
        assert f"tpu-stack/{framework}:tpu-" in done.stdout
