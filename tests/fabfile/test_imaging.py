"""`fab build`, `fab push` and `fab images` as a person types them where there is no Docker, or nothing to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.images.recipe import frameworks
from launch.jobs import CHECKOUT

KNOWN = ", ".join(frameworks())
Fab = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def fab(tmp_path: Path) -> Fab:
    """Runs `fab` with a DOCKER_HOST that nobody answers on."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        places = {"TPU_STACK_RUNS": str(tmp_path / "runs"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(
            [Path(sys.executable).with_name("fab"), *words],
            cwd=CHECKOUT,
            env={**os.environ, **places, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.mark.parametrize("words", [["build"], ["build", "--update-base"], ["images"], ["images", "--prune"]])
def test_without_docker_it_is_said_where_it_was_looked_for_and_what_to_do(fab: Fab, words: list[str]) -> None:
    done = fab(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Docker does not answer at unix:///")
    assert "start it there, or unset DOCKER_HOST" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["build", "--framework", "cobol"],
            f'--framework: "cobol" is not a framework; choose one of {KNOWN}',
        ),
        (
            ["build", "--stack", "jax"],
            (
                "--stack: a stack is a Pulumi stack, and images are built for frameworks; "
                "fab build --framework jax (make images FRAMEWORK=jax)"
            ),
        ),
        (
            ["push", "--image", "jax", "--stack", "dev"],
            "--image: images are named by their framework; fab push --framework jax",
        ),
        (
            ["build", "--platform", "gpu"],
            '--platform: "gpu" is not a platform of images; choose one of tpu, cpu',
        ),
        (["push"], "--stack: say to which stack's repository; `pulumi stack ls` lists them"),
        (
            ["push", "--framework", "cobol", "--stack", "dev"],
            f'--framework: "cobol" is not a framework; choose one of {KNOWN}',
        ),
    ],
)
def test_a_mistake_is_found_before_docker_is_asked(fab: Fab, words: list[str], said: str) -> None:
    done = fab(*words)
    assert (done.stderr, done.returncode) == (f"error: {said}\n", 2)
