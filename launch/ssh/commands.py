"""Commands on a host: words arrive as themselves, and when a command is given up nothing of it goes on there."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shlex
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import asyncssh

from launch.errors import HostError
from launch.ssh import problems
from launch.ssh.access import Access
from launch.transport import PIECE_BYTES, Completed, Show, Stream

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


def command_line(words: bytes, stdin: bytes) -> str:
    """What a login shell is told, for a command whose words and input will be sent."""
    return shlex.join(["sh", "-c", KEEPER, "sh", str(len(words)), str(len(stdin))])


async def complete(
    connection: asyncssh.SSHClientConnection,
    access: Access,
    argv: Sequence[str],
    stdin: str,
    *,
    timeout_s: float,
) -> Completed:
    """Run a command to its end, its output in memory."""
    said: dict[Stream, bytearray] = {"out": bytearray(), "err": bytearray()}

    async def keep(stream: Stream, data: bytes) -> None:
        if len(said[stream]) + len(data) > LONGEST_ANSWER_BYTES:
            raise HostError(host=access.name, reason=f"{argv[0]} {TOO_LONG}")
        said[stream] += data

    try:
        async with asyncio.timeout(timeout_s), _running(connection, access, argv, stdin) as process:
            await _read_both(process, access, keep)
            code: int | None = await _exit_code(process, access)
    except TimeoutError:
        return Completed(exit_code=None, stdout="", stderr=f"not done within {timeout_s:g} s")
    stdout, stderr = (said[stream].decode(errors="replace") for stream in ("out", "err"))
    return Completed(exit_code=code, stdout=stdout, stderr=stderr)


async def follow(
    connection: asyncssh.SSHClientConnection,
    access: Access,
    argv: Sequence[str],
    show: Show,
    *,
    timeout_s: float | None,
) -> int | None:
    """Run a command and hand out what it says; the exit code, None where its time was over."""
    with contextlib.closing(_Hand(show)) as hand:
        try:
            async with asyncio.timeout(timeout_s), _running(connection, access, argv, "") as process:
                await _read_both(process, access, hand.give)
                return await _exit_code(process, access)
        except TimeoutError:
            return None


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


@contextlib.asynccontextmanager
async def _running(
    connection: asyncssh.SSHClientConnection, access: Access, argv: Sequence[str], stdin: str
) -> AsyncIterator[asyncssh.SSHClientProcess[bytes]]:
    words, text = shlex.join(argv).encode(), stdin.encode()
    process = await open_process(connection, access, command_line(words, text), window=WINDOW_BYTES)
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and what it said tells why
            process.stdin.write(words + text)
        yield process
    finally:
        process.close()


async def open_process(
    connection: asyncssh.SSHClientConnection, access: Access, command: str, *, window: int
) -> asyncssh.SSHClientProcess[bytes]:
    """A channel with a command in it.

    Raises:
        HostError: the host refuses the channel, or the connection is lost.
    """
    try:
        process: asyncssh.SSHClientProcess[bytes] = await connection.create_process(
            command, encoding=None, window=window
        )
    except asyncssh.ChannelOpenError as error:
        if connection.is_closed():
            raise problems.lost(access, "before the command was sent") from None
        raise problems.channel_refused(access, error) from None
    except (asyncssh.Error, OSError):
        raise problems.lost(access, "before the command was sent") from None
    return process


async def _read_both(process: asyncssh.SSHClientProcess[bytes], access: Access, take: Take) -> None:
    async def read(stream: Stream, reader: asyncssh.SSHReader[bytes]) -> None:
        while True:
            try:
                data = await reader.read(PIECE_BYTES)
            except (asyncssh.Error, OSError):
                raise problems.lost(access, "while a command ran") from None
            if not data:
                return
            await take(stream, data)

    reading = [
        asyncio.create_task(read("out", process.stdout)),
        asyncio.create_task(read("err", process.stderr)),
    ]
    try:
        await asyncio.gather(*reading)
    finally:
        for task in reading:
            task.cancel()


async def _exit_code(process: asyncssh.SSHClientProcess[bytes], access: Access) -> int:
    await process.wait_closed()
    if process.returncode is None:
        raise problems.lost(access, "while a command ran")
    return process.returncode
