"""The start-up scripts of the machines with their settings, as they go into a VM's metadata `startup-script`. Pure.

The scripts are files of `infra/startup/`; Google's guest agent runs them as root at every boot. What varies from stack
to stack goes in front of them as quoted assignments, so that no setting is ever read as shell.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

NfsVersion = Literal["4.1", "3"]
RootIs = Literal["squashed", "kept"]

FOLDER = Path(__file__).parent

# The values also land in /etc/exports, /etc/fstab and a systemd unit, each with a quoting of its own: none is needed.
_PATH = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)+")
_SERVER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_MAX_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gateway:
    """What the gateway serves. `disk`: the device name under which the disk is attached to the VM.

    clients: address ranges (CIDR) that may mount. uid, gid: whom all files belong to, whoever writes them.
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
    """What a TPU VM mounts where. `server`: a name or IPv4 address; `export`: the path there.

    root: "squashed" where the server decides whom files belong to (the gateway), "kept" where root of a host is root of
    the share (Filestore): there the share, which is root's own at first, is opened to everybody like /tmp.
    """

    server: str
    export: str
    mount: str
    version: NfsVersion = "4.1"
    root: RootIs = "squashed"


def gateway_script(gateway: Gateway) -> str:
    """The start-up script of the gateway. ValueError: a setting that cannot be right, with its name and the rule."""
    _need(bool(gateway.clients), "clients", gateway.clients, "at least one address range; nobody could mount")
    for each in gateway.clients:
        _need(_is_range(each), "clients", each, "IPv4 ranges such as 10.0.0.0/20, and not the whole internet")
    for name, number in (("uid", gateway.uid), ("gid", gateway.gid)):
        _need(0 < number <= _MAX_ID, name, number, f"1 to {_MAX_ID}; 0 is root")
    _need(_PATH.fullmatch(gateway.export) is not None, "export", gateway.export, _PATH_RULE)
    _need(
        _DEVICE_NAME.fullmatch(gateway.disk) is not None,
        "disk",
        gateway.disk,
        "a device name of Compute Engine",
    )
    _need(gateway.disk_wait_s > 0, "disk_wait_s", gateway.disk_wait_s, "more than 0")
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
    """The start-up script of a TPU VM that mounts a share. ValueError: as for `gateway_script`."""
    _need(_SERVER.fullmatch(host.server) is not None, "server", host.server, "a host name or an IPv4 address")
    _need(_PATH.fullmatch(host.export) is not None, "export", host.export, _PATH_RULE)
    _need(_PATH.fullmatch(host.mount) is not None, "mount", host.mount, _PATH_RULE)
    for name, value, choices in (("version", host.version, NfsVersion), ("root", host.root, RootIs)):
        _need(value in get_args(choices), name, value, f"one of {', '.join(get_args(choices))}")
    return script(
        "tpu_host.sh",
        {
            "SHARE_SOURCE": f"{host.server}:{host.export}",
            "SHARE_MOUNT": host.mount,
            "SHARE_VERSION": host.version,
            "SHARE_ROOT": host.root,
        },
    )


def script(name: str, settings: Mapping[str, str]) -> str:
    """The file `name` of infra/startup/ behind its settings and what all scripts share, ready to be run."""
    parts = [(FOLDER / each).read_text(encoding="utf-8") for each in ("machine.sh", name)]
    return "".join(["#!/bin/bash\n", assignments(settings), *parts])


def assignments(settings: Mapping[str, str]) -> str:
    """Lines of shell after which every variable holds its value, character by character.

    ValueError: a name that is none of a variable, or a value that no variable of a shell can hold.
    """
    lines = []
    for name, value in settings.items():
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            raise ValueError(f"{name!r} cannot name a setting: capital letters, digits and underscores")
        if any(each == "\0" or "\ud800" <= each <= "\udfff" for each in value):
            raise ValueError(f"{name}={value!r}: a shell's variable holds no NUL and no half of a character")
        lines.append(f"{name}={shlex.quote(value)}\n")
    return "".join(lines)


_PATH_RULE = (
    "an absolute path of letters, digits, dots, hyphens and underscores, with nothing after the last name"
)


def _need(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {value!r} is not {rule}")


def _is_range(text: str) -> bool:
    try:
        return ipaddress.IPv4Network(text).prefixlen > 0
    except ValueError:
        return False
