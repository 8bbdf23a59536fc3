"""This machine as hosts: as many as were asked for, each with its share of the processors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import RequestError
from contracts.files import DiskFiles
from contracts.inventory import from_json, to_json
from launch import targets
from launch.remote_files import Buckets


@given(st.lists(st.integers(0, 500), min_size=1, max_size=70, unique=True), st.integers(1, 70))
def test_all_processors_are_used_and_none_twice_while_there_are_enough(
    processors: list[int], count: int
) -> None:
    shares = targets.shares(processors, count)
    assert len(shares) == count
    assert all(shares)
    used = [processor for share in shares for processor in share]
    if count <= len(processors):
        assert used == processors
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
    else:
        assert {len(share) for share in shares} == {1}
        times = [used.count(processor) for processor in processors]
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize(("platform", "count"), [("cpu", 2), ("gpu", 1), ("tpu", 1)])
def test_without_a_number_of_hosts_there_are_two_on_cpu_and_one_elsewhere(
    runs_dir: Path, platform: str, count: int
) -> None:
    target = targets.on_this_machine(hosts=None, platform=platform)
    assert (len(target.hosts), len(target.agents), len(target.cpus)) == (count, count, count)
    assert target.devices == count
    assert target.runs_url == str(runs_dir)


@pytest.mark.parametrize(
    ("asked", "there", "files"),
    [
        ("elsewhere", str(Path.cwd() / "elsewhere"), DiskFiles),
        ("/srv/runs/", "/srv/runs", DiskFiles),
        ("gs://bucket/runs/", "gs://bucket/runs", Buckets),
    ],
)
def test_runs_lie_where_they_are_asked_to_by_option_or_environment(
    asked: str, there: str, files: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets.on_this_machine(hosts="1", platform="cpu", runs=asked)
    assert (target.runs_url, type(target.files)) == (there, files)
    monkeypatch.setenv("TPU_STACK_RUNS", asked)
    target = targets.on_this_machine(hosts="1", platform="cpu")
    assert (target.runs_url, type(target.files)) == (there, files)


@pytest.mark.parametrize("asked", ["gs:/bucket/runs", "gs:bucket/runs"])
def test_a_url_with_too_few_slashes_makes_no_folder(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=f"^--runs {asked}: is no URL; write gs://bucket/runs$"):
        targets.on_this_machine(hosts="1", platform="cpu", runs=asked)
    monkeypatch.setenv("TPU_STACK_RUNS", asked)
    with pytest.raises(RequestError, match=r"^\$TPU_STACK_RUNS gs:"):
        targets.on_this_machine(hosts="1", platform="cpu")


def test_this_machines_inventory_is_one_that_contract_1_can_hold(runs_dir: Path) -> None:
    target = targets.local(3, "cpu", [0, 1, 2, 3])
    assert from_json(to_json(target.inventory)) == target.inventory
    assert [host.index for host in target.hosts] == [0, 1, 2]
    assert len({host.name for host in target.hosts}) == 3
    assert {host.reach for host in target.hosts} == {"local"}
    assert target.cpus == ((0,), (1,), (2, 3))


def test_only_cpu_processes_are_kept_to_a_share_of_the_processors(runs_dir: Path) -> None:
    assert targets.local(1, "gpu", [0, 1]).cpus == (None,)
