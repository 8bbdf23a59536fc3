"""Sessions with a host's agent: one process there, a line a request, a line an answer; its code is sent if needed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import shlex
import time
import zipfile
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncssh

from backends.vm.access import Access
from backends.vm.connection import open_process
from launch.hosts import PIECE_BYTES, Completed, HostError

AGENT_ROOT = "~/.cache/tpu-stack/agent"
PYTHON = "python3"
SESSIONS_AT_ONCE = 4
LONGEST_ANSWER_BYTES = 64 * 2**20
LAST_WORDS_BYTES = 4096
# The agent ends a session of which nothing is heard for 15 minutes; one that may be about to is not used again.
FRESH_S = 600.0
NOT_FOUND = 127
WINDOW_BYTES = 2 * 2**20

Connect = Callable[[], Awaitable[asyncssh.SSHClientConnection]]


class Sessions:
    """The sessions of one host: an idle one is used again, one that is busy keeps nobody waiting."""

    def __init__(self, access: Access, root: str, connect: Connect) -> None:
        self.round_trips = 0
        self._access = access
        self._root = root
        self._connect = connect
        self._idle: list[_Session] = []
        self._places = asyncio.Semaphore(SESSIONS_AT_ONCE)

    async def ask(self, verb: str, request: str, *, timeout_s: float) -> Completed:
        """Return one answer, in `stdout`; `exit_code` None: none came in time, and that session is over.

        Raises:
            HostError: the host cannot be reached, or has no Python.
        """
        connection = await self._connect()
        try:
            async with asyncio.timeout(timeout_s), self._session(connection) as session:
                answer = await session.ask(with_verb(verb, request))
        except TimeoutError:
            return Completed(exit_code=None, stdout="", stderr="")
        if answer is not None:
            return Completed(exit_code=0, stdout=answer.decode(errors="replace"), stderr="")
        code, last_words = await session.end()
        if code == NOT_FOUND:
            raise self._access.command_missing(PYTHON)
        return Completed(exit_code=code, stdout="", stderr=last_words)

    @contextlib.asynccontextmanager
    async def _session(self, connection: asyncssh.SSHClientConnection) -> AsyncIterator[_Session]:
        async with self._places:
            session = self._idle_one() or await self._begin(connection)
            try:
                yield session
            except BaseException:
                session.close()
                raise
            finally:
                self.round_trips += session.count_round_trips()
            if session.is_usable:
                self._idle.append(session)

    def _idle_one(self) -> _Session | None:
        while self._idle:
            session = self._idle.pop(0)
            if session.is_usable:
                return session
            session.close()
        return None

    async def _begin(self, connection: asyncssh.SSHClientConnection) -> _Session:
        command = agent_code().command_line(self._root)
        process = await open_process(connection, self._access, command, window=WINDOW_BYTES)
        return _Session(process, self._access)


class _Session:
    """A process that answers a line with a line."""

    def __init__(self, process: asyncssh.SSHClientProcess[bytes], access: Access) -> None:
        self._process = process
        self._access = access
        self._left = b""
        self._round_trips = 0
        self._last_s = time.monotonic()
        self._last_words = b""
        self._listening = asyncio.create_task(self._listen())

    @property
    def is_usable(self) -> bool:
        alive = not self._process.is_closing() and not self._process.stdout.at_eof()
        return alive and not self._left and time.monotonic() - self._last_s < FRESH_S

    def count_round_trips(self) -> int:
        """Since this was last asked."""
        count, self._round_trips = self._round_trips, 0
        return count

    async def ask(self, request: bytes) -> bytes | None:
        """Return the answer; None: the process ended instead.

        Raises:
            HostError: the connection was lost, or the answer is beyond all bounds.
        """
        answer = await self._exchange(request)
        if answer is not None and answer.startswith(b'{"need"'):
            answer = await self._exchange(agent_code().answer)
        self._last_s = time.monotonic()
        return answer

    async def end(self) -> tuple[int | None, str]:
        """Exit code and last words of the process, which has ended or ends now."""
        with contextlib.suppress(TimeoutError, asyncssh.Error, OSError):
            async with asyncio.timeout(5):
                await self._listening
                await self._process.wait_closed()
        self.close()
        return self._process.returncode, self._last_words.decode(errors="replace")

    def close(self) -> None:
        """The agent sees the end of its input and ends, after what it is about."""
        self._process.close()
        self._listening.cancel()

    async def _exchange(self, line: bytes) -> bytes | None:
        self._round_trips += 1
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended: what it said before tells why
                self._process.stdin.write(line)
                await self._process.stdin.drain()
            return await self._line()
        except (asyncssh.Error, OSError):
            raise self._access.lost("while the agent was asked") from None

    async def _line(self) -> bytes | None:
        pieces, length = [self._left], len(self._left)
        while b"\n" not in pieces[-1]:
            piece = await self._process.stdout.read(PIECE_BYTES)
            if not piece:
                return None
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST_ANSWER_BYTES:
                reason = f"the agent's answer is longer than {LONGEST_ANSWER_BYTES >> 20} MiB"
                raise HostError(host=self._access.name, reason=reason)
        line, _, self._left = b"".join(pieces).partition(b"\n")
        return line

    async def _listen(self) -> None:
        """Keep the end of what it says on the other output, so that it never waits for somebody to read it.

        A connection that is lost ends this without a word: who asks is told, and an idle one is not used again.
        """
        with contextlib.suppress(asyncssh.Error, OSError):
            while piece := await self._process.stderr.read(PIECE_BYTES):
                self._last_words = (self._last_words + piece)[-LAST_WORDS_BYTES:]


def with_verb(verb: str, request: str) -> bytes:
    """Return a verb's request as a session's line. It is not read anew: with a bundle in it, it is long."""
    assert request.startswith("{") and "\n" not in request, "a request is a JSON object on one line"
    fields = request[1:].lstrip()
    return f'{{"verb": {json.dumps(verb)}{"" if fields.startswith("}") else ", "}{fields}\n'.encode()


CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("host", "host/agent", "host/agent/containers", "host/agent/storage", "contracts")
# The oldest that a zip knows: the same code is the same archive on every day.
LONG_AGO = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentCode:
    """loader: the program that a host begins with. answer: the line that brings the archive."""

    loader: str
    sha256: str
    answer: bytes

    def command_line(self, root: str) -> str:
        """Return the line for a host's login shell that begins a session. Any shell reads the loader's digits alike."""
        begin = "import sys; exec(bytes.fromhex(sys.argv.pop(1)))"
        return shlex.join([PYTHON, "-S", "-E", "-c", begin, self.loader.encode().hex(), root, self.sha256])


@functools.cache
def agent_code(checkout: Path = CHECKOUT) -> AgentCode:
    """Return the agent of this checkout, and the contracts that it imports."""
    packed = archive(
        {
            f"{name}/{path.name}": path.read_bytes()
            for name in PACKAGES
            for path in (checkout / name).glob("*.py")
        }
    )
    return AgentCode(
        loader=(checkout / "host" / "loader.py").read_text(encoding="utf-8"),
        sha256=hashlib.sha256(packed).hexdigest(),
        answer=json.dumps({"archive_base64": b64encode(packed).decode()}).encode() + b"\n",
    )


def archive(files: dict[str, bytes]) -> bytes:
    """Return a zip of the files; the same ones give the same bytes, in whatever order and at whatever time."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as writer:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.external_attr = 0o100644 << 16
            writer.writestr(entry, files[name], zipfile.ZIP_DEFLATED, 9)
    return packed.getvalue()
