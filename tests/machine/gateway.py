"""A gateway that is its own TPU host: a machine with both start-up scripts run once, beside a metadata server."""

from __future__ import annotations

import dataclasses
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra import startup
from tests.machine import debian
from tests.machine.guest import Disk, Ended, Guest, GuestError, started

ADDRESS = "10.0.2.15"
EXPORT, MOUNT = "/srv/share", "/mnt/share"
UID, GID = 4242, 4343


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """One guest attribute that the machine set."""

    path: str
    flavor: str | None
    value: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gateway:
    """A machine that is its own TPU host, after the first run of both scripts."""

    guest: Guest
    metadata: str
    told: list[Told]
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
        other = startup.Gateway(
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
        _metadata_server() as (port, told),
        started(debian.image(installed=installed), (share, swap, scribbled), folder) as guest,
    ):
        metadata = f"10.0.2.2:{port}"
        serve = startup.Gateway(export=EXPORT, clients=("10.0.2.0/24", "10.9.0.0/16"), uid=UID, gid=GID)
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
            told=told,
            share=share,
            swap=swap,
            scribbled=scribbled,
            first=first,
            host_first=host_first,
        )


@contextmanager
def _metadata_server() -> Iterator[tuple[int, list[Told]]]:
    """Google's metadata server as far as setting guest attributes goes; its port, and what it was told."""
    told: list[Told] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            value = self.rfile.read(int(self.headers["Content-Length"])).decode()
            told.append(Told(path=self.path, flavor=self.headers["Metadata-Flavor"], value=value))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
