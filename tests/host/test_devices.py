"""A host's devices are there and free, and a lock that nobody holds any more is no obstacle."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from host.agent import preflight

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "rb+")
if sys.argv[2] == "flock":
    fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def held(path: Path, how: str) -> Iterator[int]:
    """Another process that has the file open, or locked as well."""
    command = [sys.executable, "-S", "-E", "-c", HOLD, str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield holder.pid
        finally:
            holder.kill()


def test_a_host_without_the_device_is_refused_not_run_on_its_cpu(host: Any, tmp_path: Path) -> None:
    globs = [str(tmp_path / "accel*"), str(tmp_path / "vfio/[0-9]*")]
    for platform, name in (("tpu", "TPU"), ("gpu", "GPU")):
        ok, message = host.finding("device", platform=platform, device_globs=globs)
        assert not ok
        assert f"no {name} on this host: none of {globs[0]}, {globs[1]} exists" in message


def test_a_device_that_another_process_holds_is_named_with_its_holder(host: Any, tmp_path: Path) -> None:
    device = tmp_path / "accel0"
    device.touch()
    fields = {"platform": "tpu", "device_globs": [str(tmp_path / "accel*")]}
    with held(device, "open") as pid:
        ok, message = host.finding("device", **fields)
        assert not ok
        assert f"{device} is held by pid {pid} ({sys.executable} -S -E -c" in message
    assert host.finding("device", **fields) == (True, f"1 TPU devices: {device}")


@pytest.mark.parametrize("how", ["open", "flock"])
def test_a_lock_file_that_is_held_is_left_alone_and_its_holder_named(
    host: Any, tmp_path: Path, how: str
) -> None:
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    fields = {"platform": "tpu", "device_globs": ["/dev/null"], "lockfiles": [str(lock)]}
    with held(lock, how) as pid:
        ok, message = host.finding("lockfile", **fields)
    assert not ok
    assert f"{lock} is held by pid {pid}" in message
    assert lock.exists()


def test_a_lock_is_noticed_even_if_its_holder_cannot_be_seen(host: Any, tmp_path: Path) -> None:
    lock, proc = tmp_path / "libtpu_lockfile", tmp_path / "proc"
    proc.mkdir()
    with lock.open("wb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ok, message = host.finding(
            "lockfile", platform="tpu", device_globs=["/dev/null"], lockfiles=[str(lock)], proc_root=str(proc)
        )
    assert not ok
    assert "may not see" in message
    assert lock.exists()


def test_a_lock_file_that_nobody_holds_is_removed_and_that_is_said(host: Any, tmp_path: Path) -> None:
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    fields = {"platform": "tpu", "device_globs": ["/dev/null"], "lockfiles": [str(lock)]}
    ok, message = host.finding("lockfile", **fields)
    assert ok
    assert f"removed {lock}" in message
    assert not lock.exists()
    assert "lockfile" not in [check["name"] for check in host.response(**fields)["checks"]]


def test_a_tpu_s_lock_file_is_no_business_of_a_cpu_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    monkeypatch.setitem(preflight.LOCKFILES, "tpu", [str(lock)])
    assert preflight.check_lockfiles("cpu", None, "/proc") == []
    assert lock.exists()
    assert len(preflight.check_lockfiles("tpu", None, "/proc")) == 1
    assert not lock.exists()


def test_devices_that_stand_in_for_a_tpu_s_are_looked_at_on_a_cpu(host: Any, tmp_path: Path) -> None:
    device, lock = tmp_path / "accel0", tmp_path / "lockfile"
    fields = {"device_globs": [str(tmp_path / "accel*")], "lockfiles": [str(lock)]}
    assert "none of" in host.finding("device", **fields)[1]
    device.touch()
    lock.touch()
    assert "removed" in host.finding("lockfile", **fields)[1]
    with held(device, "open") as pid:
        ok, message = host.finding("device", **fields)
    assert (ok, f"held by pid {pid}" in message) == (False, True)
