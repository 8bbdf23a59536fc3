"""Runs in containers, in the image that was really built: the same losses as bare, the same ends, and nothing left."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.runs import Run
from tests.launch.code.package_index import add_wheel
from tests.runs.lab import CHECKOUT, FAST, SLOWLY, STEPS, Lab, Losses, losses, result, saved_steps
from tools import stand_in_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BUILD_LIMIT_S = 1800


@pytest.fixture(scope="module")
def base_image() -> Iterator[None]:
    """Where no registry can be reached, the images are built from the stand-in base."""
    base = stand_in_base.chosen(os.environ, print)
    with pytest.MonkeyPatch.context() as patch:
        if base is not None:
            patch.setenv(stand_in_base.VARIABLE, base)
        yield


@pytest.fixture(scope="module")
def jax_image(base_image: None) -> None:
    """The image for CPUs, as `fab build` makes it where it is not there."""
    command = [str(CHECKOUT / ".venv" / "bin" / "fab"), "build", "--framework", "jax", "--platform", "cpu"]
    built = subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr


def docker(*words: str) -> str:
    """What Docker answers."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def containers(run: Run) -> list[str]:
    """The names of the run's containers that are there, running or not."""
    return docker(
        "ps", "--all", "--filter", f"label=tpu-stack.run={run.run_id}", "--format", "{{.Names}}"
    ).split()


def launched(lab: Lab, *more: str) -> Run:
    """A run in containers that has joined."""
    words = " ".join([*lab.options(), *more])
    command = lab.fab("train", "--job", "flax_mlm", "--runtime", "docker", "--detach", "--args", words)
    ended = command.ended()
    assert ended.code == 0, ended.said
    return lab.all_runs()[0]


@pytest.mark.usefixtures("jax_image")
def test_a_run_in_containers_is_stopped_and_resumed_with_the_losses_of_a_bare_one_and_leaves_nothing(
    lab: Lab, right_losses: Losses
) -> None:
    run = launched(lab, *SLOWLY)
    lab.reach(run, 1)
    stop = lab.fab("stop").ended()
    assert stop.code == 0, stop.said
    stopped = lab.read(run)
    step = result(stopped)["steps"]
    assert (result(stopped)["outcome"], saved_steps(stopped)[-1]) == ("stopped", step)
    assert [ended["code"] for ended in lab.exits(run)] == [75, 75]
    assert 0 < step < STEPS
    assert containers(run) == []

    ended = lab.fab("train", "--resume", run.run_id, "--args", " ".join(FAST)).ended()
    assert ended.code == 0, ended.said
    resumed = lab.read(run)
    assert (run.described["runtime"], run.described["image"][:7]) == ("docker", "sha256:")
    assert resumed.described["image"] == run.described["image"]
    assert f"resumed after step {step}\n" in lab.log(resumed)
    assert losses(resumed) == right_losses
    assert containers(run) == []
    owners = {path.stat().st_uid for path in Path(run.directory.url).rglob("*")}
    assert owners == {os.getuid()}


@pytest.mark.usefixtures("jax_image")
def test_a_project_s_packages_are_a_layer_over_the_image(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, index = lab.runs_dir.parent / "needy", lab.runs_dir.parent / "index"
    add_wheel(index, "greet", "1.0", program="greet-all")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.as_uri())
    folder.mkdir()
    (folder / "train.py").write_text(
        "import greet, jax, subprocess\nsubprocess.run(['greet-all'], check=True)\n"
    )
    (folder / "pyproject.toml").write_text(
        "[project]\nname = 'needy'\nversion = '1'\ndependencies = ['greet']\n"
    )
    command = ("--workdir", str(folder), "--runtime", "docker", "--", "python", "train.py")
    ended = lab.fab("train", *command).ended()
    assert ended.code == 0, ended.said
    assert "pyproject.toml: 1 package besides the framework's: greet==1.0" in ended.said
    (run,) = lab.all_runs()
    for host in range(2):
        assert f"hello from {lab.agent_root}/bundles/" in lab.log(run, host)
