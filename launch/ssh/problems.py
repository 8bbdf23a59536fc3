"""What SSH's errors mean for a user: of a host, a reason and a remedy. Pure."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

import asyncssh

from launch.hosts import HostError
from launch.ssh.access import Access

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


def host_key_unknown(access: Access) -> HostError:
    """Nothing is known that the host could be told from another by."""
    if access.made_by_pulumi:
        remedy = (
            "`pulumi up --refresh` reads the key once the host has published it, a minute after it started; where the "
            f"organisation policy {ATTRIBUTES_POLICY} holds it never does: {_by_hand(access)} shows the key and asks"
        )
    else:
        remedy = (
            "put the first two words of its /etc/ssh/ssh_host_ed25519_key.pub into host_keys of the inventory; "
            f"read them on the host itself; or {_by_hand(access)} shows the key and asks"
        )
    return HostError(host=access.name, reason="its host key is not known", remedy=remedy)


def _by_hand(access: Access) -> str:
    return "`fab trust`" if access.index is None else f"`fab trust --host {access.index}`"


def host_key_unreadable(access: Access, line: str, why: str) -> HostError:
    return HostError(
        host=access.name,
        reason=f'the inventory\'s host key "{line[:60]}" cannot be read: {why}',
        remedy='write it as "ssh-ed25519 AAAA…", the first two words of /etc/ssh/ssh_host_ed25519_key.pub',
    )


def host_key_changed(access: Access, expected: Sequence[str], found: str) -> HostError:
    """It may be another machine. expected, found: fingerprints."""
    again = (
        "made again since the inventory was written: `pulumi up --refresh`"
        if access.made_by_pulumi
        else "set up again: put its new key into the inventory"
    )
    return HostError(
        host=access.name,
        reason=f"shows the host key {found}, and the inventory has {' and '.join(expected)}",
        remedy=f"if it was {again}; where what it publishes stays the old one, {_by_hand(access)} shows the key and "
        "asks; if you did not expect that, somebody may be in between: do not connect",
    )


def permission_denied(
    access: Access, user: str, offered: Sequence[str], kept_back: Sequence[str]
) -> HostError:
    """None of the keys is let in. kept_back: why others were not offered."""
    keys = ", ".join(offered) or "no key"
    outside = EXTERNAL if user.startswith("ext_") else ""
    aside = "".join(f"; {reason}" for reason in kept_back)
    return HostError(
        host=access.name,
        reason=f"does not let {user} in with {keys}{aside}",
        remedy=NEW_KEY + outside
        if access.os_login
        else f"add one of them to ~{user}/.ssh/authorized_keys there",
    )


def through(hop: Access, access: Access, error: HostError) -> HostError:
    """The way to `access` leads through a host that cannot be reached itself."""
    return HostError(host=access.name, reason=f"through {hop.name}: {error.reason}", remedy=error.remedy)


def no_connection(access: Access, error: BaseException) -> HostError:
    """The connection did not come about: nobody answered, or it was refused."""
    place = f"{access.address}:{access.port}"
    start = "is the host running? " + (
        "`pulumi up --refresh` finds out" if access.made_by_pulumi else f"is sshd listening on {place}?"
    )
    remedy = start
    if access.through is not None and isinstance(error, asyncssh.ChannelOpenError):
        reason = f"{access.through.name} cannot reach it at {place}: {error.reason}"
        if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
            remedy = f"set AllowTcpForwarding yes in /etc/ssh/sshd_config of {access.through.name}"
    elif isinstance(error, socket.gaierror):
        reason, remedy = (
            f'the name "{access.address}" is not known: {error.strerror}',
            "look at it in the inventory",
        )
    elif isinstance(error, TimeoutError):
        reason = f"{place} does not answer"
        remedy = f"{start}; is it reachable from here, and does a firewall let port {access.port} through?"
    elif isinstance(error, ConnectionRefusedError):
        reason = f"{place} refuses the connection"
    elif isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        reason, remedy = f"there is no way to {place} from here", f"are you in its network? {start}"
    else:
        reason = f"no connection to {place}: {said(error)}"
    return HostError(host=access.name, reason=reason, remedy=remedy)


def closed_at_once(access: Access) -> HostError:
    """It was connected to and said no word."""
    return HostError(
        host=access.name,
        reason="closed the connection before a word was said: too many are being opened (MaxStartups), or it starts",
        remedy="try again in a minute; where it lasts, look at `journalctl --unit ssh` there",
    )


def no_login(access: Access, error: BaseException, limit_s: float) -> HostError:
    """It was connected to, and the greeting went wrong."""
    if isinstance(error, TimeoutError):
        reason = f"took more than {limit_s:g} s for the login"
        remedy = "the host is overloaded or stopped; look at it in the cloud console"
    elif isinstance(error, (asyncssh.ConnectionLost, ConnectionError)):
        reason, remedy = "closed the connection during the login", "look at `journalctl --unit ssh` there"
    else:
        reason, remedy = f"the login failed: {said(error)}", "is it an SSH server?"
    return HostError(host=access.name, reason=reason, remedy=remedy)


def proxy_missing(access: Access, command: str) -> HostError:
    remedy = (
        "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then `gcloud auth login`"
        if command == "gcloud"
        else "install it, or put it on PATH"
    )
    return HostError(host=access.name, reason=f"the command {command} is not installed", remedy=remedy)


def proxy_ended(access: Access, code: int | None, last_words: str) -> HostError:
    command = " ".join((access.proxy_command or ())[:3])
    return HostError(
        host=access.name,
        reason=f"{command} ended with exit code {code}" + (f": {last_words}" if last_words else ""),
        remedy=(
            "`gcloud auth login`, if it is about that; else: is the host running (`pulumi up --refresh`), and have you "
            "the role roles/iap.tunnelResourceAccessor?"
        )
        if command.startswith("gcloud")
        else "try the command by itself",
    )


def lost(access: Access, while_: str) -> HostError:
    return HostError(
        host=access.name,
        reason=f"the connection was lost {while_}",
        remedy="what was sent is not sent twice: look what came of it, then try again",
    )


def channel_refused(access: Access, error: BaseException) -> HostError:
    return HostError(
        host=access.name,
        reason=f"refused to open one more session: {said(error)}",
        remedy="MaxSessions in its /etc/ssh/sshd_config must be 10 or more",
    )


def command_missing(access: Access, command: str) -> HostError:
    return HostError(
        host=access.name,
        reason=f"{command} is not there",
        remedy=f"install it on the host: `fab run -- sudo apt-get install --yes {command}`",
    )


def said(error: BaseException) -> str:
    """An error in its own words, or by its name where it has none."""
    return str(getattr(error, "reason", "") or error) or type(error).__name__
