"""The first words to a host: `python3 -S -E -c THIS ROOT SHA256` begins a session with the agent of that hash.

The first line of stdin is the first request. Where that agent is missing, `{"need": SHA256}` asks for it, and the next
line, `{"archive_base64": ...}`, brings it as a zip of the packages `host.agent` and `contracts`.
Python 3.6 can read this text, so that one too old for the agent can say so.
"""

import json
import os
import sys

LONGEST_LINE = 1 << 28
IDLE_LIMIT_S = 900


class Refused(Exception):
    """A session that cannot begin. The arguments: why not, and what to do about it."""


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def unpack(archive: bytes, folder: str) -> None:
    """Unpack the agent into `folder`, atomically. Of two that unpack at once, one wins."""
    import io
    import shutil
    import zipfile

    agents, name = os.path.split(folder)
    os.makedirs(agents, exist_ok=True)
    for left in os.listdir(agents):  # by an unpacking that was killed
        if left.startswith(".") and not os.path.exists("/proc/" + left.rpartition(".")[2]):
            shutil.rmtree(os.path.join(agents, left), ignore_errors=True)
    temporary = os.path.join(agents, f".{name}.{os.getpid()}")
    try:
        zipfile.ZipFile(io.BytesIO(archive)).extractall(temporary)
        os.rename(temporary, folder)
    except OSError:
        if not os.path.isdir(folder):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def brought(sha256: str) -> bytes:
    """Ask the launcher for the agent's archive."""
    import base64
    import hashlib

    say({"need": sha256})
    line = sys.stdin.buffer.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):  # the launcher is gone
        raise SystemExit(0)
    try:
        archive = base64.b64decode(json.loads(line.decode())["archive_base64"])
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"the agent did not arrive whole: {error!r}", "connect again") from None
    actual = hashlib.sha256(archive).hexdigest()
    if actual != sha256:
        raise Refused(f"the agent that arrived has the sha256 {actual}, not {sha256}", "connect again")
    return archive


def in_memory() -> str:
    """The folder for the agent when the disk is full, so that runs can still be inspected and stopped."""
    place = f"/dev/shm/tpu-stack-{os.getuid()}"
    try:
        os.mkdir(place, 0o700)
    except FileExistsError:
        status = os.lstat(place)
        if status.st_uid != os.getuid() or status.st_mode & 0o170077 != 0o040000:
            raise  # somebody else could change what we run
    return place


def placed(root: str, sha256: str) -> str:
    """The folder that holds the agent; it is brought where it is missing."""
    import errno

    folder = os.path.join(root, "agents", sha256)
    if os.path.isdir(folder):
        return folder
    archive = brought(sha256)
    try:
        unpack(archive, folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = os.path.join(in_memory(), "agents", sha256)
        if not os.path.isdir(folder):
            unpack(archive, folder)
    return folder


def begin(root: str, sha256: str) -> int:
    if sys.version_info < (3, 10):
        number = ".".join(map(str, sys.version_info[:3]))
        raise Refused(
            f"{sys.executable} is Python {number}; the agent needs 3.10 or later",
            "install a newer python3, or make the slice with a newer runtime version",
        )
    import signal

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(IDLE_LIMIT_S)  # nobody tells the end of a connection that was cut
    path = os.path.expanduser(root)
    if not os.path.isabs(path):
        raise Refused(f"{root}: this host knows no such directory", "name one that starts with / or ~/")
    first = sys.stdin.buffer.readline(LONGEST_LINE)
    folder = placed(path, sha256)
    sys.path[0] = folder
    try:
        from host.agent.protocol import serve
    except (ImportError, SyntaxError, ValueError) as error:
        raise Refused(f"the agent in {folder} is damaged: {error}", f"on that host: rm -r {folder}") from None
    return int(serve(first, sys.stdin.buffer, sys.stdout, IDLE_LIMIT_S))


def main() -> int:
    try:
        return begin(*sys.argv[1:])
    except Refused as refusal:
        message, remedy = refusal.args
    except OSError as error:
        message = f"the agent cannot be put on this host: {error.filename or sys.argv[1]}: {error.strerror}"
        remedy = "see to that directory: it has to be writable for this user, with some space free"
    say({"version": 1, "ok": False, "error": {"message": message, "remedy": remedy}})
    return 1


if __name__ == "__main__":
    sys.exit(main())
