"""What this host is: facts that say nothing about whether it is in order."""

from __future__ import annotations

import os
import shutil
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def facts() -> Json:
    kernel = os.uname()
    return {
        "hostname": kernel.nodename,
        "kernel": kernel.release,
        "boot_id": boot_id(),
        "user": user_name(),
        "home": os.path.expanduser("~"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "agent_sha256": agent_sha256(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "docker": shutil.which("docker") is not None,
        "free_ports": free_ports(2),
    }


def agent_sha256() -> str:
    """What this agent is made of: the names and the contents of its files."""
    import hashlib

    folder = os.path.dirname(os.path.abspath(__file__))
    digest = hashlib.sha256()
    for name in sorted(name for name in os.listdir(folder) if name.endswith(".py")):
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def boot_id() -> str | None:
    """Changes with every boot of the machine; containers have their machine's."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run as a number that has no name
        return str(os.getuid())


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody has now, chosen by the kernel; held all at once, so that they differ."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("0.0.0.0", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
