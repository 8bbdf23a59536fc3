"""Facts about this host for every preflight, and the verb describe, which reports more for a bug report."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys

from .containers import docker_command
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
    """Free TCP ports, chosen by the kernel; all are bound at once, so that they differ."""
    held = [socket.socket() for _ in range(count)]
    try:
        for listener in held:
            listener.bind(("0.0.0.0", 0))
        return [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()


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
WORKER_NUMBER = "agent-worker-number"
"""The instance attribute with the slice's own number of this host, which JAX and libtpu read."""
SHOWN_ATTRIBUTES = ("accelerator-type", WORKER_NUMBER, "worker-id", "worker-network-endpoints", "tpu-env")
"""Attributes of the instance whose values are shown: its kind, and what it knows of its place in the slice."""
DOCKER_INFO = (
    "{{.ServerVersion}}, cgroup {{.CgroupVersion}}, {{.CgroupDriver}}, {{.SecurityOptions}}, {{.Driver}}"
)


def describe(_request: Json) -> Json:
    """Describe this host: titles and texts, in reading order."""
    facts = host_facts()
    entries = {
        "system": "{}, kernel {}, {}".format(os_name(), facts["kernel"], os.uname().machine),
        "processors and memory": "{}, {:.0f} GiB".format(facts["cpus"], facts["memory_bytes"] / 2**30),
        "python": "{} ({})".format(facts["python"], sys.executable),
        "ids": ids(),
        "sudo": first_line(["sudo", "-n", "true"], quiet="without a password"),
        "limits": limits(),
        "device nodes": nodes(),
        "/tmp/libtpu_lockfile": file_mode("/tmp/libtpu_lockfile"),
        "/dev/shm": room("/dev/shm"),
        "/tmp": room("/tmp"),
        **{path: content(path) for path in FILES},
        "cloud-init": all_lines(["cloud-init", "status", "--long"]),
        "docker": docker(),
        **metadata(),
        "settings in the environment": ", ".join(sorted(n for n in os.environ if n.startswith(SETTINGS)))
        or "none",
    }
    return {"found": entries}


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
    parts = []
    for name, resource_kind in named:
        both = [
            "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
            for limit in resource.getrlimit(resource_kind)
        ]
        parts.append("{} {}".format(name, "/".join(both)))
    return ", ".join(parts) + " (soft/hard)"


def nodes() -> str:
    import glob

    paths = sorted({path for pattern in DEVICES for path in glob.glob(pattern)})
    return " | ".join(f"{path} {file_mode(path)}" for path in paths) or "none of " + ", ".join(DEVICES)


def file_mode(path: str) -> str:
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
        usage = os.statvfs(path)
    except OSError as error:
        return str(error.strerror)
    free, size = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
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
    lines = (done.stdout + done.stderr).decode(errors="replace").splitlines()
    return " | ".join(
        [f"exit code {done.returncode}", *(line.strip() for line in lines[:14] if line.strip())]
    )


def first_line(command: list[str], quiet: str) -> str:
    """The output of a command that is silent on success. quiet: the text for success."""
    output = all_lines(command)
    return quiet if output == "exit code 0" else output


def metadata() -> Json:
    """The names of this instance's guest attributes and attributes, without the values, which may be secret."""
    guest, attributes = (
        ask_metadata("guest-attributes/?recursive=true"),
        ask_metadata("attributes/?recursive=true"),
    )
    entries = {
        "guest attributes": guest if isinstance(guest, str) else ", ".join(names_in(guest)) or "none",
        "instance attributes": attributes
        if isinstance(attributes, str)
        else ", ".join(sorted(attributes)) or "none",
    }
    if not isinstance(attributes, str):
        shown = {name: str(attributes.get(name, "none")).split() for name in SHOWN_ATTRIBUTES}
        entries.update({name: " ".join(parts) for name, parts in shown.items()})
    return entries


def names_in(tree: Json) -> list[str]:
    """namespace/key of each guest attribute."""
    return sorted(
        f"{space}/{key}" for space, keys in tree.items() for key in (keys if isinstance(keys, dict) else [""])
    )


def ask_metadata(path: str) -> Json | str:
    """The value at a path of the metadata server, or why there is no answer."""
    import urllib.error
    import urllib.request

    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=METADATA_LIMIT_S
        ) as answer:
            values = json.loads(answer.read())
            return values if isinstance(values, dict) else str(type(values))
    except urllib.error.HTTPError as error:
        return f"the metadata server answers {error.code}"
    except (OSError, ValueError) as error:
        return f"no metadata server answers ({getattr(error, 'reason', error)})"
