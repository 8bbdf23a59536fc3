"""The verb preflight: whether a job can start here, and what is to be done where it cannot."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from contracts import atomic
from contracts.durations import spoken
from contracts.errors import remedy_for
from contracts.host_interface import DEVICE_GLOBS

from .attempt_process import plain_environment
from .containers import docker_command
from .containers.image_pull import check_docker
from .host_facts import host_facts
from .proc import controlled, described, holders, parse_listeners, start_ticks, wait_until
from .protocol import Failed, check
from .storage.host_files import tail
from .storage.staged_bundles import is_present

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .protocol import Json


def preflight(request: Json) -> Json:
    """Check whether a job can start here. All checks run, so that one call finds all that is wrong."""
    now = time.time()
    # The interpreter takes longest, and works while the rest is looked at.
    bare = request["container"] is None
    python = (
        check_python(request["python"], request["modules"], request["python_remedy"] or PYTHON_REMEDY)
        if bare
        else None
    )
    checks = [] if request["mount"] is None else [check_mount(request["mount"])]
    is_mounted = all(check["ok"] for check in checks)
    places = [
        look_at(name, request[name])
        for name in ("root", "run_dir", "cache_dir")
        if request[name] is not None and (is_mounted or not lies_in(request[name], request["mount"]))
    ]
    checks += [place["check"] for place in places]
    checks += check_room(places, request["min_free_bytes"])
    if request["port"] is not None:
        checks.append(check_port(request["port"]))
    checks.append(check_clock(now - request["time"], request["max_clock_offset_s"]))
    checks.append(check_device(request["platform"], request["device_globs"]))
    checks += check_lockfiles(request["platform"], request["lockfiles"])
    if request["alone"]:
        checks += check_leftovers(request["root"], not bare)
    checks += check_peers(request["peers"]) if request["peers"] else []
    bundle = request["bundle"]
    facts = {
        **host_facts(request["free_ports"] or 2),
        "time": now,
        "clock_offset_s": now - request["time"],
        "bundle_present": bool(bundle) and is_present(request["root"], bundle),
        "free_bytes": free_bytes(places),
    }
    if python is not None:
        return {"checks": [python(), *checks], "facts": facts}
    docker_checks, docker_facts = check_docker(request)
    return {"checks": [*docker_checks, *checks], "facts": {**facts, **docker_facts}}


def check_port(port: int) -> Json:
    with socket.socket() as listener:
        # A port in TIME_WAIT is free to those who listen with this option, as the coordinator does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
            listener.listen(1)
        except OSError as error:
            reason = str(error.strerror)
            taken = error.errno == errno.EADDRINUSE
        else:
            return check("port", f"port {port} is free")
    if not taken:
        return check("port", f"port {port} cannot be used: {reason}", "choose another port")
    sockets: list[str] = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as file:
                sockets += parse_listeners(file.read(), port)
        except (OSError, ValueError, IndexError):
            continue
    held_by = sorted({pid for pids in holders(sockets).values() for pid in pids})
    message = f"port {port} is taken by {described(held_by)}"
    return check("port", message, "stop that process, or choose another port")


def check_clock(offset_s: float, limit_s: float) -> Json:
    message = f"the clock is {offset_s:+.2f} s from the launching machine's"
    if abs(offset_s) <= limit_s:
        return check("clock", message)
    return check(
        "clock", f"{message}; the limit is {limit_s:g} s", "turn on time synchronisation on both machines"
    )


LOOK_PAUSE_S = 0.005
PYTHON_REMEDY = "install the requirements on this host, or name the interpreter that has them"
PROBE = """
import importlib.util, json, sys
def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except Exception:
        return True
print(json.dumps([list(sys.version_info[:3]), [name for name in sys.argv[1:] if lacks(name)]]))
"""


def check_python(
    python: str, modules: list[str], remedy: str = PYTHON_REMEDY, timeout_s: float = 20.0
) -> Callable[[], Json]:
    """Start the check of the interpreter, which takes a while. Returns a function that waits for its result."""
    interpreter = shutil.which(os.path.expanduser(python))
    if interpreter is None:
        return lambda: check("python", f"{python}: no such interpreter on this host", remedy)
    try:
        probe = subprocess.Popen(
            [interpreter, "-c", PROBE, *modules],
            cwd="/",
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        reason = error.strerror
        return lambda: check("python", f"{interpreter} cannot be run: {reason}", remedy)

    def finding() -> Json:
        with probe:
            # `communicate` sleeps until the process has ended, which fails where the clock is libfaketime's.
            if wait_until(lambda: probe.poll() is not None, timeout_s, LOOK_PAUSE_S):
                with contextlib.suppress(subprocess.TimeoutExpired):  # what it began may hold its pipes
                    output, complaint = probe.communicate(timeout=timeout_s)
                    return judged(interpreter, output, complaint, len(modules), remedy)
            probe.kill()
        return check(
            "python", f"{interpreter} did not answer within {timeout_s:.0f} s", "see what that program is"
        )

    return finding


def judged(interpreter: str, output: bytes, complaint: bytes, modules: int, remedy: str) -> Json:
    """The check of the interpreter, from its output."""
    try:
        version, missing = json.loads(output)
    except (ValueError, TypeError):
        last = (tail(complaint, 1) or ["nothing"])[0]
        return check("python", f"{interpreter} is no working Python; it said: {last}", remedy)
    number = ".".join(map(str, version))
    if version < [3, 12]:
        return check("python", f"{interpreter} is Python {number}; a job needs 3.12 or later", remedy)
    if missing:
        return check("python", f"{interpreter} (Python {number}) lacks {', '.join(missing)}", remedy)
    return check("python", f"{interpreter} is Python {number} with all of {modules} modules")


PLACE_LIMIT_S = 10.0


def lies_in(path: str, mount: str | None) -> bool:
    """Whether the path is below that mount point, by the names alone: a mount that hangs is not asked."""
    return mount is not None and f"{os.path.normpath(path)}/".startswith(f"{os.path.normpath(mount)}/")


def in_time(look: Callable[[], Json], timeout_s: float) -> Json | None:
    """The result of `look`, or None if it takes longer than the limit.

    It runs in a process of its own: one that waits for a network file system whose server is gone cannot be
    interrupted, nor always killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # The answer's pipe alone stays open: whoever waits for the end of the others' is not to wait for this one.
        os.closerange(0, writing)
        try:
            result = look()
        except Exception as error:
            result = {"bug": repr(error)}
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    data = b""
    deadline = time.monotonic() + timeout_s
    try:
        while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(reading, 65536)
            if not piece:
                break
            data += piece
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 0.2, 0.002)
    result = json.loads(data) if data else {}
    if "bug" in result:
        raise RuntimeError(result["bug"])
    return result or None


def look_at(name: str, path: str, timeout_s: float = PLACE_LIMIT_S) -> Json:
    """The check of one directory with its `path`, and its `device` and `free_bytes` if they could be read."""
    facts = in_time(lambda: place_facts(name, path), timeout_s)
    if facts is None:
        message = f"{path} does not answer within {timeout_s:g} s"
        remedy = "see that the server of its file system is up, or choose another directory"
        facts = {"check": check(name, message, remedy)}
    return {"path": path, **facts}


def place_facts(name: str, path: str) -> Json:
    finding = check_writable(name, path)
    existing = path
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    room = os.statvfs(existing)
    return {
        "check": finding,
        "device": os.stat(existing).st_dev,
        "free_bytes": room.f_bavail * room.f_frsize,
    }


def check_writable(name: str, path: str) -> Json:
    """Makes the directory and writes a byte: a full or read-only disk shows in nothing less."""
    trial = os.path.join(path, f".agent-trial.{os.getpid()}")
    try:
        os.makedirs(path, exist_ok=True)
        try:
            with open(trial, "wb") as file:
                file.write(b"x")
        finally:
            atomic.remove(trial)
    except OSError as error:
        return check(name, f"{path} cannot be written: {error.strerror}", remedy_for(error))
    return check(name, f"{path} can be written")


def free_bytes(places: list[Json]) -> dict[str, int]:
    """The free space of each file system, under the first of the places that are on it."""
    first: dict[int, str] = {}
    free: dict[str, int] = {}
    for place in places:
        if "device" in place and first.setdefault(place["device"], place["path"]) == place["path"]:
            free[place["path"]] = place["free_bytes"]
    return free


def check_room(places: list[Json], min_free_bytes: int) -> list[Json]:
    """A finding for each file system."""
    checks = []
    for path, free in free_bytes(places).items():
        have, want = (f"{size / 2**30:.1f} GiB" for size in (free, min_free_bytes))
        if free < min_free_bytes:
            remedy = "free some space there (old runs, caches, docker images), or ask for less"
            checks.append(check("disk", f"{path} has {have} free and needs {want}", remedy))
        else:
            checks.append(check("disk", f"{path} has {have} free"))
    return checks


MOUNT_LIMIT_S = 5.0
MOUNT_REMEDY = "`fab deploy` mounts it; why it is not: `journalctl --unit tpu-stack-share` on that host"


def parse_mounts(text: str) -> dict[str, str]:
    """Mount points and their sources of a /proc/mounts, which writes blanks and the like as octal numbers."""

    def plain(word: str) -> str:
        return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), word)

    rows = (line.split(" ") for line in text.splitlines())
    return {plain(row[1]): plain(row[0]) for row in rows if len(row) > 2}


def check_mount(path: str) -> Json:
    """Whether something is mounted there and answers; a file system whose server is gone does not."""
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
        source = parse_mounts(file.read()).get(os.path.normpath(path))
    if source is None:
        return check("mount", f"{path} is not mounted", MOUNT_REMEDY)
    answer = in_time(lambda: mount_answer(path), MOUNT_LIMIT_S)
    if answer is None:
        message = f"{path} ({source}) does not answer within {MOUNT_LIMIT_S:g} s"
        return check("mount", message, f"see that its server is up; {MOUNT_REMEDY}")
    if answer["error"] is not None:
        return check("mount", f"{path} ({source}): {answer['error']}", MOUNT_REMEDY)
    return check("mount", f"{path} is mounted from {source}")


def mount_answer(path: str) -> Json:
    """Ask a mount's server: listing a directory needs it, since the kernel caches only the directory's own entry."""
    try:
        os.statvfs(path)
        os.listdir(path)
    except OSError as error:
        return {"error": error.strerror}
    return {"error": None}


ENTRY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
ROOT_LIMIT_S = 20.0
LOCKFILES: dict[str, list[str]] = {"tpu": ["/tmp/libtpu_lockfile"], "gpu": [], "cpu": []}


def check_device(platform: str, globs: list[str] | None) -> Json:
    """Whether the devices are there and, but for a GPU, which several may use, nobody has them open.

    A CPU has none unless the request names some, which then stand for a TPU's.
    """
    globs = list(DEVICE_GLOBS[platform]) if globs is None else globs
    if not globs:
        return check("device", f"{len(os.sched_getaffinity(0))} CPU cores")
    import glob

    name = "stand-in" if platform == "cpu" else platform.upper()
    devices = sorted(path for pattern in globs for path in glob.glob(pattern))
    if not devices:
        message = f"no {name} on this host: none of {', '.join(globs)} exists"
        return check("devices", message, f"choose a host that has one, or another platform than {platform}")
    if platform != "gpu":
        real = {os.path.realpath(path): path for path in devices}
        for target, held_by in sorted(holders(real).items()):
            if held_by:
                message = f"{real[target]} is held by {described(held_by)}"
                return check("device", message, "stop the run that holds it, or end that process")
    return check("device", f"{len(devices)} {name} devices: {', '.join(devices)}")


def check_lockfiles(platform: str, paths: list[str] | None) -> list[Json]:
    """A finding for each lock file that is there; where the request names none, of those that the platform has."""
    paths = LOCKFILES[platform] if paths is None else paths
    return [check_lockfile(path) for path in paths if os.path.lexists(path)]


def check_lockfile(path: str) -> Json:
    """A lock file that outlived its process, as SIGKILL leaves one, is removed; a held one is left alone.

    One of another user's is looked at and removed as root, where this user may become that: root sees every holder.
    """
    real = os.path.realpath(path)
    held_by = holders([real])[real]
    remedy = "stop the run that holds it, or end that process"
    try:
        if held_by or is_locked(path):
            return check("lockfile", f"{path} is held by {described(held_by)}", remedy)
        os.unlink(path)
    except FileNotFoundError:
        return check("lockfile", f"{path} is not there")
    except OSError as error:
        message = f"{path} cannot be looked at or removed: {error.strerror}"
        refused = check("lockfile", message, f"if nobody needs it: sudo rm {path}")
        return (isinstance(error, PermissionError) and lockfile_as_root(path)) or refused
    return check("lockfile", f"removed {path}, left over from a process that has ended")


def lockfile_as_root(path: str) -> Json | None:
    """The check of a lock file by root; None if this user may not become root."""
    if os.geteuid() == 0:
        return None
    command = ["sudo", "-n", "--", sys.executable, "-S", "-E", ENTRY, "_lockfile", path]
    try:
        output = subprocess.run(command, capture_output=True, timeout=ROOT_LIMIT_S, check=True).stdout
        finding: Json = json.loads(output)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return finding


def is_locked(path: str) -> bool:
    """Whether some process has a lock, of either make, on the file."""
    with open(path, "rb+") as file:
        for lock in (fcntl.flock, fcntl.lockf):
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def check_leftovers(root: str, with_containers: bool = False) -> list[Json]:
    """A failed check for each run of this agent that still has processes here, or one passed check.

    with_containers: whether Docker is asked as well, which alone knows of a container that is root's.
    """
    runs: dict[str, list[int]] = {}
    for pid, directory in controlled():
        own = re.fullmatch(re.escape(os.path.join(root, "runs")) + r"/([^/]+)/\d+-\d+", directory)
        if own:
            runs.setdefault(own.group(1), []).append(pid)
    findings = [
        check("leftovers", leftover_message(run_id, alive), f"`fab stop {run_id}`")
        for run_id, alive in sorted(runs.items())
    ]
    for run_id, name in running_containers(root) if with_containers else ():
        if run_id not in runs:
            message = f"{run_id} is still alive here: the container {name}"
            findings.append(check("leftovers", message, f"`fab stop {run_id}`"))
    return findings or [check("leftovers", "no earlier run has left a process")]


def running_containers(root: str) -> list[tuple[str, str]]:
    """Run and name of each running container of this agent; none if Docker does not answer, which has its own check."""
    form = '{{.Label "tpu-stack.run"}}\t{{.Names}}'
    arguments = ["ps", "--format", form, "--filter", f"label=tpu-stack.root={root}"]
    try:
        answer = docker_command.ask([*arguments, "--filter", f"label=tpu-stack.host={os.uname().nodename}"])
    except Failed:
        return []
    rows = [line.split("\t") for line in answer.out.splitlines()] if answer.is_good else []
    return sorted((run_id, name) for run_id, name in rows)


def leftover_message(run_id: str, alive: list[int]) -> str:
    first = min(alive)
    ticks = start_ticks(first)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age = (
        "just ended" if ticks is None else f"for {spoken(now_s - ticks / os.sysconf('SC_CLK_TCK'), units=1)}"
    )
    more = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
    return f"{run_id} is still alive here: pid {first}, {age}{more}"


REACH_LIMIT_S = 3.0


def check_peers(peers: list[Json], timeout_s: float = REACH_LIMIT_S) -> list[Json]:
    """Connect to all peers at once. Returns a failed check for each that cannot be reached, or one passed check."""
    # A name that no server resolves keeps its thread longer than the limit; it is waited for no longer.
    reasons: list[str | None] = [f"no answer within {timeout_s:g} s"] * len(peers)

    def reach(index: int, host: str, port: int) -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except TimeoutError:
            pass
        except OSError as error:
            reasons[index] = str(error.strerror or error)
        else:
            reasons[index] = None

    deadline = time.monotonic() + timeout_s + 0.2
    threads = [
        threading.Thread(target=reach, args=(index, peer["host"], peer["port"]), daemon=True)
        for index, peer in enumerate(peers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    unreachable = [
        check(
            "peers",
            f"cannot reach {peer['name']} ({peer['host']}:{peer['port']}): {reason}",
            "see that it is up, and that the firewall lets the slice's hosts reach each other on all ports",
        )
        for peer, reason in zip(peers, list(reasons), strict=True)
        if reason is not None
    ]
    return unreachable or [check("peers", f"reaches all of {len(peers)} peers")]
