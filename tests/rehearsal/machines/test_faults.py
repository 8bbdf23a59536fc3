"""Each fault is what it says, hits no other machine, and is undone."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest

from rehearsal.machines import DEVICE, PYTHON, MachinesError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test may have to build the image

Lab = Any  # conftest.py's; a conftest is nothing to import from
Eventually = Callable[[Callable[[], bool]], None]
SHARE = "/mnt/share"


def reachable(address: str) -> bool:
    """False where nothing at all comes back; a refusal is an answer, and none of what is asked for here."""
    try:
        socket.create_connection((address, 22), timeout=1.0).close()
    except TimeoutError:
        return False
    return True


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[tuple[IO[bytes], IO[bytes], subprocess.Popen[bytes]]]:
    """A process with its input and output; it is killed at the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin and process.stdout
        try:
            yield process.stdin, process.stdout, process
        finally:
            process.kill()


def comes(output: IO[bytes], within_s: float) -> bytes:
    """A line, or nothing where none comes in that time."""
    return output.readline() if select.select([output], [], [], within_s)[0] else b""


def test_a_machine_that_is_cut_off_tells_nobody_and_its_connections_go_on_when_it_is_healed(lab: Lab) -> None:
    peer = f"timeout 2 bash -c 'exec 3<>/dev/tcp/{lab.addresses['w-0']}/22'"
    echo = lab.ssh_command("w-0", "tee ~/received")
    tick = lab.ssh_command("w-0", "while echo tick; do sleep 0.2; done")
    with running(echo) as (told, heard, echoing), running(tick) as (_, ticks, ticking):
        told.write(b"before\n")
        assert (comes(heard, 10), comes(ticks, 10)) == (b"before\n", b"tick\n")
        lab.faults.cut("w-0")
        try:
            told.write(b"meanwhile\n")
            while comes(ticks, 0):  # what had come before
                pass
            assert comes(ticks, 1.0) == b""
            container, _ = lab.machines.find("w-0")
            assert container.exec_run("cat /home/sa_rehearsal/received").output == b"before\n"
            assert not reachable(lab.addresses["w-0"])
            assert lab.try_ssh("w-1", peer).returncode == 124  # timeout's own: nothing came back
            assert reachable(lab.addresses["w-1"])
            assert (echoing.poll(), ticking.poll()) == (None, None)
            lab.faults.cut("w-0")
        finally:
            lab.faults.heal("w-0")
        assert (comes(heard, 20), comes(ticks, 20)) == (b"meanwhile\n", b"tick\n")
        assert lab.ssh("w-0", "echo back") == "back"
        assert lab.ssh("w-1", f"{peer}; echo $?") == "0"


def test_a_full_disk_takes_no_byte_and_no_other_machine_notices(lab: Lab) -> None:
    write = "echo word >~/written && cat ~/written"
    lab.faults.fill_disk("w-0")
    try:
        refused = lab.try_ssh("w-0", write)
        assert "No space left on device" in refused.stderr
        assert lab.ssh("w-0", "df --output=avail ~ | tail -n 1") == "0"
        assert lab.ssh("w-1", write) == "word"
        lab.faults.fill_disk("w-0")
    finally:
        lab.faults.empty_disk("w-0")
    assert lab.ssh("w-0", f"{write}; ls -A ~ | grep full; true") == "word"
    assert int(lab.ssh("w-0", "df --output=avail ~ | tail -n 1")) > 400_000


@pytest.mark.nightly
def test_what_is_full_refused_or_broken_is_so_until_it_is_undone(lab: Lab) -> None:
    write = f"echo word >{SHARE}/full-test && cat {SHARE}/full-test; rm -f {SHARE}/full-test"
    ask = f"{PYTHON} -c 'print(1)'"
    lab.faults.fill_share("w-0")
    lab.faults.break_python("w-0")
    lab.faults.break_python("w-0")
    try:
        for name in ("w-0", "w-1"):
            assert "No space left on device" in lab.try_ssh(name, write).stderr
        assert (lab.try_ssh("w-0", ask).returncode, lab.ssh("w-1", ask)) == (127, "1")
        lab.faults.refuse_keys("w-0")
        assert "Permission denied (publickey)" in lab.try_ssh("w-0", "true").stderr
    finally:
        lab.faults.accept_keys("w-0")
        lab.faults.mend_python("w-0")
        lab.faults.mend_python("w-0")
        lab.faults.empty_share("w-0")
    assert (lab.ssh("w-1", write), lab.ssh("w-0", ask)) == ("word", "1")
    with pytest.raises(MachinesError, match=r"there is no machine 'w-9'; there are: w-0, w-1"):
        lab.faults.cut("w-9")


def test_a_clock_that_is_off_is_so_for_new_connections_and_for_nothing_that_measures_durations(
    lab: Lab,
) -> None:
    seconds = -300.5
    ask = f"{PYTHON} -c 'import time; print(time.time(), time.monotonic())'"
    lab.faults.set_clock("w-0", seconds)
    try:
        wall, monotonic = map(float, lab.ssh("w-0", ask).split())
        assert wall - time.time() == pytest.approx(seconds, abs=5)
        assert monotonic == pytest.approx(time.monotonic(), abs=5)
        assert int(lab.ssh("w-0", "date +%s")) - time.time() == pytest.approx(seconds, abs=5)
        assert lab.ssh("w-0", "printenv WORDS") == 'a "b" $c \\d'
        assert int(lab.ssh("w-1", "date +%s")) == pytest.approx(time.time(), abs=5)
    finally:
        lab.faults.set_clock("w-0", 0.0)
    assert lab.ssh("w-0", "date +%s; printenv LD_PRELOAD FAKETIME; printenv WORDS").splitlines()[1:] == [
        'a "b" $c \\d'
    ]
    assert int(lab.ssh("w-0", "date +%s")) == pytest.approx(time.time(), abs=5)


@pytest.mark.nightly
def test_a_held_device_is_open_in_a_process_of_the_machines_user_until_it_is_released(
    lab: Lab, eventually: Eventually
) -> None:
    holders = f'for f in /proc/[0-9]*/fd/*; do [ "$(readlink $f)" = {DEVICE} ] && echo $f; done; true'
    assert lab.ssh("w-0", holders) == ""
    pid = lab.faults.hold_device("w-0")
    try:
        assert lab.ssh("w-0", holders) == f"/proc/{pid}/fd/9"
    finally:
        lab.faults.release_device("w-0")
    eventually(lambda: lab.ssh("w-0", f"{holders}; ls -d /proc/{pid} 2>/dev/null; true") == "")


def test_an_unmounted_share_is_an_empty_folder_on_that_machine_alone(lab: Lab) -> None:
    lab.ssh("w-1", f"echo kept >{SHARE}/kept")
    lab.faults.unmount_share("w-0")
    try:
        assert lab.ssh("w-0", f"ls -A {SHARE}; mountpoint -q {SHARE}; echo $?") == "32"
        assert lab.ssh("w-1", f"cat {SHARE}/kept") == "kept"
        lab.faults.unmount_share("w-0")
    finally:
        lab.faults.mount_share("w-0")
        lab.faults.mount_share("w-0")
    assert lab.ssh("w-0", f"cat {SHARE}/kept; mount | grep -c ' {SHARE} '").split() == ["kept", "1"]
    lab.ssh("w-0", f"rm {SHARE}/kept")


def test_a_changed_host_key_is_what_new_connections_see_until_the_machines_own_is_back(lab: Lab) -> None:
    other = lab.faults.change_host_key("w-0")
    try:
        assert other != lab.keys["w-0"].public
        assert "Host key verification failed" in lab.try_ssh("w-0", "true").stderr
        assert lab.try_ssh("w-0", "echo in", host_key=other).stdout == "in\n"
        newest = lab.faults.change_host_key("w-0")
        assert lab.try_ssh("w-0", "echo in", host_key=newest).stdout == "in\n"
    finally:
        lab.faults.restore_host_key("w-0")
    assert lab.ssh("w-0", "echo in") == "in"


def test_the_newest_job_process_stands_still_until_it_may_go_on(lab: Lab, eventually: Eventually) -> None:
    start = "nohup sh -c 'sleep 300; :' {} >/dev/null 2>&1 & echo $!"
    with pytest.raises(MachinesError, match="w-0 runs no job to wedge"):
        lab.faults.wedge("w-0")
    pids = [
        lab.ssh("w-0", start.format(module)) for module in ("jobs.demo", "jobs.demo", "jobs.runtime.deliver")
    ]
    state = f"cut -d ' ' -f 3 /proc/{pids[1]}/stat"
    try:
        assert lab.faults.wedge("w-0") == int(pids[1])
        eventually(lambda: lab.ssh("w-0", state) == "T")
        lab.faults.unwedge("w-0", int(pids[1]))
        eventually(lambda: lab.ssh("w-0", state) == "S")
        assert lab.faults.wedge("w-0", int(pids[0])) == int(pids[0])
    finally:
        lab.ssh("w-0", f"kill -KILL {' '.join(pids)}; pkill -KILL -f 'sleep 300'")
