"""What this host is: facts for every preflight, and the verb describe, which tells more for a bug report."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

from . import docker_command
from .protocol import Failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


def host_facts(ports: int = 2) -> Json:
    kernel = os.uname()
    return {
        "kernel": kernel.release,
        "home": os.path.expanduser("~"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "docker": shutil.which("docker") is not None,
        "free_ports": free_ports(ports),
    }


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


LIMIT_S = 15.0
METADATA_LIMIT_S = 5.0
DEVICES = ("/dev/accel*", "/dev/vfio", "/dev/vfio/*", "/dev/nvidia*")  # more than a job needs
FILES = (
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/defrag",
    "/etc/tmpfiles.d/tpu-stack-huge-pages.conf",
    "/proc/sys/kernel/pid_max",
)
SETTINGS = ("TPU_", "LIBTPU", "PJRT_", "JAX_", "XLA_", "CLOUD_TPU_", "MEGASCALE_")
TOLD = ("accelerator-type", "agent-worker-number")
"""Attributes of the instance whose values are told: its kind, and the slice's own number of this host."""
DOCKER_INFO = (
    "{{.ServerVersion}}, cgroup {{.CgroupVersion}}, {{.CgroupDriver}}, {{.SecurityOptions}}, {{.Driver}}"
)


def describe(_request: Json) -> Json:
    """Titles and texts, in the order in which they are read."""
    known = host_facts()
    found = {
        "system": "{}, kernel {}, {}".format(os_name(), known["kernel"], os.uname().machine),
        "processors and memory": "{}, {:.0f} GiB".format(known["cpus"], known["memory_bytes"] / 2**30),
        "python": "{} ({})".format(known["python"], sys.executable),
        "ids": ids(),
        "sudo": first_line(["sudo", "-n", "true"], quiet="without a password"),
        "limits": limits(),
        "device nodes": nodes(),
        "/tmp/libtpu_lockfile": mode_of("/tmp/libtpu_lockfile"),
        "/dev/shm": room("/dev/shm"),
        "/tmp": room("/tmp"),
        **{path: content(path) for path in FILES},
        "cloud-init": all_lines(["cloud-init", "status", "--long"]),
        "docker": docker(),
        **metadata(),
        "settings in the environment": ", ".join(sorted(n for n in os.environ if n.startswith(SETTINGS)))
        or "none",
    }
    return {"found": found}


def os_name() -> str:
    for line in content("/etc/os-release").split(" | "):
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return "unknown"


def ids() -> str:
    groups = " ".join(map(str, sorted(os.getgroups())))
    return f"user {os.getuid()}, group {os.getgid()}, groups {groups}, umask {umask():03o}"


def umask() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0


def limits() -> str:
    import resource

    named = (
        ("memlock", resource.RLIMIT_MEMLOCK),
        ("nofile", resource.RLIMIT_NOFILE),
        ("nproc", resource.RLIMIT_NPROC),
    )
    told = []
    for name, which in named:
        both = [
            "unlimited" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(which)
        ]
        told.append("{} {}".format(name, "/".join(both)))
    return ", ".join(told) + " (soft/hard)"


def nodes() -> str:
    import glob

    paths = sorted({path for pattern in DEVICES for path in glob.glob(pattern)})
    return " | ".join(f"{path} {mode_of(path)}" for path in paths) or "none of " + ", ".join(DEVICES)


def mode_of(path: str) -> str:
    import stat

    try:
        status = os.stat(path)
    except OSError as error:
        return str(error.strerror)
    may = "may" if os.access(path, os.R_OK | os.W_OK) else "may not"
    return (
        f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid}, this user {may} read and write it"
    )


def room(path: str) -> str:
    try:
        found = os.statvfs(path)
    except OSError as error:
        return str(error.strerror)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    return f"{free / 2**30:.1f} GiB free of {size / 2**30:.1f}"


def content(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return " | ".join(line.strip() for line in file.read(4000).splitlines() if line.strip())
    except OSError as error:
        return str(error.strerror)


def docker() -> str:
    try:
        answer = docker_command.ask(["info", "--format", DOCKER_INFO], LIMIT_S)
    except Failed as failure:
        return failure.message
    return answer.out.strip() if answer.is_good else answer.complaint


def all_lines(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False
        )
    except FileNotFoundError:
        return f"there is no {command[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stdout + done.stderr).decode(errors="replace").splitlines()
    return " | ".join([f"exit code {done.returncode}", *(line.strip() for line in said[:14] if line.strip())])


def first_line(command: list[str], quiet: str) -> str:
    """What a command says that says nothing where all is well."""
    said = all_lines(command)
    return quiet if said == "exit code 0" else said


def metadata() -> Json:
    """Names alone, of what this instance publishes and of what it was told; the values may be anything."""
    guest, told = ask_metadata("guest-attributes/?recursive=true"), ask_metadata("attributes/?recursive=true")
    found = {
        "guest attributes": guest if isinstance(guest, str) else ", ".join(names_in(guest)) or "none",
        "instance attributes": told if isinstance(told, str) else ", ".join(sorted(told)) or "none",
    }
    if not isinstance(told, str):
        found.update({name: str(told.get(name, "none")) for name in TOLD})
    return found


def names_in(tree: Json) -> list[str]:
    """namespace/key of each guest attribute."""
    return sorted(
        f"{space}/{key}" for space, keys in tree.items() for key in (keys if isinstance(keys, dict) else [""])
    )


def ask_metadata(path: str) -> Json | str:
    """What the metadata server has there, or why it does not say."""
    import urllib.error
    import urllib.request

    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=METADATA_LIMIT_S
        ) as answer:
            found = json.loads(answer.read())
            return found if isinstance(found, dict) else str(type(found))
    except urllib.error.HTTPError as error:
        return f"the metadata server answers {error.code}"
    except (OSError, ValueError) as error:
        return f"no metadata server answers ({getattr(error, 'reason', error)})"
