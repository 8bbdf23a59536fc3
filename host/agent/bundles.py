"""The verb stage: bundles of code, each under its own hash."""

from __future__ import annotations

import errno
import os

from .proc import start_ticks
from .protocol import Failed, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .protocol import Json


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
