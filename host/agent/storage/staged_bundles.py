"""Bundles of files on this host: received, unpacked under their hashes, and removed when nobody needs them."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from ..proc import start_ticks
from ..protocol import Failed, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from ..protocol import Json

UNUSED_S = 14 * 86400.0
STARTING_S = 86400.0
"""From the use of a bundle to the start of the process that needs it, at most: images are pulled meanwhile."""
CHUNK = 4 * 2**20
"""Of base64, which can be decoded in pieces of a multiple of four."""
ANSWER_LIMIT_S = 60.0
GOOGLE = "https://storage.googleapis.com"


def bundle_dir(root: str, sha256: str) -> str:
    return os.path.join(root, "bundles", sha256)


def is_present(root: str, sha256: str) -> bool:
    """Whether a bundle is there; it then counts as used now."""
    path = bundle_dir(root, sha256)
    if not os.path.isdir(path):
        return False
    with contextlib.suppress(OSError):
        os.utime(path)
    return True


def stage(request: Json) -> Json:
    """Unpack a bundle into a folder named by its hash, atomically and readable by this user alone.

    It comes as `archive_base64`: whole, or the piece from `offset` on of an archive of `size_bytes`. Or it is fetched
    from the file or object `archive_path`, which has it as base64. `present` is false where it is not complete, and
    `problem` says why it could not be fetched.
    """
    import shutil

    root, sha256, text = request["root"], request["sha256"], request["archive_base64"]
    path, bundles = bundle_dir(root, sha256), os.path.join(root, "bundles")
    answer = {"path": path, "present": True, "sent": False, "problem": None}
    if is_present(root, sha256):
        os.chmod(path, 0o700)  # an earlier version let others read it
        return answer
    if text is None and request["archive_path"] is None:
        return {**answer, "present": False}
    os.makedirs(bundles, exist_ok=True)
    remove_unused(root)
    pieces = os.path.join(bundles, f".{sha256}.pieces")
    temporary = os.path.join(bundles, f".{sha256}.{os.getpid()}")
    archive, tree = os.path.join(temporary, "archive"), os.path.join(temporary, "tree")
    try:
        if text is not None:
            data = decoded(text)
            if (request["offset"] or 0) + len(data) < (request["size_bytes"] or 0):
                write_at(pieces, request["offset"] or 0, data)
                return {**answer, "present": False}
            os.makedirs(temporary, 0o700)
            if request["offset"]:
                write_at(pieces, request["offset"], data)
                os.rename(pieces, archive)
            else:
                write_at(archive, 0, data)
        else:
            os.makedirs(temporary, 0o700)
            if problem := fetch(request["archive_path"], archive):
                return {**answer, "present": False, "problem": problem}
        check_hash(archive, sha256)
        unpack(archive, tree)
        os.rename(tree, path)
    except OSError as error:
        # Another stage of the same bundle was quicker, and a directory with files in it is never replaced.
        if is_present(root, sha256):
            return answer
        with contextlib.suppress(OSError):
            os.unlink(pieces)
        raise error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {**answer, "sent": True}


def decoded(text: str) -> bytes:
    import base64

    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Refused(f"stage: archive_base64 is not base64: {error}", "send the bundle again") from None


def write_at(path: str, offset: int, data: bytes) -> None:
    """Write a piece of a file. Whoever else sends the same bundle writes the same bytes to the same place."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "r+b") as file:
        file.seek(offset)
        file.write(data)


def check_hash(path: str, sha256: str) -> None:
    import hashlib

    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    if digest.hexdigest() != sha256:
        message = f"stage: the archive's sha256 is {digest.hexdigest()}, not {sha256}"
        raise Refused(message, "send the bundle again")


def fetch(place: str, archive: str) -> str | None:
    """Write the archive that a file or an object has as base64; return why that cannot be read, if it cannot."""
    import http.client

    try:
        with opened(place) as source, open(archive, "wb") as file:
            while text := source.read(CHUNK):
                file.write(decoded(text.decode("ascii")))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        return f"{place}: {error.strerror or error}"
    except (http.client.HTTPException, UnicodeDecodeError) as error:
        return f"{place}: {error}"
    return None


@contextlib.contextmanager
def opened(place: str) -> Iterator[BinaryIO]:
    """Open a file, or an object of Cloud Storage (gs://…) with this host's own account, for reading."""
    if not place.startswith("gs://"):
        with open(os.path.expanduser(place), "rb") as file:
            yield file
        return
    import urllib.parse
    import urllib.request

    from ..host_facts import ask_metadata

    bucket, _, name = place[len("gs://") :].partition("/")
    stand_in = os.environ.get("STORAGE_EMULATOR_HOST")
    headers, handlers = {}, []
    if stand_in:
        handlers = [urllib.request.ProxyHandler({})]
    else:
        token = ask_metadata("service-accounts/default/token")
        if isinstance(token, str):
            raise OSError(token)
        headers = {"Authorization": f"Bearer {token['access_token']}"}
    url = f"{stand_in or GOOGLE}/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}?alt=media"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.build_opener(*handlers).open(request, timeout=ANSWER_LIMIT_S) as response:
        yield response


def remove_unused(root: str) -> None:
    """Remove the bundles that no run has used for UNUSED_S, and what an unpacking that was killed has left.

    A bundle counts as used when a launch asks for it. So a process needs none that was last used long before its start.
    """
    import shutil

    from ..attempt_process import processes

    bundles = os.path.join(root, "bundles")
    oldest_s = time.time() - UNUSED_S
    for process in processes({"root": root, "run_id": None, "attempt": None, "process_id": None}):
        if process.state()[0] in ("starting", "running"):
            with contextlib.suppress(OSError):
                oldest_s = min(oldest_s, os.stat(process.lock_path).st_mtime - STARTING_S)
    for name in os.listdir(bundles):
        path, maker = os.path.join(bundles, name), name.rpartition(".")[2]
        is_left = name.startswith(".") and maker.isdigit() and start_ticks(int(maker)) is None
        try:
            if not is_left and os.stat(path).st_mtime > oldest_s:
                continue
            if os.path.isdir(path) and not name.startswith("."):
                # Whoever asks for it meanwhile finds it whole or not at all.
                os.rename(path, path := os.path.join(bundles, f".{name}.{os.getpid()}"))
        except OSError:
            continue
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(path)


def unpack(archive: str, into: str) -> None:
    """Unpack a tar.gz of plain files and directories; the names are all looked at before anything is written.

    Raises:
        Refused: not a tar.gz, or a member is not plain or would land elsewhere.
    """
    import gzip
    import shutil
    import tarfile
    import zlib

    try:
        with tarfile.open(archive, mode="r:gz") as tar:
            for member in tar:
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or not (member.isreg() or member.isdir()):
                    message = (
                        f"stage: the member {member.name!r} is not a plain file or directory below the top"
                    )
                    raise Refused(message, "make the bundle of plain files with relative names")
            while tar.fileobj is not None and tar.fileobj.read(CHUNK):
                pass  # up to the checksum at the end
        with tarfile.open(archive, mode="r:gz") as tar:
            os.makedirs(into, 0o700)
            for member in tar:
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
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise Refused(f"stage: the archive is not a tar.gz: {error}", "make the bundle again") from None
