"""A machine: what is asked for, what is there, and the files that make a container of the host image into this one."""

from __future__ import annotations

import dataclasses
import io
import re
import tarfile
from collections.abc import Mapping

from rehearsal.machines.docker_engine import MachinesError

# Places in the host image, and in what is made of it.
PYTHON = "/opt/jobs/bin/python"
DEVICE = "/run/tpu-stack/accel0"
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key"
SETTINGS = "/etc/ssh/sshd_config.d/machine.conf"
# The share a second time, only for root: from here it is mounted again where it has been unmounted.
SPARE_SHARE = "/opt/tpu-stack/share"
HOME_MIB = 1024
DOCKER_DATA = "/var/lib/docker"
DOCKER_START = "/opt/tpu-stack/start-docker"

FAKETIME = "/opt/tpu-stack/libfaketime.so"
# The monotonic clock stays as it is: a computer that is set wrong measures durations all the same.
_CLOCK = f'"LD_PRELOAD={FAKETIME}" "FAKETIME_DONT_FAKE_MONOTONIC=1" "FAKETIME=%+.3f"'
_SHIFT = re.compile(re.escape(_CLOCK).replace(re.escape("%+.3f"), r"[+-][\d.]+"))

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A host to be made.

    address: out of the network's subnet. host_key_private_pem: of its ed25519 key, in OpenSSH's form.
    authorized_keys: public lines that its user is let in with. environment: of every ssh session.
    share_mount: an absolute path; None where the machine has no share.
    """

    name: str
    address: str
    host_key_private_pem: str
    authorized_keys: tuple[str, ...]
    user: str = "sa_rehearsal"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    share_mount: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """A host that was made. state: as Docker calls it, "running" or "exited" above all. share_mount: "" for none."""

    name: str
    address: str
    state: str
    user: str
    share_mount: str


def home(user: str) -> str:
    return f"/home/{user}"


def authorized_keys_path(user: str) -> str:
    return f"/etc/ssh/authorized_keys/{user}"


def check(machine: Machine) -> None:
    """Raises MachinesError on a user, a share mount or a variable that cannot be."""
    if not _USER.fullmatch(machine.user) or machine.user == "root":
        raise MachinesError(
            f"{machine.name}: user {machine.user!r}: 1 to 32 of a-z, 0-9, _ and -, beginning with a letter or _,"
            " and not root"
        )
    if machine.share_mount is not None and not re.fullmatch(r"(/[\w.-]+)+", machine.share_mount):
        raise MachinesError(f"{machine.name}: share_mount {machine.share_mount!r} is no absolute path")
    settings(machine.environment)


def settings(environment: Mapping[str, str]) -> str:
    """The machine's own lines of sshd's configuration. All variables stand in one SetEnv: sshd heeds only the first.

    Raises MachinesError on a variable that sshd cannot set.
    """
    words = []
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name) or any(ord(letter) < 32 for letter in value):
            raise MachinesError(
                f"environment {name}={value!r}: a name of letters, digits and _, a value of one line, no control"
                " characters"
            )
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        words.append(f'"{name}={quoted}"')
    return f"SetEnv {' '.join(words)}\n" if words else ""


def shifted(settings: str, seconds: float) -> str:
    """The machine's lines of sshd's configuration with the clock of what ssh starts so much ahead; 0.0: as it is.

    libfaketime does it, which variables of every session preload.
    """
    found = _SHIFT.sub("", settings).removeprefix("SetEnv").strip()
    words = [found] if found else []
    if seconds != 0.0:
        words.append(_CLOCK % seconds)
    return f"SetEnv {' '.join(words)}\n" if words else ""


def files(machine: Machine, environment: Mapping[str, str]) -> bytes:
    """An archive, to be unpacked at / before the first start: no secret is in the container's environment or image."""
    contents = {
        HOST_KEY: (machine.host_key_private_pem.strip() + "\n", 0o600),
        authorized_keys_path(machine.user): (
            "".join(f"{key.strip()}\n" for key in machine.authorized_keys),
            0o644,
        ),
        SETTINGS: (settings(environment), 0o644),
    }
    return archive({path: (text.encode(), mode) for path, (text, mode) in contents.items()})


def archive(contents: Mapping[str, tuple[bytes, int]]) -> bytes:
    """Files of root's, path → (content, mode), as Docker takes them. Always the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for path, (content, mode) in sorted(contents.items()):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), mode
            packed.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
