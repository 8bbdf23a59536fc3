"""A host over SSH as launch sees it: commands, files, a tunnel, and sessions with its agent."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import shlex
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import asyncssh

from contracts.inventory import Inventory, Slice
from launch.hosts import PIECE_BYTES, Completed, HostError, Show, Stream
from launch.ssh import copying, problems
from launch.ssh.access import Access, routes
from launch.ssh.agent_session import AGENT_ROOT, PYTHON, Sessions
from launch.ssh.connection import Ssh, open_process, together

Take = Callable[[Stream, bytes], Awaitable[None]]

# What is sent ahead of being taken, for each host.
WINDOW_BYTES = 256 * 1024
LONGEST_ANSWER_BYTES = 64 * 2**20
TOO_LONG = f"said more than {LONGEST_ANSWER_BYTES >> 20} MiB"

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
    """`launch.hosts.Transport` of one host. It connects at its first use.

    Beyond what every transport raises: a command that is not there is told by the host's shell, with exit code 127;
    where a signal N ended it, that shell says 128 + N.
    """

    def __init__(self, access: Access, ssh: Ssh, python: str = PYTHON) -> None:
        self.access = access
        self._ssh = ssh
        self._sessions = Sessions(access, self._connected, python)

    @property
    def round_trips(self) -> int:
        """How often its agent was asked and waited for."""
        return self._sessions.round_trips

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        return self._ssh.begin(self._complete(argv, stdin, timeout_s))

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        return self._ssh.begin(self._follow(argv, show, timeout_s))

    def ask(self, root: str, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        """Ask the agent whose own directory there is `root`; the answer is the line in `stdout`."""
        return self._ssh.begin(self._sessions.ask(root, verb, request, timeout_s=timeout_s))

    def put(self, source: Path, target: str, progress: copying.Progress | None = None) -> None:
        async def work() -> None:
            await copying.put(await self._connected(), self.access, source, target, progress)

        self._wait(work())

    def get(self, source: str, target: Path, progress: copying.Progress | None = None) -> None:
        async def work() -> None:
            await copying.get(await self._connected(), self.access, source, target, progress)

        self._wait(work())

    def host_key(self, access: Access) -> asyncssh.SSHKey:
        """The key that the host shows to whoever comes by the way `access`; raises HostError where it shows none."""
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
                raise problems.channel_refused(self.access, error) from None

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
        said: dict[Stream, bytearray] = {"out": bytearray(), "err": bytearray()}

        async def keep(stream: Stream, data: bytes) -> None:
            if len(said[stream]) + len(data) > LONGEST_ANSWER_BYTES:
                raise HostError(host=self.access.name, reason=f"{argv[0]} {TOO_LONG}")
            said[stream] += data

        try:
            async with asyncio.timeout(timeout_s):
                code = await self._run(connection, argv, stdin, keep)
        except TimeoutError:
            return Completed(exit_code=None, stdout="", stderr=f"not done within {timeout_s:g} s")
        stdout, stderr = (said[stream].decode(errors="replace") for stream in ("out", "err"))
        return Completed(exit_code=code, stdout=stdout, stderr=stderr)

    async def _follow(self, argv: Sequence[str], show: Show, timeout_s: float | None) -> int | None:
        """Run a command and hand out what it says; the exit code, None where its time was over."""
        connection = await self._connected()
        with contextlib.closing(_Hand(show)) as hand:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._run(connection, argv, "", hand.give)
            except TimeoutError:
                return None

    async def _run(
        self, connection: asyncssh.SSHClientConnection, argv: Sequence[str], stdin: str, take: Take
    ) -> int:
        """Give all that a command says to `take`; its exit code."""
        words, text = shlex.join(argv).encode(), stdin.encode()
        command = shlex.join(["sh", "-c", KEEPER, "sh", str(len(words)), str(len(text))])
        process = await open_process(connection, self.access, command, window=WINDOW_BYTES)

        async def read(stream: Stream, reader: asyncssh.SSHReader[bytes]) -> None:
            while True:
                try:
                    data = await reader.read(PIECE_BYTES)
                except (asyncssh.Error, OSError):
                    raise problems.lost(self.access, "while a command ran") from None
                if not data:
                    return
                await take(stream, data)

        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and what it said tells why
                process.stdin.write(words + text)
            await together([read("out", process.stdout), read("err", process.stderr)])
            await process.wait_closed()
        finally:
            process.close()
        if process.returncode is None:
            raise problems.lost(self.access, "while a command ran")
        return process.returncode


class _Hand:
    """Gives pieces to a `Show`, which may block, in a thread of its own: the event loop serves other hosts."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._pieces: queue.SimpleQueue[tuple[Stream, bytes, asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="ssh output", daemon=True).start()

    async def give(self, stream: Stream, data: bytes) -> None:
        """Comes back when it has been taken."""
        async with self._turn:
            taken: asyncio.Future[None] = self._loop.create_future()
            self._pieces.put((stream, data, taken))
            await taken

    def close(self) -> None:
        self._pieces.put(None)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            stream, data, taken = piece
            error: Exception | None = None
            try:
                self._show(stream, data)
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, taken, error)


def _settle(taken: asyncio.Future[None], error: Exception | None) -> None:
    if taken.done():
        return
    if error is None:
        taken.set_result(None)
    else:
        taken.set_exception(error)


@dataclasses.dataclass(frozen=True)
class SessionLink:
    """How the agent of a host is asked over SSH: `launch.hosts.Link`. root: its directory there."""

    transport: SshTransport
    root: str = AGENT_ROOT

    def ask(self, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        return self.transport.ask(self.root, verb, request, timeout_s=timeout_s)


def transports_of(
    inventory: Inventory, one_slice: Slice, indexes: Sequence[int] | None = None, *, ssh: Ssh | None = None
) -> tuple[SshTransport, ...]:
    """The hosts of a slice, all or those at `indexes`, in worker order. Nothing is connected to yet.

    Raises:
        RequestError: a host cannot be reached in the way that the inventory says.
    """
    connections = ssh or Ssh()
    found = routes(inventory, one_slice)
    return tuple(
        SshTransport(found[index], connections)
        for index in (range(len(found)) if indexes is None else indexes)
    )
