"""A host over SSH as launch sees it: commands, files, a tunnel, and sessions with its agent.

Files and folders go by SFTP under another name first, so that they are whole or not there. Not by asyncssh's own
recursion: it copies one file after the other, refuses links that lead outside, and opens pipes and devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import shlex
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncssh

from backends.vm.access import Access, error_text, routes
from backends.vm.agent_session import AGENT_ROOT, Sessions
from backends.vm.connection import Ssh, open_process, together
from contracts.atomic import atomic_path, beside_name, refuse_to_merge
from contracts.inventory import Inventory, Slice
from launch.hosts import PIECE_BYTES, Completed, HostError, Show, Stream

Take = Callable[[Stream, bytes], Awaitable[None]]

# What is sent ahead of being taken, for each host.
WINDOW_BYTES = 256 * 1024
LONGEST_ANSWER_BYTES = 64 * 2**20
TOO_LONG = f"said more than {LONGEST_ANSWER_BYTES >> 20} MiB"

Progress = Callable[[int], None]
"""Is told how many more bytes have been copied."""

COPIED_BYTES = 4 * 2**20
COPIED_LIMIT_S = 120.0
FULL_BYTES = 2**20
FILES_AT_ONCE = 16
LOST = "while files were copied"

# A host's login shell may be any, so what it is given is one word in quotes that every shell reads alike: no quote, no
# backslash, no newline in it. The command's own words ($1 bytes of them, quoted for sh) and its input ($2 bytes) come
# through standard input, which holds more than an argument may.
#
# What follows on standard input is nothing, until it ends: sshd closes it when the channel or the connection goes, and
# kills nothing. So a watcher waits for that end and then ends the whole process group, which is the session that sshd
# made for this one command. What the command has put into a session of its own is meant to stay.
KEEPER = (
    "exec 3<&0 </dev/null; "
    'words=$(head -c "$1" <&3); input=$(head -c "$2" <&3; echo .); long=$2; eval "set -- $words"; '
    "( while read -r line <&3; do :; done; "
    'trap "" TERM HUP; kill -TERM 0; sleep 5; kill -KILL 0 ) >/dev/null 2>&1 & watcher=$!; '
    'if [ "$long" -gt 0 ]; then printf %s "${input%.}" | "$@" 3<&-; else "$@" 3<&-; fi; '
    'code=$?; kill -KILL "$watcher" 2>/dev/null; exit "$code"'
)


class SshTransport:
    """`launch.hosts.Transport` of one host, and the `Link` to its agent. It connects at its first use.

    Beyond what every transport raises: a command that is not there is told by the host's shell, with exit code 127;
    where a signal N ended it, that shell says 128 + N.
    """

    def __init__(self, access: Access, ssh: Ssh, agent_root: str = AGENT_ROOT) -> None:
        self.access = access
        self._ssh = ssh
        self._sessions = Sessions(access, agent_root, self._connected)

    @property
    def round_trips(self) -> int:
        """How often its agent was asked and waited for."""
        return self._sessions.round_trips

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        return self._ssh.begin(self._complete(argv, stdin, timeout_s))

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        return self._ssh.begin(self._follow(argv, show, timeout_s))

    knows_all = False

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        return self._ssh.begin(self._sessions.ask(verb, request, timeout_s=timeout_s))

    def put(self, source: Path, target: str, progress: Progress | None = None) -> None:
        """Copy a file or folder of this machine to `target` on the host; "~/" is the home directory there.

        Raises:
            HostError: it could not be written there; nothing half-written is left.
            OSError: it could not be read here.
        """
        self._wait(self._put(source, target, progress))

    def get(self, source: str, target: Path, progress: Progress | None = None) -> None:
        """Copy a file or folder of the host to `target` on this machine.

        Whatever names the host says, nothing outside `target` is written: every file and folder is made anew.

        Raises:
            HostError: it could not be read there.
            OSError: it could not be written here.
        """
        self._wait(self._get(source, target, progress))

    def host_key(self, access: Access) -> asyncssh.SSHKey:
        """Return the key that the host shows by the way `access`; raises HostError where it shows none."""
        return self._wait(self._ssh.host_key(access))

    def connect(self) -> Future[None]:
        """Open the connection, for those who want to know only whether there is one."""

        async def work() -> None:
            await self._connected()

        return self._ssh.begin(work())

    @contextlib.contextmanager
    def forward(self, remote_host: str, remote_port: int) -> Iterator[int]:
        """A port on 127.0.0.1 of this machine that leads to one that the host can reach."""

        async def listen() -> asyncssh.SSHListener:
            connection = await self._connected()
            try:
                return await connection.forward_local_port("127.0.0.1", 0, remote_host, remote_port)
            except OSError as error:
                raise self.access.channel_refused(error) from None

        async def close() -> None:
            listener.close()

        listener = self._wait(listen())
        try:
            yield listener.get_port()
        finally:
            self._wait(close())

    async def _connected(self) -> asyncssh.SSHClientConnection:
        return await self._ssh.connection(self.access)

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        future = self._ssh.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _complete(self, argv: Sequence[str], stdin: str, timeout_s: float) -> Completed:
        """Run a command to its end, its output in memory."""
        connection = await self._connected()
        output: dict[Stream, bytearray] = {"out": bytearray(), "err": bytearray()}

        async def keep(stream: Stream, data: bytes) -> None:
            if len(output[stream]) + len(data) > LONGEST_ANSWER_BYTES:
                raise HostError(host=self.access.name, reason=f"{argv[0]} {TOO_LONG}")
            output[stream] += data

        try:
            async with asyncio.timeout(timeout_s):
                code = await self._run(connection, argv, stdin, keep)
        except TimeoutError:
            return Completed(exit_code=None, stdout="", stderr=f"not done within {timeout_s:g} s")
        stdout, stderr = (output[stream].decode(errors="replace") for stream in ("out", "err"))
        return Completed(exit_code=code, stdout=stdout, stderr=stderr)

    async def _follow(self, argv: Sequence[str], show: Show, timeout_s: float | None) -> int | None:
        """Run a command and hand out what it says; the exit code, None where its time was over."""
        connection = await self._connected()
        loop = asyncio.get_running_loop()
        # It may block, so it has a thread of its own: the event loop serves other hosts.
        shower = ThreadPoolExecutor(1, "ssh output")

        async def give(stream: Stream, data: bytes) -> None:
            await loop.run_in_executor(shower, show, stream, data)

        try:
            async with asyncio.timeout(timeout_s):
                return await self._run(connection, argv, "", give)
        except TimeoutError:
            return None
        finally:
            shower.shutdown(wait=False)

    async def _run(
        self, connection: asyncssh.SSHClientConnection, argv: Sequence[str], stdin: str, take: Take
    ) -> int:
        """Give all that a command says to `take`; its exit code."""
        command_line, text = shlex.join(argv).encode(), stdin.encode()
        command = shlex.join(["sh", "-c", KEEPER, "sh", str(len(command_line)), str(len(text))])
        process = await open_process(connection, self.access, command, window=WINDOW_BYTES)

        async def read(stream: Stream, reader: asyncssh.SSHReader[bytes]) -> None:
            while True:
                try:
                    data = await reader.read(PIECE_BYTES)
                except (asyncssh.Error, OSError):
                    raise self.access.lost("while a command ran") from None
                if not data:
                    return
                await take(stream, data)

        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and what it said tells why
                process.stdin.write(command_line + text)
            await together([read("out", process.stdout), read("err", process.stderr)])
            await process.wait_closed()
        finally:
            process.close()
        if process.returncode is None:
            raise self.access.lost("while a command ran")
        return process.returncode

    async def _put(self, source: Path, target: str, progress: Progress | None) -> None:
        path = at_home(target)
        folder, name = posixpath.split(path)
        fresh = posixpath.join(folder, beside_name(name))
        async with _sftp(await self._connected(), self.access) as sftp:
            try:
                await _refuse_to_merge(sftp, self.access, path, source)
                await sftp.makedirs(folder or ".", exist_ok=True)
                await _Copy(sftp, self.access, progress).put(source, fresh)
                await sftp.posix_rename(fresh, path)
            except BaseException as error:
                full = isinstance(error, asyncssh.SFTPFailure) and await _is_full(sftp, folder or ".")
                await _remove(sftp, fresh)
                if isinstance(error, asyncssh.SFTPError):
                    raise _refused(self.access, target, error, full) from None
                raise

    async def _get(self, source: str, target: Path, progress: Progress | None) -> None:
        refuse_to_merge(target)
        path = at_home(source)
        async with _sftp(await self._connected(), self.access) as sftp:
            try:
                attributes = await sftp.stat(path)
                with atomic_path(target) as fresh:
                    await _Copy(sftp, self.access, progress).get(path, attributes.permissions or 0, fresh)
            except asyncssh.SFTPError as error:
                raise _refused(self.access, source, error, full=False) from None


def make_transports(
    inventory: Inventory, one_slice: Slice, indexes: Sequence[int]
) -> tuple[SshTransport, ...]:
    """Return the hosts of a slice at `indexes`. Nothing is connected to yet.

    Raises:
        RequestError: a host cannot be reached in the way that the inventory says.
    """
    connections, accesses = Ssh(), routes(inventory, one_slice)
    return tuple(SshTransport(accesses[index], connections) for index in indexes)


def at_home(path: str) -> str:
    """Return a path as SFTP has it, where what does not start at the root starts in the home directory."""
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
                while piece := await asyncio.to_thread(reader.read, COPIED_BYTES):
                    async with asyncio.timeout(COPIED_LIMIT_S):
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
                    async with asyncio.timeout(COPIED_LIMIT_S):
                        piece = await reader.read(COPIED_BYTES, offset)
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
        async with asyncio.timeout(COPIED_LIMIT_S):
            # As Python itself has names that are no UTF-8.
            sftp = await connection.start_sftp_client(path_errors="surrogateescape")
    except asyncssh.ChannelOpenError as error:
        raise access.channel_refused(error) from None
    except (asyncssh.Error, OSError) as error:
        raise HostError(host=access.name, reason=f"no SFTP: {error_text(error)}") from None
    try:
        async with sftp:
            yield sftp
    except (asyncssh.DisconnectError, ConnectionError):
        raise access.lost(LOST) from None
    except TimeoutError:
        reason = f"took more than {COPIED_LIMIT_S:g} s for a piece of a file"
        raise HostError(host=access.name, reason=reason) from None


async def _refuse_to_merge(sftp: asyncssh.SFTPClient, access: Access, path: str, source: Path) -> None:
    if await sftp.isdir(path):
        reason = f"{path} is a folder that is there already"
        raise HostError(host=access.name, reason=reason, remedy="name another, or remove it first")
    if source.is_dir() and await sftp.lexists(path):
        reason = f"{path} is a file, and a folder would take its place"
        raise HostError(host=access.name, reason=reason, remedy="remove it first")


async def _is_full(sftp: asyncssh.SFTPClient, folder: str) -> bool:
    """Return whether that is why: all that OpenSSH says of a full disk is "Failure"."""
    try:
        disk = await sftp.statvfs(folder)
    except (asyncssh.Error, OSError):
        return False
    return disk.bavail * disk.frsize < FULL_BYTES


async def _remove(sftp: asyncssh.SFTPClient, path: str) -> None:
    with contextlib.suppress(asyncssh.Error, OSError):
        async with asyncio.timeout(COPIED_LIMIT_S):
            if await sftp.isdir(path):
                await sftp.rmtree(path, ignore_errors=True)
            else:
                await sftp.remove(path)


def _refused(access: Access, path: str, error: asyncssh.SFTPError, full: bool) -> HostError:
    if isinstance(error, (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection)):
        return access.lost(LOST)
    if full:
        return HostError(
            host=access.name,
            reason=f"{path}: no space is left on the disk",
            remedy="`fab run -- df -h` shows which; docker images are the usual cause: `docker system prune`",
        )
    return HostError(host=access.name, reason=f"{path}: {error_text(error)}")
