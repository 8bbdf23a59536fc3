"""The start-up scripts of the machines with their settings, as they go into a VM's metadata `startup-script`. Pure.

The scripts are files of `infra/startup/`; Google's guest agent runs them as root at every boot. What varies from stack
to stack goes in front of them as quoted assignments, so that no setting is ever read as shell. The values also land in
/etc/exports, /etc/fstab and a systemd unit, each with a quoting of its own: the configuration's reader takes only paths
that need none.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

NfsVersion = Literal["4.1", "3"]
RootIs = Literal["squashed", "kept"]

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """The settings of the gateway's share. `disk`: the device name under which the disk is attached to the VM.

    clients: address ranges (CIDR) that may mount. uid, gid: the owner of all files, whoever writes them.
    disk_wait_s: how long a boot waits for the disk before it fails.
    """

    export: str
    clients: tuple[str, ...]
    uid: int
    gid: int
    disk: str = "share"
    disk_wait_s: int = 120


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuHost:
    """The share that a TPU VM mounts. `server`: a name or IPv4 address; `export`: the path there.

    root: "squashed" where the server decides whom files belong to (the gateway), "kept" where root of a host is root of
    the share (Filestore): there the share, which is root's own at first, is opened to everybody like /tmp.
    """

    server: str
    export: str
    mount: str
    version: NfsVersion = "4.1"
    root: RootIs = "squashed"


def gateway_script(gateway: GatewaySettings) -> str:
    """The start-up script of the gateway."""
    return script(
        "gateway.sh",
        {
            "SHARE_DEVICE": f"/dev/disk/by-id/google-{gateway.disk}",
            "SHARE_DISK_WAIT_S": str(gateway.disk_wait_s),
            "SHARE_EXPORT": gateway.export,
            # Slices of one subnet share a range, and exportfs takes none twice.
            "SHARE_CLIENTS": " ".join(dict.fromkeys(gateway.clients)),
            "SHARE_UID": str(gateway.uid),
            "SHARE_GID": str(gateway.gid),
        },
    )


def tpu_host_script(host: TpuHost) -> str:
    """The start-up script of a TPU VM that mounts a share."""
    return script("tpu_host.sh", _share_settings(host))


def compute_host_script(host: TpuHost | None, hosts: int) -> str:
    """The start-up script of a TPU host that Compute Engine makes. host: the share that it mounts; None: none.

    hosts: of its slice.
    """
    settings = {"SLICE_HOSTS": str(hosts), **(_share_settings(host) if host else {})}
    return script("compute_host.sh", settings, more=("tpu_host.sh",) if host else ())


def _share_settings(host: TpuHost) -> dict[str, str]:
    return {
        "SHARE_SOURCE": f"{host.server}:{host.export}",
        "SHARE_MOUNT": host.mount,
        "SHARE_VERSION": host.version,
        "SHARE_ROOT": host.root,
    }


def script(name: str, settings: Mapping[str, str], more: Sequence[str] = ()) -> str:
    """The file `name` of infra/startup/ behind its settings and what all scripts share, ready to be run.

    more: files that go on where it ends.
    """
    parts = [(FOLDER / file_name).read_text(encoding="utf-8") for file_name in ("machine.sh", name, *more)]
    return "".join(["#!/bin/bash\n", assignments(settings), *parts])


def assignments(settings: Mapping[str, str]) -> str:
    """Lines of shell after which every variable holds its value, character by character."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
