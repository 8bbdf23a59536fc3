"""What each host is told, compared whole: a key more or less is a change of what runs there."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from backends.local.local_backend import local
from contracts.errors import RequestError
from contracts.ranks import decoded
from launch import plan
from launch.hosts import Agent, GoneLink
from launch.targets import Container
from tests.launch.slices import IMAGES, NO_STORAGE, make_host, make_plan, make_slice, make_target, ssh_backend

TARGET = make_target(
    [Agent(host="w", link=GoneLink("", ""), root="/")] * 2,
    name="local",
    backend=local(1, "cpu", [0]).backend,
    platform="cpu",
    python="/venv/bin/python",
    runs_url="/runs",
    agent_root="/cache/agent",
    cache_dir="/cache",
    cpus=((0, 1), None),
    coordinator_host="127.0.0.1",
)
PLAN = make_plan(
    TARGET,
    attempt=1,
    arguments=("--data", "my text.txt", "--steps", "5"),
    cwd="/home/me",
    coordinator_port=4000,
    liveness_port=4001,
    liveness_token="0123",
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
    "PYTHONDONTWRITEBYTECODE": "",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def test_the_start_request_of_a_process_is_this() -> None:
    assert plan.start(PLAN, 0) == {
        "run_id": "flax_mlm-20261120-214500-abcd",
        "attempt": 1,
        "process_id": 0,
        "argv": [
            *["/venv/bin/python", "-P", "-u", "-m", "jobs.flax_mlm", "--data"],
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
        "liveness_host": "127.0.0.1",
        "liveness_port": 4001,
        "liveness_token": "0123",
        "hang_floor_s": 120.0,
        "heartbeat_limit_s": 300.0,
    }


@pytest.mark.parametrize("origin", ["queued-resource q", "group q", "instance q"])
def test_hosts_that_compute_engine_made_are_told_their_place_and_their_group(origin: str) -> None:
    hosts = [make_host(index, internal_address=f"10.0.0.{index}") for index in range(4)]
    one = make_slice(hosts, origin=origin, count=2, ends_at="2026-11-26T16:00:00+00:00")
    target = make_target([], hosts=tuple(hosts), slice=one, platform="tpu", cpus=(None,) * 4)
    there = dataclasses.replace(PLAN, target=target, homes=("/home/me",) * 4)
    request = plan.start(there, 3)
    groups = {name: value for name, value in request["env"].items() if name.startswith("MEGASCALE")}
    assert request["slice_ends_s"] == 1_795_708_800.0
    if origin.startswith("queued-resource"):
        assert "worker_env" not in request and not groups
        return
    assert request["worker_env"] == {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3"}
    assert groups == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.0",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }


def test_the_preflight_request_of_a_host_that_several_runs_share_is_this() -> None:
    assert plan.preflight(PLAN, 1, now_s=12.5) == {
        "python": "/venv/bin/python",
        "python_remedy": "name one that has the job's packages, or leave --python out",
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


def test_a_slice_of_its_own_is_asked_for_its_mount_its_devices_and_the_way_to_the_first_host() -> None:
    target = dataclasses.replace(
        TARGET, name="dev", backend=ssh_backend(), runs_url="/share/runs", stand_in_devices=("/run/accel0",)
    )
    alone = dataclasses.replace(PLAN, target=target)
    first, second = (plan.preflight(alone, rank, now_s=0.0) for rank in range(2))
    assert (first["peers"], second["peers"]) == ([], [{"name": "w-0", "host": "10.0.0.0", "port": 22}])
    for request in (first, second):
        assert (request["alone"], request["mount"]) == (True, "/share")
        assert request["python_remedy"] == "`fab deploy --stack dev --runtime bare` installs it"
        assert (request["device_globs"], request["lockfiles"]) == (["/run/accel0"], ["/tmp/libtpu_lockfile"])


def test_what_the_preflight_found_is_settled_and_paths_below_a_home_are_written_out_for_each_host() -> None:
    target = dataclasses.replace(
        TARGET, python="~/venv/bin/python", cache_dir="~/.cache/x", agent_root="~/agent"
    )
    homely = dataclasses.replace(PLAN, target=target)
    facts = [{"free_ports": [5000, 5001], "home": "/home/a"}, {"free_ports": [6000, 6001], "home": "/home/b"}]
    found = plan.settled(homely, facts, token="secret")
    assert (found.coordinator, found.liveness_port, found.liveness_token) == (
        "127.0.0.1:5000",
        5001,
        "secret",
    )
    for rank, home in enumerate(("/home/a", "/home/b")):
        request = plan.start(found, rank)
        assert request["argv"][0] == f"{home}/venv/bin/python"
        assert request["env"]["RUN_CACHE_DIR"] == f"{home}/.cache/x"
        assert request["env"]["PYTHONPATH"] == f"{home}/agent/bundles/{'ab' * 32}"


IMAGE = "europe-west4-docker.pkg.dev/p/r/jax@sha256:" + "0" * 64
CONTAINED = dataclasses.replace(
    PLAN,
    target=dataclasses.replace(TARGET, agent_root="~/.cache/tpu-stack/agent", cache_dir="~/.cache/tpu-stack"),
    run_dir="/share/runs/one",
    cwd="~",
    container=Container(image=IMAGE, mounts=("/share",), read_only_mounts=("/text",)),
)


def test_in_a_container_a_process_is_the_images_python_and_sees_code_cache_and_share() -> None:
    request = plan.start(CONTAINED, 0)
    assert request["argv"][:5] == ["python", "-P", "-u", "-m", "jobs.flax_mlm"]
    assert request["cwd"] == "/share/runs/one"
    looked_for = plan.preflight(CONTAINED, 0, now_s=0.0)["container"]
    assert looked_for == {"image": IMAGE, "mounts": ["/share", "/text"]}, "what the launch brings is not"
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


STACK = dataclasses.replace(TARGET, name="dev", backend=ssh_backend(), platform="tpu")
BUILT = "sha256:" + "b" * 64
OLD = "europe-west4-docker.pkg.dev/p/r/jax@sha256:" + "0" * 64


IN_DOCKER = {"runtime": "docker", "image": OLD}
PRIVILEGED = {**IN_DOCKER, "container_access": "privileged"}
BARE = {"runtime": "bare", "image": None}


@pytest.mark.parametrize(
    ("framework", "runtime", "before", "access", "found"),
    [
        # The image that the stack has, with only the devices unless more is asked for.
        ("jax", None, None, None, (IMAGES["jax"], "devices")),
        ("jax", None, None, "privileged", (IMAGES["jax"], "privileged")),
        ("pytorch", None, None, None, None),
        ("jax", "bare", None, None, None),
        # A run that is resumed has what it was started with, unless something else is asked for.
        ("jax", None, IN_DOCKER, None, (OLD, "devices")),
        ("jax", None, BARE, None, None),
        ("jax", "docker", IN_DOCKER, None, (IMAGES["jax"], "devices")),
        ("jax", None, PRIVILEGED, None, (OLD, "privileged")),
        ("jax", None, PRIVILEGED, "devices", (OLD, "devices")),
        # What cannot be had is refused with the remedy.
        ("jax", "bare", None, "privileged", "--container-access privileged: the processes run in no container here"),
        ("jax", None, None, "root", '--container-access: "root" is not an access; choose one of devices, privileged'),
        ("jax", "podman", None, None, '--runtime: "podman" is not a runtime; choose one of bare, docker'),
        ("pytorch", "docker", None, None, "--runtime docker: the stack dev has no image of pytorch; `fab build --fr"),
    ],
)  # fmt: skip
def test_a_run_is_in_the_image_that_the_stack_has_or_in_that_in_which_it_began(
    framework: str,
    runtime: str | None,
    before: dict[str, Any] | None,
    access: str | None,
    found: tuple[str, str] | str | None,
) -> None:
    if isinstance(found, str):
        with pytest.raises(RequestError) as error:
            plan.choose_container(STACK, framework, runtime, before, access)
        assert str(error.value).startswith(found)
        return
    box = plan.choose_container(STACK, framework, runtime, before, access)
    wanted = None if found is None else Container(image=found[0], mounts=("/share",), access=found[1])
    assert box == wanted
    inventory = dataclasses.replace(STACK.inventory, storage=NO_STORAGE)
    bare = dataclasses.replace(STACK, inventory=inventory)
    box = plan.choose_container(bare, framework, runtime, before, access)
    assert box == (wanted and dataclasses.replace(wanted, mounts=())), "without a share none is mounted"


def test_this_machine_runs_bare_unless_docker_is_asked_for_and_then_in_what_was_built_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = local(2, "cpu", [0, 1])
    built = {("jax", "cpu"): mock.Mock(id=BUILT)}
    monkeypatch.setattr("images.local_images.required", lambda *asked: built[asked])
    assert plan.choose_container(here, "jax", None) is None
    assert plan.choose_container(here, "jax", "docker") == Container(image=BUILT)
    with pytest.raises(RequestError, match="the images are for TPUs and CPUs; on a GPU leave --runtime out"):
        plan.choose_container(dataclasses.replace(here, platform="gpu"), "jax", "docker")


def test_a_container_here_sees_the_working_directory_and_the_files_that_options_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "empty": "",
    }
    box, seen = Container(image=BUILT), (str(work), f"{elsewhere}/text.txt", f"{elsewhere}/tokenizer.json")
    assert plan.container_with_files(box, options, str(work)) == dataclasses.replace(
        box, read_only_mounts=seen
    )
    monkeypatch.setenv("HOME", str(elsewhere))
    with pytest.raises(
        RequestError, match="~/text.txt means another folder in a container; write its path out"
    ):
        plan.container_with_files(box, {"data": "~/text.txt"}, "/")


TORCH = dataclasses.replace(PLAN, job="torch_glue", framework="pytorch", arguments=("--steps", "5"))
FACTS = [{"free_ports": [4000, 4001, *range(5000, 5008)], "home": "/home/me"}] * 2


def test_a_job_of_another_framework_with_one_process_a_host_finds_what_its_framework_s_launcher_would_set() -> (
    None
):
    assert plan.preflight(TORCH, 1, now_s=0.0)["free_ports"] == 4
    assert plan.preflight(TORCH, 1, now_s=0.0)["modules"][0] == "torch"
    told = plan.start(plan.settled(TORCH, FACTS, token="t"), 1)
    assert told["argv"] == ["/venv/bin/python", "-P", "-u", "-m", "jobs.torch_glue", "--steps", "5"]
    of_torch = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_PORT": "4000",
        "RUN_PROCESS_ID": "1",
    }
    assert told["env"].items() >= of_torch.items()
    assert "PYTHONPATH" in told["env"] and "RUN_RANKS_PER_HOST" not in told["env"]


def test_a_job_with_a_rank_a_chip_has_a_supervisor_that_is_told_of_a_job_and_not_of_a_folder() -> None:
    target = dataclasses.replace(TARGET, platform="tpu", name="dev", backend=ssh_backend())
    chips = dataclasses.replace(TORCH, target=target, ranks_per_host=4, container=Container(image="i"))
    chips = plan.settled(chips, FACTS, token="t")
    told = plan.start(chips, 1)
    assert told["argv"][:-1] == ["python", "-P", "-u", "-m", "jobs.runtime.ranks.rank_supervisor"]
    spec = decoded(told["argv"][-1])
    assert spec.words == ("python", "-P", "-u", "-m", "jobs.torch_glue", "--steps", "5")
    assert (spec.folder, spec.work, spec.python) == (None, None, None)
    assert (spec.ranks.size, spec.ranks.topology) == (8, "4x4")
    assert (told["env"]["RUN_NUM_PROCESSES"], told["env"]["RUN_PROCESS_ID"]) == ("2", "1")
    assert (told["num_processes"], "RANK" in told["env"]) == (2, False)


@pytest.mark.parametrize(
    ("framework", "platform", "asked", "found"),
    [
        ("pytorch", "tpu", None, 4),
        ("pytorch_xla", "tpu", "4", 4),
        ("pytorch_xla", "tpu", "1", "has one chip, and a host of s has 4; leave it out"),
        ("pytorch", "gpu", None, 4),
        ("pytorch", "gpu", "2", 2),
        ("pytorch", "gpu", "8", "has one chip, and a host of s has 4"),
        ("pytorch", "cpu", None, 1),
        ("pytorch", "cpu", "3", 3),
        ("jax", "tpu", None, 1),
        ("jax", "cpu", "2", "one process of a jax job drives all devices of its host"),
        ("tensorflow", "cpu", "2", "one process of a tensorflow job drives all devices of its host"),
    ],
)
def test_a_job_has_as_many_processes_on_a_host_as_its_framework_wants(
    framework: str, platform: str, asked: str | None, found: int | str
) -> None:
    target = dataclasses.replace(TARGET, platform=platform)
    if isinstance(found, int):
        assert plan.ranks_of_job(framework, target, asked) == found
    else:
        with pytest.raises(RequestError, match=f"--processes-per-host {asked}: .*{found}"):
            plan.ranks_of_job(framework, target, asked)
