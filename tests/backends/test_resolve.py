"""What --stack, --slice and --hosts mean, and what is refused before anything is connected to."""

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.local.local_backend import gpus, on_this_machine, shares
from backends.resolve import inventory_target, resolve
from console.hosts import verification
from contracts.errors import RequestError
from contracts.files import DiskFiles
from contracts.inventory import Inventory, from_json, to_json
from contracts.run_directory import RunDirectory
from launch import launching
from launch.hosts import GoneLink, HostError
from launch.remote_files import Buckets, HostFiles
from launch.request.run_request import Request
from launch.runs import Run
from launch.targets import PresetInventory, Target, TargetRequest
from tests.launch.slices import NFS, NO_STORAGE, make_host, make_inventory, make_slice

HOSTS = [make_host(index, reach="direct") for index in range(4)]
MAIN = make_slice(HOSTS, name="main", origin="queued-resource main")
SHARE = dataclasses.replace(NFS, bucket_url="gs://b")
STACK = make_inventory(MAIN, storage=SHARE)


def target(inventory: Inventory = STACK, **wanted: Any) -> Target:
    return inventory_target(inventory, TargetRequest(stack="dev", **wanted))


def refused(inventory: Inventory = STACK, **wanted: Any) -> str:
    with pytest.raises(RequestError) as error:
        target(inventory, **wanted)
    return str(error.value)


def test_a_stacks_hosts_are_a_tpus_with_their_runs_on_the_share() -> None:
    found = target()
    assert [host.index for host in found.hosts] == [0, 1, 2, 3]
    assert (len(found.transports), len(found.agents), len(found.cpus)) == (4, 4, 4)
    assert (found.platform, found.devices, found.capabilities.is_billed) == ("tpu", 16, True)
    assert (found.runs_url, found.mount) == ("/share/runs", "/share")
    assert found.coordinator_host == "10.0.0.0"
    assert isinstance(found.files, HostFiles)
    assert found.pulumi_stack == "dev"


@pytest.mark.parametrize(
    ("hosts", "listed", "platform", "why"),
    [
        (None, 4, "tpu", None),
        ("0-3", 4, "tpu", None),
        ("1-3", 4, "tpu", "--hosts: 3 of the 4 hosts of main"),
        ("1-3", 4, "cpu", None),
        (None, 3, "tpu", "the slice main (v5litepod-16) has 4 hosts"),
    ],
)
def test_a_part_of_a_tpu_slice_cannot_compute_and_a_part_of_other_hosts_can(
    hosts: str | None, listed: int, platform: str, why: str | None
) -> None:
    slices = (make_slice(HOSTS[:listed], name="main"),)
    found = target(dataclasses.replace(STACK, slices=slices), hosts=hosts, platform=platform)
    assert (found.part_of_tpu or "").startswith(why) if why else found.part_of_tpu is None
    if why:  # said before a host is asked
        request = Request(job="jax_hello", arguments=(), name=None, resume=None)
        with pytest.raises(RequestError, match=re.escape(why)):
            launching.launch(request, found, print)
        with pytest.raises(RequestError, match=re.escape(why)):
            verification.verify(found, "jax", None)


def test_runs_go_to_the_bucket_where_there_is_no_share_and_to_where_they_are_asked_to_go() -> None:
    no_share = dataclasses.replace(STACK, storage=dataclasses.replace(SHARE, nfs_source=None, nfs_mount=None))
    assert target(no_share).runs_url == "gs://b/runs"
    assert isinstance(target(no_share).files, Buckets)
    assert target(no_share).mount is None
    for asked in ("gs://b/other/", "/data/runs", "/share2/runs"):
        assert (target(runs=asked).runs_url, target(runs=asked).mount) == (asked.rstrip("/"), None)


def test_a_choice_of_hosts_keeps_their_order_and_the_first_of_them_is_where_the_group_forms() -> None:
    found = target(hosts="3,1-2")
    assert [host.index for host in found.hosts] == [1, 2, 3]
    assert [agent.host for agent in found.agents] == ["w-1", "w-2", "w-3"]
    assert (found.coordinator_host, found.devices) == ("10.0.0.1", 12)


def test_a_rehearsals_hosts_have_processors_and_their_own_python() -> None:
    python, devices = "/venv/bin/python", ("/run/accel0",)
    preset = PresetInventory(
        folder=Path("/n"), inventory=STACK, platform="cpu", python=python, stand_in_devices=devices
    )
    found = target(preset=preset)
    assert (found.platform, found.devices, found.python) == ("cpu", 4, python)
    assert found.stand_in_devices == devices


EMPTY = dataclasses.replace(MAIN, hosts=())
OTHER = dataclasses.replace(MAIN, name="other")
ONLY_NFS = dataclasses.replace(NO_STORAGE, nfs_mount="/mnt/share")
SPREAD = dataclasses.replace(MAIN, zones=("us-central1-a", "us-west4-a"))


def test_the_runs_of_a_slice_that_may_be_in_several_zones_are_in_the_bucket() -> None:
    assert target().runs_url == "/share/runs"
    assert target(dataclasses.replace(STACK, slices=(SPREAD,))).runs_url == "gs://b/runs"


@pytest.mark.parametrize(
    ("changed", "wanted", "said"),
    [
        ({"slices": ()}, {}, "the stack dev has no slice; add one to tpu-stack:slices, then `pulumi up`"),
        ({"slices": (MAIN, OTHER)}, {}, "--slice: the stack dev has several, say which: main, other"),
        ({}, {"slice": "mian"}, '--slice: "mian" is not a slice of dev; choose one of main'),
        ({"slices": (EMPTY,)}, {}, "the slice main has no hosts yet: its queued-resource main was still"),
        ({}, {"hosts": "0-4"}, "--hosts 0-4: the slice has the hosts 0 to 3"),
        ({}, {"hosts": "2-1"}, "--hosts 2-1: the slice has the hosts 0 to 3"),
        ({}, {"hosts": "all"}, '--hosts: "all" is not a list of hosts; write it as 0-3,5'),
        ({}, {"hosts": ""}, '--hosts: "" is not a list of hosts'),
        ({}, {"runs": "runs"}, "--runs runs: must be an absolute path on the hosts, or a URL"),
        ({"storage": NO_STORAGE}, {}, "the stack dev has neither NFS nor a bucket"),
        (
            {"storage": ONLY_NFS, "slices": (SPREAD,)},
            {},
            "the stack dev has no bucket, and main may be in us-ce",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_there_is(
    changed: dict[str, Any], wanted: dict[str, Any], said: str
) -> None:
    assert refused(dataclasses.replace(STACK, **changed), **wanted).startswith(said)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"platform": "cuda"}, '--platform: "cuda" is not a platform; choose one of cpu, gpu, tpu'),
        ({"hosts": "0"}, "--hosts 0: must be a whole number from 1 to 64 on this machine"),
        ({"hosts": "1000"}, "--hosts 1000: must be a whole number from 1 to 64 on this machine"),
        ({"hosts": "2", "platform": "gpu"}, "--hosts 2: on this machine one process drives all its GPUs"),
        ({"slice": "main"}, "--slice main: this machine has no slices; say --stack as well"),
    ],
)
def test_of_this_machine_what_it_cannot_be_is_refused(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as error:
        resolve(TargetRequest(**wanted))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory"),
        ("{}", "version None cannot be read"),
        (to_json(STACK).replace('"zone"', '"zoen"', 1), "inventory.slices[0].zone is missing"),
        (to_json(STACK), None),
    ],
)
def test_a_stack_that_looks_like_a_path_is_the_inventory_in_that_file(
    tmp_path: Path, text: str | None, said: str | None
) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    if said is None:
        found = resolve(TargetRequest(stack=str(path)))
        assert (found.inventory, found.pulumi_stack) == (STACK, None)
        return
    with pytest.raises(RequestError) as error:
        resolve(TargetRequest(stack=str(path)))
    assert str(path) in str(error.value)
    assert said in str(error.value)


def test_on_a_host_that_a_run_had_and_the_slice_has_no_more_nothing_runs() -> None:
    attempt = {"attempt": 0, "started": "2020-11-20T21:45:00Z", "processes": 1}
    described = {"run_id": "r", "hosts": [{"index": 0, "name": "w-old"}], "attempts": [attempt]}
    run = Run(directory=RunDirectory("/nowhere"), described=described, result=None, heartbeats=(None,))
    known = target().backend.status([run])
    assert (known.processes, known.errors, known.knowing) == ((), (), 1)
    with pytest.raises(HostError, match="w-old: is no longer a host of main → `fab recover` goes on"):
        target().backend.logs(run, 0, offset=0, limit_bytes=1)


@pytest.mark.parametrize(
    ("changes", "slice_created", "is_gone"),
    [
        ({}, "c1", True),
        ({}, "c2", False),
        ({}, "", False),
        ({"name": "other"}, "c1", False),
        # The other API has made it, with the same name.
        ({"origin": "group " + MAIN.origin.rpartition(" ")[2]}, "c1", True),
        # A slice of another stack, which may be called the same.
        ({"origin": "group tpu-stack-other-main"}, "c1", False),
    ],
)
def test_a_host_of_a_slice_that_was_made_again_is_another_one_though_its_name_is_the_same(
    changes: dict[str, str], slice_created: str, is_gone: bool
) -> None:
    fresh = dataclasses.replace(MAIN, created="c2")
    there = inventory_target(dataclasses.replace(STACK, slices=(fresh,)), TargetRequest(stack="dev"))
    described = {
        "hosts": [{"index": 0, "name": MAIN.hosts[0].name}],
        "slice": {"name": MAIN.name, "origin": MAIN.origin, **changes},
        "attempts": [{"attempt": 0, "slice_created": slice_created}],
    }
    (agent,) = there.backend.agents_for(described)  # type: ignore[attr-defined]
    assert isinstance(agent.link, GoneLink) == is_gone


@pytest.mark.parametrize(
    ("beat_age_s", "state"), [(5.0, "running"), (300.0, "lost")], ids=["it lives", "it is gone"]
)
@pytest.mark.parametrize("changes", [{"name": "old"}, {"origin": "group tpu-stack-other-main"}])
def test_whether_a_run_lives_on_another_slice_its_heartbeats_show(
    changes: dict[str, str], beat_age_s: float, state: str
) -> None:
    described = {
        "run_id": "r",
        "hosts": [{"index": 0, "name": "w-old"}],
        "slice": {"name": MAIN.name, "origin": MAIN.origin, **changes},
        "attempts": [{"attempt": 0, "started": "2020-11-20T21:45:00Z", "processes": 1}],
    }
    beat = {"attempt": 0, "state": "running", "time": time.time() - beat_age_s}
    run = Run(directory=RunDirectory("/nowhere"), described=described, result=None, heartbeats=(beat,))
    assert target().run_state(run) == state
    assert f"It is on the slice {changes.get('name', MAIN.name)} (" in launching.about_other_slice(
        run, target()
    )


@given(st.lists(st.integers(0, 500), min_size=1, max_size=70, unique=True), st.integers(1, 70))
def test_all_processors_are_used_and_none_twice_while_there_are_enough(
    processors: list[int], count: int
) -> None:
    shared = shares(processors, count)
    assert len(shared) == count
    assert all(shared)
    used = [processor for share in shared for processor in share]
    if count <= len(processors):
        assert used == processors
        sizes = [len(share) for share in shared]
        assert max(sizes) - min(sizes) <= 1
    else:
        assert {len(share) for share in shared} == {1}
        times = [used.count(processor) for processor in processors]
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize(("platform", "count"), [("cpu", 2), ("gpu", 1), ("tpu", 1)])
def test_without_a_number_of_hosts_there_are_two_on_cpu_and_one_elsewhere(
    runs_dir: Path, platform: str, count: int
) -> None:
    found = on_this_machine(hosts=None, platform=platform)
    assert (len(found.hosts), len(found.agents), len(found.cpus), found.devices) == (count,) * 4
    assert found.runs_url == str(runs_dir)
    assert all(cpus is None for cpus in found.cpus) == (platform != "cpu")
    assert from_json(to_json(found.inventory)) == found.inventory, "an inventory as any other"


NO_STORE = "must be a folder, or a bucket of Cloud Storage (gs://BUCKET/…)"


@pytest.mark.parametrize(
    ("asked", "there", "files"),
    [
        ("elsewhere", str(Path.cwd() / "elsewhere"), DiskFiles),
        ("/srv/runs/", "/srv/runs", DiskFiles),
        ("gs://bucket/runs/", "gs://bucket/runs", Buckets),
        ("gs:/bucket/runs", "is no URL; write gs://bucket/runs", None),
        ("file:///srv/runs", "/srv/runs", DiskFiles),
        ("s3://bucket/runs", f"{NO_STORE}, not s3://", None),
        ("GS://bucket/runs", f"{NO_STORE}, not GS://", None),
        ("memory://runs", f"{NO_STORE}, not memory://", None),
        ("gs://", "names no bucket; write gs://BUCKET/…", None),
        ("gs:///runs", "names no bucket; write gs://BUCKET/…", None),
    ],
)
def test_runs_lie_where_they_are_asked_to_by_option_or_environment(
    asked: str, there: str, files: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(runs: str | None) -> tuple[str, type]:
        made = on_this_machine(hosts="1", platform="cpu", runs=runs)
        return made.runs_url, type(made.files)

    if files is not None:
        assert found(asked) == (there, files)
    else:
        with pytest.raises(RequestError, match=f"^{re.escape(f'--runs {asked}: {there}')}$"):
            found(asked)
    monkeypatch.setenv("TPU_STACK_RUNS", asked)
    if files is not None:
        assert found(None) == (there, files)
    else:
        with pytest.raises(RequestError, match=f"^{re.escape(f'$TPU_STACK_RUNS {asked}: {there}')}$"):
            found(None)


@pytest.mark.parametrize(
    ("chosen", "nodes", "found"),
    [(None, 4, 4), ("0,2", 4, 2), ("", 4, 1), ("0", 0, 1), (None, 0, 1), ("0,1,2", 2, 2)],
)
def test_this_machine_has_the_gpus_that_its_processes_may_see(
    chosen: str | None, nodes: int, found: int
) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert gpus(environ, [f"/dev/nvidia{index}" for index in range(nodes)]) == found
