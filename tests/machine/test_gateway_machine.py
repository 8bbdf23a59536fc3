"""The start-up scripts of gateway and TPU host, run on a real Debian 12 machine: systemd, apt, the kernel's NFS.

The gateway is its own TPU host, through its own address. Any test may run by itself or in any order. The first is in
CI, on a machine that has the packages already: it takes about a minute and sees both scripts on a real Debian. The
others are nightly, on a machine where the script installs them.
"""

import dataclasses
import hashlib
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra import startup
from tests.machine import debian
from tests.machine.guest import Disk, Ended, Guest, GuestError, started
from tests.servers import Handler, serving

# Each run boots the machine, and may build its disk first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READY = "tpu-stack: ready: /srv/share is exported to 10.0.2.0/24 10.9.0.0/16"
NOTHING_TO_DO = [f"{READY}; nothing had to be done"]
ANYBODY = ("setpriv", "--reuid=123456", "--regid=654321", "--clear-groups")
NFS_PROGRAM = 100003
PROGRAM_MISMATCH = 2


ADDRESS = "10.0.2.15"
EXPORT, MOUNT = "/srv/share", "/mnt/share"
UID, GID = 4242, 4343


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuestAttribute:
    """One guest attribute that the machine set."""

    path: str
    flavor: str | None
    value: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gateway:
    """A machine that is its own TPU host, after the first run of both scripts."""

    guest: Guest
    metadata: str
    attributes: list[GuestAttribute]
    share: Disk
    swap: Disk
    scribbled: Disk
    first: Ended
    host_first: Ended

    def start_up(self, path: str = "/opt/startup/gateway") -> Ended:
        """One more run of a start-up script."""
        return self.guest.run(path, GCE_METADATA_HOST=self.metadata)

    def with_disk(self, name: str) -> Ended:
        """The gateway's script for another disk, as if that were the one attached."""
        other = startup.GatewaySettings(
            export="/srv/other", clients=("10.0.2.0/24",), uid=UID, gid=GID, disk=name, disk_wait_s=2
        )
        self.guest.put("/root/other", startup.gateway_script(other))
        return self.start_up("/root/other")

    def state(self) -> str:
        """All that a run could change: files, mounts, what is served, and since when."""
        files = "/etc/fstab /etc/nfs.conf.d/* /etc/exports.d/* /etc/apt/apt.conf.d/* /etc/systemd/system/*"
        look = (
            f"stat --format '%n %Y %s %A' {files}; findmnt {EXPORT}; findmnt {MOUNT}; exportfs -s",
            "systemctl show --property ActiveEnterTimestamp nfs-server tpu-stack-share",
        )
        return self.guest.read("sh", "-e", "-c", "; ".join(look))


@contextmanager
def running(folder: Path, *, installed: bool = False) -> Iterator[Gateway]:
    """The gateway with three disks, whose files lie in `folder`: an empty one, one with swap, one of unknown use.

    installed: the packages that its script installs are there already.
    """
    share, swap, scribbled = (Disk(name=each, file=folder / each) for each in ("share", "swap", "scribbled"))
    for disk, size_mib in ((share, 256), (swap, 64), (scribbled, 64)):
        disk.file.touch()
        os.truncate(disk.file, size_mib << 20)
    subprocess.run([debian.need("mkswap", "util-linux"), swap.file], check=True, capture_output=True)
    with scribbled.file.open("r+b") as file:
        file.seek(5000)
        file.write(b"somebody's data in a format that nobody knows")
    with (
        _metadata_server() as (port, attributes),
        started(debian.image(installed=installed), (share, swap, scribbled), folder) as guest,
    ):
        metadata = f"10.0.2.2:{port}"
        serve = startup.GatewaySettings(
            export=EXPORT, clients=("10.0.2.0/24", "10.9.0.0/16"), uid=UID, gid=GID
        )
        guest.put("/opt/startup/gateway", startup.gateway_script(serve))
        mount = startup.TpuHost(server=ADDRESS, export=EXPORT, mount=MOUNT)
        guest.put("/opt/startup/tpu-host", startup.tpu_host_script(mount))
        guest.put("/etc/startup-environment", f"GCE_METADATA_HOST={metadata}\n")
        first = guest.run("/opt/startup/gateway", limit_s=400, GCE_METADATA_HOST=metadata)
        if first.status != 0:
            raise GuestError(f"the gateway's script failed:\n{first.output}")
        host_first = guest.run("/opt/startup/tpu-host", GCE_METADATA_HOST=metadata)
        guest.until("findmnt", MOUNT, limit_s=60)
        yield Gateway(
            guest=guest,
            metadata=metadata,
            attributes=attributes,
            share=share,
            swap=swap,
            scribbled=scribbled,
            first=first,
            host_first=host_first,
        )


@contextmanager
def _metadata_server() -> Iterator[tuple[str, list[GuestAttribute]]]:
    """Google's metadata server as far as setting guest attributes goes: its port, and those that were set."""
    attributes: list[GuestAttribute] = []

    class Metadata(Handler):
        def do_PUT(self) -> None:
            flavor, value = self.headers["Metadata-Flavor"], self.body().decode()
            attributes.append(GuestAttribute(path=self.path, flavor=flavor, value=value))
            self.reply()

    with serving(Metadata) as address:
        yield address.rpartition(":")[2], attributes


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The machine that all tests share: booting it takes longer than any of them."""
    # A short name, as the path of a socket may have 107 characters at most.
    with running(tmp_path_factory.mktemp("vm")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def installed_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One that has the packages."""
    with running(tmp_path_factory.mktemp("vm"), installed=True) as gateway:
        yield gateway


@pytest.mark.parametrize("which", ["installed_gateway", pytest.param("gateway", marks=pytest.mark.nightly)])
def test_the_first_run_makes_a_file_system_serves_it_to_hosts_and_nothing_else_and_says_what_it_did(
    request: pytest.FixtureRequest, which: str
) -> None:
    gateway: Gateway = request.getfixturevalue(which)
    guest, lines = gateway.guest, gateway.first.output.splitlines()
    assert [each for each in lines if not each.startswith("tpu-stack: ")] == []
    assert "tpu-stack: made an ext4 file system on the empty disk /dev/disk/by-id/google-share" in lines
    assert lines[-1] == READY
    # Who waits for the gateway learns when it is ready.
    assert [each.value for each in gateway.attributes[:2]] == ["starting", "yes"]
    assert {each.path for each in gateway.attributes} == {
        "/computeMetadata/v1/instance/guest-attributes/tpu-stack/ready"
    }
    assert {each.flavor for each in gateway.attributes} == {"Google"}

    assert gateway.host_first.status == 0
    source, options = guest.read("findmnt", "--noheadings", "--output", "SOURCE,OPTIONS", MOUNT).split()
    assert source == f"{ADDRESS}:{EXPORT}"
    assert {"vers=4.1", "hard", "nconnect=4", "nosuid", "nodev", "proto=tcp"} <= set(options.split(","))
    # A file belongs to the job's user, whoever writes it.
    guest.read(*ANYBODY, "sh", "-c", f"umask 077; mkdir -p {MOUNT}/run; echo 1 >{MOUNT}/run/one")
    guest.read("sh", "-c", f"echo 2 >>{MOUNT}/run/one")
    assert guest.read("stat", "--format", "%u:%g", f"{EXPORT}/run/one") == f"{UID}:{GID}"
    assert guest.read(*ANYBODY, "cat", f"{MOUNT}/run/one") == "1\n2"

    listening = guest.read("ss", "--no-header", "--numeric", "--listening", "--tcp", "--udp").splitlines()
    assert {(line.split()[0], line.split()[4].rpartition(":")[2]) for line in listening} == {("tcp", "2049")}
    assert null_call(gateway, version=4) == 0
    assert null_call(gateway, version=3) == PROGRAM_MISMATCH
    old = guest.run("mount", "-t", "nfs", "-o", "vers=4.0,retry=0", f"{ADDRESS}:{EXPORT}", "/media")
    assert old.status != 0 and "Protocol not supported" in old.output


@pytest.mark.nightly
def test_an_address_outside_of_the_ranges_mounts_nothing(gateway: Gateway) -> None:
    gateway.guest.read("ip", "address", "replace", "192.0.2.7/32", "dev", "lo")
    gateway.guest.read("ip", "address", "replace", "10.9.0.7/32", "dev", "lo")
    mount = ("mount", "-t", "nfs", "-o", "vers=4.1,retry=0")
    assert gateway.guest.run(*mount, f"192.0.2.7:{EXPORT}", "/media").status != 0
    gateway.guest.read(*mount, f"10.9.0.7:{EXPORT}", "/media")
    gateway.guest.read("umount", "/media")


@pytest.mark.nightly
def test_a_run_that_finds_everything_in_place_changes_nothing_and_says_so(gateway: Gateway) -> None:
    gateway.guest.read("sh", "-c", f"echo kept >{MOUNT}/before")
    before = gateway.state()
    again, host_again = gateway.start_up(), gateway.start_up("/opt/startup/tpu-host")
    assert again.output.splitlines() == NOTHING_TO_DO
    assert host_again.output.splitlines() == [
        f"tpu-stack: ready: {ADDRESS}:{EXPORT} is mounted at {MOUNT}; nothing had to be done"
    ]
    assert gateway.state() == before
    assert gateway.guest.read("cat", f"{MOUNT}/before") == "kept"


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "reason"), [("swap", "TYPE=swap"), ("scribbled", "is not empty")])
def test_a_disk_with_somebody_else_s_data_is_left_alone(gateway: Gateway, name: str, reason: str) -> None:
    disk = {each.name: each for each in (gateway.swap, gateway.scribbled)}[name]
    before = hashlib.sha256(disk.file.read_bytes()).hexdigest()
    ended = gateway.with_disk(name)
    assert ended.status != 0
    (line,) = ended.output.splitlines()
    assert line.startswith(f"tpu-stack: FAILED: the disk /dev/disk/by-id/google-{name} ")
    assert reason in line
    assert hashlib.sha256(disk.file.read_bytes()).hexdigest() == before
    assert gateway.attributes[-1].value.startswith("no: the disk ")


@pytest.mark.nightly
def test_a_host_that_boots_before_its_gateway_mounts_as_soon_as_it_serves(gateway: Gateway) -> None:
    gateway.guest.read("umount", MOUNT)
    gateway.guest.read("systemctl", "stop", "nfs-server")
    try:
        ended = gateway.start_up("/opt/startup/tpu-host")
        assert ended.status == 0
        assert gateway.attributes[-1].value == "mounting"
        gateway.guest.until(
            "sh", "-c", "journalctl --boot --unit tpu-stack-share | grep -q refused", limit_s=60
        )
    finally:
        gateway.guest.read("systemctl", "start", "nfs-server")
    gateway.guest.until("findmnt", MOUNT, limit_s=60)


@pytest.mark.nightly
def test_without_the_share_only_root_may_write_where_it_would_be(gateway: Gateway) -> None:
    gateway.guest.read("umount", MOUNT)
    try:
        assert gateway.guest.run(*ANYBODY, "touch", f"{MOUNT}/astray").status != 0
    finally:
        gateway.start_up("/opt/startup/tpu-host")
        gateway.guest.until("findmnt", MOUNT, limit_s=60)


@pytest.mark.nightly
def test_after_a_reboot_the_share_is_served_and_mounted_with_its_data(gateway: Gateway) -> None:
    gateway.guest.read(*ANYBODY, "sh", "-c", f"echo kept >{MOUNT}/across")
    gateway.guest.reboot()
    gateway.guest.until("findmnt", MOUNT, limit_s=60)
    assert gateway.guest.read("cat", f"{MOUNT}/across") == "kept"
    gateway.guest.read(*ANYBODY, "sh", "-c", f"echo more >>{MOUNT}/across")
    journal = gateway.guest.read(
        "journalctl", "--boot", "--unit", "google-startup-scripts", "--output", "cat"
    )
    assert NOTHING_TO_DO[0] in journal.splitlines()
    assert gateway.guest.read("systemctl", "--failed", "--no-legend") == ""


def null_call(gateway: Gateway, *, version: int) -> int:
    """What the server answers to NFS's procedure 0 of a version (RFC 5531: accept_stat)."""
    call = struct.pack(">11I", 0x80000000 + 40, 1, 0, 2, NFS_PROGRAM, version, 0, 0, 0, 0, 0)
    escaped = "".join(f"\\x{each:02x}" for each in call)
    ask = f"exec 3<>/dev/tcp/{ADDRESS}/2049; printf '{escaped}' >&3; head --bytes 28 <&3 | od -An -tx1"
    answer = bytes.fromhex(gateway.guest.read("timeout", "20", "bash", "-c", ask))
    status: int = struct.unpack(">7I", answer)[-1]
    return status
