"""The code of this checkout as one archive named by its content: what runs on a host is exactly this."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

from contracts.errors import RequestError

FOLDERS = ("contracts", "jobs")
LARGEST_BYTES = 16 * 2**20
LEFT_OUT = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A tar.gz and the SHA-256 of its bytes. The same files give the same bytes, whenever and wherever made."""

    sha256: str
    archive: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """The git commit of a checkout, for the record; `is_dirty`: files differ from it."""

    hash: str
    is_dirty: bool


def build(checkout: Path) -> Bundle:
    """Bundle FOLDERS of `checkout`.

    Raises:
        RequestError: they hold more than LARGEST_BYTES, so most likely something that is not code.
    """
    files = sorted(
        path
        for folder in FOLDERS
        for path in (checkout / folder).rglob("*")
        if path.is_file() and not LEFT_OUT.intersection(path.relative_to(checkout).parts)
    )
    sizes = {path: path.stat().st_size for path in files}
    if sum(sizes.values()) > LARGEST_BYTES:
        largest = max(files, key=lambda path: sizes[path])
        raise RequestError(
            f"{checkout}: {', '.join(FOLDERS)} hold {sum(sizes.values()) / 2**20:,.0f} MiB, more than the "
            f"{LARGEST_BYTES / 2**20:.0f} MiB that are sent to hosts as code; the largest file is "
            f"{largest.relative_to(checkout)}: keep data elsewhere"
        )
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            member = tarfile.TarInfo(path.relative_to(checkout).as_posix())
            member.size = sizes[path]
            member.mode = 0o644
            tar.addfile(member, io.BytesIO(path.read_bytes()))
    archive = gzip.compress(tar_bytes.getvalue(), compresslevel=6, mtime=0)
    return Bundle(sha256=hashlib.sha256(archive).hexdigest(), archive=archive)


def commit_of(checkout: Path) -> Commit | None:
    """The checkout's commit; None where it is no git checkout, has no commit yet, or git is not installed."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(checkout), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    if commit is None or changes is None:
        return None
    return Commit(hash=commit.strip(), is_dirty=bool(changes.strip()))
