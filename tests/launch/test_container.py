"""Bare or in a container: what is asked for, what the run was, what the stack has; in that order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from launch import plan, targets
from launch.hosts import Agent
from launch.plan import Container
from launch.target import Target
from tests.launch.slices import IMAGES, NFS, make_target

MakeAgent = Callable[..., Agent]
BUILT = "sha256:" + "b" * 64
OLD = "europe-west4-docker.pkg.dev/p/r/jax@sha256:" + "0" * 64


def built(stack: str, platform: str) -> str:
    assert (stack, platform) == ("jax", "cpu")
    return BUILT


def unasked(stack: str, platform: str) -> str:
    raise AssertionError(f"{stack} for {platform} was looked for here")


@pytest.fixture
def slice_of_two(make_agent: MakeAgent) -> Target:
    return make_target([make_agent(lambda verb, request: {}) for _ in range(2)])


@pytest.fixture
def here() -> Target:
    return targets.local(2, "cpu", [0, 1])


def test_a_stack_with_an_image_runs_its_jobs_in_it_and_sees_the_share_there(slice_of_two: Target) -> None:
    assert plan.choose_container(slice_of_two, "jax", None, unasked) == Container(
        image=IMAGES["jax"], mounts=("/share",)
    )


@pytest.mark.parametrize(("stack", "runtime"), [("pytorch", None), ("jax", "bare")])
def test_a_stack_without_an_image_and_who_says_bare_run_bare(
    slice_of_two: Target, stack: str, runtime: str | None
) -> None:
    assert plan.choose_container(slice_of_two, stack, runtime, unasked) is None


def test_docker_without_an_image_in_the_inventory_says_how_it_gets_there(slice_of_two: Target) -> None:
    with pytest.raises(RequestError) as error:
        plan.choose_container(slice_of_two, "pytorch", "docker", unasked)
    assert str(error.value) == (
        "--runtime docker: the stack dev has no image of pytorch; `fab build --stack pytorch`, "
        "`fab push --stack dev --image pytorch`, then `pulumi up`"
    )


@pytest.mark.parametrize(
    ("before", "asked", "access"),
    [
        (None, None, "devices"),
        (None, "privileged", "privileged"),
        ({"container_access": "privileged"}, None, "privileged"),
        ({"container_access": "privileged"}, "devices", "devices"),
        ({}, None, "devices"),
    ],
)
def test_a_container_has_the_devices_alone_unless_more_is_asked_for_now_or_was_when_the_run_began(
    slice_of_two: Target, before: dict[str, Any] | None, asked: str | None, access: str
) -> None:
    described = None if before is None else {"runtime": "docker", "image": OLD, **before}
    found = plan.choose_container(slice_of_two, "jax", None, unasked, described, asked)
    assert found is not None and found.access == access


@pytest.mark.parametrize(("runtime", "access"), [("bare", "privileged"), (None, "root")])
def test_an_access_that_is_none_or_that_no_container_has_is_refused(
    slice_of_two: Target, runtime: str | None, access: str
) -> None:
    with pytest.raises(RequestError, match=f'--container-access:? "?{access}'):
        plan.choose_container(slice_of_two, "jax", runtime, unasked, None, access)


@pytest.mark.parametrize(
    ("box", "platform", "is_hint"),
    [
        (Container(image=BUILT), "tpu", True),
        (Container(image=BUILT, access="privileged"), "tpu", False),
        (Container(image=BUILT), "cpu", False),
        (None, "tpu", False),
    ],
)
def test_only_where_a_container_may_keep_a_tpu_from_initialising_the_way_out_is_named(
    box: Container | None, platform: str, is_hint: bool
) -> None:
    assert ("--container-access privileged" in (plan.container_hint(box, platform) or "")) == is_hint


def test_this_machine_runs_bare_unless_docker_is_asked_for_and_then_in_what_was_built_here(
    here: Target,
) -> None:
    assert plan.choose_container(here, "jax", None, unasked) is None
    assert plan.choose_container(here, "jax", "docker", built) == Container(image=BUILT)


@pytest.mark.parametrize(
    ("before", "image"),
    [({"runtime": "docker", "image": OLD}, OLD), ({"runtime": "bare", "image": None}, None)],
)
def test_a_run_goes_on_in_the_image_that_it_was_started_in_whatever_the_stack_has_now(
    slice_of_two: Target, before: dict[str, Any], image: str | None
) -> None:
    found = plan.choose_container(slice_of_two, "jax", None, unasked, before)
    assert (found.image if found else None) == image


def test_who_says_docker_of_a_run_that_goes_on_gets_the_image_that_the_stack_has_now(
    slice_of_two: Target,
) -> None:
    found = plan.choose_container(slice_of_two, "jax", "docker", unasked, {"runtime": "docker", "image": OLD})
    assert found is not None
    assert found.image == IMAGES["jax"]


def test_a_runtime_that_does_not_exist_is_refused_with_those_there_are(here: Target) -> None:
    with pytest.raises(
        RequestError, match='--runtime: "podman" is not a runtime; choose one of bare, docker'
    ):
        plan.choose_container(here, "jax", "podman", unasked)


def test_there_is_no_image_for_gpus() -> None:
    with pytest.raises(RequestError, match="the images are for TPUs and CPUs; on a GPU leave --runtime out"):
        plan.built_here("jax", "gpu")


def test_a_container_here_sees_the_working_directory_and_the_files_that_options_name(tmp_path: Path) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    for folder in (work, elsewhere):
        folder.mkdir()
    for path in (work / "inside.txt", elsewhere / "text.txt", elsewhere / "tokenizer.json"):
        path.touch()
    options = {
        "data": f"file://{elsewhere}/text.txt",
        "tokenizer": "../elsewhere/tokenizer.json",
        "near": "inside.txt",
        "missing": "/no/such/file",
        "bucket": "gs://bucket/text",
        "steps": 5,
        "nothing": None,
        "empty": "",
    }
    found = plan.container_with_files(Container(image=BUILT), options, str(work))
    assert found == Container(
        image=BUILT,
        read_only_mounts=(str(work), f"{elsewhere}/text.txt", f"{elsewhere}/tokenizer.json"),
    )


def test_a_tilde_is_refused_because_a_container_has_another_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").touch()
    with pytest.raises(
        RequestError, match="~/text.txt means another folder in a container; write its path out"
    ):
        plan.container_with_files(Container(image=BUILT), {"data": "~/text.txt"}, "/")


def test_a_share_that_a_slice_does_not_have_is_not_mounted(make_agent: MakeAgent) -> None:
    target = make_target([make_agent(lambda verb, request: {})])
    storage = dataclasses.replace(NFS, nfs_source=None, nfs_mount=None)
    inventory = dataclasses.replace(target.inventory, storage=storage)
    assert plan.choose_container(
        dataclasses.replace(target, inventory=inventory), "jax", None, unasked
    ) == Container(image=IMAGES["jax"])
