"""Connections to hosts: one a host, opened on first use, its key checked, a limit on each part, kept and reused."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh

from backends.vm import login
from backends.vm.access import Access
from backends.vm.login import Identities, load
from launch.hosts import HostError

# Each is a gcloud process of its own, which takes a processor for a second or two.
PROXIES_AT_ONCE = 8
CLOSE_S = 5.0
KEEPALIVES = 3
ENDINGS = (asyncssh.ConnectionLost, ConnectionError)
HOST_KEY_KINDS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long each part of an opening may take, and how often a quiet connection is tried: lost after three times."""

    connect_s: float = 20.0
    login_s: float = 15.0
    keepalive_s: float = 15.0


def _options(limits: Limits) -> asyncssh.SSHClientConnectionOptions:
    """Return the options of all connections. Nothing is read from ~/.ssh: what holds is in the inventory and here."""
    return asyncssh.SSHClientConnectionOptions(
        config=None,
        known_hosts=([], [], []),
        x509_trusted_certs=None,
        client_keys=None,
        agent_path=None,
        preferred_auth="publickey",
        gss_host=None,
        # The first of these has the quickest implementation here; all hosts have it.
        encryption_algs=["aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes256-ctr", "aes128-ctr"],
        compression_algs=None,
        connect_timeout=None,
        login_timeout=0,
        keepalive_interval=limits.keepalive_s,
        keepalive_count_max=KEEPALIVES,
    )


class Ssh:
    """The connections, and the thread whose event loop they live in; both begin with the first use.

    What is sent over a connection that breaks is never sent twice; the next call opens a new one.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._opening: dict[Access, asyncio.Task[asyncssh.SSHClientConnection]] = {}
        self._shared: dict[str, asyncio.Task[Any]] = {}
        self._proxies = asyncio.Semaphore(PROXIES_AT_ONCE)
        self._options = _options(self._limits)
        self._closed = False

    def begin[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Carry out `work` in the event loop. Cancelling the Future cancels it."""
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError("these connections were closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="ssh", daemon=True).start()
                atexit.register(self.close)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def connection(self, access: Access) -> asyncssh.SSHClientConnection:
        """Return the connection to a host: the one there is, or a new one.

        Raises:
            HostError: it cannot be reached.
        """
        task = self._opening.get(access)
        if task is None or _is_over(task):
            task = self._opening[access] = asyncio.create_task(self._open(access))
            task.add_done_callback(_look_at)
        return await asyncio.shield(task)

    async def host_key(self, access: Access) -> asyncssh.SSHKey:
        """Return the key that a host shows: over a way of its own where there is one, else through the one before it.

        Raises:
            HostError: it shows none.
        """
        if access.otherwise is not None:
            try:
                return await self._host_key(access.otherwise, hop=None)
            except HostError as error:
                if not error.reason.startswith("gcloud"):
                    raise
        hop = await self.connection(access.through) if access.through is not None else None
        return await self._host_key(access, hop)

    def close(self) -> None:
        """Close every connection for good; what is still under way ends."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close_all(), loop).result(CLOSE_S + 1)
        loop.call_soon_threadsafe(loop.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _open(self, access: Access) -> asyncssh.SSHClientConnection:
        try:
            identities: Identities = await self._once("identities", load(os.environ, Path.home()))
            user: str = await self._once(
                "user" if access.os_login and not access.user else f"user of {access}",
                login.find_user(access, identities),
            )
        except HostError as error:
            raise dataclasses.replace(error, host=access.name) from None
        hop = None
        if access.through is not None:
            try:
                hop = await self.connection(access.through)
            except HostError as error:
                if access.otherwise is None:
                    raise access.unreachable_through(access.through, error) from None
                return await self.connection(access.otherwise)
        gate = self._proxies if access.proxy_command else contextlib.nullcontext()
        async with gate:
            return await self._log_in(access, user, identities, hop)

    async def _log_in(
        self,
        access: Access,
        user: str,
        identities: Identities,
        hop: asyncssh.SSHClientConnection | None,
    ) -> asyncssh.SSHClientConnection:
        """Connect, compare the host's key, and log in. hop: the connection to `access.through`."""
        pinned = _pinned(access)
        greeting = _Greeting()
        limits = self._limits
        try:
            async with (
                _proxied(access, hop) as proxy,
                asyncio.timeout(
                    limits.connect_s if proxy is None else limits.connect_s + limits.login_s
                ) as limit,
            ):
                if proxy is None:  # a socket to a program says nothing of what is behind it
                    greeting.on_connected = lambda: limit.reschedule(
                        asyncio.get_running_loop().time() + limits.login_s
                    )
                connection = await asyncssh.connect(
                    access.address,
                    access.port,
                    sock=proxy.socket if proxy else None,
                    tunnel=hop,
                    config=None,
                    options=self._options,
                    username=user,
                    client_keys=list(identities.keys),
                    known_hosts=(list(pinned), [], []),
                    server_host_key_algs=_kinds(pinned),
                    client_factory=lambda: greeting,
                )
        except HostError:
            raise
        except Exception as error:
            raise self._explained(access, error, greeting, pinned, user, identities) from None
        if proxy is not None:
            greeting.proxy = asyncio.create_task(_stop_with(connection, proxy))
        return connection

    def _explained(
        self,
        access: Access,
        error: Exception,
        greeting: _Greeting,
        pinned: tuple[asyncssh.SSHKey, ...],
        user: str,
        identities: Identities,
    ) -> HostError:
        if isinstance(error, asyncssh.HostKeyNotVerifiable) and greeting.found is not None:
            expected = [key.get_fingerprint() for key in pinned]
            return access.host_key_changed(expected, greeting.found.get_fingerprint())
        if isinstance(error, asyncssh.PermissionDenied) or "authentication failures" in str(error):
            return access.permission_denied(user, identities.names, identities.kept_back)
        if greeting.connection is None or (isinstance(error, TimeoutError) and not greeting.spoke):
            return access.no_connection(error)
        if not greeting.spoke and isinstance(error, ENDINGS):
            return access.closed_at_once()
        return access.no_login(error, self._limits.login_s)

    async def _host_key(self, access: Access, hop: asyncssh.SSHClientConnection | None) -> asyncssh.SSHKey:
        """Return the key that a server shows, which says nothing yet of who it is. Nothing is logged in to."""
        limits = self._limits
        try:
            async with (
                _proxied(access, hop) as proxy,
                asyncio.timeout(limits.connect_s + limits.login_s),
            ):
                key = await asyncssh.get_server_host_key(
                    access.address,
                    access.port,
                    sock=proxy.socket if proxy else None,
                    tunnel=hop,
                    config=None,
                    server_host_key_algs=list(HOST_KEY_KINDS),
                )
        except HostError:
            raise
        except Exception as error:
            raise access.no_connection(error) from None
        if proxy is not None:
            await proxy.stop()
        if key is None:
            raise access.no_login(asyncssh.ConnectionLost("no host key was shown"), limits.login_s)
        return key

    async def _once[T](self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` gives, asked once for all hosts; asked again after it failed."""
        task = self._shared.get(name)
        if task is None or (task.done() and _failed(task)):
            task = self._shared[name] = asyncio.create_task(work)
            task.add_done_callback(_look_at)
        else:
            work.close()
        result: T = await asyncio.shield(task)
        return result

    async def _close_all(self) -> None:
        current = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not current]
        open_now = [task.result() for task in self._opening.values() if task.done() and not _is_over(task)]
        for connection in open_now:
            connection.close()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*tasks, return_exceptions=True)
                for connection in open_now:
                    await connection.wait_closed()
        for task in self._shared.values():
            if task.done() and not _failed(task) and isinstance(result := task.result(), Identities):
                await result.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _look_at(task: asyncio.Task[Any]) -> None:
    """Whoever waited for it may be gone, and asyncio prints an error that nobody has looked at."""
    if not task.cancelled():
        task.exception()


def _is_over(task: asyncio.Task[asyncssh.SSHClientConnection]) -> bool:
    """Return whether it failed, or the connection that it opened is closed."""
    return task.done() and (_failed(task) or task.result().is_closed())


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


class _Greeting(asyncssh.SSHClient):
    """What is seen of a server while a connection is opened."""

    def __init__(self) -> None:
        self.on_connected: Callable[[], None] | None = None
        self.connection: asyncssh.SSHClientConnection | None = None
        self.found: asyncssh.SSHKey | None = None
        self.proxy: asyncio.Task[None] | None = None

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self.connection = conn
        if self.on_connected is not None:
            self.on_connected()

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:  # noqa: ARG002 - asyncssh's
        self.found = key
        return False

    @property
    def spoke(self) -> bool:
        """Whether the server has said what it is."""
        return self.connection is not None and bool(self.connection.get_extra_info("server_version"))


def _pinned(access: Access) -> tuple[asyncssh.SSHKey, ...]:
    if not access.host_keys:
        raise access.host_key_unknown()

    def keys() -> Iterator[asyncssh.SSHKey]:
        for line in access.host_keys:
            try:
                yield asyncssh.import_public_key(line)
            except asyncssh.KeyImportError as error:
                raise access.host_key_unreadable(line, str(error)) from None

    return tuple(keys())


def _kinds(pinned: Sequence[asyncssh.SSHKey]) -> list[str]:
    """Of the host's keys a pinned one is asked for first; any other, so that it can be named when it is refused."""
    pinned_kinds = {key.get_algorithm() for key in pinned}
    return sorted(
        HOST_KEY_KINDS, key=lambda kind: kind.replace("rsa-sha2-512", "ssh-rsa") not in pinned_kinds
    )


@contextlib.asynccontextmanager
async def _proxied(access: Access, hop: asyncssh.SSHClientConnection | None) -> AsyncIterator[Proxy | None]:
    """The running program that is the way to the host, where it takes one. It is stopped if what it is for fails.

    Raises:
        HostError: there is no such program, or it has ended, and that is why.
    """
    if access.proxy_command is None or hop is not None:
        yield None
        return
    try:
        proxy = await Proxy.start(access.proxy_command)
    except (FileNotFoundError, PermissionError):
        raise access.proxy_missing(access.proxy_command[0]) from None
    try:
        yield proxy
    except BaseException as error:
        try:
            ended = await proxy.ended() if isinstance(error, ENDINGS) else None
        finally:
            await proxy.stop()
        if ended is not None:
            raise access.proxy_ended(*ended) from None
        raise


async def _stop_with(connection: asyncssh.SSHClientConnection, proxy: Proxy) -> None:
    try:
        await connection.wait_closed()
    finally:
        await proxy.stop()


LINES_KEPT = 20
LONGEST_LINE_BYTES = 4096
END_S = 2.0


class Proxy:
    """The running program. `socket` is our end; the program has the other one itself, so no byte goes through here."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self.socket = ours
        self._process = process
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Proxy:
        """Raises OSError: there is no such program."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE_BYTES,
                start_new_session=True,  # Ctrl-C in the launcher's terminal is not meant for a connection
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(process, ours)

    async def ended(self) -> tuple[int, str] | None:
        """Exit code and last words, where it has ended or does so in a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
                await asyncio.shield(self._listening)
                return code, self._said[-1] if self._said else ""
        return None

    async def stop(self) -> None:
        """End the program, where it still runs."""
        self.socket.close()
        try:
            if await self.ended() is None:
                # gcloud is a shell that starts another program.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()
        finally:
            self._listening.cancel()

    async def _listen(self) -> None:
        """Its messages are kept, not shown: a warning of it is no news for a user."""
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(LONGEST_LINE_BYTES):
            self._said.extend(line for line in piece.decode(errors="replace").splitlines() if line.strip())


async def open_process(
    connection: asyncssh.SSHClientConnection, access: Access, command: str, *, window: int
) -> asyncssh.SSHClientProcess[bytes]:
    """Return a channel with a command in it.

    Raises:
        HostError: the host refuses the channel, or the connection is lost.
    """
    try:
        process: asyncssh.SSHClientProcess[bytes] = await connection.create_process(
            command, encoding=None, window=window
        )
    except asyncssh.ChannelOpenError as error:
        if connection.is_closed():
            raise access.lost("before the command was sent") from None
        raise access.channel_refused(error) from None
    except (asyncssh.Error, OSError):
        raise access.lost("before the command was sent") from None
    return process


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them, or the first error, the others being ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
