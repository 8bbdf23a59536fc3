"""`fab verify` from start to verdict on this machine: two processes of real JAX, and nothing left afterwards."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from contracts.errors import RequestError
from launch import targets
from launch.commands import verify
from launch.commands import verify as verification
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
