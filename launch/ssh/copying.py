"""Files and folders to a host and back, by SFTP: under another name first, whole or not there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncssh

from contracts.atomic import atomic_path, beside_name, refuse_to_merge
from launch.hosts import HostError
from launch.ssh import problems
from launch.ssh.access import Access
from launch.ssh.connection import together

Progress = Callable[[int], None]
"""Is told how many more bytes have been copied."""

PIECE_BYTES = 4 * 2**20
PIECE_LIMIT_S = 120.0
FULL_BYTES = 2**20
FILES_AT_ONCE = 16
LOST = "while files were copied"


async def put(
    connection: asyncssh.SSHClientConnection,
    access: Access,
    source: Path,
    target: str,
    progress: Progress | None = None,
) -> None:
    """Copy a file or folder of this machine to `target` on the host; "~/" is the home directory there.

    Raises:
        HostError: it could not be written there; nothing half-written is left.
        OSError: it could not be read here.
    """
    path = at_home(target)
    folder, name = posixpath.split(path)
    fresh = posixpath.join(folder, beside_name(name))
    async with _sftp(connection, access) as sftp:
        try:
            await _refuse_to_merge(sftp, access, path, source)
            await sftp.makedirs(folder or ".", exist_ok=True)
            await _Copy(sftp, access, progress).put(source, fresh)
            await sftp.posix_rename(fresh, path)
        except BaseException as error:
            full = isinstance(error, asyncssh.SFTPFailure) and await _is_full(sftp, folder or ".")
            await _remove(sftp, fresh)
            if isinstance(error, asyncssh.SFTPError):
                raise _refused(access, target, error, full) from None
            raise


async def get(
    connection: asyncssh.SSHClientConnection,
    access: Access,
    source: str,
    target: Path,
    progress: Progress | None = None,
) -> None:
    """Copy a file or folder of the host to `target` on this machine.

    Whatever names the host says, nothing outside `target` is written: every file and folder is made anew.

    Raises:
        HostError: it could not be read there.
        OSError: it could not be written here.
    """
    refuse_to_merge(target)
    path = at_home(source)
    async with _sftp(connection, access) as sftp:
        try:
            found = await sftp.stat(path)
            with atomic_path(target) as fresh:
                await _Copy(sftp, access, progress).get(path, found.permissions or 0, fresh)
        except asyncssh.SFTPError as error:
            raise _refused(access, source, error, full=False) from None


def at_home(path: str) -> str:
    """A path as SFTP has it, where what does not start at the root starts in the home directory."""
    return (path[2:] or ".") if path.startswith("~/") else "." if path == "~" else path


class _Copy:
    """One copying, over one channel: several files at once, as each costs a few round trips."""

    def __init__(self, sftp: asyncssh.SFTPClient, access: Access, progress: Progress | None) -> None:
        self._sftp = sftp
        self._access = access
        self._progress = progress or (lambda _: None)
        self._places = asyncio.Semaphore(FILES_AT_ONCE)

    async def put(self, source: Path, target: str) -> None:
        mode = os.stat(source).st_mode
        if stat.S_ISDIR(mode):
            await self._sftp.mkdir(target)
            await together(
                self._sftp.symlink(os.readlink(entry.path), posixpath.join(target, entry.name))
                if entry.is_symlink()
                else self.put(Path(entry.path), posixpath.join(target, entry.name))
                for entry in os.scandir(source)
            )
        elif stat.S_ISREG(mode):
            async with self._places:
                await self._put_file(source, target)
        else:
            raise OSError(f"{source} is neither a file nor a folder nor a link")
        await self._sftp.chmod(target, stat.S_IMODE(mode))

    async def _put_file(self, source: Path, target: str) -> None:
        offset = 0
        with open(source, "rb") as reader:
            async with self._sftp.open(target, "xb") as writer:
                while piece := await asyncio.to_thread(reader.read, PIECE_BYTES):
                    async with asyncio.timeout(PIECE_LIMIT_S):
                        await writer.write(piece, offset)
                    offset += len(piece)
                    self._progress(len(piece))

    async def get(self, source: str, mode: int, target: Path) -> None:
        if stat.S_ISLNK(mode):
            os.symlink(await self._sftp.readlink(source), target)
            return
        if stat.S_ISDIR(mode):
            os.mkdir(target)
            entries = [
                entry for entry in await self._sftp.readdir(source) if entry.filename not in (".", "..")
            ]
            await together(
                self.get(
                    posixpath.join(source, name := self._plain_name(source, str(entry.filename))),
                    entry.attrs.permissions or 0,
                    target / name,
                )
                for entry in entries
            )
        elif stat.S_ISREG(mode):
            async with self._places:
                await self._get_file(source, target)
        else:
            raise HostError(
                host=self._access.name, reason=f"{source} is neither a file nor a folder nor a link"
            )
        os.chmod(target, stat.S_IMODE(mode))

    async def _get_file(self, source: str, target: Path) -> None:
        offset = 0
        with open(target, "xb") as writer:  # "x" follows no link that a host has put in the way
            async with self._sftp.open(source, "rb") as reader:
                while True:
                    async with asyncio.timeout(PIECE_LIMIT_S):
                        piece = await reader.read(PIECE_BYTES, offset)
                    if not piece:
                        return
                    assert isinstance(piece, bytes), "the file was opened in binary mode"
                    await asyncio.to_thread(writer.write, piece)
                    offset += len(piece)
                    self._progress(len(piece))

    def _plain_name(self, folder: str, name: str) -> str:
        if not name or "/" in name or "\0" in name:
            reason = f"{folder} says that it holds {name!r}, which is the name of no file"
            raise HostError(host=self._access.name, reason=reason)
        return name


@contextlib.asynccontextmanager
async def _sftp(
    connection: asyncssh.SSHClientConnection, access: Access
) -> AsyncIterator[asyncssh.SFTPClient]:
    try:
        async with asyncio.timeout(PIECE_LIMIT_S):
            # As Python itself has names that are no UTF-8.
            sftp = await connection.start_sftp_client(path_errors="surrogateescape")
    except asyncssh.ChannelOpenError as error:
        raise problems.channel_refused(access, error) from None
    except (asyncssh.Error, OSError) as error:
        raise HostError(host=access.name, reason=f"no SFTP: {problems.said(error)}") from None
    try:
        async with sftp:
            yield sftp
    except (asyncssh.DisconnectError, ConnectionError):
        raise problems.lost(access, LOST) from None
    except TimeoutError:
        reason = f"took more than {PIECE_LIMIT_S:g} s for a piece of a file"
        raise HostError(host=access.name, reason=reason) from None


async def _refuse_to_merge(sftp: asyncssh.SFTPClient, access: Access, path: str, source: Path) -> None:
    if await sftp.isdir(path):
        reason = f"{path} is a folder that is there already"
        raise HostError(host=access.name, reason=reason, remedy="name another, or remove it first")
    if source.is_dir() and await sftp.lexists(path):
        reason = f"{path} is a file, and a folder would take its place"
        raise HostError(host=access.name, reason=reason, remedy="remove it first")


async def _is_full(sftp: asyncssh.SFTPClient, folder: str) -> bool:
    """Whether that is why: all that OpenSSH says of a full disk is "Failure"."""
    try:
        disk = await sftp.statvfs(folder)
    except (asyncssh.Error, OSError):
        return False
    return disk.bavail * disk.frsize < FULL_BYTES


async def _remove(sftp: asyncssh.SFTPClient, path: str) -> None:
    with contextlib.suppress(asyncssh.Error, OSError):
        async with asyncio.timeout(PIECE_LIMIT_S):
            if await sftp.isdir(path):
                await sftp.rmtree(path, ignore_errors=True)
            else:
                await sftp.remove(path)


def _refused(access: Access, path: str, error: asyncssh.SFTPError, full: bool) -> HostError:
    if isinstance(error, (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection)):
        return problems.lost(access, LOST)
    if full:
        return HostError(
            host=access.name,
            reason=f"{path}: no space is left on the disk",
            remedy="`fab run -- df -h` shows which; docker images are the usual cause: `docker system prune`",
        )
    return HostError(host=access.name, reason=f"{path}: {problems.said(error)}")
