"""What each host is told, compared whole: a key more or less is a change of what runs there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from launch import plan, targets
from launch.hosts import Agent
from launch.plan import Container, Plan
from launch.target import Target
from tests.launch.slices import IMAGES, NFS, make_target

PLAN = Plan(
    run_id="flax_mlm-20261120-214500-abcd",
    attempt=1,
    job="flax_mlm",
    framework="jax",
    arguments=("--data", "my text.txt", "--steps", "5"),
    platform="cpu",
    run_dir="/runs/one",
    cache_dir="/cache",
    cwd="/home/me",
    python="/venv/bin/python",
    agent_root="/cache/agent",
    bundle_sha256="ab" * 32,
    coordinator_host="127.0.0.1",
    local_devices=1,
    cpus=((0, 1), None),
    hosts=(("w-0", "10.0.0.1", 22), ("w-1", "10.0.0.2", 22)),
    coordinator_port=4000,
    hub_port=4001,
    hub_token="0123",
    homes=("/home/me", "/home/you"),
)
ENVIRONMENT = {
    "RUN_ID": "flax_mlm-20261120-214500-abcd",
    "RUN_DIR": "/runs/one",
    "RUN_JOB": "flax_mlm",
    "RUN_FRAMEWORK": "jax",
    "RUN_ATTEMPT": "1",
    "RUN_NUM_PROCESSES": "2",
    "RUN_PROCESS_ID": "0",
    "RUN_COORDINATOR": "127.0.0.1:4000",
    "RUN_PLATFORM": "cpu",
    "RUN_CACHE_DIR": "/cache",
    "RUN_LOCAL_DEVICES": "1",
    "PYTHONPATH": "/cache/agent/bundles/" + "ab" * 32,
    "PYTHONDONTWRITEBYTECODE": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def test_the_start_request_of_a_process_is_this() -> None:
    assert plan.start(PLAN, 0) == {
        "run_id": "flax_mlm-20261120-214500-abcd",
        "attempt": 1,
        "process_id": 0,
        "argv": [
            "/venv/bin/python",
            "-P",
            "-u",
            "-m",
            "jobs.flax_mlm",
            "--data",
            "my text.txt",
            "--steps",
            "5",
        ],
        "env": ENVIRONMENT,
        "cwd": "/home/me",
        "log_path": "/runs/one/logs/1/host-0.log",
        "run_dir": "/runs/one",
        "num_processes": 2,
        "cpus": [0, 1],
        "hub_host": "127.0.0.1",
        "hub_port": 4001,
        "hub_token": "0123",
        "hang_floor_s": 120.0,
        "heartbeat_limit_s": 300.0,
    }


def test_processes_differ_in_their_rank_their_log_and_their_processors_alone() -> None:
    first, second = plan.start(PLAN, 0), plan.start(PLAN, 1)
    assert second == {
        **first,
        "process_id": 1,
        "env": {**ENVIRONMENT, "RUN_PROCESS_ID": "1"},
        "log_path": "/runs/one/logs/1/host-1.log",
        "cpus": None,
    }


def test_a_run_in_a_bucket_keeps_its_logs_with_the_agent() -> None:
    there = dataclasses.replace(PLAN, run_dir="gs://bucket/runs/one")
    request = plan.start(there, 1)
    assert request["run_dir"] is None
    assert request["log_path"] == f"/cache/agent/runs/{PLAN.run_id}/logs/1/host-1.log"
    assert request["env"]["RUN_DIR"] == "gs://bucket/runs/one"
    assert plan.preflight(there, 0, now_s=1.0)["run_dir"] is None


def test_the_preflight_request_of_a_host_that_several_runs_share_is_this() -> None:
    assert plan.preflight(PLAN, 1, now_s=12.5) == {
        "python": "/venv/bin/python",
        "python_remedy": None,
        "modules": [
            "jax",
            "flax",
            "optax",
            "orbax.checkpoint",
            "tokenizers",
            "safetensors",
            "tyro",
            "tensorboard",
        ],
        "platform": "cpu",
        "run_dir": "/runs/one",
        "cache_dir": "/cache",
        "mount": None,
        "min_free_bytes": 512 * 2**20,
        "peers": [],
        "alone": False,
        "time": 12.5,
        "max_clock_offset_s": 5.0,
        "bundle": "ab" * 32,
    }


def test_every_other_host_of_a_slice_has_to_reach_the_first() -> None:
    alone = dataclasses.replace(PLAN, alone=True, mount="/mnt/share")
    requests = [plan.preflight(alone, rank, now_s=0.0) for rank in range(2)]
    assert [request["peers"] for request in requests] == [
        [],
        [{"name": "w-0", "host": "10.0.0.1", "port": 22}],
    ]
    assert [request["alone"] for request in requests] == [True, True]
    assert [request["mount"] for request in requests] == ["/mnt/share"] * 2


def test_files_that_stand_in_for_devices_are_looked_at_with_the_lock_file() -> None:
    rehearsed = dataclasses.replace(PLAN, stand_in_devices=("/run/accel0",))
    request = plan.preflight(rehearsed, 0, now_s=0.0)
    assert (request["device_globs"], request["lockfiles"]) == (["/run/accel0"], ["/tmp/libtpu_lockfile"])


def test_the_ports_and_home_directories_are_those_that_the_preflight_found() -> None:
    facts = [{"free_ports": [5000, 5001], "home": "/home/a"}, {"free_ports": [6000, 6001], "home": "/home/b"}]
    found = plan.settled(PLAN, facts, token="secret")
    assert (found.coordinator, found.hub_port, found.hub_token) == ("127.0.0.1:5000", 5001, "secret")
    assert found.homes == ("/home/a", "/home/b")


def test_a_path_below_the_home_directory_is_written_out_for_each_host() -> None:
    homely = dataclasses.replace(
        PLAN, python="~/venv/bin/python", cache_dir="~/.cache/x", agent_root="~/agent"
    )
    for rank, home in enumerate(PLAN.homes):
        request = plan.start(homely, rank)
        assert request["argv"][0] == f"{home}/venv/bin/python"
        assert request["env"]["RUN_CACHE_DIR"] == f"{home}/.cache/x"
        assert request["env"]["PYTHONPATH"] == f"{home}/agent/bundles/{'ab' * 32}"


@pytest.mark.parametrize("devices", [None, 3])
def test_the_number_of_devices_is_told_only_where_it_is_chosen(devices: int | None) -> None:
    told = plan.environment(dataclasses.replace(PLAN, local_devices=devices), 0).get("RUN_LOCAL_DEVICES")
    assert told == (None if devices is None else "3")


IMAGE = "europe-west4-docker.pkg.dev/p/r/jax@sha256:" + "0" * 64
CONTAINED = dataclasses.replace(
    PLAN,
    agent_root="~/.cache/tpu-stack/agent",
    cache_dir="~/.cache/tpu-stack",
    run_dir="/share/runs/one",
    cwd="~",
    container=Container(image=IMAGE, mounts=("/share",), read_only_mounts=("/text",)),
)


def test_in_a_container_a_process_is_the_images_python_and_sees_code_cache_and_share() -> None:
    request = plan.start(CONTAINED, 0)
    assert request["argv"][:5] == ["python", "-P", "-u", "-m", "jobs.flax_mlm"]
    assert request["cwd"] == "/share/runs/one"
    assert request["container"] == {
        "image": IMAGE,
        "platform": "cpu",
        "mounts": ["/share", "~/.cache/tpu-stack"],
        "read_only_mounts": ["~/.cache/tpu-stack/agent/bundles/" + "ab" * 32, "/text"],
        "shm_bytes": 8 * 2**30,
        "access": "devices",
    }


def test_a_run_directory_outside_the_other_mounts_is_mounted_and_one_in_a_bucket_is_not() -> None:
    elsewhere = dataclasses.replace(CONTAINED, run_dir="/runs/one")
    assert plan.start(elsewhere, 0)["container"]["mounts"] == ["/share", "~/.cache/tpu-stack", "/runs/one"]
    bucket = dataclasses.replace(CONTAINED, run_dir="gs://bucket/one")
    assert plan.start(bucket, 0)["container"]["mounts"] == ["/share", "~/.cache/tpu-stack"]
    assert plan.start(bucket, 0)["cwd"] == "~/.cache/tpu-stack"


def test_the_preflight_looks_for_the_image_and_for_what_the_launch_does_not_bring_itself() -> None:
    assert plan.preflight(CONTAINED, 0, now_s=0.0)["container"] == {
        "image": IMAGE,
        "mounts": ["/share", "/text"],
    }
    assert "container" not in plan.preflight(PLAN, 0, now_s=0.0)
    assert "container" not in plan.start(PLAN, 0)


def test_a_job_is_told_the_peak_of_all_devices_together_where_it_is_known() -> None:
    assert "RUN_PEAK_FLOPS_PER_S" not in plan.environment(PLAN, 0)
    known = dataclasses.replace(PLAN, peak_flops_per_s=3_152_000_000_000_000)
    assert plan.environment(known, 0)["RUN_PEAK_FLOPS_PER_S"] == "3152000000000000"


def test_only_a_process_that_computes_on_cpu_is_told_of_large_pages() -> None:
    assert "GLIBC_TUNABLES" not in plan.environment(dataclasses.replace(PLAN, platform="tpu"), 0)


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
        "--runtime docker: the stack dev has no image of pytorch; `fab build --framework pytorch`, "
        "`fab push --stack dev --framework pytorch`, then `pulumi up`"
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
