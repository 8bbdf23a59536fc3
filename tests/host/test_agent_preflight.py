"""A preflight finds everything that would keep a job from starting here, and says what to do about it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from host import agent as module

GIB = 1 << 30


class Host:
    """Preflights of one agent, with everything in order unless a test says otherwise."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def response(self, **fields: Any) -> dict[str, Any]:
        request = {
            "python": sys.executable,
            "modules": ["json"],
            "platform": "cpu",
            "run_dir": str(self.agent.run_dir),
            "cache_dir": str(self.agent.root / "cache"),
            "min_free_bytes": 1,
            "port": None,
            "time": time.time(),
            "max_clock_offset_s": 10,
            "bundle": None,
            "lockfiles": [],
            **fields,
        }
        return dict(self.agent("preflight", **request))

    def finding(self, name: str, **fields: Any) -> tuple[bool, str]:
        checks = [check for check in self.response(**fields)["checks"] if check["name"] == name]
        assert len(checks) == 1, checks
        assert checks[0]["ok"] or checks[0]["remedy"]
        return checks[0]["ok"], checks[0]["message"]


@pytest.fixture
def host(agent: Any) -> Host:
    return Host(agent)


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


def test_a_host_in_order_passes_every_check_and_tells_its_facts(host: Host) -> None:
    response = host.response(port=free_port())
    assert [check for check in response["checks"] if not check["ok"]] == []
    names = [check["name"] for check in response["checks"]]
    assert names == ["python", "root", "run_dir", "cache_dir", "disk", "port", "clock", "device"]
    facts = response["facts"]
    assert facts["hostname"] == socket.gethostname()
    assert facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["memory_bytes"] > GIB // 8
    assert facts["agent_sha256"] == hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    assert facts["bundle_present"] is False
    assert list(facts["free_bytes"]) == [str(host.agent.root)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def test_missing_modules_are_named(host: Host) -> None:
    ok, message = host.finding("python", modules=["json", "no_such_a", "no_such.b"])
    assert not ok
    assert "lacks no_such_a, no_such.b" in message


def test_an_interpreter_that_is_missing_old_or_none_at_all_is_named(host: Host) -> None:
    assert "/no/python: no such interpreter" in host.finding("python", python="/no/python")[1]
    ok, message = host.finding("python", python="true")
    assert not ok and "no working Python" in message
    if host.agent.python != sys.executable:
        ok, message = host.finding("python", python=host.agent.python)
        assert not ok and "needs 3.12" in message


def test_an_interpreter_that_hangs_is_given_up(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    finding = module.check_python(str(program), [], timeout_s=0.2)
    assert not finding["ok"]
    assert "did not answer" in finding["message"]


def test_a_directory_that_cannot_be_made_is_named(host: Host) -> None:
    ok, message = host.finding("cache_dir", cache_dir="/proc/no/cache")
    assert not ok
    assert "/proc/no/cache cannot be written" in message


def test_a_full_disk_is_found_by_writing(host: Host, small_disk: Path) -> None:
    (small_disk / "rest").write_bytes(bytes(512 << 10))
    ok, message = host.finding("run_dir", run_dir=str(small_disk))
    assert not ok
    assert "No space left" in message
    assert [path.name for path in small_disk.iterdir()] == ["rest"]


def test_too_little_free_space_is_told_with_path_and_gib_once_a_filesystem(host: Host) -> None:
    ok, message = host.finding("disk", min_free_bytes=1 << 60)
    assert not ok
    assert f"{host.agent.root} has " in message and "GiB free and needs 1073741824.0 GiB" in message


def test_each_filesystem_is_looked_at(host: Host, small_disk: Path) -> None:
    response = host.response(cache_dir=str(small_disk / "cache"), min_free_bytes=GIB // 16)
    disks = [check for check in response["checks"] if check["name"] == "disk"]
    assert [check["ok"] for check in disks] == [True, False]
    assert str(small_disk / "cache") in disks[1]["message"]


def test_a_taken_port_names_who_has_it(host: Host) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ok, message = host.finding("port", port=port)
    assert not ok
    assert f"port {port} is taken by pid {os.getpid()}" in message
    assert host.finding("port", port=port)[0]


def test_a_listener_is_found_in_the_kernel_s_table() -> None:
    header = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode"
    )
    row = (
        "   {0}: 0100007F:1F90 00000000:0000 {1} 00000000:00000000 00:00000000 00000000     0        0 {2} 1"
    )
    text = "\n".join([header, row.format(0, "0A", 11), row.format(1, "01", 12)])
    assert module.parse_listeners(text, 8080) == ["socket:[11]"]
    assert module.parse_listeners(text, 8081) == []


@pytest.mark.parametrize("offset_s", [-60, 60])
def test_a_clock_that_is_off_is_told_with_its_offset(host: Host, offset_s: float) -> None:
    ok, message = host.finding("clock", time=time.time() - offset_s)
    assert not ok
    assert abs(float(message.split()[3]) - offset_s) < 5


def test_a_host_without_the_device_is_refused_not_run_on_its_cpu(host: Host, tmp_path: Path) -> None:
    globs = [str(tmp_path / "accel*"), str(tmp_path / "vfio/[0-9]*")]
    for platform, name in (("tpu", "TPU"), ("gpu", "GPU")):
        ok, message = host.finding("device", platform=platform, device_globs=globs)
        assert not ok
        assert f"no {name} on this host: none of {globs[0]}, {globs[1]} exists" in message


def test_a_device_that_another_process_holds_is_named_with_its_holder(host: Host, tmp_path: Path) -> None:
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
    host: Host, tmp_path: Path, how: str
) -> None:
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    fields = {"platform": "tpu", "device_globs": ["/dev/null"], "lockfiles": [str(lock)]}
    with held(lock, how) as pid:
        ok, message = host.finding("lockfile", **fields)
    assert not ok
    assert f"{lock} is held by pid {pid}" in message
    assert lock.exists()


def test_a_lock_is_noticed_even_if_its_holder_cannot_be_seen(host: Host, tmp_path: Path) -> None:
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


def test_a_lock_file_that_nobody_holds_is_removed_and_that_is_said(host: Host, tmp_path: Path) -> None:
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    fields = {"platform": "tpu", "device_globs": ["/dev/null"], "lockfiles": [str(lock)]}
    ok, message = host.finding("lockfile", **fields)
    assert ok
    assert f"removed {lock}" in message
    assert not lock.exists()
    assert "lockfile" not in [check["name"] for check in host.response(**fields)["checks"]]


def test_a_lock_file_is_no_business_of_a_cpu_job(host: Host, tmp_path: Path) -> None:
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    host.response(lockfiles=[str(lock)])
    assert lock.exists()


def test_a_bundle_that_is_there_is_said_to_be(host: Host) -> None:
    (host.agent.root / "bundles" / ("a" * 64)).mkdir(parents=True)
    assert host.response(bundle="a" * 64)["facts"]["bundle_present"] is True
    assert host.response(bundle="b" * 64)["facts"]["bundle_present"] is False
