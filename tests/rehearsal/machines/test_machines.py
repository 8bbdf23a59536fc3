"""Machines come with what a host has, die as hosts do, and leave nothing behind, whatever becomes of their maker."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from rehearsal.machines.docker_engine import MachinesError, connect
from rehearsal.machines.guardian import left
from rehearsal.machines.host_image import PYTHON
from rehearsal.machines.machines import Machines
from tests.rehearsal.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test may have to build the image

Lab = Any  # conftest.py's; a conftest is nothing to import from
SHARE = "/mnt/share"


def things_of(rehearsal: str) -> list[tuple[str, str]]:
    client = connect()
    try:
        return left(client, rehearsal)
    finally:
        client.close()


def test_its_user_has_what_jobs_need_on_a_network_that_leads_nowhere_else(lab: Lab) -> None:
    said = lab.ssh(
        "w-0",
        "id -un; pwd; hostname; sudo -n id -u; printenv NO_GCE_CHECK;"
        f"{PYTHON} -c 'import jax, gcsfs, orbax.checkpoint'",
    )
    assert said.splitlines() == ["sa_rehearsal", "/home/sa_rehearsal", "w-0", "0", "true"]
    assert lab.ssh("w-0", "exec 3<>/dev/tcp/w-1/22 && head -c 4 <&3") == "SSH-"
    client = connect()
    assert client.networks.get(lab.machines.network.name).attrs["Internal"] is True
    client.close()
    orphan = lab.ssh("w-0", "(setsid sleep 0.2 >/dev/null 2>&1 & echo $!)")
    until(lambda: lab.ssh("w-0", f"ls -d /proc/{orphan} 2>/dev/null; true") == "")  # reaped


def test_only_the_pinned_key_and_only_the_persons_key_let_anybody_in(lab: Lab) -> None:
    stranger = lab.try_ssh("w-0", "true", host_key=lab.keys["w-1"].public)
    assert "Host key verification failed" in stranger.stderr
    for option in ("PreferredAuthentications=password", "IdentityFile=none"):
        command = lab.ssh_command("w-0", "true")
        if option.startswith("IdentityFile"):
            command = [word for word in command if word not in ("-i", str(lab._identity))]
        refused = subprocess.run(
            [*command[:1], "-o", option, *command[1:]],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30,
            env={key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"}, check=False,
        )  # fmt: skip
        assert "Permission denied (publickey)" in refused.stderr


def test_a_killed_machine_tells_nobody_and_comes_back_with_its_name_and_key_and_an_empty_home(
    lab: Lab,
) -> None:
    lab.ssh("w-0", f"touch ~/of-before; echo kept >{SHARE}/of-before")
    peer = f"exec 3<>/dev/tcp/{lab.addresses['w-0']}/22; head -n 1 <&3 >/dev/null; echo open; cat <&3; echo ended"
    with subprocess.Popen(
        lab.ssh_command("w-1", peer), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as watcher:
        assert watcher.stdout
        assert watcher.stdout.readline() == "open\n"
        lab.machines.kill("w-0")
        assert [(each.name, each.state) for each in lab.machines.list()] == [
            ("w-0", "exited"),
            ("w-1", "running"),
        ]
        lab.machines.kill("w-0")
        with pytest.raises(MachinesError, match="w-0 is exited, not running; start it first"):
            lab.faults.cut("w-0")
        # A connection that was ended would have said so by the time that w-1 has answered something else.
        lab.ssh("w-1", "true")
        assert lab.ssh("w-1", f"ss -tn state established dst {lab.addresses['w-0']} | grep -c :22") == "1"
        watcher.kill()
    lab.machines.restart("w-0")
    assert lab.ssh("w-0", f"ls ~; cat {SHARE}/of-before") == "kept"
    lab.ssh("w-0", f"rm {SHARE}/of-before")


def test_a_share_outlives_its_machines_and_one_rehearsal_goes_without_the_other(
    empty_lab: Lab, lab: Lab
) -> None:
    empty_lab.boot("w-0")
    empty_lab.ssh("w-0", f"echo kept >{SHARE}/kept")
    empty_lab.machines.remove("w-0")
    empty_lab.machines.remove("w-0")
    assert empty_lab.machines.list() == []
    empty_lab.boot("w-0")
    assert empty_lab.ssh("w-0", f"cat {SHARE}/kept") == "kept"
    assert empty_lab.machines.network.subnet != lab.machines.network.subnet
    with pytest.raises(MachinesError, match=f"rehearsal {lab.machines.name} is there already"):
        Machines(name=lab.machines.name, say=print).__enter__()
    assert len(empty_lab.machines.remove_everything()) == 4  # a machine, the storage, its volume, the network
    assert things_of(empty_lab.machines.name) == []
    assert empty_lab.machines.remove_everything() == []
    assert lab.ssh("w-0", "echo alive") == "alive"


def test_a_machine_that_cannot_be_booted_leaves_nothing_and_says_why(lab: Lab) -> None:
    with pytest.raises(MachinesError, match=r"machine w-2: .*[Aa]ddress"):
        lab.boot("w-2", address=lab.addresses["w-0"])
    assert [each.name for each in lab.machines.list()] == ["w-0", "w-1"]
