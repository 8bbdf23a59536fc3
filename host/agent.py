"""What runs on each host: `python3 -S -E agent.py VERB`, a JSON request on stdin, a JSON response on stdout.

The verbs are preflight, stage, start, status, stop, logs and stacks; sent twice, each is done once.
Exit status: 0 done, 1 could not be carried out, 2 the request was wrong.
Python 3.8 to 3.13 on Linux, the standard library alone.
"""

# Start-up is paid on every host for every verb: what a verb alone needs is imported inside it.
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, TypeAlias

    Json: TypeAlias = dict[str, Any]
    Kind: TypeAlias = tuple[Callable[[Any], bool], str]
    Verb: TypeAlias = tuple[Callable[[Json], Json], str]

VERSION = 1

# ---------------------------------------------------------------- protocol


class Refused(Exception):
    """The request is wrong: whoever sent it has to change it."""

    status = 2

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


class Failed(Refused):
    """The request is right and this host could not carry it out."""

    status = 1


def is_text(value: object) -> bool:
    """Whether the kernel can take `value` as an argument or a path: no NUL, nothing that UTF-8 cannot say."""
    return isinstance(value, str) and "\0" not in value and not re.search("[\ud800-\udfff]", value)


def is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float, high: float) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numeric and low <= value <= high  # type: ignore[operator]


def matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def is_texts(value: object) -> bool:
    return isinstance(value, list) and all(is_text(item) for item in value)


def is_environment(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_text(name) and name != "" and "=" not in name and is_text(text) for name, text in value.items()
    )


LARGEST_READ = 16 << 20
KINDS: dict[str, Kind] = {
    "text": (lambda value: is_text(value) and value != "", "a string that is not empty"),
    "name": (matches(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"), "letters, digits, '.', '_' and '-', 128 at most"),
    "sha256": (matches("[0-9a-f]{64}"), "64 hexadecimal digits"),
    "path": (lambda value: is_text(value) and value[:1] in ("/", "~"), "a path starting with / or ~"),
    "platform": (matches("cpu|gpu|tpu"), "cpu, gpu or tpu"),
    "count": (lambda value: is_whole(value, 0, 1 << 31), "a whole number from 0"),
    "positive": (lambda value: is_whole(value, 1, 1 << 31), "a whole number from 1"),
    "port": (lambda value: is_whole(value, 1, 65535), "a whole number from 1 to 65535"),
    "bytes": (lambda value: is_whole(value, 0, 1 << 62), "a whole number from 0"),
    "offset": (lambda value: is_whole(value, -(1 << 62), 1 << 62), "a whole number"),
    "limit": (lambda value: is_whole(value, 4, LARGEST_READ), f"a whole number from 4 to {LARGEST_READ}"),
    "seconds": (lambda value: is_number(value, 0, 86400 * 30), "a number of seconds from 0 to 30 days"),
    "time": (lambda value: is_number(value, 0, 1e12), "seconds since 1970"),
    "texts": (is_texts, "a list of strings"),
    "argv": (
        lambda value: is_texts(value) and value[:1] not in ([], [""]),
        "a list of strings, the program first",
    ),
    "env": (is_environment, "an object of names and strings"),
    "cpus": (
        lambda value: (
            isinstance(value, list) and value != [] and all(is_whole(item, 0, 1 << 16) for item in value)
        ),
        "a list of CPU numbers that is not empty",
    ),
}


def read_request(verb: str, body: bytes) -> Json:
    """The request of `verb`, every field of it checked; a field that may be absent is there, as None.

    Raises:
        Refused: not JSON, another version, or any field missing or of another kind; it names all of them.
    """
    if verb not in VERBS:
        raise Refused(f"{verb!r} is not a verb of this agent", f"use one of {', '.join(sorted(VERBS))}")
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise Refused(f"{verb}: the request is not JSON: {error}", "send one JSON object on stdin") from None
    if not isinstance(request, dict):
        raise Refused(f"{verb}: the request is not a JSON object", "send one JSON object on stdin")
    version = request.get("version")
    if not is_whole(version, VERSION, VERSION):
        raise Refused(
            f"the request has version {shown(version)}, this agent speaks version {VERSION}",
            "use the launcher and the agent of one checkout",
        )
    found: Json = {}
    mistakes = []
    for field in f"root:path {VERBS[verb][1]}".split():
        name, _, kind = field.rstrip("?").partition(":")
        is_right, rule = KINDS[kind]
        value = found[name] = request.get(name)
        if value is None:
            mistakes += [] if field.endswith("?") else [f"{name} is missing; it is {rule}"]
        elif not is_right(value):
            mistakes.append(f"{name} is {shown(value)}; it must be {rule}")
        elif kind == "path":
            found[name] = os.path.expanduser(value)
            if not os.path.isabs(found[name]):
                mistakes.append(f"{name} is {shown(value)}; this host knows no such home directory")
    if mistakes:
        raise Refused(f"{verb}: " + "; ".join(mistakes), "correct the request")
    return found


def shown(value: object) -> str:
    """`value` for a message: short, and the kind alone of what may hold secrets, as an environment does."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def respond(verb: str, body: bytes) -> tuple[Json, int]:
    """The response to one request and the exit status that goes with it; never raises."""
    try:
        if not os.path.exists("/proc/self/stat"):
            raise Failed("this host has no /proc", "run the agent on Linux with /proc mounted")
        request = read_request(verb, body)
        return {"version": VERSION, "ok": True, **VERBS[verb][0](request)}, 0
    except Refused as refusal:
        message, remedy, status = refusal.message, refusal.remedy, refusal.status
    except OSError as error:
        message, remedy, status = f"{verb}: {reason_of(error)}", remedy_for(error), 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        message, status = f"{verb}: the agent has a bug: {type(error).__name__}: {error}", 1
        remedy = "the traceback is on the agent's stderr; report it"
    return {"version": VERSION, "ok": False, "error": {"message": message, "remedy": remedy}}, status


def reason_of(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def remedy_for(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on that disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "use a directory that this user may write, or change its owner"
    return "see to that file on this host"


def write_json(path: str, value: Json, put: Callable[[str, str], None] = os.replace) -> None:
    """Write `value` beside and move it there: a reader finds the old file or the new one, never half of one.

    With `put=os.link` a file that is there already stays: FileExistsError.
    """
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(value, file)
        put(beside, path)
    finally:
        remove(beside)


def read_json(path: str) -> Json:
    """The object in `path`, empty where there is none, or none that can be read: a torn file is no news."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def wait_until(condition: Callable[[], bool], timeout_s: float, pause_s: float = 0.02) -> bool:
    """Whether `condition` came to hold within the time limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
    return True


# ---------------------------------------------------------------- facts of this host


def parse_stat(text: str) -> tuple[str, int]:
    """State letter and start time (ticks since boot) of a /proc/<pid>/stat; its name may hold anything."""
    fields = text[text.rindex(")") + 1 :].split()
    return fields[0], int(fields[19])


def start_ticks(pid: int) -> int | None:
    """When `pid` began, which tells it from a later process of the same number; None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, ticks = parse_stat(file.read())
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else ticks


def catches(status_text: str, signum: int) -> bool:
    """Whether a process of this /proc/<pid>/status has a handler for the signal."""
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status_text, re.MULTILINE)
    return mask is not None and bool(int(mask.group(1), 16) >> (signum - 1) & 1)


def pids(proc_root: str) -> Iterator[int]:
    return (int(name) for name in os.listdir(proc_root) if name.isdigit())


def members(control_dir: str) -> list[int]:
    """Every live process with this control directory in its environment, in whatever session it is."""
    mark = b"RUN_CONTROL_DIR=" + os.fsencode(control_dir)
    found = []
    for pid in pids("/proc"):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = mark in file.read().split(b"\0")
        except OSError:  # it ended, or it is another user's and so not ours
            continue
        if marked and pid != os.getpid() and start_ticks(pid) is not None:
            found.append(pid)
    return found


def holders(targets: Iterable[str], proc_root: str) -> dict[str, list[int]]:
    """Who has each target open: a path, or socket:[inode]. Other users' processes show to root alone."""
    found: dict[str, list[int]] = {target: [] for target in targets}
    for pid in pids(proc_root):
        if pid == os.getpid():
            continue
        descriptors = f"{proc_root}/{pid}/fd"
        try:
            opened = {os.readlink(f"{descriptors}/{name}") for name in os.listdir(descriptors)}
        except OSError:
            continue
        for target in opened & set(found):
            found[target].append(pid)
    return found


def described(held_by: list[int], proc_root: str) -> str:
    """The processes for a message: pid and command line."""
    parts = []
    for pid in held_by:
        try:
            with open(f"{proc_root}/{pid}/cmdline", "rb") as file:
                line = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            line = "ended meanwhile"
        parts.append(f"pid {pid} ({line[:120]})")
    return ", ".join(parts) or "a process that this user may not see"


def parse_listeners(text: str, port: int) -> list[str]:
    """socket:[inode] of everything that listens on `port` in a /proc/net/tcp or tcp6."""
    rows = (line.split() for line in text.splitlines()[1:])
    return [
        f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    ]


def is_locked(path: str) -> bool:
    """Whether some process has a lock, of either make, on the file."""
    with open(path, "rb+") as file:
        for lock in (fcntl.flock, fcntl.lockf):
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def tail(data: bytes, count: int = 20) -> list[str]:
    """The last lines of a log, none of them endless."""
    return [line[-2000:] for line in data.decode(errors="replace").splitlines()[-count:]]


def tail_of(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return tail(file.read(65536))
    except OSError:
        return []


# ---------------------------------------------------------------- preflight


def check(name: str, message: str, remedy: str | None = None) -> Json:
    """One finding; what needs a remedy is not in order."""
    return {"name": name, "ok": remedy is None, "message": message, "remedy": remedy}


PROBE = """
import json, sys
def lacks(name):
    try:
        return importlib.util.find_spec(name) is None
    except Exception:
        return True
if sys.version_info >= (3, 4):
    import importlib.util
    missing = [name for name in sys.argv[1:] if lacks(name)]
else:
    missing = []
print(json.dumps([list(sys.version_info[:3]), missing]))
"""


def check_python(python: str, modules: list[str], timeout_s: float = 20.0) -> Json:
    import shutil
    import subprocess

    remedy = "install the requirements on this host, or name the interpreter that has them"
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        return check("python", f"{python}: no such interpreter on this host", remedy)
    try:
        probe = subprocess.run(
            [found, "-c", PROBE, *modules],
            capture_output=True,
            cwd="/",
            env=plain_environment(),
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
        version, missing = json.loads(probe.stdout)
    except subprocess.TimeoutExpired:
        return check("python", f"{found} did not answer within {timeout_s:.0f} s", "see what that program is")
    except OSError as error:
        return check("python", f"{found} cannot be run: {error.strerror}", remedy)
    except (ValueError, TypeError):
        said = (tail(probe.stderr, 1) or ["nothing"])[0]
        return check("python", f"{found} is no working Python; it said: {said}", remedy)
    number = ".".join(map(str, version))
    if version < [3, 12]:
        return check("python", f"{found} is Python {number}; a job needs 3.12 or later", remedy)
    if missing:
        return check("python", f"{found} (Python {number}) lacks {', '.join(missing)}", remedy)
    return check("python", f"{found} is Python {number} with all of {len(modules)} modules")


def check_writable(name: str, path: str) -> Json:
    """Makes the directory and writes a byte: a full or read-only disk shows in nothing less."""
    trial = os.path.join(path, f".agent-trial.{os.getpid()}")
    try:
        os.makedirs(path, exist_ok=True)
        try:
            with open(trial, "wb") as file:
                file.write(b"x")
        finally:
            remove(trial)
    except OSError as error:
        return check(name, f"{path} cannot be written: {error.strerror}", remedy_for(error))
    return check(name, f"{path} can be written")


def check_disks(paths: list[str], min_free_bytes: int) -> tuple[list[Json], dict[str, int]]:
    """The free space of each filesystem that the paths are on, once each."""
    seen, free, checks = set(), {}, []
    for path in paths:
        existing = path
        while not os.path.exists(existing):
            existing = os.path.dirname(existing)
        device = os.stat(existing).st_dev
        if device in seen:
            continue
        seen.add(device)
        room = os.statvfs(existing)
        free[path] = room.f_bavail * room.f_frsize
        have, want = (f"{size / 2**30:.1f} GiB" for size in (free[path], min_free_bytes))
        if free[path] < min_free_bytes:
            remedy = "free some space there (old runs, caches, docker images), or ask for less"
            checks.append(check("disk", f"{path} has {have} free and needs {want}", remedy))
        else:
            checks.append(check("disk", f"{path} has {have} free"))
    return checks, free


def check_port(port: int, proc_root: str) -> Json:
    import socket

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
            with open(f"{proc_root}/net/{table}", encoding="ascii") as file:
                sockets += parse_listeners(file.read(), port)
        except (OSError, ValueError, IndexError):
            continue
    held_by = sorted({pid for found in holders(sockets, proc_root).values() for pid in found})
    message = f"port {port} is taken by {described(held_by, proc_root)}"
    return check("port", message, "stop that process, or choose another port")


def check_clock(offset_s: float, limit_s: float) -> Json:
    message = f"the clock is {offset_s:+.2f} s from the launching machine's"
    if abs(offset_s) <= limit_s:
        return check("clock", message)
    return check(
        "clock", f"{message}; the limit is {limit_s:g} s", "turn on time synchronisation on both machines"
    )


DEVICE_GLOBS = {"tpu": ["/dev/accel*", "/dev/vfio/[0-9]*"], "gpu": ["/dev/nvidia[0-9]*"], "cpu": []}


def check_device(platform: str, globs: list[str], proc_root: str) -> Json:
    if platform == "cpu":
        return check("device", f"{len(os.sched_getaffinity(0))} CPU cores")
    import glob

    devices = sorted(path for pattern in globs for path in glob.glob(pattern))
    if not devices:
        message = f"no {platform.upper()} on this host: none of {', '.join(globs)} exists"
        return check("device", message, f"choose a host that has one, or another platform than {platform}")
    if platform == "tpu":
        real = {os.path.realpath(path): path for path in devices}
        for target, held_by in sorted(holders(real, proc_root).items()):
            if held_by:
                message = f"{real[target]} is held by {described(held_by, proc_root)}"
                return check("device", message, "stop the run that holds it, or end that process")
    return check("device", f"{len(devices)} {platform.upper()} devices: {', '.join(devices)}")


def check_lockfile(path: str, proc_root: str) -> Json:
    """A lock file that outlived its process, as SIGKILL leaves one, is removed; a held one is left alone."""
    real = os.path.realpath(path)
    held_by = holders([real], proc_root)[real]
    remedy = "stop the run that holds it, or end that process"
    try:
        if held_by or is_locked(path):
            return check("lockfile", f"{path} is held by {described(held_by, proc_root)}", remedy)
        os.unlink(path)
    except FileNotFoundError:
        return check("lockfile", f"{path} is not there")
    except OSError as error:
        message = f"{path} cannot be looked at or removed: {error.strerror}"
        return check("lockfile", message, f"if nobody needs it: sudo rm {path}")
    return check("lockfile", f"removed {path}, left over from a process that has ended")


def preflight(request: Json) -> Json:
    """Whether a job can start here; looks at everything, so that one visit finds all there is to mend."""
    import hashlib

    now = time.time()
    proc_root = request["proc_root"] or "/proc"
    places = [(name, request[name]) for name in ("root", "run_dir", "cache_dir") if request[name]]
    checks = [check_python(request["python"], request["modules"])]
    checks += [check_writable(name, path) for name, path in places]
    disks, free = check_disks([path for _, path in places], request["min_free_bytes"])
    checks += disks
    if request["port"] is not None:
        checks.append(check_port(request["port"], proc_root))
    checks.append(check_clock(now - request["time"], request["max_clock_offset_s"]))
    platform = request["platform"]
    globs = DEVICE_GLOBS[platform] if request["device_globs"] is None else request["device_globs"]
    checks.append(check_device(platform, globs, proc_root))
    if platform == "tpu":
        lockfiles = ["/tmp/libtpu_lockfile"] if request["lockfiles"] is None else request["lockfiles"]
        checks += [check_lockfile(path, proc_root) for path in lockfiles if os.path.lexists(path)]
    with open(__file__, "rb") as file:
        agent_sha256 = hashlib.sha256(file.read()).hexdigest()
    facts = {
        "hostname": os.uname().nodename,
        "python": ".".join(map(str, sys.version_info[:3])),
        "agent_sha256": agent_sha256,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "time": now,
        "clock_offset_s": now - request["time"],
        "bundle_present": bool(request["bundle"])
        and os.path.isdir(bundle_dir(request["root"], request["bundle"])),
        "free_bytes": free,
    }
    return {"checks": checks, "facts": facts}


# ---------------------------------------------------------------- stage


def bundle_dir(root: str, sha256: str) -> str:
    return os.path.join(root, "bundles", sha256)


def stage(request: Json) -> Json:
    """Put a bundle of code under its own hash: whole or not there."""
    path = bundle_dir(request["root"], request["sha256"])
    present = os.path.isdir(path)
    if present or request["archive_base64"] is None:
        return {"path": path, "present": present, "sent": False}
    import base64
    import hashlib
    import shutil

    try:
        archive = base64.b64decode(request["archive_base64"], validate=True)
    except ValueError as error:
        raise Refused(f"stage: archive_base64 is not base64: {error}", "send the bundle again") from None
    found = hashlib.sha256(archive).hexdigest()
    if found != request["sha256"]:
        message = f"stage: the archive's sha256 is {found}, not {request['sha256']}"
        raise Refused(message, "send the bundle again")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    remove_leftovers(os.path.dirname(path))
    beside = os.path.join(os.path.dirname(path), f".{request['sha256']}.{os.getpid()}")
    try:
        unpack(archive, beside)
        os.rename(beside, path)
    except OSError as error:
        # Another stage of the same bundle was quicker, and a directory with files in it is never replaced.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not os.path.isdir(path):
            raise
        return {"path": path, "present": True, "sent": False}
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return {"path": path, "present": True, "sent": True}


def remove_leftovers(bundles: str) -> None:
    """Clear away what an unpacking that was killed has left."""
    import shutil

    for name in os.listdir(bundles):
        maker = name.rpartition(".")[2]
        if name.startswith(".") and maker.isdigit() and start_ticks(int(maker)) is None:
            shutil.rmtree(os.path.join(bundles, name), ignore_errors=True)


def unpack(archive: bytes, into: str) -> None:
    """Unpack a tar.gz of plain files and directories; the names are all looked at before anything is written.

    Raises:
        Refused: not a tar.gz, or a member is not plain or would land elsewhere.
    """
    import gzip
    import io
    import shutil
    import tarfile
    import zlib

    try:
        content = gzip.decompress(archive)
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar.getmembers():
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or not (member.isreg() or member.isdir()):
                    message = (
                        f"stage: the member {member.name!r} is not a plain file or directory below the top"
                    )
                    raise Refused(message, "make the bundle of plain files with relative names")
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        raise Refused(f"stage: the archive is not a tar.gz: {error}", "make the bundle again") from None
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        os.makedirs(into)
        for member in tar.getmembers():
            target = os.path.join(into, member.name)
            if member.isdir():
                os.makedirs(target, exist_ok=True)
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            source = tar.extractfile(member)
            if source is None:
                raise Failed(f"stage: {member.name!r} has no content", "make the bundle again")
            with source, open(target, "wb") as file:
                shutil.copyfileobj(source, file)
            os.chmod(target, 0o755 if member.mode & 0o100 else 0o644)


# ---------------------------------------------------------------- start, status, stop, logs, stacks

START_LIMIT_S = 10.0
KILL_LIMIT_S = 5.0


class Process:
    """One process of one attempt, by what is on disk: its directory is also the job's RUN_CONTROL_DIR."""

    def __init__(self, root: str, run_id: str, attempt: int, process_id: int) -> None:
        self.run_id, self.attempt, self.process_id = run_id, attempt, process_id
        self.dir = os.path.join(root, "runs", run_id, f"{attempt}-{process_id}")
        self.lock_path = self.dir + ".lock"
        self.record_path = os.path.join(self.dir, "process.json")
        self.exit_path = os.path.join(self.dir, "exit.json")
        self.stop_path = os.path.join(self.dir, "stop-requested")
        self.log_path = os.path.join(self.dir, "supervisor.log")
        self.reserve_path = os.path.join(self.dir, "reserve")
        self.stacks_path = os.path.join(self.dir, "stacks.txt")
        self.record = read_json(self.record_path)

    def is_alive(self) -> bool:
        return bool(self.record) and start_ticks(self.record["pid"]) == self.record["start_ticks"]

    def is_supervised(self) -> bool:
        ticks = self.record.get("supervisor_start_ticks")
        return ticks is not None and start_ticks(self.record["supervisor_pid"]) == ticks

    def is_starting(self) -> bool:
        """Whether a start is under way: it and its supervisor hold the lock until the record is there."""
        try:
            with open(self.lock_path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def state(self) -> tuple[str, Json]:
        """starting, running, exited or lost, and the exit record."""
        alive, supervised = self.is_alive(), self.is_supervised()
        exit_record = read_json(self.exit_path)  # read last: whoever was gone above has written it by now
        if exit_record:
            return "exited", exit_record
        if not self.record and self.is_starting():
            return "starting", {}
        return ("running" if alive or supervised else "lost"), {}

    def kill(self) -> None:
        """SIGKILL to the process group and to whatever else was started from it, until nothing is left."""

        def is_gone() -> bool:
            if self.is_alive():
                signal_quietly(os.killpg, self.record["pgid"], signal.SIGKILL)
            left = members(self.dir)
            for pid in left:
                signal_quietly(os.kill, pid, signal.SIGKILL)
            return not left and not self.is_alive()

        wait_until(is_gone, KILL_LIMIT_S)


def signal_quietly(send: Callable[[int, int], None], number: int, signum: int) -> None:
    """A process that ended meanwhile needs no signal; one that changed its user shows in what is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(number, signum)


def plain_environment() -> dict[str, str]:
    """This agent's environment without what it may have from being run inside a job."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RUN_")}


def processes(request: Json) -> list[Process]:
    """The processes that the request means, in order; an absent field means all."""

    def listed(path: str) -> list[str]:
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    runs = os.path.join(request["root"], "runs")
    found = []
    for run_id in [request["run_id"]] if request["run_id"] else listed(runs):
        for name in listed(os.path.join(runs, run_id)):
            parts = re.fullmatch(r"(\d+)-(\d+)", name)
            if parts:
                found.append((run_id, int(parts.group(1)), int(parts.group(2))))
    return [
        Process(request["root"], run_id, attempt, process_id)
        for run_id, attempt, process_id in sorted(found)
        if request["attempt"] in (None, attempt) and request["process_id"] in (None, process_id)
    ]


def known_process(request: Json) -> Process:
    process = Process(request["root"], request["run_id"], request["attempt"], request["process_id"])
    if not process.record:
        name = f"process {process.process_id} of attempt {process.attempt} of {process.run_id}"
        raise Failed(f"{name} was never started on this host", "ask `status` which there are")
    return process


def start(request: Json) -> Json:
    """Start one process under a supervisor that outlives this agent; a second start tells of the first."""
    import shutil

    process = Process(request["root"], request["run_id"], request["attempt"], request["process_id"])
    os.makedirs(os.path.dirname(process.dir), exist_ok=True)
    lock = os.open(process.lock_path, os.O_RDWR | os.O_CREAT, 0o600)

    def is_locked_by_us() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        if not wait_until(is_locked_by_us, START_LIMIT_S + KILL_LIMIT_S):
            raise Failed(f"another start of {process.dir} does not end", "ask `status`, then `stop` it")
        process.record = read_json(process.record_path)
        already = bool(process.record)
        if not already:
            # What is there is a start that came to nothing, and nobody else is at it.
            shutil.rmtree(process.dir, ignore_errors=True)
            os.mkdir(process.dir)
            try:
                process.record = spawn_supervisor(process, request, lock)
            except BaseException:
                process.kill()
                shutil.rmtree(process.dir, ignore_errors=True)
                raise
    finally:
        os.close(lock)
    return {**{name: process.record[name] for name in ("pid", "pgid", "started")}, "already": already}


def spawn_supervisor(process: Process, request: Json, lock: int) -> Json:
    """The record of the process that a new supervisor has started.

    Raises:
        Failed: the supervisor could not start it, or said nothing within the limit.
    """
    import select
    import subprocess

    log = os.open(process.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        supervisor = subprocess.Popen(
            [sys.executable, "-S", "-E", os.path.abspath(__file__), "_supervise", process.dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=plain_environment(),
            start_new_session=True,
            pass_fds=[lock],
        )
    finally:
        os.close(log)
    if supervisor.stdin is None or supervisor.stdout is None:
        raise Failed("the supervisor has no pipes", "report it")
    # The request goes through a pipe, not a file: its environment may hold what no disk should keep.
    with supervisor.stdout, supervisor.stdin:
        try:
            supervisor.stdin.write(json.dumps({**request, "lock": lock}).encode())
            supervisor.stdin.close()
        except BrokenPipeError:
            pass
        answered = select.select([supervisor.stdout], [], [], START_LIMIT_S)[0]
        answer = supervisor.stdout.readline() if answered else b""
    if answer:
        reply = json.loads(answer)
        supervisor.returncode = 0  # it lives on by design; without this Python warns that nobody waits for it
        if "record" in reply:
            return dict(reply["record"])
        raise Failed(reply["message"], reply["remedy"])
    supervisor.kill()
    supervisor.wait()
    said = " ".join(tail_of(process.log_path)[-1:]) or "nothing"
    raise Failed(
        f"start: the supervisor gave no answer; it said: {said}",
        f"start again; see the host's load, {sys.executable}",
    )


def status(request: Json) -> Json:
    """What became of each process that the request means."""

    def one(process: Process) -> Json:
        state, ended = process.state()
        log_path, log_bytes = process.record.get("log_path"), 0
        with contextlib.suppress(OSError):
            log_bytes = os.path.getsize(log_path or "")
        return {
            **{name: getattr(process, name) for name in ("run_id", "attempt", "process_id")},
            **{name: process.record.get(name) for name in ("pid", "started", "log_path")},
            **{name: ended.get(name) for name in ("code", "signal", "reason")},
            "ended": ended.get("time"),
            "state": state,
            "log_bytes": log_bytes,
            "supervised": process.is_supervised(),
        }

    return {"processes": [one(process) for process in processes(request)]}


def stop(request: Json) -> Json:
    """SIGTERM to each process, time for a checkpoint, then SIGKILL to all that is left of it.

    Raises:
        Failed: something is still there after SIGKILL.
    """
    found = processes(request)
    wait_until(
        lambda: not any(process.state()[0] == "starting" for process in found), START_LIMIT_S + KILL_LIMIT_S
    )
    found = processes(request)
    running = [process for process in found if process.is_alive()]
    left_over = [process for process in found if process not in running and members(process.dir)]
    for process in running:
        ask_to_stop(process)
    wait_until(lambda: not any(process.is_alive() for process in running), request["grace_s"])
    killed = [process for process in running if process.is_alive()] + left_over
    for process in killed + running:  # a process that ended without a supervisor may have left children
        if process in killed or not process.is_supervised():
            process.kill()

    def is_settled(process: Process) -> bool:
        return not process.is_alive() and (os.path.exists(process.exit_path) or not process.is_supervised())

    wait_until(lambda: all(is_settled(process) for process in running), KILL_LIMIT_S)
    stuck = [process for process in running + left_over if process.is_alive() or members(process.dir)]
    if stuck:
        names = ", ".join(
            f"process {process.process_id} (pid {process.record.get('pid')})" for process in stuck
        )
        raise Failed(f"{names} did not end within {KILL_LIMIT_S:g} s of SIGKILL", "restart this host")

    def one(process: Process) -> Json:
        ended = read_json(process.exit_path)
        if process in killed:
            how = "killed"
        elif process in running:
            how = "exited by itself" if ended.get("code") is not None else "terminated"
        else:
            how = "not running"
        if process in running and not ended:
            reason = f"stopped ({how}) after its supervisor had gone"
            with contextlib.suppress(FileExistsError):
                write_json(process.exit_path, exit_record(None, None, time.time(), reason, []), os.link)
        pid, code, signum = process.record.get("pid"), ended.get("code"), ended.get("signal")
        return {"process_id": process.process_id, "pid": pid, "how": how, "code": code, "signal": signum}

    return {"stopped": [one(process) for process in found]}


def ask_to_stop(process: Process) -> None:
    """SIGTERM, once: a job may take a second one for impatience. The file tells it that this was wanted."""
    with open(process.stop_path, "a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not file.read() and process.is_alive():
            signal_quietly(os.kill, process.record["pid"], signal.SIGTERM)
            file.write("sent\n")


def torn_bytes(data: bytes) -> int:
    """How many bytes at the end are the beginning of a UTF-8 character."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if needed > back else 0
    return 0


def whole_lines(data: bytes, limit: int, ended: bool) -> bytes:
    """The beginning of `data` to hand out: whole lines, or whole characters of a line longer than the limit.

    `data` reaches past the limit where there is more; a line without its end waits until the log has ended.
    """
    chunk = data[:limit]
    is_all = len(data) <= limit
    if is_all and ended:
        return chunk
    newline = chunk.rfind(b"\n")
    if newline >= 0:
        return chunk[: newline + 1]
    return b"" if is_all else chunk[: len(chunk) - torn_bytes(chunk)]


def beginning(offset: int, before: bytes, after: bytes) -> int:
    """Where to begin instead of at `offset`: back where its line starts, if `before` reaches so far, else on
    at the next whole character."""
    newline = before.rfind(b"\n")
    if newline >= 0 or len(before) == offset:
        return offset - len(before) + newline + 1
    return offset + next((index for index, byte in enumerate(after) if byte & 0xC0 != 0x80), 0)


def logs(request: Json) -> Json:
    """A piece of the log; a negative offset counts from the end and is moved back to a line's start."""
    process = known_process(request)
    ended = process.state()[0] in ("exited", "lost")
    limit, offset = request["limit_bytes"], request["offset"]
    try:
        log = os.open(process.record["log_path"], os.O_RDONLY)
    except FileNotFoundError:
        return {"text": "", "offset": 0, "next_offset": 0, "size": 0, "ended": ended}
    try:
        size = os.fstat(log).st_size
        begin = max(0, size + offset) if offset < 0 else min(offset, size)
        back = min(begin, limit) if offset < 0 else 0
        begin = beginning(begin, os.pread(log, back, begin - back), os.pread(log, 4, begin))
        data = whole_lines(os.pread(log, min(limit + 1, size - begin), begin), limit, ended)
    finally:
        os.close(log)
    text = data.decode(errors="replace")
    return {"text": text, "offset": begin, "next_offset": begin + len(data), "size": size, "ended": ended}


def stacks(request: Json) -> Json:
    """The stacks of all threads of a process, as its own SIGUSR1 handler writes them."""
    process = known_process(request)
    name, pid = f"process {process.process_id}", process.record["pid"]
    if not process.is_alive():
        raise Failed(f"{name} (pid {pid}) is not running", "ask `status` how it ended")
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        if not catches(file.read(), signal.SIGUSR1):
            message = f"{name} (pid {pid}) has no SIGUSR1 handler, and the signal would kill it"
            raise Failed(message, "ask again when it is past its start-up")

    def written() -> int:
        try:
            return os.path.getsize(process.stacks_path)
        except OSError:
            return 0

    before = size = written()
    signal_quietly(os.kill, pid, signal.SIGUSR1)
    changed = time.monotonic()

    def is_written() -> bool:
        nonlocal size, changed
        if written() != size:
            size, changed = written(), time.monotonic()
        return size > before and time.monotonic() - changed >= 0.2

    if not wait_until(is_written, request["timeout_s"]):
        message = f"{name} (pid {pid}) did not answer SIGUSR1 within {request['timeout_s']:g} s"
        raise Failed(message, "it hangs outside Python's reach; `stop` it")
    with open(process.stacks_path, "rb") as stacks_file:
        stacks_file.seek(before)
        return {"text": stacks_file.read().decode(errors="replace")}


ONE = "run_id:name attempt:count process_id:count"
HOST = "python:text modules:texts platform:platform run_dir:path? cache_dir:path bundle:sha256? port:port?"
LIMITS = "min_free_bytes:bytes time:time max_clock_offset_s:seconds"
WHERE = "device_globs:texts? lockfiles:texts? proc_root:path?"
PROGRAM = "argv:argv env:env cwd:path log_path:path run_dir:path? num_processes:positive cpus:cpus?"
# Each verb with its fields and their kinds; a field with a question mark may be absent or null.
VERBS: dict[str, Verb] = {
    "preflight": (preflight, f"{HOST} {LIMITS} {WHERE}"),
    "stage": (stage, "sha256:sha256 archive_base64:text?"),
    "start": (start, f"{ONE} {PROGRAM} settle_s:seconds?"),
    "status": (status, "run_id:name? attempt:count? process_id:count?"),
    "stop": (stop, "run_id:name attempt:count? process_id:count? grace_s:seconds"),
    "logs": (logs, f"{ONE} offset:offset limit_bytes:limit"),
    "stacks": (stacks, f"{ONE} timeout_s:seconds"),
}

# ---------------------------------------------------------------- supervisor

DONE, SAVED, WRONG_REQUEST, LOST_A_PEER = 0, 75, 2, 76
LOOK_PERIOD_S = 0.5
LAST_WORDS_S = 1.0
SETTLE_S = 1.5
RESERVE_BYTES = 65536


def exit_record(code: int | None, signum: int | None, ended: float, reason: str, lines: list[str]) -> Json:
    name = None if signum is None else signal_name(signum)
    return {
        "code": code,
        "signal": signum,
        "signal_name": name,
        "time": ended,
        "reason": reason,
        "tail": lines,
    }


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"


def heartbeats(run_dir: str | None, attempt: int) -> list[Json]:
    """The heartbeats of an attempt that can be read now, each with the rank that its name gives."""
    directory = os.path.join(run_dir or "", "heartbeats")
    found: list[Json] = []
    try:
        names = os.listdir(directory) if run_dir else []
    except OSError:
        return found
    for name in names:
        rank = re.fullmatch(r"host-(\d+)\.json", name)
        beat = read_json(os.path.join(directory, name)) if rank else {}
        if rank and beat.get("attempt") == attempt and is_number(beat.get("time"), 0, math.inf):
            found.append({**beat, "rank": int(rank.group(1))})
    return found


def culprit(beats: list[Json]) -> Json | None:
    """The first failure of those in the heartbeats; who only lost a peer is left out, unless all did."""
    failed = [beat for beat in beats if beat.get("state") == "failed"]
    own_fault = [beat for beat in failed if beat.get("exit_code") != LOST_A_PEER]
    return min(own_fault or failed, key=lambda beat: (beat["time"], beat["rank"]), default=None)


def step_of(beat: Json) -> int:
    step = beat.get("step")
    return step if isinstance(step, int) else 0


def failed_result(blamed: Json, beats: list[Json], lines: list[str]) -> Json:
    """result.json of a run that failed, in the words of the host that was first to fail."""
    message = f"host {blamed['rank']}: {blamed.get('message')}"
    unknown = ("wall_s", "tokens_per_s", "eval_loss", "eval_accuracy", "unigram_entropy")
    result = {
        "outcome": "failed",
        "steps": max(map(step_of, beats), default=0),
        "error": "\n".join([message, *lines]),
        "failed_host": blamed["rank"],
        "attempt": blamed["attempt"],
        "time": blamed["time"],
        **dict.fromkeys(unknown),
    }
    return {**result, "request": True} if blamed.get("exit_code") == WRONG_REQUEST else result


def note(text: str) -> None:
    """A line in supervisor.log; with a full disk there is nowhere to say it."""
    with contextlib.suppress(OSError):
        print(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), text, file=sys.stderr, flush=True)


def tried(what: str, action: Callable[[], object]) -> bool:
    """Whether `action` went through: a full disk or a vanished run directory must not end the supervision."""
    try:
        action()
    except (OSError, ValueError) as error:
        note(f"{what}: {error}")
        return False
    return True


def supervise(state_dir: str) -> int:
    """Start one process, tell the waiting `start`, and stay until the end of the process is on record."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        # A handler, not SIG_IGN, which the job would inherit. The job is told to end by whoever wants it to.
        signal.signal(signum, lambda number, _frame: note(f"{signal_name(number)} is not for the supervisor"))
    request = json.loads(sys.stdin.buffer.read())
    root, run_id = os.path.split(os.path.dirname(state_dir))
    process = Process(os.path.dirname(root), run_id, request["attempt"], request["process_id"])
    reply: Json
    try:
        process.record = spawn(process, request)
        reply = {"record": process.record}
    except Refused as refusal:
        reply = {"message": refusal.message, "remedy": refusal.remedy}
    except OSError as error:
        reply = {"message": f"start: {reason_of(error)}", "remedy": remedy_for(error)}
    os.close(request["lock"])
    tried("telling start", lambda: os.write(1, json.dumps(reply).encode() + b"\n"))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if "record" in reply:
        watch(process, request)
    return 0


def spawn(process: Process, request: Json) -> Json:
    """Start the job's process and put it on record; if it cannot be put on record it is ended again."""
    import subprocess

    if not os.path.isdir(request["cwd"]):
        message = f"start: cwd {request['cwd']} is not a directory of this host"
        raise Failed(message, "stage the bundle first, or correct cwd")
    with open(
        process.reserve_path, "wb"
    ) as file:  # what exit.json will need when the job has filled the disk
        file.write(bytes(RESERVE_BYTES))
    environment = {**plain_environment(), **request["env"], "RUN_CONTROL_DIR": process.dir}
    try:
        os.makedirs(os.path.dirname(request["log_path"]), exist_ok=True)
        log = os.open(request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise Failed(
            f"start: the log {request['log_path']} cannot be written: {error.strerror}", remedy_for(error)
        ) from None
    everything = os.sched_getaffinity(0)
    wanted = everything if request["cpus"] is None else set(request["cpus"])
    try:
        choose_cpus(wanted)
        child = subprocess.Popen(
            request["argv"],
            cwd=request["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        message = f"start: no such executable: {request['argv'][0]!r}: {error.strerror}"
        raise Failed(message, "name a program that is on this host and may be run") from None
    finally:
        os.close(log)
        os.sched_setaffinity(0, everything)
    child.returncode = 0  # it is waited for by number, with the exact time
    with open(f"/proc/{child.pid}/stat", encoding="utf-8", errors="replace") as stat:
        ticks = parse_stat(stat.read())[1]
    record = {
        "pid": child.pid,
        "pgid": child.pid,
        "start_ticks": ticks,
        "supervisor_pid": os.getpid(),
        "supervisor_start_ticks": start_ticks(os.getpid()),
        "started": time.time(),
        "log_path": request["log_path"],
    }
    try:
        write_json(process.record_path, record)
    except OSError:
        process.record = record
        process.kill()
        raise
    return record


def choose_cpus(wanted: set[int]) -> None:
    """Put this thread, and so what it starts, on these CPUs.

    Raises:
        Failed: this host does not have all of them; the kernel itself takes what there is and says nothing.
    """
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, wanted)
    if os.sched_getaffinity(0) != wanted:
        message = f"start: cpus {sorted(wanted)} are not all on this host"
        raise Failed(message, f"choose from {sorted(allowed)}")


def watch(process: Process, request: Json) -> None:
    """Wait for the end of the process, or bring it about when a sibling has failed; then say how it ended."""
    import threading

    over = threading.Event()
    ended: Json = {}

    def reap() -> None:
        # WNOWAIT leaves a zombie, which keeps the pid and the group's number ours until all is done.
        found = os.waitid(os.P_PID, process.record["pid"], os.WEXITED | os.WNOWAIT)
        ended["time"] = time.time()
        own = found is not None and found.si_code == os.CLD_EXITED
        ended["code"] = found.si_status if found and own else None
        ended["signal"] = found.si_status if found and not own else None
        over.set()

    threading.Thread(target=reap, daemon=True).start()
    stopped_because = None
    while not over.wait(LOOK_PERIOD_S):
        others = [
            beat
            for beat in heartbeats(request["run_dir"], process.attempt)
            if beat["rank"] != process.process_id
        ]
        failed = culprit(others)
        if failed is None:
            continue
        stopped_because = f"stopped because host {failed['rank']} failed: {failed.get('message')}"
        note(stopped_because)
        if not over.wait(LAST_WORDS_S):
            process.kill()
        while not over.wait(60):
            note(f"pid {process.record['pid']} is still there after SIGKILL")
    clear_group(process)
    conclude(process, request, ended, stopped_because)


def clear_group(process: Process) -> None:
    """End what the process has left behind; its zombie still keeps the group's number ours."""
    signal_quietly(os.killpg, process.record["pgid"], signal.SIGKILL)
    process.kill()


def conclude(process: Process, request: Json, ended: Json, stopped_because: str | None) -> None:
    """Put the end on record: in exit.json and, unless it was a good one, in the heartbeat and the result."""
    code, signum = ended["code"], ended["signal"]
    how = f"exit code {code}" if signum is None else f"killed by signal {signum} ({signal_name(signum)})"
    lines = tail_of(request["log_path"])
    record = exit_record(code, signum, ended["time"], stopped_because or how, lines)
    tried("removing the reserve", lambda: remove(process.reserve_path))
    recorded = tried("writing exit.json", lambda: write_json(process.exit_path, record))
    os.waitpid(process.record["pid"], 0)
    if code not in (DONE, SAVED) and request["run_dir"] is not None:
        was_asked = os.path.exists(process.stop_path)
        beat = last_heartbeat(process, request["run_dir"], record)
        if was_asked:
            beat["state"] = "stopped"
        elif stopped_because:
            beat.update(message=stopped_because, exit_code=LOST_A_PEER)
        directory = os.path.join(request["run_dir"], "heartbeats")
        with contextlib.suppress(OSError):
            os.mkdir(directory)  # the run directory itself is not made anew: who removed it meant it
        path = os.path.join(directory, f"host-{process.process_id}.json")
        # What the job kept free for its last words; one that was killed could not give it back itself.
        reserve = os.path.join(directory, f".host-{process.process_id}.reserve")
        tried("removing the job's reserve", lambda: remove(reserve))
        tried("writing the heartbeat", lambda: write_json(path, beat))
        if not was_asked:  # who asked knows why, and what the outcome is to be called
            # A sibling that died a moment earlier may not have said so yet.
            time.sleep(SETTLE_S if request["settle_s"] is None else request["settle_s"])
            result = verdict(request["run_dir"], beat, lines)
            path_of_result = os.path.join(request["run_dir"], "result.json")
            tried("writing result.json", lambda: write_json(path_of_result, result, os.link))
    if not recorded:  # the disk may have been freed meanwhile
        wait_until(lambda: tried("writing exit.json", lambda: write_json(process.exit_path, record)), 60, 1)


def last_heartbeat(process: Process, run_dir: str, record: Json) -> Json:
    """What the process can no longer say itself; its own last words, if it had time for any, are kept."""
    beats = heartbeats(run_dir, process.attempt)
    mine: Json = next((beat for beat in beats if beat["rank"] == process.process_id), {})
    own_words = mine.get("message") if mine.get("state") == "failed" else None
    words = own_words or next((line for line in reversed(record["tail"]) if line.strip()), None)
    how = f"exit code {record['code']}"
    return {
        "rank": process.process_id,
        "attempt": process.attempt,
        "state": "failed",
        "step": step_of(mine),
        "time": record["time"],
        "step_time": mine.get("step_time"),
        "pid": process.record["pid"],
        "message": record["reason"] if record["code"] is None or not words else f"{how}: {words}",
        "exit_code": record["code"],
    }


def verdict(run_dir: str, mine: Json, lines: list[str]) -> Json:
    """The run's result by what all hosts say; `mine` and its lines where nothing can be read any more."""
    beats = heartbeats(run_dir, mine["attempt"])
    blamed = culprit(beats) or mine
    if blamed["rank"] != mine["rank"]:
        lines = tail_of(os.path.join(run_dir, "logs", str(mine["attempt"]), f"host-{blamed['rank']}.log"))
    return failed_result(blamed, beats or [mine], lines)


# ---------------------------------------------------------------- main


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "_supervise":
        return supervise(arguments[1])
    verb = arguments[0] if len(arguments) == 1 else " ".join(arguments)
    response, status_code = respond(verb, sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()
    return status_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
