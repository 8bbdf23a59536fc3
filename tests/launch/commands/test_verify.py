"""`fab verify` from start to verdict on this machine: two processes of real JAX, and nothing left afterwards."""

from __future__ import annotations

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import RequestError
from launch import targets
from launch.commands import verify
from launch.commands import verify as verification
from launch.commands.verify import Expected
from launch.target import Target


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("TPU_STACK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return targets.local(2, "cpu", sorted(os.sched_getaffinity(0)))


@pytest.mark.slow
def test_two_hosts_compute_together_and_no_trace_of_it_stays_among_the_runs(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verification.verify(target, "jax", None) == 0
    said = capsys.readouterr().out
    assert "all is well: 2 devices on 2 hosts compute together" in said
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_a_slice_with_fewer_devices_than_it_promises_is_not_well_and_what_was_found_is_kept(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = dataclasses.replace(verify.expected(target), devices_per_host=4)
    monkeypatch.setattr(verify, "expected", lambda target: wanted)
    assert verification.verify(target, "jax", None) == 1
    said = capsys.readouterr().out
    assert "NOT WELL" in said and "has 1 devices where the slice has 4 a host" in said
    assert list((tmp_path / "runs").rglob("verify/host-1.json"))


def test_a_framework_that_nobody_has_written_is_refused_with_those_there_are(target: Target) -> None:
    with pytest.raises(RequestError, match="--framework torch: choose one of jax"):
        verification.verify(target, "torch", None)


WANTED = Expected(platform="tpu", hosts=2, devices_per_host=4, peak_flops_per_s=197e12)
HOSTS = ["w-0", "w-1"]


def report(**changed: Any) -> dict[str, Any]:
    return {
        "host": "t1v",
        "platform": "tpu",
        "device_kind": "TPU v5 lite",
        "local_devices": 4,
        "devices": 8,
        "processes": 2,
        "cpus": 112,
        "versions": {"python": "3.12.1", "jax": "0.12.0"},
        "matmuls": [{"device": f"d{n}", "is_right": True, "flops_per_s": 150e12} for n in range(4)],
        "all_reduce": {"is_right": True, "mib": 64, "took_s": 0.002},
        "clock_s": 1000.0,
        **changed,
    }


def found(second: dict[str, Any] | None, wanted: Expected = WANTED) -> list[str]:
    return verify.judge(wanted, HOSTS, [report(), second])


def test_hosts_that_are_as_the_slice_promises_are_well() -> None:
    assert found(report(clock_s=1000.4)) == []
    said = verify.lines([report(), report()], [], HOSTS)
    assert said == ["python 3.12.1, jax 0.12.0", "all is well: 8 devices on 2 hosts compute together"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"platform": "cpu"}, "w-1: computes on cpu, and asked for is tpu"),
        ({"local_devices": 3}, "w-1: has 3 devices where the slice has 4 a host"),
        ({"devices": 4, "processes": 1}, "w-1: sees 4 devices of 1 hosts where there are 8 of 2"),
        (
            {"all_reduce": {"is_right": False, "mib": 1, "took_s": 1.0}},
            "w-1: has a wrong sum over all devices",
        ),
        ({"versions": {"python": "3.12.1"}}, "jax is not the same on all hosts: 0.12.0 on w-0; none on w-1"),
        ({"clock_s": 1020.0}, "w-0: its clock is -10.0 s from the others'"),
    ],
)
def test_each_thing_that_is_wrong_is_a_finding_with_its_host(changed: dict[str, Any], said: str) -> None:
    assert [text for text in found(report(**changed)) if text.startswith(said)]


def test_a_host_that_wrote_nothing_is_a_finding() -> None:
    (text,) = found(None)
    assert text.startswith("w-1: wrote no report → ")


def test_a_device_that_multiplies_wrongly_is_named() -> None:
    bad = copy.deepcopy(report())
    bad["matmuls"][2]["is_right"] = False
    (text,) = found(bad)
    assert text.startswith("w-1: d2 multiplies wrongly")


def test_a_device_far_behind_the_others_is_named_but_not_on_a_shared_cpu() -> None:
    slow = copy.deepcopy(report())
    slow["matmuls"][1]["flops_per_s"] = 50e12
    (text,) = found(slow)
    assert text.startswith("w-1: d1 does 50.0 TFLOP/s where the middle one does 150.0 TFLOP/s")
    on_cpu = Expected(platform="cpu", hosts=2, devices_per_host=4, peak_flops_per_s=None)
    cpus = [report(platform="cpu"), {**slow, "platform": "cpu"}]
    assert verify.judge(on_cpu, HOSTS, cpus) == []


def test_the_table_has_a_line_for_every_host_also_for_one_that_is_silent() -> None:
    table = verify.table(HOSTS, [report(), None], WANTED)
    assert [list(column.cells) for column in table.columns][:3] == [
        ["w-0", "w-1"],
        ["4 × TPU v5 lite", "no report"],
        ["150.0 TFLOP/s (76% of peak)", ""],
    ]
