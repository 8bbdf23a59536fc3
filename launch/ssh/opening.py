"""Opening one connection: the host's key checked, a limit on each part, and every failure in words."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import asyncssh

from launch.errors import HostError
from launch.ssh import problems
from launch.ssh.access import Access
from launch.ssh.identities import Identities
from launch.ssh.proxy import Proxy

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


def options(limits: Limits) -> asyncssh.SSHClientConnectionOptions:
    """What all connections have in common. Nothing is read from ~/.ssh: what holds is in the inventory and here."""
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


async def open_connection(
    access: Access,
    *,
    user: str,
    identities: Identities,
    hop: asyncssh.SSHClientConnection | None,
    common: asyncssh.SSHClientConnectionOptions,
    limits: Limits,
) -> asyncssh.SSHClientConnection:
    """Connect and log in. hop: the connection to `access.through`.

    Raises:
        HostError: it did not come about, and why.
    """
    pinned = _pinned(access)
    proxy = None
    greeting = _Greeting()
    try:
        async with asyncio.timeout(limits.connect_s) as limit:
            greeting.on_connected = lambda: limit.reschedule(
                asyncio.get_running_loop().time() + limits.login_s
            )
            if access.proxy_command is not None and hop is None:
                proxy = await Proxy.start(access.proxy_command)
                greeting.on_connected = None  # a socket to a program says nothing of what is behind it
                limit.reschedule(asyncio.get_running_loop().time() + limits.connect_s + limits.login_s)
            connection = await asyncssh.connect(
                access.address,
                access.port,
                sock=proxy.socket if proxy else None,
                tunnel=hop,
                config=None,
                options=common,
                username=user,
                client_keys=list(identities.keys),
                known_hosts=(list(pinned), [], []),
                server_host_key_algs=_kinds(pinned),
                client_factory=lambda: greeting,
            )
    except BaseException as error:
        ended = await _ended(proxy, error)
        if not isinstance(error, Exception):
            raise
        raise _explained(access, error, greeting, pinned, user, identities, limits, ended) from None
    if proxy is not None:
        greeting.proxy = asyncio.create_task(_stop_with(connection, proxy))
    return connection


async def host_key(
    access: Access, *, hop: asyncssh.SSHClientConnection | None, limits: Limits
) -> asyncssh.SSHKey:
    """The key that a server shows, which says nothing yet of who it is. Nothing is logged in to.

    Raises:
        HostError: it shows none, and why.
    """
    proxy = None
    try:
        async with asyncio.timeout(limits.connect_s + limits.login_s):
            if access.proxy_command is not None and hop is None:
                proxy = await Proxy.start(access.proxy_command)
            found = await asyncssh.get_server_host_key(
                access.address,
                access.port,
                sock=proxy.socket if proxy else None,
                tunnel=hop,
                config=None,
                server_host_key_algs=list(HOST_KEY_KINDS),
            )
    except Exception as error:
        ended = await _ended(proxy, error)
        proxy = None
        if isinstance(error, FileNotFoundError | PermissionError) and access.proxy_command:
            raise problems.proxy_missing(access, access.proxy_command[0]) from None
        if ended is not None:
            raise problems.proxy_ended(access, *ended) from None
        raise problems.no_connection(access, error) from None
    finally:
        if proxy is not None:
            await proxy.stop()
    if found is None:
        raise problems.no_login(access, asyncssh.ConnectionLost("no host key was shown"), limits.login_s)
    return found


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
        raise problems.host_key_unknown(access)

    def keys() -> Iterator[asyncssh.SSHKey]:
        for line in access.host_keys:
            try:
                yield asyncssh.import_public_key(line)
            except asyncssh.KeyImportError as error:
                raise problems.host_key_unreadable(access, line, str(error)) from None

    return tuple(keys())


def _kinds(pinned: Sequence[asyncssh.SSHKey]) -> list[str]:
    """Of the host's keys a pinned one is asked for first; any other, so that it can be named when it is refused."""
    wanted = {key.get_algorithm() for key in pinned}
    return sorted(HOST_KEY_KINDS, key=lambda kind: kind.replace("rsa-sha2-512", "ssh-rsa") not in wanted)


async def _ended(proxy: Proxy | None, error: BaseException) -> tuple[int, str] | None:
    """How the proxy ended, if that is why there is no connection; it is ended in any case."""
    if proxy is None:
        return None
    try:
        return await proxy.ended() if isinstance(error, ENDINGS) else None
    finally:
        await proxy.stop()


async def _stop_with(connection: asyncssh.SSHClientConnection, proxy: Proxy) -> None:
    try:
        await connection.wait_closed()
    finally:
        await proxy.stop()


def _explained(
    access: Access,
    error: Exception,
    greeting: _Greeting,
    pinned: tuple[asyncssh.SSHKey, ...],
    user: str,
    identities: Identities,
    limits: Limits,
    ended: tuple[int, str] | None,
) -> HostError:
    if (
        isinstance(error, FileNotFoundError | PermissionError)
        and access.proxy_command
        and not greeting.connection
    ):
        return problems.proxy_missing(access, access.proxy_command[0])
    if ended is not None:
        return problems.proxy_ended(access, *ended)
    if isinstance(error, asyncssh.HostKeyNotVerifiable) and greeting.found is not None:
        expected = [key.get_fingerprint() for key in pinned]
        return problems.host_key_changed(access, expected, greeting.found.get_fingerprint())
    if isinstance(error, asyncssh.PermissionDenied) or "authentication failures" in str(error):
        return problems.permission_denied(access, user, identities.names, identities.kept_back)
    if greeting.connection is None or (isinstance(error, TimeoutError) and not greeting.spoke):
        return problems.no_connection(access, error)
    if not greeting.spoke and isinstance(error, ENDINGS):
        return problems.closed_at_once(access)
    return problems.no_login(access, error, limits.login_s)
