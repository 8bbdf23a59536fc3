"""How each host of a slice is reached: address, user, pinned keys, and the way there. Pure."""

from __future__ import annotations

import dataclasses
import functools
import re

from contracts.errors import RequestError
from contracts.inventory import Gateway, Host, Inventory, Slice

SSH_PORT = 22


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


def routes(inventory: Inventory, one_slice: Slice) -> tuple[Access, ...]:
    """How each host of the slice is reached, in worker order.

    Hosts behind IAP go through the first of them: one tunnel serves a slice of any size, and they reach each other.

    Raises:
        RequestError: a host cannot be reached in the way it says.
    """
    first: Access | None = None
    found = []
    for host in one_slice.hosts:
        access = _route(inventory, one_slice, host, first)
        if first is None and host.reach == "iap":
            first = access
        found.append(access)
    return tuple(found)


def gateway_access(inventory: Inventory, gateway: Gateway) -> Access:
    """The gateway, which has no address outside the project's network: through IAP where there is a project."""
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
    """The command that is a connection to a port of an instance, by way of Identity-Aware Proxy."""
    tunnel = ("gcloud", "compute", "start-iap-tunnel", instance, str(port), "--listen-on-stdin")
    return (*tunnel, "--zone", zone, "--project", project)


def address_and_port(text: str) -> tuple[str, int]:
    """What "10.0.0.2", "name:2222", "::1" and "[::1]:2222" mean."""
    if match := re.fullmatch(r"\[([^\]]+)\](?::(\d{1,5}))?|([^:]+):(\d{1,5})", text):
        return match[1] or match[3], int(match[2] or match[4] or SSH_PORT)
    return text, SSH_PORT


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
        alone = access(proxy_command=tunnel)
        return alone if first is None else access(through=first, otherwise=alone)
    raise RequestError(
        f'{host.name}: reach "{host.reach}" is this machine by itself and needs no inventory: leave --stack out, '
        'or write "direct" to go there over SSH'
    )
