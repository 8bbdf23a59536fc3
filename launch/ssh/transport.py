"""A host over SSH, as launch sees it: commands, files, a tunnel, and sessions with its agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh

from launch.ssh import commands, copying, problems
from launch.ssh.access import Access
from launch.ssh.session import PYTHON, Sessions
from launch.transport import Completed, Show

if TYPE_CHECKING:
    from launch.ssh.connections import Ssh


class SshTransport:
    """`launch.transport.Transport` of one host. It connects at its first use.

    Beyond what every transport raises: a command that is not there is told by the host's shell, with exit code 127;
    where a signal N ended it, that shell says 128 + N.
    """

    def __init__(self, access: Access, ssh: Ssh, python: str = PYTHON) -> None:
        self.access = access
        self._ssh = ssh
        self._sessions = Sessions(access, lambda: ssh.connection(access), python)

    @property
    def round_trips(self) -> int:
        """How often its agent was asked and waited for."""
        return self._sessions.round_trips

    def begin(self, argv: Sequence[str], stdin: str, *, timeout_s: float) -> Future[Completed]:
        async def work() -> Completed:
            connection = await self._ssh.connection(self.access)
            return await commands.complete(connection, self.access, argv, stdin, timeout_s=timeout_s)

        return self._ssh.begin(work())

    def stream(self, argv: Sequence[str], show: Show, *, timeout_s: float | None) -> Future[int | None]:
        async def work() -> int | None:
            connection = await self._ssh.connection(self.access)
            return await commands.follow(connection, self.access, argv, show, timeout_s=timeout_s)

        return self._ssh.begin(work())

    def ask(self, root: str, verb: str, request: str, *, timeout_s: float) -> Future[Completed]:
        """Ask the agent whose own directory there is `root`; the answer is the line in `stdout`."""
        return self._ssh.begin(self._sessions.ask(root, verb, request, timeout_s=timeout_s))

    def put(self, source: Path, target: str, progress: copying.Progress | None = None) -> None:
        async def work() -> None:
            connection = await self._ssh.connection(self.access)
            await copying.put(connection, self.access, source, target, progress)

        self._wait(work())

    def get(self, source: str, target: Path, progress: copying.Progress | None = None) -> None:
        async def work() -> None:
            connection = await self._ssh.connection(self.access)
            await copying.get(connection, self.access, source, target, progress)

        self._wait(work())

    def host_key(self, access: Access) -> asyncssh.SSHKey:
        """The key that the host shows to whoever comes by the way `access`; raises HostError where it shows none."""
        return self._wait(self._ssh.host_key(access))

    def connect(self) -> Future[None]:
        """Open the connection, for those who want to know only whether there is one."""

        async def work() -> None:
            await self._ssh.connection(self.access)

        return self._ssh.begin(work())

    @contextlib.contextmanager
    def forward(self, remote_host: str, remote_port: int) -> Iterator[int]:
        """A port on 127.0.0.1 of this machine that leads to one that the host can reach."""

        async def listen() -> tuple[int, Callable[[], None]]:
            connection = await self._ssh.connection(self.access)
            try:
                listener = await connection.forward_local_port("127.0.0.1", 0, remote_host, remote_port)
            except OSError as error:
                raise problems.channel_refused(self.access, error) from None
            return listener.get_port(), listener.close

        port, close = self._wait(listen())

        async def end() -> None:
            close()

        try:
            yield port
        finally:
            self._wait(end())

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        future = self._ssh.begin(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
