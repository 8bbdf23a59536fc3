"""`fab verify` from start to verdict on this machine: two processes that compute, and nothing left afterwards."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from backends.local import environments
from backends.local.local_backend import local, on_this_machine
from console.hosts import verification
from contracts.errors import RequestError
from launch.hosts import Agent, GoneLink
from launch.targets import Target
from tests.launch.slices import make_target


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return local(2, "cpu", sorted(os.sched_getaffinity(0)))


@pytest.mark.slow
def test_two_hosts_compute_together_and_only_what_is_wrong_leaves_a_trace_among_the_runs(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verification.verify(target, "jax", None) == 0
    assert "all is well: 2 devices on 2 hosts compute together" in capsys.readouterr().out
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == []
    monkeypatch.setattr(Target, "devices", 8)
    assert verification.verify(target, "jax", None) == 1
    said = capsys.readouterr().out
    assert "NOT WELL" in said and "has 1 devices where the slice has 4 a host" in said
    assert list((tmp_path / "runs").rglob("verify/rank-1.json"))
    with pytest.raises(RequestError, match="--framework torch: choose one of jax, pytorch"):
        verification.verify(target, "torch", None)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_two_hosts_compute_together_in_another_framework(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environments.environment_python(framework)
    if not (python.parent.parent / environments.COMPLETE).exists():
        pytest.skip(f"the environment of {framework} is not made")
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = on_this_machine(hosts="2", platform="cpu", python=str(python))
    assert verification.verify(here, framework, None) == 0
    assert "all is well: 2 devices on 2 hosts compute together" in capsys.readouterr().out


SLICE = make_target([Agent(host="w", link=GoneLink("", ""), root="/")] * 2)


def report(**changed: Any) -> dict[str, Any]:
    return {
        "host": "t1v", "platform": "tpu", "device_kind": "TPU v5 lite", "local_devices": 4, "devices": 8,
        "processes": 2, "cpus": 112, "versions": {"python": "3.12.1", "jax": "0.12.0"}, "clock_s": 1000.0,
        "matmuls": [{"device": f"d{n}", "is_right": True, "flops_per_s": 150e12} for n in range(4)],
        "all_reduce": {"is_right": True, "mib": 64, "took_s": 0.002}, **changed,
    }  # fmt: skip


def with_matmul(**changed: Any) -> dict[str, Any]:
    """A report of whose second device something else is found."""
    good = report()["matmuls"]
    return report(matmuls=[good[0], {**good[1], **changed}, *good[2:]])


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (None, "w-1: wrote no report → "),
        (report(platform="cpu"), "w-1: computes on cpu, and asked for is tpu"),
        (report(local_devices=3), "w-1: has 3 devices where the slice has 4 a host"),
        (report(devices=4, processes=1), "w-1: sees 4 devices of 1 hosts where there are 8 of 2"),
        (report(all_reduce={"is_right": False}), "w-1: has a wrong sum over all devices"),
        (
            report(versions={"python": "3.12.1"}),
            "jax is not the same on all hosts: 0.12.0 on w-0; none on w-1",
        ),
        (report(clock_s=1020.0), "w-0: its clock is -10.0 s from the others'"),
        (with_matmul(is_right=False), "w-1: d1 multiplies wrongly"),
        (with_matmul(flops_per_s=50e12), "w-1: d1 does 50.0 TFLOP/s where the middle one does 150.0 TFLOP/s"),
    ],
)
def test_each_thing_that_is_wrong_is_a_finding_with_its_host(
    second: dict[str, Any] | None, said: str
) -> None:
    assert [text for text in verification.judge(SLICE, [report(), second]) if text.startswith(said)]


def test_hosts_that_are_as_the_slice_promises_are_well_and_a_slow_shared_cpu_is_no_finding() -> None:
    assert verification.judge(SLICE, [report(), report(clock_s=1000.4)]) == []
    said = verification.lines([report(), report()], [])
    assert said == ["python 3.12.1, jax 0.12.0", "all is well: 8 devices on 2 hosts compute together"]
    on_cpu = dataclasses.replace(SLICE, platform="cpu", cpu_devices=4)
    slow = {**with_matmul(flops_per_s=50e12), "platform": "cpu"}
    assert verification.judge(on_cpu, [report(platform="cpu"), slow]) == []


def test_the_ranks_of_a_host_are_one_line_and_one_that_is_missing_or_adds_up_wrongly_is_the_host_s() -> None:
    ranks = [report(local_devices=1, processes=8, matmuls=[each]) for each in report()["matmuls"]]
    assert verification.merged(ranks) == report()
    assert verification.judge(SLICE, [verification.merged(ranks)] * 2) == []
    assert verification.merged([*ranks[:3], None]) is None
    wrong = [*ranks[:3], {**ranks[3], "all_reduce": {"is_right": False}}]
    assert verification.judge(SLICE, [report(), verification.merged(wrong)]) == [
        "w-1: has a wrong sum over all devices"
    ]
