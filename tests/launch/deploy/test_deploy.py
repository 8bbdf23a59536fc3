"""`fab deploy`: what each target needs, and that it fits into one command."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from contracts.inventory import Storage
from launch.deploy import deploy, python_environment
from launch.deploy.steps import to_json
from launch.hosts import Agent
from launch.target import Target
from tests.launch.slices import make_target

MakeAgent = Callable[..., Agent]
NONE = Storage(bucket_url=None, bucket_region=None, nfs_source=None, nfs_mount=None)


@pytest.fixture
def agents(make_agent: MakeAgent) -> list[Agent]:
    return [make_agent(lambda verb, request: {"names": []}, host=f"w-{index}") for index in range(2)]


def names(target: Target, **options: Any) -> list[str]:
    lock = python_environment.Lock(sha256="00", folder="/l", name="tpu")
    given = {"with_comforts": False, "contained": False, "lock": lock, **options}
    return [step.name for step in deploy.steps(target, "jax", **given)]


def test_each_target_gets_the_steps_that_it_needs(agents: list[Agent]) -> None:
    target = make_target(agents)
    before, after = (
        ["first boot", "certificates", "share", "folders"],
        ["docker helper", "docker log-in", "python"],
    )
    always = [*before, "huge pages", *after]
    assert names(target) == always
    assert names(dataclasses.replace(target, platform="cpu")) == [*before, *after]
    assert names(target, with_comforts=True) == [*always, "comforts"]
    bare = dataclasses.replace(target.inventory, storage=NONE, images={})
    in_bucket = dataclasses.replace(target, inventory=bare, runs_url="gs://b/runs")
    assert names(in_bucket) == ["first boot", "certificates", "folders", "huge pages", "python"]


def test_hosts_whose_runs_are_in_containers_get_docker_and_no_python(agents: list[Agent]) -> None:
    found = names(make_target(agents), contained=True, lock=None)
    assert found == [
        "first boot",
        "certificates",
        "share",
        "folders",
        "huge pages",
        "docker",
        "docker helper",
        "docker log-in",
    ]


def test_on_this_machine_nothing_is_installed_and_nothing_needs_root(agents: list[Agent]) -> None:
    target = make_target(agents, name="local", python="/venv/bin/python", runs_url="/runs")
    found = deploy.steps(target, "jax", with_comforts=True, contained=False, lock=None)
    assert [step.name for step in found] == ["folders", "python"]
    assert not any(step.root for step in found) and found[1].change == ""


def test_folders_on_the_share_are_not_made_on_the_disk_under_it(agents: list[Agent]) -> None:
    (folders,) = [
        step
        for step in deploy.steps(make_target(agents), "jax", with_comforts=False, contained=False, lock=None)
        if step.name == "folders"
    ]
    assert folders.needs == ("share",) and "/share/runs" in folders.check


def test_all_steps_together_fit_in_one_argument_of_a_shell(agents: list[Agent]) -> None:
    """sshd hands the whole command to a shell as one argument."""
    lock = python_environment.Lock(sha256="00" * 32, folder="~/l", name="tpu")
    every = deploy.steps(make_target(agents), "jax", with_comforts=True, contained=False, lock=lock)
    argv = [deploy.PYTHON, "-S", "-E", "-c", deploy.RUNNER.read_text(), to_json(every)]
    assert len(shlex.join(argv).encode()) < 100_000
