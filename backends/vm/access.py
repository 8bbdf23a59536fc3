"""How each host of a slice is reached, and what it means where it cannot be: of a host, a reason and a remedy. Pure."""

from __future__ import annotations

import dataclasses
import errno
import functools
import socket
from collections.abc import Sequence

import asyncssh

from contracts.errors import RequestError
from contracts.inventory import Gateway, Host, Inventory, Slice
from launch.hosts import SSH_PORT, HostError, address_and_port

# OS Login's names for users from outside the organisation that the project belongs to.
EXTERNAL = (
    "; a login that begins with ext_ also needs roles/compute.osLoginExternalUser, which the organisation's "
    "administrator gives"
)
NEW_KEY = (
    "`gcloud compute os-login ssh-keys add --key-file ~/.ssh/id_ed25519.pub`; a new key works within a minute"
)


ATTRIBUTES_POLICY = "compute.disableGuestAttributesAccess"
"""The organisation policy under which no host publishes its name and its host keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """One SSH server. name: as messages call it.

    user: None means the one that OS Login knows, or on hosts of no project the one of this machine.
    host_keys: "TYPE BASE64" each; without one nobody connects.
    proxy_command: a program whose standard input and output are the connection; None: a TCP connection.
    through: the server that makes the connection; `otherwise` is the way where that one cannot be reached.
    index: of the host in its slice; None: it is no host of one. project: Google's, None where it is in none.
    """

    name: str
    address: str
    port: int = SSH_PORT
    user: str | None
    os_login: bool
    host_keys: tuple[str, ...]
    made_by_pulumi: bool
    proxy_command: tuple[str, ...] | None = None
    through: Access | None = None
    otherwise: Access | None = None
    index: int | None = None
    project: str | None = None

    def host_key_unknown(self) -> HostError:
        """Nothing is known that the host could be told from another by."""
        if self.made_by_pulumi:
            remedy = (
                "`pulumi up --refresh` reads the key once the host has published it, a minute after it started; where "
                f"the organisation policy {ATTRIBUTES_POLICY} holds it never does: {self._by_hand()} shows the key and "
                "asks"
            )
        else:
            remedy = (
                "put the first two words of its /etc/ssh/ssh_host_ed25519_key.pub into host_keys of the inventory; "
                f"read them on the host itself; or {self._by_hand()} shows the key and asks"
            )
        return HostError(host=self.name, reason="its host key is not known", remedy=remedy)

    def _by_hand(self) -> str:
        return "`fab trust`" if self.index is None else f"`fab trust --host {self.index}`"

    def host_key_unreadable(self, line: str, reason: str) -> HostError:
        return HostError(
            host=self.name,
            reason=f'the inventory\'s host key "{line[:60]}" cannot be read: {reason}',
            remedy='write it as "ssh-ed25519 AAAA…", the first two words of /etc/ssh/ssh_host_ed25519_key.pub',
        )

    def host_key_changed(self, expected: Sequence[str], shown: str) -> HostError:
        """It may be another machine. expected, shown: fingerprints."""
        again = (
            "made again since the inventory was written: `pulumi up --refresh`"
            if self.made_by_pulumi
            else "set up again: put its new key into the inventory"
        )
        return HostError(
            host=self.name,
            reason=f"shows the host key {shown}, and the inventory has {' and '.join(expected)}",
            remedy=f"if it was {again}; where what it publishes stays the old one, {self._by_hand()} shows the key and "
            "asks; if you did not expect that, somebody may be in between: do not connect",
        )

    def permission_denied(self, user: str, offered: Sequence[str], kept_back: Sequence[str]) -> HostError:
        """None of the keys is let in. kept_back: why others were not offered."""
        keys = ", ".join(offered) or "no key"
        outside = EXTERNAL if user.startswith("ext_") else ""
        aside = "".join(f"; {reason}" for reason in kept_back)
        return HostError(
            host=self.name,
            reason=f"does not let {user} in with {keys}{aside}",
            remedy=NEW_KEY + outside
            if self.os_login
            else f"add one of them to ~{user}/.ssh/authorized_keys there",
        )

    def unreachable_through(self, hop: Access, error: HostError) -> HostError:
        """Return why a host behind `hop` cannot be reached: `hop` cannot be reached itself."""
        return HostError(host=self.name, reason=f"through {hop.name}: {error.reason}", remedy=error.remedy)

    def no_connection(self, error: BaseException) -> HostError:
        """Return why there is no connection: nobody answered, or it was refused."""
        place = f"{self.address}:{self.port}"
        start = "is the host running? " + (
            "`pulumi up --refresh` finds out" if self.made_by_pulumi else f"is sshd listening on {place}?"
        )
        remedy = start
        if self.through is not None and isinstance(error, asyncssh.ChannelOpenError):
            reason = f"{self.through.name} cannot reach it at {place}: {error.reason}"
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                remedy = f"set AllowTcpForwarding yes in /etc/ssh/sshd_config of {self.through.name}"
        elif isinstance(error, socket.gaierror):
            reason, remedy = (
                f'the name "{self.address}" is not known: {error.strerror}',
                "look at it in the inventory",
            )
        elif isinstance(error, TimeoutError):
            reason = f"{place} does not answer"
            remedy = f"{start}; is it reachable from here, and does a firewall let port {self.port} through?"
        elif isinstance(error, ConnectionRefusedError):
            reason = f"{place} refuses the connection"
        elif isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            reason, remedy = f"there is no way to {place} from here", f"are you in its network? {start}"
        else:
            reason = f"no connection to {place}: {error_text(error)}"
        return HostError(host=self.name, reason=reason, remedy=remedy)

    def closed_at_once(self) -> HostError:
        """It was connected to and said no word."""
        return HostError(
            host=self.name,
            reason="closed the connection before a word was said: too many are being opened (MaxStartups), or it "
            "starts",
            remedy="try again in a minute; where it lasts, look at `journalctl --unit ssh` there",
        )

    def no_login(self, error: BaseException, limit_s: float) -> HostError:
        """It was connected to, and the greeting went wrong."""
        if isinstance(error, TimeoutError):
            reason = f"took more than {limit_s:g} s for the login"
            remedy = "the host is overloaded or stopped; look at it in the cloud console"
        elif isinstance(error, (asyncssh.ConnectionLost, ConnectionError)):
            reason, remedy = "closed the connection during the login", "look at `journalctl --unit ssh` there"
        else:
            reason, remedy = f"the login failed: {error_text(error)}", "is it an SSH server?"
        return HostError(host=self.name, reason=reason, remedy=remedy)

    def proxy_missing(self, command: str) -> HostError:
        remedy = (
            "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then `gcloud auth login`"
            if command == "gcloud"
            else "install it, or put it on PATH"
        )
        return HostError(host=self.name, reason=f"the command {command} is not installed", remedy=remedy)

    def proxy_ended(self, code: int | None, last_words: str) -> HostError:
        command = " ".join((self.proxy_command or ())[:3])
        remedy = "try the command by itself"
        if command.startswith("gcloud") and "was not found" in last_words:
            remedy = (
                "if Google took it back, `fab recover RUN` asks for its slice again, or `pulumi up --refresh`"
            )
        elif command.startswith("gcloud"):
            remedy = (
                "`gcloud auth login`, if it is about that; else: is the host running (`pulumi up --refresh`), and have "
                "you the role roles/iap.tunnelResourceAccessor?"
            )
        return HostError(
            host=self.name,
            reason=f"{command} ended with exit code {code}" + (f": {last_words}" if last_words else ""),
            remedy=remedy,
        )

    def lost(self, while_: str) -> HostError:
        return HostError(
            host=self.name,
            reason=f"the connection was lost {while_}",
            remedy="what was sent is not sent twice: look what came of it, then try again",
        )

    def channel_refused(self, error: BaseException) -> HostError:
        return HostError(
            host=self.name,
            reason=f"refused to open one more session: {error_text(error)}",
            remedy="MaxSessions in its /etc/ssh/sshd_config must be 10 or more",
        )

    def command_missing(self, command: str) -> HostError:
        return HostError(
            host=self.name,
            reason=f"{command} is not there",
            remedy=f"install it on the host: `fab run -- sudo apt-get install --yes {command}`",
        )


def error_text(error: BaseException) -> str:
    """Return an error in its own words, or by its name where it has none."""
    return str(getattr(error, "reason", "") or error) or type(error).__name__


def routes(inventory: Inventory, one_slice: Slice) -> tuple[Access, ...]:
    """Return how each host of the slice is reached, in worker order.

    Hosts behind IAP go through the first of them: one tunnel serves a slice of any size, and they reach each other.

    Raises:
        RequestError: a host cannot be reached in the way it says.
    """
    first: Access | None = None
    accesses = []
    for host in one_slice.hosts:
        access = _route(inventory, one_slice, host, first)
        if first is None and host.reach == "iap":
            first = access
        accesses.append(access)
    return tuple(accesses)


def gateway_access(inventory: Inventory, gateway: Gateway) -> Access:
    """Return the gateway, which has no address outside the project's network: through IAP where there is a project."""
    address, port = address_and_port(gateway.address)
    tunnel = None
    if inventory.project is not None:
        tunnel = iap_tunnel(gateway.name, gateway.zone, inventory.project, port)
    return Access(
        name=gateway.name,
        address=address,
        port=port,
        user=gateway.user,
        os_login=inventory.project is not None,
        host_keys=gateway.host_keys,
        made_by_pulumi=inventory.project is not None,
        proxy_command=tunnel,
        project=inventory.project,
    )


def iap_tunnel(instance: str, zone: str, project: str, port: int) -> tuple[str, ...]:
    """Return the command that is a connection to a port of an instance, by way of Identity-Aware Proxy."""
    tunnel = ("gcloud", "compute", "start-iap-tunnel", instance, str(port), "--listen-on-stdin")
    return (*tunnel, "--zone", zone, "--project", project)


def _route(inventory: Inventory, one_slice: Slice, host: Host, first: Access | None) -> Access:
    inside, inside_port = address_and_port(host.internal_address)
    access = functools.partial(
        Access,
        name=host.name or f"{one_slice.name}[{host.index}]",
        address=inside,
        port=inside_port,
        user=host.user,
        os_login=inventory.project is not None,
        host_keys=host.host_keys,
        made_by_pulumi=inventory.project is not None,
        index=host.index,
        project=inventory.project,
    )
    if host.reach == "direct":
        address, port = address_and_port(host.external_address or host.internal_address)
        return access(address=address, port=port)
    if host.reach == "gateway":
        if inventory.gateway is None:
            raise RequestError(
                f'{host.name}: reach "gateway", but the inventory of {inventory.stack} has no gateway; add one, '
                'or write "direct"'
            )
        return access(through=gateway_access(inventory, inventory.gateway))
    if host.reach == "iap":
        if inventory.project is None:
            raise RequestError(
                f'{host.name}: reach "iap" needs the project that the host is in, and the inventory of '
                f'{inventory.stack} has none; write "direct" for a machine of your own'
            )
        tunnel = iap_tunnel(host.name, one_slice.zone, inventory.project, inside_port)
        tunnelled = access(proxy_command=tunnel)
        return tunnelled if first is None else access(through=first, otherwise=tunnelled)
    raise RequestError(
        f'{host.name}: reach "{host.reach}" is this machine by itself and needs no inventory: leave --stack out, '
        'or write "direct" to go there over SSH'
    )
