"""All connections of a launcher: one a host, opened on first use, side by side, kept and reused."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh

from contracts.inventory import Inventory, Slice
from launch.errors import HostError
from launch.ssh import login, opening, problems
from launch.ssh.access import Access, routes
from launch.ssh.identities import Identities, load
from launch.ssh.opening import Limits
from launch.ssh.transport import SshTransport

# Each is a gcloud process of its own, which takes a processor for a second or two.
PROXIES_AT_ONCE = 8
CLOSE_S = 5.0


class Ssh:
    """The connections, and the thread whose event loop they live in; both begin with the first use.

    What is sent over a connection that breaks is never sent twice; the next call opens a new one.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._transports: dict[Access, SshTransport] = {}
        self._opening: dict[Access, asyncio.Task[asyncssh.SSHClientConnection]] = {}
        self._shared: dict[str, asyncio.Task[Any]] = {}
        self._proxies = asyncio.Semaphore(PROXIES_AT_ONCE)
        self._options = opening.options(self._limits)
        self._closed = False

    def transports(
        self, inventory: Inventory, one_slice: Slice, indexes: Sequence[int] | None = None
    ) -> tuple[SshTransport, ...]:
        """The hosts of a slice, all or those at `indexes`, in worker order. Nothing is connected to yet.

        Raises:
            RequestError: a host cannot be reached in the way that the inventory says.
        """
        found = routes(inventory, one_slice)
        return tuple(self.host(found[index]) for index in (range(len(found)) if indexes is None else indexes))

    def host(self, access: Access) -> SshTransport:
        """The host that is reached in this way; the same one for the same way."""
        with self._lock:
            return self._transports.setdefault(access, SshTransport(access, self))

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
        """The connection to a host: the one there is, or a new one.

        Raises:
            HostError: it cannot be reached.
        """
        task = self._opening.get(access)
        if task is None or _is_over(task):
            task = self._opening[access] = asyncio.create_task(self._open(access))
            task.add_done_callback(_look_at)
        return await asyncio.shield(task)

    async def host_key(self, access: Access) -> asyncssh.SSHKey:
        """The key that a host shows: over a way of its own where there is one, else through the one before it.

        Raises:
            HostError: it shows none.
        """
        if access.otherwise is not None:
            try:
                return await opening.host_key(access.otherwise, hop=None, limits=self._limits)
            except HostError as error:
                if not error.reason.startswith("gcloud"):
                    raise
        hop = await self.connection(access.through) if access.through is not None else None
        return await opening.host_key(access, hop=hop, limits=self._limits)

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
                login.user_of(access, identities),
            )
        except HostError as error:
            raise dataclasses.replace(error, host=access.name) from None
        hop = None
        if access.through is not None:
            try:
                hop = await self.connection(access.through)
            except HostError as error:
                if access.otherwise is None:
                    raise problems.through(access.through, access, error) from None
                return await self.connection(access.otherwise)
        gate = self._proxies if access.proxy_command else contextlib.nullcontext()
        async with gate:
            return await opening.open_connection(
                access, user=user, identities=identities, hop=hop, common=self._options, limits=self._limits
            )

    async def _once[T](self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, asked once for all hosts; asked again after it failed."""
        task = self._shared.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._shared[name] = asyncio.create_task(work)
            task.add_done_callback(_look_at)
        else:
            work.close()
        found: T = await asyncio.shield(task)
        return found

    async def _close_all(self) -> None:
        here = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not here]
        open_now = [task.result() for task in self._opening.values() if task.done() and not _is_over(task)]
        for connection in open_now:
            connection.close()
        for task in others:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*others, return_exceptions=True)
                for connection in open_now:
                    await connection.wait_closed()
        good = [task for task in self._shared.values() if task.done() and not _is_over_badly(task)]
        for found in (task.result() for task in good):
            if isinstance(found, Identities):
                await found.close()


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
    """Whether it failed, or the connection that it opened is closed."""
    return task.done() and (task.cancelled() or task.exception() is not None or task.result().is_closed())


def _is_over_badly(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
