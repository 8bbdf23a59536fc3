"""A preflight finds everything that would keep a job from starting here, and says what to do about it."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from host.agent import preflight
from host.agent.proc import parse_listeners
from tests.servers import Handler, free_port, serving


def test_a_host_in_order_passes_every_check_and_tells_its_facts(host: Any) -> None:
    response = host.response(port=free_port())
    assert [check for check in response["checks"] if not check["ok"]] == []
    names = [check["name"] for check in response["checks"]]
    assert names == ["python", "root", "run_dir", "cache_dir", "disk", "port", "clock", "device"]
    facts = response["facts"]
    assert facts["cpus"] == len(os.sched_getaffinity(0))
    assert facts["memory_bytes"] > 2**27
    assert len(set(facts["free_ports"])) == 2
    assert (facts["home"], facts["docker"]) == (str(Path.home()), shutil.which("docker") is not None)
    assert facts["kernel"] == os.uname().release
    assert facts["bundle_present"] is False
    assert list(facts["free_bytes"]) == [str(host.agent.root)]
    (host.agent.root / "bundles" / ("a" * 64)).mkdir(parents=True)
    assert host.response(bundle="a" * 64)["facts"]["bundle_present"] is True


def test_an_interpreter_that_will_not_do_is_named(host: Any, tmp_path: Path) -> None:
    (found,) = host.checks("python", python="/no/python", python_remedy="`fab deploy`")
    assert "/no/python: no such interpreter" in found["message"]
    assert found["remedy"] == "`fab deploy`"  # the launcher's, where it has one
    wrong = {"true": "no working Python", host.agent.python: "needs 3.12"}
    for python, said in wrong.items():
        if python == sys.executable:
            continue
        ok, message = host.finding("python", python=python)
        assert not ok and said in message
    ok, message = host.finding("python", modules=["json", "no_such_a", "no_such.b"])
    assert not ok and "lacks no_such_a, no_such.b" in message
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    finding = preflight.check_python(str(program), [], timeout_s=0.2)()
    assert not finding["ok"] and "did not answer" in finding["message"]


def test_a_taken_port_is_named_with_its_holder_as_the_kernel_tells_it(host: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ok, message = host.finding("port", port=port)
    assert not ok
    assert f"port {port} is taken by pid {os.getpid()}" in message
    assert host.finding("port", port=port)[0]
    row = "{}: 0100007F:1F90 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1"
    text = "\n".join(["  sl  local_address …", row.format(0, "0A", 11), row.format(1, "01", 12)])
    assert parse_listeners(text, 8080) == ["socket:[11]"]
    assert parse_listeners(text, 8081) == []


@pytest.mark.parametrize("offset_s", [-60, 60])
def test_a_clock_that_is_off_is_told_with_its_offset(offset_s: float) -> None:
    found = preflight.check_clock(offset_s, 10)
    assert (found["ok"], found["message"].split(" s ")[0]) == (False, f"the clock is {offset_s:+.2f}")


def test_what_an_earlier_run_left_alive_is_named(host: Any, tmp_path: Path) -> None:
    assert host.finding("leftovers", alone=True)[0]
    started = host.agent.start_and_hear(
        'import subprocess; subprocess.Popen(["sleep", "600"]); say("up"); live()'
    )
    assert host.checks("leftovers") == []
    (found,) = host.checks("leftovers", alone=True)
    assert not found["ok"]
    message = rf"run-1 is still alive here: pid {started['pid']}, for \d+ s and 1 more"
    assert re.fullmatch(message, found["message"]), found
    assert found["remedy"] == "`fab stop run-1`"
    assert host.finding("leftovers", alone=True, root=str(tmp_path / "another agent's"))[0]
    host.agent("stop", run_id="run-1", grace_s=0)
    assert host.finding("leftovers", alone=True)[0]


def test_a_peer_that_cannot_be_reached_is_named_with_its_address_and_not_waited_for(host: Any) -> None:
    with contextlib.ExitStack() as open_sockets:
        there = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        good = {"name": "host-1", "host": "127.0.0.1", "port": there.getsockname()[1]}
        assert host.finding("peers", peers=[good]) == (True, "reaches all of 1 peers")
        gone = {"name": "host-2", "host": "127.0.0.1", "port": free_port()}
        ok, message = host.finding("peers", peers=[good, gone])
        assert not ok
        assert message == f"cannot reach host-2 (127.0.0.1:{gone['port']}): Connection refused"
        silent = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # its queue is full: the kernel answers nobody any more
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        before = time.monotonic()
        peer = {"name": "host-3", "host": "127.0.0.1", "port": silent.getsockname()[1]}
        (finding,) = preflight.check_peers([peer], timeout_s=0.3)
        assert time.monotonic() - before < 3
        assert "no answer within 0.3 s" in finding["message"]


def test_a_host_describes_itself_without_secrets(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guest = {"hostkeys": {"ssh-ed25519": "AAAA"}, "tpu-stack": {"ready": "yes"}}
    told = {"startup-script": "s3cret", "agent-worker-number": "3"}

    class Metadata(Handler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            self.reply(guest if "guest-attributes" in self.path else told)

    monkeypatch.setenv("TPU_SECRET_SETTING", "s3cret")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    found = host.agent("describe")["found"]
    assert all(isinstance(each, str) and each for each in found.values())
    assert f"user {os.getuid()}, group {os.getgid()}" in found["ids"]
    assert "memlock " in found["limits"] and "none of /dev/accel*" in found["device nodes"]
    assert found["guest attributes"].startswith("no metadata server answers")
    assert "TPU_SECRET_SETTING" in found["settings in the environment"].split(", ")
    with serving(Metadata) as address:
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        found = host.agent("describe")["found"]
    assert found["guest attributes"] == "hostkeys/ssh-ed25519, tpu-stack/ready"
    assert found["instance attributes"] == "agent-worker-number, startup-script"
    assert (found["agent-worker-number"], found["accelerator-type"]) == ("3", "none")
    assert "s3cret" not in str(found) and "AAAA" not in str(found)


def test_a_place_without_room_or_rights_is_named_once_a_file_system(host: Any, small_disk: Path) -> None:
    ok, message = host.finding("cache_dir", cache_dir="/proc/no/cache")
    assert not ok and "/proc/no/cache cannot be written" in message
    ok, message = host.finding("disk", min_free_bytes=1 << 60)
    assert not ok
    assert f"{host.agent.root} has " in message and "GiB free and needs 1073741824.0 GiB" in message
    disks = host.checks("disk", cache_dir=str(small_disk / "cache"), min_free_bytes=1 << 26)
    assert [check["ok"] for check in disks] == [True, False]
    assert str(small_disk / "cache") in disks[1]["message"]
    (small_disk / "cache").rmdir()
    (small_disk / "rest").write_bytes(bytes(512 << 10))
    ok, message = host.finding("run_dir", run_dir=str(small_disk))
    assert not ok and "No space left" in message
    assert [path.name for path in small_disk.iterdir()] == ["rest"]


def test_a_share_that_is_not_mounted_is_named_and_not_made(
    host: Any, tmp_path: Path, small_disk: Path
) -> None:
    share = tmp_path / "share"
    checks = host.response(mount=str(share), run_dir=f"{share}/runs/1")["checks"]
    mount, *_ = (check for check in checks if not check["ok"])
    assert mount["message"] == f"{share} is not mounted"
    assert "fab deploy" in mount["remedy"] and "journalctl --unit tpu-stack-share" in mount["remedy"]
    assert not share.exists()
    ok, message = host.finding("mount", mount=f"{small_disk}/", run_dir=f"{small_disk}/runs")
    assert (ok, message) == (True, f"{small_disk}/ is mounted from tmpfs")
    assert (small_disk / "runs").is_dir()
    text = "10.0.0.2:/export /mnt/my\\040share nfs4 rw 0 0\nproc /proc proc rw 0 0\n"
    assert preflight.parse_mounts(text) == {"/mnt/my share": "10.0.0.2:/export", "/proc": "proc"}


# It forks, and this process may have threads of JAX by now.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_file_system_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "place_facts", lambda name, path: time.sleep(600))
    before = time.monotonic()
    found = preflight.look_at("run_dir", str(tmp_path), timeout_s=0.2)
    assert time.monotonic() - before < 5
    assert not found["check"]["ok"] and "does not answer within 0.2 s" in found["check"]["message"]
    assert preflight.check_room([found], 1) == []

    def broken(name: str, path: str) -> None:
        raise KeyError("oh")

    monkeypatch.setattr(preflight, "place_facts", broken)
    with pytest.raises(RuntimeError, match="KeyError"):
        preflight.look_at("run_dir", str(tmp_path))


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "rb+")
if sys.argv[2] != "open":
    fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
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


def test_a_device_that_is_missing_or_held_is_named_with_its_holder(host: Any, tmp_path: Path) -> None:
    globs = [str(tmp_path / "accel*"), str(tmp_path / "vfio/[0-9]*")]
    for platform, name in (("tpu", "TPU"), ("gpu", "GPU")):
        ok, message = host.finding("devices", platform=platform, device_globs=globs)
        assert not ok
        assert f"no {name} on this host: none of {globs[0]}, {globs[1]} exists" in message
    device = tmp_path / "accel0"
    device.touch()
    for platform, name in (("tpu", "TPU"), ("cpu", "stand-in")):
        fields = {"platform": platform, "device_globs": globs}
        with held(device, "open") as pid:
            ok, message = host.finding("device", **fields)
        assert not ok
        assert f"{device} is held by pid {pid} ({sys.executable} -S -E -c" in message
        assert host.finding("device", **fields) == (True, f"1 {name} devices: {device}")


@pytest.mark.parametrize("how", ["open", "flock", "flock of another user"])
def test_a_held_lock_file_is_left_to_its_holder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    monkeypatch.setitem(preflight.LOCKFILES, "tpu", [str(lock)])
    assert preflight.check_lockfiles("cpu", None) == []
    with held(lock, how) as pid, monkeypatch.context() as patch:
        if how == "flock of another user":  # whose open files cannot be seen
            patch.setattr(preflight, "holders", lambda targets: {target: [] for target in targets})
        (found,) = preflight.check_lockfiles("tpu", None)
    seen = "a process that this user may not see" if how == "flock of another user" else f"pid {pid}"
    assert not found["ok"] and f"{lock} is held by {seen}" in found["message"]
    assert lock.exists()
    (found,) = preflight.check_lockfiles("tpu", None)
    assert found["ok"] and f"removed {lock}" in found["message"]
    assert not lock.exists()
    assert preflight.check_lockfiles("tpu", None) == []


@pytest.mark.parametrize("sudo", ["may", "may not"])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_lock_file_of_another_user_is_looked_at_as_root_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sudo: str, is_held: bool
) -> None:
    lock, program = tmp_path / "libtpu_lockfile", tmp_path / "sudo"
    lock.touch()
    program.write_text("#!/bin/sh\n" + {"may": 'shift 2; exec "$@"', "may not": "exit 1"}[sudo])
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def refused(_: str) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(preflight, "is_locked", refused)
    monkeypatch.setattr(preflight, "holders", lambda targets: {target: [] for target in targets})
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with held(lock, "flock") if is_held else contextlib.nullcontext():
        found = preflight.check_lockfile(str(lock))
    told = {(True, True): "is held by pid", (True, False): "removed"}
    assert (
        told.get((sudo == "may", is_held), "cannot be looked at or removed: Permission denied")
        in found["message"]
    )
    assert found["ok"] is (sudo == "may" and not is_held) is not lock.exists()
